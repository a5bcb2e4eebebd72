"""Loading: a part's network is built on the meta device, and its parameters are assigned from memory-mapped files.

Nothing is copied where the stored dtype is the wanted one and the device is the CPU: pages are read when they are used,
and are copy-on-write, so a change of a weight never reaches the file.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from backend.catalog.spec import PartSpec, TensorAt
from backend.engine.devices import device_memory, out_of_memory
from backend.engine.loading import lazy_imports
from backend.engine.loading.dequantize import TORCH_DTYPES, Dequantizer, pieces_of
from backend.engine.loading.gguf_dequantize import TYPES, GgufBlocks
from backend.engine.loading.pinned_copy import Upload
from backend.schema.allowed_classes import class_of
from backend.schema.messages import Trouble

NETWORK_PACKAGES = ("diffusers.models", "transformers.models", "torch.nn")  # whose classes may be built


def load_part(
    part: PartSpec,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    on_bytes: Callable[[int, int], None] | None = None,
    maps: Mapping[Path, mmap.mmap] | None = None,
) -> torch.nn.Module:
    """The network of `part` with its weights, in eval mode and without gradients.

    `dtype`: of the floating-point parameters; None keeps what is stored. `on_bytes(done, total)` reports progress in
    bytes. `maps`: of the part's files (`open_maps`), for callers that drop tensors later (`drop_pages`).
    Peak memory: the result, and one tensor at a time that is cast or moved. Raises Trouble where file and class do not
    agree ("damaged", "not_supported", "missing_file", "not_finite"); out-of-memory errors are raised unchanged.
    """
    return fill(build_meta(part), part, dtype=dtype, device=device, on_bytes=on_bytes, maps=maps)


def fill(
    module: torch.nn.Module,
    part: PartSpec,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    on_bytes: Callable[[int, int], None] | None = None,
    maps: Mapping[Path, mmap.mmap] | None = None,
    without: Collection[str] = (),
) -> torch.nn.Module:
    """As `load_part`, into a `module` that `build_meta` has made; parameters named in `without` are left as they are."""
    total, done, device = part.nbytes, 0, torch.device(device)
    maps = open_maps(part.files, private=device_memory.is_ram(device)) if maps is None else maps
    upload = None if device_memory.is_ram(device) else Upload(device)
    own = {*dict(module.named_parameters(remove_duplicate=False)), *dict(module.named_buffers(remove_duplicate=False))}
    own.difference_update(without)
    for name, at in part.tensors.items():
        if name not in own:  # markers, and what merged files carry along
            continue
        if upload is not None and name not in part.scales and _is_plain(at):
            tensor = upload.tensor(at, dtype)
        else:
            tensor = _load_tensor(at, part.scales.get(name), maps, device, dtype)
        assign(module, name, tensor)
        done += at.nbytes
        if on_bytes:
            on_bytes(done, total)
    if upload is not None:
        upload.close()
    move_computed_buffers(module, device)
    return module.eval().requires_grad_(False)


def _load_tensor(
    at: TensorAt,
    scale: TensorAt | None,
    maps: Mapping[Path, mmap.mmap],
    device: torch.device,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """The tensor at `at`, dequantized, on `device`; a view of its mapping where nothing has to be copied."""
    stored = tensor = view(at, maps[at.file]) if at.packed is None else read_tensor(at)
    if scale is not None:
        tensor = _times_scale(tensor, read_scale(scale), dtype or torch.bfloat16)
    if tensor.is_floating_point():
        tensor = tensor.to(device=device, dtype=dtype or tensor.dtype)
    else:
        tensor = tensor.to(device)
    if tensor is not stored and at.packed is None:
        drop_pages(at, maps[at.file])
    return tensor


def drop_pages(at: TensorAt, mapped: mmap.mmap) -> None:
    """Drops a copied tensor's pages of the mapping from memory (MADV_DONTNEED); else file and copy would both count.

    What was written to them is lost: only for tensors that are not used any more.
    """
    if hasattr(mapped, "madvise") and hasattr(mmap, "MADV_DONTNEED"):
        first, last = -(-at.start // mmap.PAGESIZE) * mmap.PAGESIZE, at.end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def build_meta(part: PartSpec) -> torch.nn.Module:
    """The network of `part` with parameters on the meta device; computed buffers (rotary tables) are real.

    Raises Trouble: "damaged" where the part lacks a parameter of the class or one has another shape, "not_allowed" for
    a class that may not be built, "not_supported" for a dtype that cannot be read.
    """
    network = find_class(part.network)
    with _ParametersOnMeta():
        if hasattr(network, "config_class"):  # transformers: one configuration object
            module = network(network.config_class(**part.config))
        else:  # diffusers: keyword arguments
            module = network(**part.config)
    _check(module, part)
    return module


def find_class(network: str) -> type:
    """The network class behind "package.module:Class". Raises Trouble("not_allowed") for one outside
    `NETWORK_PACKAGES` and for what is no network: the name is read from files that others may have written."""
    return checked_network(network, load=lazy_imports.import_module)


def checked_network(network: str, *, load: Callable = importlib.import_module) -> type:
    """As `find_class`, imported by `load`."""
    package, _, name = network.partition(":")
    found = class_of(package, name, packages=NETWORK_PACKAGES, load=load)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise Trouble("not_allowed", f"{network[:200]!r} is no network.")
    return found


class _ParametersOnMeta(TorchFunctionMode):
    """Tensors that a constructor allocates without values go to the meta device; computed tables stay real.

    Parameters on meta are not initialized with random numbers: torch does that by way of its whole compiler.
    """

    empty = frozenset({torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full})
    fills = frozenset({"normal_", "uniform_", "kaiming_uniform_"})  # by name: transformers replaces the functions

    def __torch_function__(
        self, function: Callable, types: object, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in self.fills:
            filled = args[0] if args else kwargs["tensor"]
            if filled.is_meta:
                return filled
        if function in self.empty and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _check(module: torch.nn.Module, part: PartSpec) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    missing = [name for name in wanted if name not in part.tensors]
    where = ", ".join(path.name for path in part.files) or "no file"
    if missing:
        raise Trouble(
            "damaged",
            f"{where} lacks {len(missing)} of the {len(wanted)} tensors of {part.name}, {missing[0]} for one.",
            hint="Is every file of the model there? Download it again if so.",
            detail="\n".join(missing),
        )
    for name, tensor in module.state_dict().items():
        at = part.tensors[name]
        plain = name not in part.scales and dequantizer_of(at) is None
        if plain and tensor.is_floating_point() and not _dtype(at).is_floating_point:
            raise Trouble(
                "not_supported",
                f"{at.file.name} stores {name} as {at.dtype}, and nothing says what numbers these codes are.",
                hint="Take the bf16 file of this model instead.",
            )
    for name, shape in wanted.items():
        at = part.tensors[name]
        if at.packed is not None and shape != tuple(at.shape):
            raise Trouble(
                "not_supported",
                f"{at.file.name} stores {name} as {at.dtype} of {list(at.shape)}, "
                f"but its network asks for {list(shape)}.",
                hint="Its shape may have been padded, or a config.json of another model lies beside it.",
            )
        if shape != tuple(at.shape):
            raise Trouble(
                "damaged",
                f"{name} of {part.name} in {part.tensors[name].file.name} is {list(part.tensors[name].shape)}, "
                f"but its configuration asks for {list(shape)}.",
                hint="The config.json belongs to another model, or the file is damaged.",
            )


def open_maps(files: Iterable[Path], *, private: bool = True) -> dict[Path, mmap.mmap]:
    """Memory mappings of `files`; a mapping lives as long as a tensor that is a view of it.

    `private`: copy-on-write; Windows commits memory for all of each. Else read-only. Raises Trouble ("missing_file",
    "damaged").
    """
    maps = {}
    for path in files:
        try:
            with path.open("rb") as file:
                maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
        except FileNotFoundError:
            raise Trouble("missing_file", f"{path} is no longer there.", hint="Was it moved or renamed?") from None
        except (OSError, ValueError) as error:
            if out_of_memory.is_oom(error):
                raise
            raise Trouble("damaged", f"{path} cannot be read: {error}.") from None
    return maps


def view(at: TensorAt, mapped: mmap.mmap) -> torch.Tensor:
    """The tensor at `at`, of shape `at.shape`, as a view of its mapped file (a copy only where the file does not align
    it, or where GGUF blocks are dequantized to float32).

    Not for quantized weights of several pieces (`read_tensor`), which may lie in several files. Raises
    Trouble("damaged") where the file is too short.
    """
    assert at.packed is None, "made from several tensors"
    blocks = dequantizer_of(at)
    if blocks is not None:
        return _swap_halves(blocks.dequantize(view(as_bytes(at), mapped)), at)
    dtype = _dtype(at)
    if at.end > len(mapped):
        raise Trouble("damaged", f"{at.file} ends before its tensor {at.key}.", hint="Download it again.")
    if at.nbytes == 0:
        return torch.empty(at.shape, dtype=dtype)
    if at.start % dtype.itemsize:
        return _swap_halves(torch.frombuffer(bytearray(mapped[at.start : at.end]), dtype=dtype).view(at.shape), at)
    count = at.nbytes // dtype.itemsize
    with _quiet() if memoryview(mapped).readonly else contextlib.nullcontext():
        found = torch.frombuffer(mapped, dtype=dtype, count=count, offset=at.start)
    return _swap_halves(found.view(at.shape), at)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's warning that a mapping is read-only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        yield


def _is_plain(at: TensorAt) -> bool:
    """Whether the file holds the tensor as it is, not quantized."""
    return at.packed is None and not at.swapped and at.dtype in TORCH_DTYPES and at.nbytes > 0


def _swap_halves(tensor: torch.Tensor, at: TensorAt) -> torch.Tensor:
    """`tensor` with the two halves of its rows swapped where its file has them the other way round."""
    return torch.cat(tensor.chunk(2)[::-1]) if at.swapped else tensor


def read_tensor(at: TensorAt, scale: TensorAt | None = None) -> torch.Tensor:
    """The tensor at `at` in RAM of its own, of shape `at.shape`: in the stored dtype, or float32 where it is
    dequantized.

    With `scale`, its 8-bit codes times the scale, float32. Raises Trouble ("damaged", "not_finite", "not_supported").
    """
    quantized = dequantizer_of(at)
    if quantized is not None:
        pieces = [at] if at.packed is None else [piece for _, piece in pieces_of(at)]
        raw = torch.cat([read_tensor(as_bytes(piece)) for piece in pieces])
        return _swap_halves(quantized.dequantize(raw), at)
    tensor = torch.empty(at.shape, dtype=_dtype(at))
    if at.nbytes:
        with at.file.open("rb") as file:
            file.seek(at.start)
            room = tensor.view(-1).view(torch.uint8).numpy()
            got = file.readinto(room)  # pyright: ignore[reportArgumentType]  (numpy's stubs hide the buffer)
        if got != at.nbytes:
            raise Trouble("damaged", f"{at.file} ends before its tensor {at.key}.", hint="Download it again.")
    tensor = _swap_halves(tensor, at)
    return tensor if scale is None else _times_scale(tensor, read_scale(scale), torch.float32)


def read_scale(at: TensorAt) -> torch.Tensor:
    """The scale of 8-bit codes, float32, as stored: of shape () or (1,), or one a row, (rows,) or (rows, 1).

    Raises Trouble("not_finite") for NaN and Inf.
    """
    scale = read_tensor(at).float()
    if not bool(torch.isfinite(scale).all()):
        raise Trouble(
            "not_finite",
            f"{at.key} in {at.file.name}, a scale of 8-bit weights, is NaN or infinite.",
            hint="The model's file is damaged.",
        )
    return scale


def _times_scale(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if scale.numel() > 1:  # one a row
        scale = scale.reshape(-1, *[1] * (codes.ndim - 1))
    return codes.float().mul_(scale).to(dtype)


def dequantizer_of(at: TensorAt) -> GgufBlocks | Dequantizer | None:
    """How a quantized tensor is dequantized from its bytes; None for plain ones. Raises Trouble("not_supported")."""
    if at.packed is not None:
        return Dequantizer(at)
    if at.dtype not in TYPES:
        return None
    found = GgufBlocks(at.dtype, tuple(at.shape))
    if found.nbytes != at.nbytes:
        raise Trouble(
            "not_supported",
            f"{at.file.name} stores {at.key} in blocks that do not end with its rows, so it cannot be read.",
            hint="Take another file of this model.",
        )
    return found


def as_bytes(at: TensorAt) -> TensorAt:
    """The same bytes as a tensor of uint8, shape (nbytes,)."""
    return replace(at, dtype="U8", shape=(at.nbytes,), swapped=False)


def _dtype(at: TensorAt) -> torch.dtype:
    if at.dtype not in TORCH_DTYPES:
        raise Trouble("not_supported", f"{at.file.name} stores {at.key} as {at.dtype}, which cannot be read.")
    return TORCH_DTYPES[at.dtype]


def assign(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Makes `tensor` (in the shape of the network's) the parameter or buffer `name` (dotted) of `module`, uncopied."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)
    elif leaf in owner._buffers:
        owner._buffers[leaf] = tensor


def move_computed_buffers(module: torch.nn.Module, device: torch.device | str) -> None:
    """Moves buffers that are computed and not stored (rotary tables) to `device`; none may be left on meta."""
    for name, buffer in module.named_buffers():
        assert buffer.device.type != "meta", f"buffer {name} was not computed and is not in the file"
        if buffer.device != torch.device(device):
            assign(module, name, buffer.to(device))
