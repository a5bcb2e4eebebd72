"""Units of offloading: a part is cut into its repeated blocks (block swap), and groups of the weights around them.

Blocks are the elements of a module list of one class that holds a good share of the weights (a transformer's layers;
FLUX has two such lists). They are streamed (prefetched one after the other), and their matrices may be stored in FP8.
What is left (embeddings, norms, first and last projections: a few per cent, and what loses most in 8 bits) is grouped
by the modules that contain no block; a group is loaded when first used, in the computation dtype, and stays until the
part is offloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from backend.catalog.spec import PartSpec, TensorAt
from backend.engine.loading.dequantize import Dequantizer
from backend.engine.loading.disk_reader import Layout, Span, lay_out, spans_of
from backend.engine.loading.fp8_storage import cast, is_float8, multiply, store
from backend.engine.loading.gguf_dequantize import GgufBlocks
from backend.engine.loading.load import TORCH_DTYPES, dequantizer_of, move_computed_buffers, read_scale
from backend.engine.offload.vram_states import State
from backend.schema.messages import Trouble

SHARE = 0.05  # of a part's bytes: a module list with less is no list of blocks

Factor = (
    float | torch.Tensor | GgufBlocks | Dequantizer
)  # what stored numbers are multiplied with, or how they are decoded


@dataclass(eq=False)
class Unit:
    """Tensors that are offloaded and fetched together, in the order of the file.

    `targets[i]`: the modules and attributes that hold tensor i (several where weights are tied).
    """

    position: int
    name: str  # of the module: "transformer_blocks.3"
    block: bool  # one of the repeated blocks, else a group of weights around them
    module: nn.Module
    names: tuple[str, ...]  # of the parameters, dotted
    tensors: tuple[TensorAt, ...]
    targets: tuple[tuple[tuple[nn.Module, str], ...], ...]
    raw: Layout  # as in the file
    computing: Layout  # as the forward pass takes them
    spans: tuple[Span, ...]
    on_disk: Source
    stored: Stored | None = None  # its weights in memory; None: on disk
    parked: Stored | None = None  # its offload state, kept in RAM while the weights are nearer to computation
    ready: Stored | None = None  # resident: its weights as the forward pass takes them, for as long as they stay
    packed: frozenset[int] = frozenset()  # tensors that stay quantized as in the file, until they are used
    fp8_codes: frozenset[int] = frozenset()  # tensors whose layers multiply in FP8, without a cast (`fp8_matmul`)

    def casts(self, source: Source, index: int) -> bool:
        """Whether tensor `index` of `source` must be cast or dequantized before the forward pass takes it."""
        if index in self.fp8_codes and source.layout.fields[index].dtype is torch.float8_e4m3fn:
            return False
        factor = source.factors[index]
        same = source.layout.fields[index].dtype == self.computing.fields[index].dtype
        return not same or isinstance(factor, torch.Tensor) or factor != 1.0


@dataclass(eq=False)
class Source:
    """How a unit's tensors are stored.

    `factors[i]`: the scale of tensor i (a number; or float32, one a row, shape (rows,)), or its dequantizer.
    `nonfinite[i]`: whether there are FP8 codes that are NaN or Inf (None: not checked yet).
    """

    layout: Layout
    factors: tuple[Factor, ...]
    nonfinite: list[bool | None]


@dataclass(eq=False)
class Stored(Source):
    """A unit's tensors in memory, in `state`.

    `buffer` (uint8) holds them all, one after the other, where they may have to be fetched; None: separate tensors.
    `private_bytes` leaves out views of the memory-mapped file.
    """

    state: State
    tensors: list[torch.Tensor]
    buffer: torch.Tensor | None
    private_bytes: int


def find_units(
    module: nn.Module,
    part: PartSpec,
    computing: torch.dtype,
    split_bytes: int | None = None,
    *,
    stays_packed: Callable[[str], bool] | None = None,
) -> list[Unit]:
    """The parameters and buffers of `module` that `part` has in its files, grouped in units; blocks in the order of the
    module. `computing`: the dtype of the forward pass.

    `split_bytes`: a block that takes more bytes in the file is cut into its children, they into theirs, until all are
    smaller or have none. `stays_packed(name)`: whether a parameter of a block that the file stores quantized stays
    quantized in memory. Raises Trouble ("not_supported") for tensors that cannot be read one by one.
    """
    lists = _block_lists(module, part)
    sizes = _sizes(part) if split_bytes is not None else {}
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    groups: dict[str, dict[str, None]] = {}
    names = {}
    for name, owner, leaf, tensor in _named_tensors(module):
        owners.setdefault(id(tensor), []).append((owner, leaf))
        if name in part.tensors and names.setdefault(id(tensor), name) == name:
            group = _group_of(name, lists)
            if split_bytes is not None and group.rpartition(".")[0] in lists:
                group = _piece_of(name, group, sizes, split_bytes)
            groups.setdefault(group, {})[name] = None
    found = []
    for group, members in groups.items():
        block = any(group.startswith(f"{path}.") for path in lists)
        targets = {name: tuple(owners[id(_tensor(module, name))]) for name in members}
        found.append(_make_unit(len(found), group, block, module, part, targets, computing))
    for unit in found:
        if unit.block and stays_packed is not None:
            unit.packed = frozenset(
                index
                for index, (name, factor) in enumerate(zip(unit.names, unit.on_disk.factors, strict=True))
                if stays_packed(name) and (name in part.scales or isinstance(factor, Dequantizer))
            )
    return sorted(found, key=lambda unit: unit.position)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    for path, owner in module.named_modules(remove_duplicate=False):
        for leaf, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is not None:
                yield f"{path}.{leaf}".lstrip("."), owner, leaf, tensor


def _tensor(module: nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(path), leaf)


def _block_lists(module: nn.Module, part: PartSpec) -> tuple[str, ...]:
    """Paths of the outermost module lists of two or more modules of one class with at least `SHARE` of the bytes."""
    found: list[str] = []
    for path, inner in module.named_modules():
        if (
            not isinstance(inner, nn.ModuleList)
            or len(inner) < 2
            or any(path.startswith(f"{outer}.") for outer in found)
        ):
            continue
        nbytes = sum(at.nbytes for name, at in part.tensors.items() if name.startswith(f"{path}."))
        if len({type(block) for block in inner}) == 1 and nbytes >= SHARE * part.nbytes:
            found.append(path)
    return tuple(found)


def _group_of(name: str, lists: tuple[str, ...]) -> str:
    """The block that `name` belongs to, or the path of the largest module around it that contains no block."""
    for path in lists:
        if name.startswith(f"{path}."):
            return f"{path}.{name[len(path) + 1 :].split('.')[0]}"
    steps = name.split(".")[:-1]
    for depth in range(1, len(steps) + 1):
        path = ".".join(steps[:depth])
        if not any(f"{other}.".startswith(f"{path}.") for other in lists):
            return path
    return ".".join(steps)


def _sizes(part: PartSpec) -> dict[str, int]:
    """Bytes in the file under every module path."""
    sizes: dict[str, int] = {}
    for name, at in part.tensors.items():
        steps = name.split(".")
        for depth in range(1, len(steps)):
            path = ".".join(steps[:depth])
            sizes[path] = sizes.get(path, 0) + at.nbytes
    return sizes


def _piece_of(name: str, block: str, sizes: dict[str, int], split_bytes: int) -> str:
    """The outermost module from `block` inwards around `name` that is small enough, or the innermost."""
    path, steps = block, name[len(block) + 1 :].split(".")[:-1]
    for step in steps:
        if sizes[path] <= split_bytes:
            break
        path = f"{path}.{step}"
    return path


def _make_unit(
    position: int,
    group: str,
    block: bool,
    module: nn.Module,
    part: PartSpec,
    targets: dict[str, tuple[tuple[nn.Module, str], ...]],
    computing: torch.dtype,
) -> Unit:
    names = sorted(targets, key=lambda name: (part.tensors[name].file, part.tensors[name].start))
    tensors = tuple(part.tensors[name] for name in names)
    raw = lay_out(_stored(at) for at in tensors)
    factors = tuple(_factor(part, name) for name in names)
    shapes = [
        (_computed_dtype(field.dtype, part, name, computing), part.tensors[name].shape)
        for field, name in zip(raw.fields, names)
    ]
    return Unit(
        position=position,
        name=group,
        block=block,
        module=module.get_submodule(group),
        names=tuple(names),
        tensors=tensors,
        targets=tuple(targets[name] for name in names),
        raw=raw,
        computing=lay_out(shapes),
        spans=spans_of(tensors, raw),
        on_disk=Source(raw, factors, [None] * len(names)),
    )


def _stored(at: TensorAt) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape that a tensor has in its file; of a quantized one those of its bytes."""
    if at.swapped:
        raise Trouble(
            "not_supported",
            f"{at.file.name} keeps the halves of {at.key} in the other order, so it cannot be read piece by piece.",
            hint="Load this part without offload, or take the model in the diffusers layout.",
        )
    if dequantizer_of(at) is not None:
        return torch.uint8, (at.nbytes,)
    if at.dtype not in TORCH_DTYPES:
        raise Trouble("not_supported", f"{at.file.name} stores {at.key} as {at.dtype}, which cannot be read.")
    return TORCH_DTYPES[at.dtype], at.shape


