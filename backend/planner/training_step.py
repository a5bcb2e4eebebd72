"""What a step of a training run takes beside weights and states, in each of its moments: forward, backward,
optimizer."""

from __future__ import annotations

from backend.planner.candidates import Terms
from backend.planner.costs import cpu_training, phase_costs
from backend.planner.costs.layout import Layout, Work, Working
from backend.planner.costs.model_sizes import PartSizes
from backend.planner.costs.training_method import shapes_of
from backend.schema.memory_plan import DTYPE_BYTES

MATERIAL_BYTES = 512  # of a token's latents and noise, which a step keeps


def working(terms: Terms, layout: Layout) -> tuple[Working, int, dict[str, int]]:
    """What a step takes beside weights, gradients and states; bytes of checkpoints among it; and of each of its
    moments, gradients included."""
    part, work, grads = terms.denoisers[0], terms.work, gradient_bytes(terms.work)
    if terms.fixed.on_cpu and (found := cpu_training.step(part, terms.point, work, layout)) is not None:
        earlier = grads if work.accumulates else 0
        update = 8 * largest_trained(part, work) + MATERIAL_BYTES * terms.point["b"] * terms.point["n"]
        moments = {
            "forward": found["forward"] + earlier,
            "backward": max(found["begins"] + earlier, found["ends"]),
            "optimizer": grads + update,
        }
        more = max(max(moments.values()) - grads, 0)
        return Working(more, more, more), 0, moments
    working, ends, checkpoints = phase_costs.step(part, terms.point, work, layout, terms.fixed)
    later = 0 if work.accumulates else grads
    begins, updating = max(working.live - later, 0), _updating(part, work, layout)
    forward = begins
    ends = max(
        ends - min(later, _last_gradients(part, work, layout)),
        _one_gradient(part, work) if work.targets == "full" else 0,
    )
    if work.targets == "full" and layout.checkpointed:
        forward = max(_forward(terms, 0 if layout.checkpoints_in_ram else checkpoints) - later, -grads)
    moments = {"forward": forward + grads, "backward": max(begins, ends) + grads, "optimizer": grads + updating}
    return _least_beside(working, max(ends, forward), updating, later), checkpoints, moments


def _updating(part: PartSizes, work: Work, layout: Layout) -> int:
    """What the optimizer makes and drops on a card."""
    if layout.states_in_ram:
        return 0
    at_once = layout.update.at_once * (work.trained_numel - work.idle_numel)
    return int(at_once + layout.update.in_turn * largest_trained(part, work))


def _last_gradients(part: PartSizes, work: Work, layout: Layout) -> int:
    """Bytes of gradients of whole blocks, or of their adapters, that are not there yet while the last are gone through
    backwards."""
    if work.targets != "full":
        return (
            gradient_bytes(work) // max(len(part.blocks), 1) if layout.checkpointed and part.name in work.trained else 0
        )
    blocks = part.blocks[: 1 if layout.checkpointed else phase_costs.BASE_DEPTH]
    return 4 * sum(block.matrix + block.rest + block.precise for block in blocks)


def _one_gradient(part: PartSizes, work: Work) -> int:
    """Of the gradient that comes last, as it is computed: it is kept in float32."""
    return 0 if work.computing == "float32" else DTYPE_BYTES[work.computing] * largest_trained(part, work)


def _forward(terms: Terms, checkpoints: int) -> int:
    """Of a forward pass that keeps checkpoints alone: autocast holds its copies of all weights until it is over."""
    part, work = terms.denoisers[0], terms.work
    copies = 0 if work.computing == "float32" else DTYPE_BYTES[work.computing] * part.numel
    return checkpoints + copies + phase_costs.denoise(part, terms.point, work, terms.fixed).live


def gradient_bytes(work: Work) -> int:
    return 4 * (work.trained_numel - work.idle_numel)


def largest_trained(part: PartSizes, work: Work) -> int:
    """Numbers of the largest tensor that trains; an optimizer on a CPU updates one after the other."""
    if work.targets == "full":
        return part.largest_matrix
    each = (shapes_of(work.algorithm, work.rank, rows, columns) for rows, columns, _ in part.linears.values())
    return max((height * width for shapes in each for height, width in shapes), default=0)


def _least_beside(working: Working, ends: int, updating: int, later: int) -> Working:
    """What is needed beside weights, gradients and states: where backward begins (`later` bytes of gradients are not
    there yet), elsewhere (`ends`), or while the optimizer updates."""
    return Working(*(max(value - later, ends, updating, 0) for value in (working.live, working.least, working.likely)))
