"""`--vram`: apply the memory plan that the studio shows to the settings of the run."""

from __future__ import annotations

from dataclasses import replace

import torch
from accelerate import Accelerator

from backend.catalog.hub import download
from backend.dataset.look_ahead import look_ahead
from backend.engine.devices import allocator_limits, device_memory
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import plan_here
from backend.planner.rules.check_training import vram_gib
from backend.schema.memory_plan import GIB, Card, VramPlan
from backend.schema.messages import Trouble
from backend.schema.paths import places
from backend.schema.settings import from_values, to_values
from backend.schema.training.config import TrainingConfig
from backend.training.checkpoint.reporter import Reporter
from backend.training.model.base_model import find_base_model


def apply_plan(config: TrainingConfig, accelerator: Accelerator, reporter: Reporter) -> TrainingConfig:
    """`config` as the plan for its `vram` sets it; as it is where it asks for none. All processes take the first one's
    plan.

    Raises Trouble for a `vram` that is no amount, and where the run cannot fit.
    """
    wanted = (config.memory.vram or "").strip()
    if not wanted:
        allocator_limits.cap(accelerator.device)
        return config
    with accelerator.main_process_first():  # one downloads what is missing
        base = find_base_model(config.model)
    card = card_of(wanted, accelerator.device)
    allocator_limits.cap(accelerator.device, most_bytes=None if wanted.lower() == "auto" else card.total_bytes)
    user = places().user
    sizes = sizes_of(base.spec, folder=user / "memory")
    known = look_ahead(config, sizes, base.family).known
    found = plan_here(sizes, card, config, download.preferences(), user=user, known=known)
    settings = _shared(found.settings, accelerator)
    if found.verdict == "red":
        raise Trouble(
            "does_not_fit",
            f"This run does not fit into {_words(card)}. {found.advice}",
            hint="Lower --max_pixels or --batch_size.",
        )
    _report(found, settings, card, config, reporter)
    return from_values(type(config), settings, base=config)


def card_of(vram: str, device: torch.device) -> Card:
    """The device with as much memory as `vram` says: "auto" (what is free now, less the reserve), or GiB."""
    reserve = None if device.type == "cpu" else int(download.preferences().reserve_gib * GIB)
    card = device_memory.probe(device, reserve_bytes=reserve)
    gib = vram_gib(vram)
    if gib is None:
        return card
    nbytes = int(gib * GIB)
    return replace(card, total_bytes=nbytes, free_bytes=nbytes, used_by_others_bytes=0, reserve_bytes=0)


def _shared(settings: dict, accelerator: Accelerator) -> dict:
    if accelerator.num_processes == 1:
        return settings
    from accelerate.utils import broadcast_object_list

    return broadcast_object_list([settings])[0]


def _report(found: VramPlan, settings: dict, card: Card, config: TrainingConfig, reporter: Reporter) -> None:
    before = to_values(config)
    changed = {name: value for name, value in settings.items() if before[name] != value}
    low, high = found.peak_low_bytes / GIB, found.peak_high_bytes / GIB
    flags = " ".join(f"--{name}" if value is True else f"--{name} {value}" for name, value in changed.items())
    reporter.note(
        f"The plan for {_words(card)}: {low:.2f} to {high:.2f} GiB at most, with {flags or 'nothing changed'}.",
        plan={
            "settings": changed,
            "peak_low_bytes": found.peak_low_bytes,
            "peak_high_bytes": found.peak_high_bytes,
            "live_bytes": found.peak_live_bytes,
            "steps": [step.sentence for step in found.steps],
        },
    )


def _words(card: Card) -> str:
    return f"{(card.total_bytes - card.used_by_others_bytes - card.reserve_bytes) / GIB:.2f} GiB of {card.device}"