def _computed_dtype(stored: torch.dtype, part: PartSpec, name: str, computing: torch.dtype) -> torch.dtype:
    """Floats, and integer codes with a factor, become `computing`; other integers stay what they are."""
    floats = stored.is_floating_point or name in part.scales or dequantizer_of(part.tensors[name]) is not None
    return computing if floats else stored


def _factor(part: PartSpec, name: str) -> Factor:
    if name not in part.scales:
        return dequantizer_of(part.tensors[name]) or 1.0
    scale = read_scale(part.scales[name])
    return float(scale) if scale.numel() == 1 else scale.reshape(-1)


def stored_layout(unit: Unit, dtype: torch.dtype) -> Layout:
    """The layout of `unit` in memory when stored as `dtype`.

    FP8 is for the matrices of a block's linear and convolution layers; all else keeps the computation's dtype. FP8
    codes that the file holds in that very format stay as they are, and so do `unit.packed` tensors.
    """
    fields = []
    for index, (raw, computing, targets) in enumerate(
        zip(unit.raw.fields, unit.computing.fields, unit.targets, strict=True)
    ):
        if not computing.dtype.is_floating_point or index in unit.packed:
            fields.append((raw.dtype, raw.shape))
        elif is_float8(dtype) and not (unit.block and _is_matrix(targets)):
            fields.append((computing.dtype, computing.shape))
        else:
            fields.append((dtype, computing.shape))
    return lay_out(fields)


