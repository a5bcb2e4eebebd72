"""LoRAs merged, resized, extracted from tuned models, baked into checkpoints, and measured block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from backend.catalog.lora.block_norms import block_of, block_order, squared_norm
from backend.catalog.spec import PartSpec
from backend.engine.loading import load
from backend.engine.loading.tensor_source import open_source
from backend.engine.lora import fuse
from backend.engine.lora.algorithms.delta import Body, Dense, Hadamard, LowRank, sum_of
from backend.engine.lora.read import read_lora
from backend.engine.lora.tools.content import Content
from backend.engine.lora.tools.export_formats import side_by_side
from backend.engine.lora.tools.safetensors_writer import Progress, Stop, never, nothing, save_stream
from backend.schema.messages import Cancelled, Trouble

EXACT_SVD = 1536  # the shorter side up to which a matrix is decomposed exactly


@dataclass(frozen=True)
class Reduced:
    """Contents of a lower rank, and what that cost: the Frobenius norm of what was lost against that of the whole."""

    contents: dict[str, Content]
    error: float
    errors: dict[str, float]
    ranks: dict[str, int]


def merged(all_contents: Sequence[tuple[dict[str, Content], float]]) -> dict[str, Content]:
    """The sum of several LoRAs, each times its strength, exactly: pairs side by side, other changes added up whole."""
    names = dict.fromkeys(name for contents, _ in all_contents for name in contents)
    found = {}
    for name in names:
        pairs, others, biases = [], [], []
        for contents, strength in all_contents:
            content = contents.get(name)
            if content is None:
                continue
            if content.magnitude is not None:
                raise Trouble(
                    "not_supported",
                    f"{name} is a DoRA, whose sum with others needs the base model.",
                    hint="Bake it instead.",
                )
            for body in content.bodies:
                body = body.low_rank() if isinstance(body, Hadamard) else body
                scaled = _scaled(body, strength)
                (pairs if isinstance(scaled, LowRank) else others).append(scaled)
            biases += [_scaled(bias, strength) for bias in content.bias]
        content = Content(bias=[_total(biases)] if biases else [])
        if pairs and not others:
            content.bodies = [side_by_side(pairs)]
        elif pairs or others:
            content.bodies = [_total([*pairs, *others])]
        found[name] = content
    return found


def _scaled(body: Body, strength: float) -> Body:
    from dataclasses import replace

    return replace(body, scale=body.scale * strength)


def _total(bodies: Sequence[Body]) -> Dense:
    return Dense(sum_of(bodies), 1.0)


def reduced(
    contents: dict[str, Content],
    *,
    rank: int | None = None,
    energy: float | None = None,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> Reduced:
    """Every weight's change at `rank`, or at the least rank that keeps the share `energy` of the squared singular
    values."""
    if (rank is None) == (energy is None):
        raise Trouble("bad_value", "Give either a rank or a share of the energy.")
    if (rank is not None and rank < 1) or (energy is not None and not 0 < energy <= 1):
        raise Trouble(
            "bad_value",
            f"A rank is at least 1 and a share lies between 0 and 1, not {energy if rank is None else rank}.",
        )
    found, errors, ranks = {}, {}, {}
    lost = whole = 0.0
    for number, (name, content) in enumerate(contents.items()):
        if should_stop():
            raise Cancelled
        if content.magnitude is not None:
            raise Trouble("not_supported", f"{name} is a DoRA, which cannot be resized without the base model.")
        small = Content(bias=content.bias)
        if content.bodies and _is_matrix(content.bodies[0]):
            pair, kept, total = _truncated(content.bodies, rank, energy)
            small.bodies = [pair]
            missing = max(0.0, total - kept)
            lost, whole = lost + missing, whole + total
            errors[name] = math.sqrt(missing / total) if total else 0.0
            ranks[name] = pair.down.shape[0]
        else:
            small.bodies = content.bodies
        found[name] = small
        on_progress(number + 1, len(contents))
    return Reduced(found, math.sqrt(lost / whole) if whole else 0.0, errors, ranks)


def _is_matrix(body: Body) -> bool:
    return len(body.shape) > 1 and min(body.shape[0], math.prod(body.shape[1:])) > 1


def _truncated(bodies: Sequence[Body], rank: int | None, energy: float | None) -> tuple[LowRank, float, float]:
    """(the best pair, energy it keeps, energy there was). A low-rank sum is decomposed in its own small space,
    exactly."""
    shape = bodies[0].shape
    bodies = [
        body.low_rank() if isinstance(body, Hadamard) and body.rank < min(shape[0], shape[1]) else body
        for body in bodies
    ]
    pairs = [body for body in bodies if isinstance(body, LowRank)]
    if len(pairs) == len(bodies):
        pair = side_by_side(pairs)
        left, right = pair.up.double(), pair.down.flatten(1).double()
        if left.shape[1] < min(left.shape[0], right.shape[1]):
            (q1, r1), (q2, r2) = torch.linalg.qr(left), torch.linalg.qr(right.t())
            u, s, v = torch.linalg.svd(r1 @ r2.t(), full_matrices=False)
            return _kept(q1 @ u, s, v @ q2.t(), rank, energy, shape)
    dense = sum_of(bodies).flatten(1)
    return _kept(
        *decomposed(dense, rank if energy is None else None),
        rank,
        energy,
        shape,
        total=float(dense.double().square().sum()),
    )


def decomposed(matrix: torch.Tensor, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Truncated SVD of `matrix` (m, n): u (m, k), s (k,), v^T (k, n). Exact for matrices of moderate size or without
    `rank`, else by random projection (k a little beyond `rank`)."""
    if rank is None or min(matrix.shape) <= EXACT_SVD or rank * 4 >= min(matrix.shape):
        return torch.linalg.svd(matrix.double() if min(matrix.shape) <= 512 else matrix, full_matrices=False)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(0)  # the same file twice gives the same result
    u, s, v = torch.svd_lowrank(matrix, q=min(rank + 16, *matrix.shape), niter=4)
    torch.random.set_rng_state(generator_state)
    return u, s, v.t()


