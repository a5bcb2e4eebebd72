"""Working memory of a training step on a card, as closed forms."""

from __future__ import annotations

import contextlib

import torch

from backend.engine.tracing import fit, forward_calls, sample_points
from backend.engine.tracing.allocation_recorder import Tape, fakes

RANK = 16  # of the adapters that are traced; their inner activations grow with it


def forms_of(network, config, known, dtype, name, targets, checkpointed, texts) -> dict:
    """A training step with adapters on `targets`, or with all weights training (`targets` = "full")."""
    names = ["1", "n", *texts]
    span = {key: sample_points.TOKENS[key] for key in ("n", *texts)}
    wanted = known["lora"].get(targets, ())
    found = {}
    for depths in sample_points.depths_of(known):
        # with checkpoints alone kept, a deeper block adds the same for every picture
        for batch in (1, 2) if depths == sample_points.depths_of(known)[0] or not checkpointed else (1,):
            points = [{**point, "b": batch, "r": RANK} for point in sample_points.points(texts, len(names))]
            few = sample_points.config_of(config, known, depths)
            tapes = [step_tape(network, few, dtype, wanted, point, checkpointed) for point in points]
            form = fit.fit(names, points, tapes, span)
            if wanted:
                layers = len(wanted) * (1 if checkpointed else min(depths))
                form = fit.with_rank(form, layers * batch * torch.finfo(dtype).bits // 8 / (2 if texts else 1), RANK)
            if depths == sample_points.depths_of(known)[0] and batch == 1:
                form["pool"] = fit.pools(tapes[-2:-1])
            found[
                f"step/{targets}/{'checkpointed' if checkpointed else 'kept'}/{name}/b{batch}/{sample_points.word(depths)}"
            ] = form
    return found


def step_tape(
    network: str, config: dict, dtype: torch.dtype, targets: list[str], point: dict, checkpointed: bool
) -> Tape:
    """One step with adapters on `targets`, or (none) of all weights; gradients are there from the start."""
    with fakes():
        module = forward_calls.build(network, config, dtype if targets else torch.float32)
        if targets:
            forward_calls.add_lora(module, targets, point["r"], torch.float32)
        else:
            module.requires_grad_(True)
        module.train()
        if checkpointed:
            module.enable_gradient_checkpointing()
        step = forward_calls.train_step(module, point, dtype)
        with (
            forward_calls.autocast(dtype) if not targets and dtype != torch.float32 else contextlib.nullcontext()
        ):  # lean layers need none
            return forward_calls.trace(module, step, warm=False, grad=True)
