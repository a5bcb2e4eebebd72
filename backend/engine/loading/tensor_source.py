"""Source of a LoRA's tensors: a safetensors file, a pickle (weights_only), or a state dict, read tensor by tensor."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch

from backend.catalog.formats.read import read_header
from backend.catalog.formats.torch_pickle import innermost
from backend.catalog.lora.keys import QUANTIZED, group, scales_of
from backend.catalog.lora.peft_config import config_beside
from backend.catalog.spec import TensorAt
from backend.engine.devices import out_of_memory
from backend.engine.loading import load
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_folder

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
INTEGER_CODES = (torch.int8, torch.uint8, torch.bool)
EIGHT_BIT_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, *INTEGER_CODES)
READ_AS = {torch.float64: torch.float32, torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32}


@dataclass(frozen=True)
class Source:
    """A LoRA before it is read: names and shapes of its tensors, metadata, and how to get each."""

    name: str
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]
    path: Path | None = None
    config: dict = field(default_factory=dict)  # an adapter_config.json beside it
    _stored: Mapping[str, TensorAt | torch.Tensor] = field(default_factory=dict, repr=False)

    def read(self, key: str) -> torch.Tensor:
        """The tensor under `key`, of shape `shapes[key]`, copied to the CPU, in its own dtype (8-bit and 64-bit floats
        as float32).

        8-bit codes are dequantized with the scale stored for them. Raises Trouble("not_supported") for a scale that
        does not fit, for codes without a scale where the file has scales for others, and where the file has keys of a
        quantization that is not known here.
        """
        tensor, scales = self.read_stored(key), self._scales.get(key, ())
        if tensor.dtype in EIGHT_BIT_DTYPES:
            self._check_companions(key, scales)
        if scales:
            return self._times_scale(key, tensor, scales)
        if tensor.is_floating_point():
            tensor = tensor.to(READ_AS.get(tensor.dtype, tensor.dtype))
        return tensor

    def read_stored(self, key: str) -> torch.Tensor:
        """The tensor under `key` as stored, of shape `shapes[key]`, copied: the caller may change it."""
        at = self._stored[key]
        return at.detach().to("cpu", copy=True) if isinstance(at, torch.Tensor) else load.read_tensor(at)

    @cached_property
    def _scales(self) -> dict[str, tuple[str, ...]]:
        """Key of an 8-bit tensor -> those of its scales."""
        found: dict[str, tuple[str, ...]] = {}
        for scale, owner in scales_of(self.shapes).items():
            if owner:
                found[owner] = (*found.get(owner, ()), scale)
        return found

    @cached_property
    def _unknown_companions(self) -> tuple[str, ...]:
        """Keys of a quantization that is not known here."""
        return tuple(key for key in group(self.shapes)[1] if QUANTIZED.search(key.rpartition(".")[2]))

    def _check_companions(self, key: str, scales: tuple[str, ...]) -> None:
        unknown = self._unknown_companions
        marked = "_quantization_metadata" in self.metadata or any(name.endswith("scaled_fp8") for name in self.shapes)
        if unknown or ((self._scales or marked) and not scales):
            what = "it has no scale, as others in the file have"
            if unknown:
                what = f"the quantization that {unknown[0]} belongs to is not understood"
            elif not self._scales:
                what = "it has no scale, though the file is marked as scaled"
            raise Trouble(
                "not_supported",
                f"{self.name} stores {key} in 8 bits, and {what}.",
                hint="Take the LoRA in bf16 or fp16 instead; nothing was changed.",
            )

    def _times_scale(self, key: str, codes: torch.Tensor, scales: tuple[str, ...]) -> torch.Tensor:
        """Dequantizes: codes times their scale (one number, one a row, or one for each block of equal size).
        float32."""
        factors = [self.read_stored(scale).float() for scale in scales]
        scale = factors[0]
        wrong = ""
        if codes.dtype not in EIGHT_BIT_DTYPES or codes.dtype in (torch.uint8, torch.bool):
            kind = str(codes.dtype).removeprefix("torch.")
            wrong = (
                "" if codes.is_floating_point() and bool((scale == 1).all()) else f"a scale beside numbers in {kind}"
            )
        elif any(other.shape != scale.shape or not torch.equal(other, scale) for other in factors[1:]):
            wrong = f"two scales that differ ({' and '.join(scales)})"
        elif not bool(torch.isfinite(scale).all()):
            wrong = "a scale that is NaN or infinite"
        elif scale.numel() != 1:
            if scale.ndim == 1 and scale.shape[0] == codes.shape[0]:
                scale = scale.reshape(-1, *[1] * (codes.ndim - 1))
            sides = zip(codes.shape, scale.shape, strict=False)
            if scale.ndim != codes.ndim or any(size % parts for size, parts in sides if parts):
                wrong = f"a scale of shape {list(scale.shape)} for numbers of shape {list(codes.shape)}"
        if wrong:
            raise Trouble(
                "not_supported",
                f"{self.name}: {key} has {wrong}.",
                hint="Take the LoRA in bf16 or fp16 instead; nothing was changed.",
            )
        if scale.numel() != 1:
            for dim, (size, parts) in enumerate(zip(codes.shape, scale.shape, strict=True)):
                if parts > 1:
                    scale = scale.repeat_interleave(size // parts, dim)
        return codes.float() * (scale if scale.numel() != 1 else scale.reshape(()))

    @property
    def hash(self) -> str:
        """sha256 of the file, "" for a state dict."""
        if self.path is None:
            return ""
        status = self.path.stat()
        return file_hash(str(self.path), status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=512)
def file_hash(path: str, nbytes: int, modified: int) -> str:
    """sha256 of a file; size and time are there so that a changed file is hashed anew."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_source(source: str | os.PathLike | Mapping[str, torch.Tensor], name: str = "") -> Source:
    """Opens a LoRA file (or a PEFT folder with one in it), or takes a state dict: name -> tensor of any shape.

    Raises Trouble ("damaged", "missing_file", "bad_value").
    """
    if isinstance(source, Mapping):
        return _from_tensors(source, name or "a state dict", None, {})
    path = Path(source)
    if is_folder(path):
        path = _file_in(path)
    if path.suffix.lower() in PICKLES:
        return replace(_from_tensors(read_pickle(path), name or path.name, path, {}), config=config_beside(path))
    header = read_header(path)
    shapes = {key: at.shape for key, at in header.tensors.items()}
    return Source(name or path.name, shapes, header.metadata, path, config_beside(path), header.tensors)


