"""Where a LoRA's tensors come from: a safetensors file, a pickle (weights only), or a state dict. Nothing but what is asked for is read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch

from backend.catalog.header import read_header
from backend.catalog.parts import read_json
from backend.catalog.spec import TensorAt
from backend.engine import load, shortage
from backend.schema.messages import Trouble

PICKLES = (".pt", ".pth", ".bin", ".ckpt")
NESTS = ("state_dict", "module", "model", "model_state", "model_state_dict", "lora_state_dict")
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
        """The tensor under `key` on the CPU, in its own dtype (8-bit and 64-bit floats as float32). Raises Trouble if not finite."""
        tensor = self.stored(key)
        if tensor.is_floating_point():
            tensor = tensor.to(READ_AS.get(tensor.dtype, tensor.dtype))
        return tensor

    def stored(self, key: str) -> torch.Tensor:
        """The tensor under `key` as it lies in the file."""
        at = self._stored[key]
        return at.detach().cpu() if isinstance(at, torch.Tensor) else load.read_tensor(at)

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
    """Opens a LoRA file (or a folder of PEFT's with one in it) or takes a state dict. Raises Trouble for what is damaged."""
    if isinstance(source, Mapping):
        return _from_tensors(source, name or "a state dict", None, {})
    path = Path(source)
    if path.is_dir():
        path = _file_in(path)
    if path.suffix.lower() in PICKLES:
        return replace(_from_tensors(read_pickle(path), name or path.name, path, {}), config=_config_beside(path))
    header = read_header(path)
    shapes = {key: at.shape for key, at in header.tensors.items()}
    return Source(name or path.name, shapes, header.metadata, path, _config_beside(path), header.tensors)


def _config_beside(path: Path) -> dict:
    """PEFT's adapter_config.json, which speaks of the file of a certain name beside it."""
    named = path.name.startswith(("adapter_model", "pytorch_lora_weights"))
    return (read_json(path.with_name("adapter_config.json")) or {}) if named else {}


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
    """The tensors in a pickled checkpoint, read so that it can run no code, and unwrapped. Raises Trouble."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True, mmap=False)
    except FileNotFoundError:
        raise Trouble("missing_file", f"There is no file {path}.", hint="Check the path.") from None
    except Exception as error:  # unpickling strangers' bytes fails in every way there is
        if shortage.is_one(error):
            raise
        raise Trouble(
            "damaged",
            f"{path.name} cannot be read as a file of weights alone.",
            hint="It is damaged, or it would run code when opened and is refused for that.",
            detail=str(error)[:2000],
        ) from None
    for _ in range(4):
        inner = next(
            (value[key] for key in NESTS if isinstance(value, dict) and isinstance(value.get(key), dict)), None
        )
        if inner is None:
            break
        value = inner
    if not isinstance(value, dict):
        raise Trouble("damaged", f"{path.name} holds no table of tensors.", hint="Is it a LoRA or a checkpoint?")
    tensors = {key: item for key, item in value.items() if isinstance(key, str) and isinstance(item, torch.Tensor)}
    if not tensors:
        raise Trouble("damaged", f"{path.name} holds no tensors.", hint="Is it a LoRA or a checkpoint?")
    return tensors
