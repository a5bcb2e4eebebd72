"""The arrangements of a training run: encode, step, sample; and the settings that make the trainer take them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from backend.catalog.quantization.methods import is_quantized
from backend.planner import candidates, training_step
from backend.planner.candidates import Option, Terms
from backend.planner.costs import cpu_training, phase_costs
from backend.planner.costs.layout import FP8, Layout, PartLayout, Update, Working
from backend.planner.costs.model_sizes import PartSizes
from backend.planner.costs.quantized_bytes import kept_bytes
from backend.planner.costs.weight_bytes import STAGING_BUFFERS, moved_bytes, off_card, on_card
from backend.schema.memory_plan import DISK, DTYPE_BYTES

MOMENTS_8BIT = 2.1  # bytes for each trained number: two moments and their scales
DECODER_SHARE = 0.25  # of an autoencoder, what is there at once where its blocks are fetched
CPU_UPDATE_BYTES = 20e9  # of RAM that an update on the CPU goes through, a second


def groups(terms: Terms, own: Layout) -> list[list[list[Option]]]:
    """What can be combined: encoding (encoders take turns and leave), and the steps with the samples between them.

    Weights that are fetched all wait in one place.
    """
    found = []
    for home in _homes(terms, own):
        here = replace(terms, homes=(home,))
        if terms.work.caches:
            found.append([_encoding(here, own), [_encode_pictures(here)], step_options(here, own, fills=True)])
        else:
            found.append([step_options(here, own, beside=terms.encoders, fills=True)])
    return found


def _homes(terms: Terms, own: Layout) -> tuple[str, ...]:
    """Where fetched weights may wait."""
    if terms.fixed.on_cpu or any(part.mode == "streamed" and part.home == DISK for part in own.parts.values()):
        return (DISK,)
    return terms.homes if "offload_device" in terms.work.can else terms.homes[:1]


def _encoding(terms: Terms, own: Layout) -> list[Option]:
    """Encoders come from disk, do their work and leave, or are fetched block by block; what the config says of one is
    done with all."""
    if not terms.encoders:
        return [Option(Layout(), ())]
    can, said = (
        terms.work.can,
        next((own.parts[part.name] for part in terms.encoders if part.name in own.parts), PartLayout(storage="")),
    )
    storages = terms.storages if "fp8_models" in can else terms.storages[:1]
    storages = (said.storage,) if said.storage else storages
    parked = (
        candidates.text_options(replace(terms, homes=(DISK,), storages=storages), ("parked",))
        if said.mode != "streamed"
        else []
    )
    streams = said.mode == "streamed" or ("offload_models" in can and not is_quantized(said.storage))
    streamed = (
        candidates.text_options(replace(terms, storages=_fetched(terms, storages)), ("streamed",), fills=False)
        if streams
        else []
    )
    found = [_leaving(one, terms) for one in (*parked, *streamed) if one.off_card_bytes <= terms.ram_bytes]
    return found or [_leaving(one, terms) for one in parked or streamed]


def _fetched(terms: Terms, storages: tuple[str, ...]) -> tuple[str, ...]:
    """On a CPU blocks come from the file as they are."""
    return (terms.work.computing,) if terms.fixed.on_cpu else storages


def _leaving(option: Option, terms: Terms) -> Option:
    """Encoding as a phase of a run: what it waits for is the disk, however its weights are kept then; and they go when
    it is done."""
    computing, home = terms.work.computing, "ram" if option.off_card_bytes else DISK
    read = sum(part.bytes(computing, computing) for part in terms.encoders)
    more = phase_costs.move_seconds(read, DISK, terms.speed) - phase_costs.move_seconds(read, home, terms.speed)
    phases = tuple(
        replace(one, name="cache text", seconds=phase_costs.ranged(sum(one.seconds) / 2 + more, terms.speed))
        for one in option.phases
    )
    parked = any(part.mode == "parked" for part in option.layout.parts.values())
    rungs = tuple(rung for rung in option.rungs if rung != "park" and not (parked and rung.startswith("disk")))
    return replace(option, phases=phases, rungs=rungs, off_card_bytes=0)


def _encode_pictures(terms: Terms) -> Option:
    part = terms.sizes.parts.get("vae")
    if part is None:
        return Option(Layout(), ())
    dtype = terms.work.decoder_dtype
    working = phase_costs.decode(
        part, {**phase_costs.encoded(terms.point, terms.sizes, terms.work), "b": 1}, dtype, terms.fixed, stage="encode"
    )
    layout = PartLayout("parked", dtype, terms.homes[-1])
    phase = phase_costs.phase("cache pictures", {"vae": part.bytes(dtype, dtype)}, working, terms.fixed)
    return Option(Layout({"vae": layout}), (phase,))


def step_options(terms: Terms, own: Layout, *, beside: Sequence[PartSizes] = (), fills: bool = False) -> list[Option]:
    """Every allowed way to take a step.

    `beside`: parts that must be on the card too (a text encoder that trains). `fills`: of blocks that are fetched as
    many stay as there is room for, unless the config says how many; else as many as it says.
    """
    can, on_cpu = terms.work.can, terms.fixed.on_cpu
    checkpoints = {(own.checkpointed, own.checkpoints_in_ram)}
    if "use_gradient_checkpointing" in can:
        checkpoints.add((True, own.checkpoints_in_ram))
    if "use_gradient_checkpointing_offload" in can and not on_cpu:
        checkpoints.add((True, True))
    states = {own.state_bytes} | (
        {MOMENTS_8BIT}
        if terms.eight_bit_moments and "customized_optimizer" in can and own.state_bytes == 8.0
        else set()
    )
    if on_cpu:
        states = {own.state_bytes}  # 8-bit optimizers need a card
    where = {own.states_in_ram} | ({True} if "enable_optimizer_cpu_offload" in can and not on_cpu else set())
    if terms.least:
        checkpoints, states, where = {max(checkpoints)}, {min(states)}, {max(where)}
    layouts = _kept_layouts(terms, own)
    found = []
    for (checkpointed, in_ram), state, outside in itertools.product(sorted(checkpoints), sorted(states), sorted(where)):
        update = own.update if state == own.state_bytes else Update(0.0)
        layout = replace(
            own,
            checkpointed=checkpointed,
            checkpoints_in_ram=in_ram,
            state_bytes=state,
            states_in_ram=outside,
            update=update,
        )
        taken = _taken(own, layout)
        for part, rungs, lossy in layouts:
            rungs = (*taken, *candidates._named("dit", tuple(rung for rung in rungs if rung != "park")))
            one = _step(terms, layout, part, rungs, lossy + (state != own.state_bytes), beside)
            found += (
                _filled(
                    terms,
                    own,
                    one,
                    lambda kept, one=one, layout=layout, rungs=rungs: _step(
                        terms, layout, kept, rungs, one.lossy, beside
                    ),
                )
                if fills
                else [one]
            )
    return found


def _kept_layouts(terms: Terms, own: Layout) -> list[tuple[PartLayout, tuple[str, ...], int]]:
    """How the denoiser's weights may be kept: (layout, rungs, lossy). What the config says itself stays so."""
    can, said = terms.work.can, own.parts.get("dit", PartLayout(storage=""))
    if said.storage:
        terms = replace(terms, storages=(said.storage,))
    elif "fp8_models" not in can:
        terms = replace(terms, storages=tuple(storage for storage in terms.storages if storage != FP8))
    fetched = list(
        candidates.part_layouts(replace(terms, storages=_fetched(terms, terms.storages)), modes=("streamed",))
    )
    fetched = [(replace(layout, on_card=max(said.on_card, 0)), rungs, lossy) for layout, rungs, lossy in fetched]
    if said.mode == "streamed":
        return fetched
    here = list(candidates.part_layouts(terms, modes=("resident",)))
    return here + (
        fetched if "offload_models" in can and terms.work.targets != "full" and not is_quantized(said.storage) else []
    )