def _from_tensors(tensors: Mapping, name: str, path: Path | None, metadata: dict) -> Source:
    wrong = [key for key, value in tensors.items() if not (isinstance(key, str) and isinstance(value, torch.Tensor))]
    if wrong:
        raise Trouble("bad_value", f"{name} holds {str(wrong[0])[:80]!r}, which is no named tensor.")
    return Source(name, {key: tuple(value.shape) for key, value in tensors.items()}, metadata, path, {}, dict(tensors))


def _file_in(folder: Path) -> Path:
    found = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    named = [path for path in found if path.stem in ("adapter_model", "pytorch_lora_weights")]
    if len(named) == 1 or len(found) == 1:
        return (named or found)[0]
    what = f"{len(found)} safetensors files" if found else "no safetensors file"
    raise Trouble("missing_file", f"{folder} holds {what}; one LoRA was expected.", hint="Name the file itself.")


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """The tensors (of any shape, on the CPU) in a pickled checkpoint, unwrapped from its outer dicts, read with
    `weights_only` so that it cannot run code. Raises Trouble ("missing_file", "damaged")."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no file {path}.", hint="Check the path.") from None
    except Exception as error:  # unpickling an untrusted file can raise anything
        if out_of_memory.is_oom(error):
            raise
        raise Trouble(
            "damaged",
            f"{path.name} cannot be read as a file of weights alone.",
            hint="It is damaged, or it would run code when opened and is refused for that.",
            detail=str(error)[:2000],
        ) from None
    value = innermost(value)
    if not isinstance(value, dict):
        raise Trouble("damaged", f"{path.name} holds no table of tensors.", hint="Is it a LoRA or a checkpoint?")
    tensors = {key: item for key, item in value.items() if isinstance(key, str) and isinstance(item, torch.Tensor)}
    if not tensors:
        raise Trouble("damaged", f"{path.name} holds no tensors.", hint="Is it a LoRA or a checkpoint?")
    return tensors