def _kept(u, s, v, rank, energy, shape, total: float | None = None) -> tuple[LowRank, float, float]:
    squares = s.double().square()
    total = float(squares.sum()) if total is None else total
    if energy is not None:
        reached = torch.cumsum(squares, 0) >= energy * total * (1 - 1e-12)
        rank = int(reached.nonzero()[0]) + 1 if bool(reached.any()) else len(s)
    rank = max(1, min(rank, len(s)))
    root = s[:rank].sqrt()
    up, down = (u[:, :rank] * root).float(), (root[:, None] * v[:rank]).float()
    return LowRank(up, down.reshape(rank, *shape[1:]), 1.0), float(squares[:rank].sum()), total


def extracted(
    tuned: PartSpec, base: PartSpec, *, rank: int, on_progress: Progress = nothing, should_stop: Stop = never
) -> Reduced:
    """The LoRA that makes `tuned` of `base` as nearly as `rank` allows; norms and biases as whole changes."""
    _check_alike(tuned, base)
    found: dict[str, Content] = {}
    errors, ranks = {}, {}
    lost = whole = 0.0
    for number, name in enumerate(sorted(base.tensors)):
        if should_stop():
            raise Cancelled
        module, _, leaf = name.rpartition(".")
        change = _values(tuned, name) - _values(base, name)
        energy = float(change.double().square().sum())
        if energy == 0.0 or leaf not in ("weight", "bias"):
            continue
        content = found.setdefault(module, Content())
        if leaf == "bias":
            content.bias = [Dense(change, 1.0)]
        elif change.ndim < 2 or min(change.shape[0], change[0].numel()) < 2:
            content.bodies = [Dense(change, 1.0)]
        else:
            pair, kept, _ = _kept(*decomposed(change.flatten(1), rank), rank, None, tuple(change.shape), total=energy)
            content.bodies = [pair]
            missing = max(0.0, energy - kept)
            lost, whole = lost + missing, whole + energy
            errors[module], ranks[module] = math.sqrt(missing / energy), pair.down.shape[0]
        on_progress(number + 1, len(base.tensors))
    if not found:
        raise Trouble("bad_value", "The two models are the same; there is nothing to extract.")
    return Reduced(found, math.sqrt(lost / whole) if whole else 0.0, errors, ranks)


def _check_alike(tuned: PartSpec, base: PartSpec) -> None:
    for name, at in base.tensors.items():
        other = tuned.tensors.get(name)
        if other is None or other.shape != at.shape:
            what = "lacks" if other is None else "has another size of"
            raise Trouble("shape_mismatch", f"The tuned model {what} {name}; both must be of the same architecture.")


def _values(part: PartSpec, name: str) -> torch.Tensor:
    return load.read_tensor(part.tensors[name], part.scales.get(name)).float()


def bake(
    part: PartSpec,
    loras: Sequence[tuple[Path, float]],
    out: Path,
    *,
    family,
    families,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> list:
    """A checkpoint of `part` with LoRAs in its weights, under diffusers' names, in `dtype` (None: as stored; 8-bit
    becomes bfloat16).

    Answers what each LoRA did ((name, modules applied, unused)). One tensor is in memory at a time.
    """
    module = load.build_meta(part)
    kind = dtype or _writable(part.storage)
    changes: dict[str, list] = {}
    report = []
    for path, strength in loras:
        read = read_lora(
            open_source(path),
            {"dit": module},
            family,
            families,
            weight_of=lambda _, name: _values(part, name),
            first="dit",
        )
        report.append((Path(path).name, read.num_applied, read.unused))
        for change in read.changes["dit"]:
            changes.setdefault(change.name, []).append((change, strength))

    def get(name: str) -> torch.Tensor:
        weight = _values(part, name)
        base = weight.clone() if any(change.dora for change, _ in changes.get(name, ())) else None
        for change, strength in changes.get(name, ()):
            fuse.fuse(weight, change, strength, base)
        return weight.to(kind)

    shapes = {name: (kind, tuple(at.shape)) for name, at in part.tensors.items()}
    save_stream(
        out, shapes, get, {"format": "pt"}, overwrite=overwrite, on_progress=on_progress, should_stop=should_stop
    )
    return report


def _writable(storage: str) -> torch.dtype:
    dtype = getattr(torch, storage, None)
    return (
        dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1 else torch.bfloat16
    )


def norm_of(body: Body) -> float:
    """Frobenius norm of a change; a pair's by its Gram matrices, without making the product."""
    if isinstance(body, LowRank):
        up, down = body.up.double(), body.down.flatten(1).double()
        return abs(body.scale) * math.sqrt(max(0.0, squared_norm(up, down)))
    return float(torch.linalg.vector_norm(body.dense().double()))


def strengths(contents: dict[str, Content]) -> list[tuple[str, float, int]]:
    """(block, Frobenius norm of all its changes together, number of modules) in the order of the model."""
    blocks: dict[str, list[float]] = {}
    for name, content in contents.items():
        single = content.bodies[0] if len(content.bodies) == 1 else None
        dense = content.dense() if single is None else None
        norm = norm_of(single) if single is not None else 0.0 if dense is None else norm_of(Dense(dense, 1.0))
        blocks.setdefault(block_of(name), []).append(norm)
    return [
        (block, math.sqrt(sum(n * n for n in norms)), len(norms))
        for block, norms in sorted(blocks.items(), key=lambda one: block_order(one[0]))
    ]