def _filled(terms: Terms, own: Layout, bare: Option, again) -> list[Option]:
    """A fetched denoiser with as many blocks staying as its highest phase leaves room for; `again(layout)` is the
    option with that layout."""
    part, said = terms.denoisers[0], own.parts.get("dit", PartLayout(storage="", on_card=-1)).on_card
    kept = bare.layout.parts[part.name]
    if kept.mode != "streamed" or (bare.high <= terms.budget_bytes) == (said >= 0):
        return [bare]  # as said, or too much with none
    before = kept.on_card
    around = bare.high - sum(on_card(part, kept, True, terms.work.computing))
    count = candidates.filled([part], kept, terms.budget_bytes - around, terms.work.computing)[part.name].on_card
    count = min(count, before) if said >= 0 else count
    return [bare] if count == before else [again(replace(kept, on_card=count))]


def _taken(own: Layout, layout: Layout) -> tuple[str, ...]:
    pairs = (
        ("checkpoint", layout.checkpointed and not own.checkpointed),
        ("checkpoint_ram", layout.checkpoints_in_ram and not own.checkpoints_in_ram),
        ("optimizer_8bit", layout.state_bytes != own.state_bytes),
        ("optimizer_ram", layout.states_in_ram and not own.states_in_ram),
    )
    return tuple(name for name, taken in pairs if taken)


