"""What a run does with a network on a CPU, on fake tensors: its step from noisy latents to gradients, and a pass of a
sample.

The trainer's own attention, the CPU's kernels and torch's own autocast are traced as they are; nothing stands for a
card's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from backend.catalog.family import DrawSettings
from backend.engine.tracing import forward_calls
from backend.engine.tracing.allocation_recorder import Tape, record
from backend.engine.tracing.forward_calls import LORA
from backend.planner.costs.training_method import Method

KERNELS = ("plain", "fused")  # attention in matrix products for short sequences, torch's own for long ones
FORWARD, TOP, BOTTOM = (
    "forward",
    "top",
    "bottom",
)  # ends of the forward pass, and of the last block's backward; beginning of the first's


def network(
    name: str,
    config: dict,
    dtype: torch.dtype,
    *,
    targets: list[str],
    rank: int,
    checkpointed: bool,
    kernel: str,
    method: Method = LORA,
) -> torch.nn.Module:
    """The network as a run on a CPU has it: with adapters on `targets`, or (none) with weights in float32 that
    train."""
    module = forward_calls.build(name, config, dtype if targets else torch.float32)
    if kernel == "plain":
        forward_calls.owner(module)[0].use_cpu_attention(module)
    if targets:
        forward_calls.add_lora(module, targets, rank, torch.float32, method=method)
    else:
        module.requires_grad_(True)
    module.train()
    if checkpointed:
        module.enable_gradient_checkpointing()
    return module


def step_tape(
    module: torch.nn.Module,
    blocks: list[torch.nn.Module],
    point: dict,
    dtype: torch.dtype,
    *,
    lean: bool,
    drawing: int = 0,
) -> Tape:
    """One step without gradients of an earlier one, with marks. `blocks` in the order in which they compute; `lean`: no
    autocast; `drawing`: denoising steps of a student."""

    def work(tape: Tape) -> None:
        latents, noise = _latents(module, point), _latents(module, point)
        with _marking(blocks, tape):
            loss = _loss(module, latents, noise, point, dtype, lean=lean, drawing=drawing)
            tape.mark(FORWARD)
            loss.backward()
            del loss

    module.zero_grad(set_to_none=True)
    return record(work, weights=forward_calls.resident(module), fake=False, workspace=False)


def sample_tape(module: torch.nn.Module, point: dict, dtype: torch.dtype) -> Tape:
    """One pass of a sample between steps; `b` 2 is both halves of guidance."""
    family, part = forward_calls.owner(module)

    def work(_: Tape) -> None:
        x = _latents(module, {**point, "b": 1}, dtype)
        both = x if point["b"] == 1 else torch.cat([x, x])

        def computing(**named):
            with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
                return module(**named)

        _, sigma, cond = family.example_inputs(module, forward_calls.whole(point), dtype)
        family.predict({part: computing}, both, sigma, cond, part=part)

    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            return record(work, weights=forward_calls.resident(module), fake=False, workspace=False)
    finally:
        module.train(training)


def _latents(module: torch.nn.Module, point: dict, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    family, _ = forward_calls.owner(module)
    return family.example_inputs(module, forward_calls.whole(point), dtype)[0]


def _loss(module, latents, noise, point: dict, dtype: torch.dtype, *, lean: bool, drawing: int) -> torch.Tensor:
    """As the trainer's learner computes it; all that is only of the forward pass is gone when this returns."""
    family, part = forward_calls.owner(module)
    wide = dtype == torch.float32
    settings = DrawSettings(0, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16 if wide else dtype, enabled=not wide):
        _, sigma, cond = family.example_inputs(module, forward_calls.whole(point), dtype)
        if drawing:
            drawn = _drawn(module, noise, cond, dtype, lean=lean, drawing=drawing)
            return ((drawn.float() - latents.float()) ** 2).flatten(1).mean(1).sum()
        x = family.noised(latents, noise, sigma, settings).to(dtype)
        with torch.autocast("cpu", enabled=False) if lean else contextlib.nullcontext():
            found = family.predict({part: module}, x, sigma, cond, part=part)
        squares = (found.float() - family.target(latents, noise, sigma, settings).float()) ** 2
        return squares.flatten(1).mean(1).sum()


def _drawn(module, noise, cond, dtype: torch.dtype, *, lean: bool, drawing: int) -> torch.Tensor:
    """As the trainer's student draws."""
    family, part = forward_calls.owner(module)
    x, levels = noise, torch.empty(drawing + 1)
    for step in range(drawing):
        sigma = levels[step].expand(len(x))
        with torch.autocast("cpu", enabled=False) if lean else contextlib.nullcontext():
            velocity = family.predict({part: module}, x.to(dtype), sigma, cond, part=part)
        x = x + (levels[step + 1] - levels[step]) * velocity.float()
    return x


@contextlib.contextmanager
def _marking(blocks: list[torch.nn.Module], tape: Tape) -> Iterator[None]:
    """Marks where gradients arrive at the output of the last block but one (TOP) and of the first (BOTTOM)."""
    handles = [
        blocks[-2].register_forward_hook(_marker(tape, TOP)),
        blocks[0].register_forward_hook(_marker(tape, BOTTOM)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _marker(tape: Tape, name: str) -> Callable:
    def once(_: torch.Tensor) -> None:
        tape.marks.setdefault(name, len(tape.events))

    def hook(block, inputs, outputs) -> None:
        for one in outputs if isinstance(outputs, tuple) else (outputs,):
            if isinstance(one, torch.Tensor) and one.requires_grad:
                one.register_hook(once)

    return hook