def _is_matrix(targets: tuple[tuple[nn.Module, str], ...]) -> bool:
    return all(isinstance(owner, nn.Linear | _ConvNd) and leaf == "weight" for owner, leaf in targets)


def convert(
    source: torch.Tensor,
    target: torch.Tensor,
    factor: Factor,
    nonfinite: bool | None,
) -> tuple[Factor, bool | None]:
    """Casts or dequantizes: writes `source` x `factor` to `target`, rounded to the latter's dtype.

    Both have the same shape, except that a quantized `source` is uint8, shape (bytes,). Returns the scale that
    `target` must still be multiplied with (a number, or float32 of shape (rows,)), and whether it has FP8 codes that
    are NaN or Inf (None: not checked).
    """
    if isinstance(factor, GgufBlocks | Dequantizer):
        if target.dtype is torch.uint8:  # it stays quantized
            target.copy_(source)
            return factor, False
        source, factor = factor.dequantize(source), 1.0
    if source.dtype == target.dtype:
        target.copy_(source)
        return factor, nonfinite if is_float8(target.dtype) else False
    if is_float8(target.dtype):
        exact = source if not is_float8(source.dtype) else _cast_new(source, factor)
        exponent = store(exact, target)
        return 2.0**-exponent, None if exponent == 0 else False
    if is_float8(source.dtype):
        cast(source, target, factor=factor, nonfinite=nonfinite)
    elif isinstance(factor, torch.Tensor) or factor != 1.0:
        multiply(source, target, factor)
    else:
        target.copy_(source)
    return 1.0, False


def _cast_new(codes: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
    return cast(codes, torch.empty(codes.shape, dtype=torch.float32, device=codes.device), factor=factor)


def move_unmanaged(module: nn.Module, units: list[Unit], device: torch.device) -> None:
    """Moves what is in no unit (rotary tables, adapters added before) to the computing device, where it stays."""
    move_computed_buffers(module, device)
    owned = {id(getattr(owner, leaf)) for unit in units for places in unit.targets for owner, leaf in places}
    for name, parameter in module.named_parameters():
        if id(parameter) not in owned:
            assert parameter.device.type != "meta", f"{name} has no memory and is not in the file"
            parameter.data = parameter.data.to(device)