def _step(terms: Terms, layout: Layout, kept: PartLayout, rungs, lossy: int, beside) -> Option:
    part, work, fixed = terms.denoisers[0], terms.work, terms.fixed
    numel, grads = work.trained_numel, training_step.gradient_bytes(work)
    here = fixed.on_cpu or not layout.states_in_ram  # on a CPU the optimizer's RAM is where all else is
    state = (
        int(layout.state_bytes * (numel - work.idle_numel)) + (4 * numel if layout.states_in_ram else 0) if here else 0
    )
    key = ("step", layout.checkpointed, layout.checkpoints_in_ram, layout.states_in_ram, layout.update, work.idle_numel)
    working, checkpoints, by_moment = terms.once(key, lambda: training_step.working(terms, layout))
    whole = part.numel * 4 if work.targets == "full" and part.name in work.trained else None
    trained = (0 if whole else 4 * numel) + state
    held, staging = (
        (whole, 0)
        if whole
        else terms.once(("held", part.name, kept), lambda: on_card(part, kept, True, work.computing))
    )
    staging += kept_bytes(kept.storage, part, DTYPE_BYTES[work.computing], checkpointed=layout.checkpointed)
    weights = {part.name: held + (part.table.get("tables", 0) if whole else 0)}
    weights |= {one.name: one.bytes(work.computing, work.computing) for one in beside}
    if work.samples and "vae" in terms.sizes.parts:  # it stays for the next sample
        weights["vae"] = _decoder_bytes(terms, layout)
    ram = off_card(part, kept, work.computing)
    ram += checkpoints if layout.checkpoints_in_ram else 0
    ram += int(layout.state_bytes * numel) + grads if layout.states_in_ram else 0
    around = sum(weights.values()) + staging + trained
    phases = [
        phase_costs.phase(
            "step",
            weights,
            working,
            fixed,
            staging=staging,
            adapter=trained + grads,
            ram=ram,
            seconds=_seconds(terms, layout, kept, checkpoints),
            moments={name: fixed.corrected(max(0, around + more)) for name, more in by_moment.items()},
        )
    ]
    if work.samples:
        phases.append(_sample(terms, weights, staging, trained))
    phases.append(_save(terms, weights, staging, trained))
    return Option(replace(layout, parts={part.name: kept}), tuple(phases), tuple(rungs), lossy, ram)


def _decoder_bytes(terms: Terms, layout: Layout) -> int:
    """Of the autoencoder between samples and in one.

    Where it is fetched block by block: of its largest blocks and what lies around them.
    """
    whole = terms.sizes.parts["vae"].bytes(terms.work.decoder_dtype, terms.work.decoder_dtype)
    away = layout.parts.get("vae", PartLayout()).mode == "streamed"
    return int(DECODER_SHARE * whole) if away else whole


def _save(terms: Terms, weights: dict[str, int], staging: int, trained: int):
    """The result is put together in RAM, where a CPU computes too; states are written from where they are."""
    work = terms.work
    number = work.saved_number_bytes if work.saved_number_bytes != 4 else 0  # float32 is saved from where it is
    if work.averages:
        number = max(number + work.saved_number_bytes, 4 if number else 0)  # the mean's, copied before it is put back
    result = number * work.trained_numel if terms.fixed.on_cpu else 0
    return phase_costs.phase(
        "save", weights, Working(result, result, result), terms.fixed, staging=staging, adapter=trained
    )


