"""What another job takes under an arrangement that is there already: the loaded model's.

Live bytes, phase by phase; no torch.
"""

from __future__ import annotations

from dataclasses import replace

from backend.planner import training_candidates
from backend.planner.candidates import Terms
from backend.planner.costs import phase_costs
from backend.planner.costs.device_speed import Speed
from backend.planner.costs.layout import DENOISERS, FP8, Fixed, Layout, PartLayout, Work
from backend.planner.costs.model_sizes import ModelSizes
from backend.planner.costs.phase_costs import point_of
from backend.planner.costs.weight_bytes import on_card
from backend.planner.workload import work_of_training
from backend.schema.memory_plan import DISK, PhasePlan, VramPlan


def live_bytes(plan: VramPlan, sizes: ModelSizes, work: Work, fixed: Fixed) -> dict[str, int]:
    """Phase -> bytes of tensors alive at once on the device, were `work` done as `plan` keeps the weights."""
    return {phase: one.live_bytes for phase, one in phases(plan, sizes, work, fixed).items()}


def high_bytes(plan: VramPlan, sizes: ModelSizes, work: Work, fixed: Fixed) -> dict[str, int]:
    """The same with what the allocator is likely to reserve, context and libraries: what a budget is held against."""
    return {phase: one.peak_high_bytes for phase, one in phases(plan, sizes, work, fixed).items()}


def phases(plan: VramPlan, sizes: ModelSizes, work: Work, fixed: Fixed) -> dict[str, PhasePlan]:
    """Each phase of `work`, done as `plan` keeps the weights."""
    layouts, point = dict(plan.layout), point_of(sizes, work)
    for name in layouts.keys() & set(DENOISERS):
        layouts[name] = replace(layouts[name], whole=work.compiled, codes=work.fp8_products)
    text = [part for name, part in sizes.parts.items() if name not in (*DENOISERS, "vae")]
    dits = [sizes.parts[name] for name in DENOISERS if name in sizes.parts]
    denoising = {**point, "b": 1} if plan.halves_apart else point
    found = {
        "text": [phase_costs.text(part, point, work, fixed) for part in text],
        "denoise": [phase_costs.denoise(part, denoising, work, fixed) for part in dits],
    }
    active = {"text": {part.name for part in text}, "denoise": {dits[0].name}}
    if "vae" in sizes.parts:
        vae, dtype = sizes.parts["vae"], work.decoder_dtype
        found["decode"] = [phase_costs.decode(vae, point, dtype, fixed, tiled=plan.tiled_vae)]
        active["decode"] = {"vae"}
        if work.encodes:
            found["encode"] = [
                phase_costs.decode(vae, phase_costs.encoded(point, sizes, work), dtype, fixed, stage="encode")
            ]
            active["encode"] = {"vae"}
    return {
        phase: phase_costs.phase(
            phase,
            {"": _weights(layouts, sizes, active[phase], work)},
            max(working, key=lambda one: one.live),
            fixed,
            adapter=work.lora_bytes if phase == "denoise" else 0,
        )
        for phase, working in found.items()
        if working
    }


def _weights(layouts: dict[str, PartLayout], sizes: ModelSizes, active: set[str], work: Work) -> int:
    """Weights on the device, and the buffers of what is fetched or cast."""
    held, staging = 0, 0
    for name, part in sizes.parts.items():
        dtype = work.decoder_dtype if name == "vae" else work.computing
        layout = layouts.get(name, PartLayout(storage=dtype))
        weights, buffers = on_card(part, layout, name in active, dtype)
        held, staging = held + weights, max(staging, buffers)
    return held + staging


def run_bytes(config, sizes: ModelSizes, fixed: Fixed, **known) -> dict[str, int]:
    """Phase -> bytes of tensors alive at once on the device in a run of `config` as it is: of its step's moments, a
    sample, a save.

    `known`: fields of `Work` that the run has found out (`width`, `text_tokens`, ...).
    """
    work, own = work_of_training(config, sizes)
    work = replace(work, **known)
    storages, homes = (work.computing, FP8), (DISK,) if fixed.on_cpu else ("ram", DISK)
    terms = Terms(sizes, work, point_of(sizes, work), Speed(1e12, 1e10, 1e9, 1e11), fixed, 2**60, homes, storages)
    beside = () if work.caches else terms.encoders
    option = min(
        training_candidates.step_options(terms, own, beside=beside),
        key=lambda one: _strays(one.layout, own, terms.denoisers[0].name, work.computing),
    )
    found = {}
    for phase in option.phases:
        found |= phase.moments or {phase.name: phase.live_bytes}
    return found


def _strays(layout: Layout, own: Layout, name: str, computing: str) -> tuple[bool, ...]:
    """In what `layout` is not what the config says, of the part that trains and of the rest."""
    part, said = layout.parts[name], own.parts.get(name, PartLayout(storage=""))
    return part.mode != said.mode, part.storage != (said.storage or computing), replace(layout, parts=own.parts) != own