def _seconds(terms: Terms, layout: Layout, kept: PartLayout, checkpoints: int) -> tuple[float, float]:
    work, part, speed = terms.work, terms.denoisers[0], terms.speed
    passes = (3 if work.targets == "full" else 2) + layout.checkpointed
    flops = (
        terms.once("operations", lambda: phase_costs.operations(part, {**terms.point, "b": 1})) * work.batch * passes
    )
    moved = 2 * moved_bytes(part, kept, work.computing) * _returning(part, kept)
    aside = phase_costs.move_seconds(moved, kept.home, speed)
    if layout.checkpoints_in_ram:
        aside += 2 * checkpoints / speed.link_bytes
    cast = part.numel * 3 * passes / speed.memory_bytes if kept.storage == FP8 else 0.0
    update = work.trained_numel * (28 / CPU_UPDATE_BYTES + 8 / speed.link_bytes) if layout.states_in_ram else 0.0
    if layout.state_bytes == MOMENTS_8BIT:
        update += work.trained_numel * 40 / speed.memory_bytes
    each = max(phase_costs.compute_seconds(flops, speed) + cast, aside) + update
    return phase_costs.ranged(each * work.total_steps, speed)


def _sample(terms: Terms, weights: dict[str, int], staging: int, adapter: int):
    """A picture between steps: no gradients matter, the VAE is there too (in float32, as the trainer keeps it)."""
    working = terms.once("sample", lambda: _sample_working(terms))
    return phase_costs.phase("sample", weights, working, terms.fixed, staging=staging, adapter=adapter)


def _sample_working(terms: Terms) -> Working:
    """Of the pass or of the decode, whichever takes more."""
    work, fixed = terms.work, terms.fixed
    vae = terms.sizes.parts.get("vae")
    pictures = 2 if work.guidance else 1
    point = {**sample_point(terms), "b": pictures}
    own = cpu_training.sample(terms.denoisers[0], point, work, pictures, step=terms.point) if fixed.on_cpu else None
    working = phase_costs.denoise(terms.denoisers[0], point, work, fixed) if own is None else Working(own, own, own)
    if vae is None:
        return working
    decoding = phase_costs.decode(vae, {**point, "b": 1}, work.decoder_dtype, fixed)
    return max(working, decoding, key=lambda one: one.likely)


def sample_point(terms: Terms) -> dict:
    """The variables of a sample: what is not said of it is as in a step."""
    work = terms.work
    if work.sample_size == (0, 0) and not work.sample_tokens and work.sample_references < 0:
        return terms.point
    (width, height), references = work.sample_size, work.sample_references
    like = replace(
        work,
        width=width or work.width,
        height=height or work.height,
        text_tokens=work.sample_tokens or work.text_tokens,
        reference_tokens=work.reference_tokens if references < 0 else references,
    )
    return phase_costs.point_of(terms.sizes, like)


def _returning(part: PartSizes, kept: PartLayout) -> float:
    """The share of the fetched blocks that a pass brings: where forwards turn to backwards, and back, the last two are
    there still."""
    fetched = len(part.blocks) - kept.on_card
    return max(fetched - STAGING_BUFFERS, 0) / max(fetched, 1)


def settings(layout: Layout, terms: Terms, own: Layout) -> dict[str, object]:
    """Knobs of `TrainingConfig` that take this arrangement; only such as the config has and does not say itself
    (`own`)."""
    wanted: dict[str, object] = {
        "use_gradient_checkpointing": layout.checkpointed,
        "use_gradient_checkpointing_offload": layout.checkpoints_in_ram,
        "enable_optimizer_cpu_offload": layout.states_in_ram,
    }
    if layout.state_bytes == MOMENTS_8BIT:
        wanted["customized_optimizer"] = "adamw8bit"
    fetched = [name for name, part in layout.parts.items() if part.mode == "streamed"]
    said = [name for name, part in own.parts.items() if part.mode == "streamed"]
    if not set(fetched) <= set(said):
        wanted["offload_models"] = ",".join(dict.fromkeys((*said, *fetched)))
    denoiser = layout.parts[terms.denoisers[0].name]
    if denoiser.mode == "streamed":
        wanted["resident_blocks"] = denoiser.on_card
    if not terms.fixed.on_cpu and any(layout.parts[name].home == DISK for name in fetched):
        wanted["offload_device"] = DISK
    stored = [name for name, part in layout.parts.items() if part.storage == FP8]
    said = [name for name, part in own.parts.items() if part.storage == FP8]
    if not set(stored) <= set(said):
        wanted["fp8_models"] = ",".join(dict.fromkeys((*said, *stored)))
    return {name: value for name, value in wanted.items() if name in terms.work.can}
