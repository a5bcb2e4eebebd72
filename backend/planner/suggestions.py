"""What would make a job fit that does not: the change that costs its user least, tried on the plan before it is told.

No torch.

Ideas come in the order of what is lost by them: memory that others hold, what is only slower, what a preference
forbids, what changes the result a little, a smaller job, another way to train; then a larger machine. The first that
fits alone is told with the least change that does; else several together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backend.planner.costs.layout import Work
from backend.planner.costs.model_sizes import ModelSizes, published
from backend.planner.costs.optimizers import OPTIMIZERS, optimizer_of
from backend.schema.memory_plan import GIB, Card, Remedy
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.settings import from_values, to_values
from backend.schema.training.config import TrainingConfig

CARDS_GIB = (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 141, 180, 192, 288)
RAM_GIB = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
RAM_FREE = 0.85  # of a machine that is not here
SMALLEST_SIDE = 256  # that is proposed for a larger picture
MOST_CHOICES = 48  # of a size, which are halved until the largest that fits is found
PREFERENCES = {
    "allow_tiles": "a decode in tiles",
    "allow_fp8": "FP8 weights",
    "allow_8bit_optimizer": "an 8-bit optimizer",
}


@dataclass(frozen=True)
class State:
    """A job on a machine, as it is asked for or as it would be changed."""

    job: object
    preferences: Preferences
    card: Card


@dataclass(frozen=True)
class Idea:
    """One way to need less: its `values`, from the least change to the greatest, what a value is in words, and what it
    changes."""

    values: tuple
    words: Callable[[Any], str]
    change: Callable[[State, Any], Remedy]


Fits = Callable[[State], bool]


def find(sizes: ModelSizes, state: State, fits: Fits, *, missing_bytes: int) -> Remedy | None:
    """The change with which `state` surely fits (`fits` says so); None where nothing that is known would help.

    `missing_bytes`: what the arrangement that needs least has too much.
    """
    ideas = list(_ideas(sizes, state, missing_bytes))
    for idea in ideas:
        if fits(applied(state, idea.change(state, idea.values[-1]))):
            return _least(idea, state, fits)
    return _together(ideas, state, fits) or _larger(state, fits, missing_bytes)


def applied(state: State, remedy: Remedy) -> State:
    """`state` with what `remedy` changes."""
    job, card = state.job, state.card
    if remedy.settings:
        job = (
            from_values(type(job), remedy.settings, base=job)
            if not isinstance(job, Work)
            else replace(job, **remedy.settings)
        )
    if remedy.freed_bytes:
        card = freed(card, remedy.freed_bytes)
    if remedy.preferences.get("reserve_gib") is not None:
        card = replace(card, reserve_bytes=int(remedy.preferences["reserve_gib"] * GIB))
    if remedy.ram_gib:
        card = with_ram(card, remedy.ram_gib)
    if remedy.card_gib:
        card = of_size(card, remedy.card_gib)
    return State(job, replace(state.preferences, **remedy.preferences), card)


def freed(card: Card, nbytes: int) -> Card:
    """`card` once other programs have let go of so much."""
    free = min(card.free_bytes + nbytes, card.total_bytes)
    others = max(0, card.used_by_others_bytes - nbytes)
    if card.device != "cpu":
        return replace(card, free_bytes=free, used_by_others_bytes=others)
    return replace(card, free_bytes=free, used_by_others_bytes=others, ram_free_bytes=free)


def with_ram(card: Card, gib: float) -> Card:
    """The machine with `gib` of RAM, of which others leave what they usually do."""
    total, free = int(gib * GIB), int(gib * GIB * RAM_FREE)
    if card.device == "cpu":
        return replace(card, total_bytes=total, free_bytes=free, used_by_others_bytes=total - free,
                       ram_total_bytes=total, ram_free_bytes=free)  # fmt: skip
    return replace(card, ram_total_bytes=total, ram_free_bytes=free)


def of_size(card: Card, gib: float) -> Card:
    """An empty card of `gib` in this machine; of a machine without one, its RAM."""
    if card.device == "cpu":
        return with_ram(card, gib)
    total = int(gib * GIB)
    return replace(card, total_bytes=total, free_bytes=total, used_by_others_bytes=0, measured=False)


def others_bytes(card: Card) -> int:
    """What other programs could let go of. On a machine without a card a system needs some of its RAM itself."""
    if card.device == "cpu":
        return max(0, int(0.9 * card.total_bytes) - card.free_bytes)
    return card.used_by_others_bytes


def smallest(state: State, fits: Fits, *, ladder: Sequence[float] = ()) -> float | None:
    """GiB of the smallest usual card, or RAM of a machine without one, that `state` surely fits on; None where none is
    large enough."""
    ladder = ladder or (RAM_GIB if state.card.device == "cpu" else CARDS_GIB)
    low, high = 0, len(ladder)
    while low < high:
        middle = (low + high) // 2
        if fits(replace(state, card=of_size(state.card, ladder[middle]))):
            high = middle
        else:
            low = middle + 1
    return ladder[low] if low < len(ladder) else None


def _least(idea: Idea, state: State, fits: Fits) -> Remedy:
    """The least change of an idea that fits with its greatest."""
    low, high = 0, len(idea.values) - 1
    while low < high:
        middle = (low + high) // 2
        if fits(applied(state, idea.change(state, idea.values[middle]))):
            high = middle
        else:
            low = middle + 1
    value = idea.values[high]
    return replace(idea.change(state, value), words=(idea.words(value),))


def _together(ideas: list[Idea], state: State, fits: Fits) -> Remedy | None:
    """Several changes at once: as few as are needed, each as small as the others leave it."""

    def with_all(chosen: list[tuple[Idea, int]]) -> State:
        now = state
        for idea, at in chosen:
            now = applied(now, idea.change(now, idea.values[at]))
        return now

    chosen = [(idea, len(idea.values) - 1) for idea in ideas]
    if not fits(with_all(chosen)):
        return None
    for one in reversed(chosen):  # what costs most is left out first
        fewer = [each for each in chosen if each is not one]
        if fits(with_all(fewer)):
            chosen = fewer
    for index in reversed(range(len(chosen))):
        idea, at = chosen[index]
        low, high = 0, at
        while low < high:
            middle = (low + high) // 2
            trial = [*chosen[:index], (idea, middle), *chosen[index + 1 :]]
            low, high = (low, middle) if fits(with_all(trial)) else (middle + 1, high)
        chosen[index] = idea, high
    now, settings, preferences, freed_bytes, ram = state, {}, {}, 0, 0.0
    for idea, at in chosen:
        one = idea.change(now, idea.values[at])
        now = applied(now, one)
        settings, preferences = settings | one.settings, preferences | one.preferences
        freed_bytes, ram = freed_bytes + one.freed_bytes, ram or one.ram_gib
    words = tuple(idea.words(idea.values[at]) for idea, at in chosen)
    return Remedy(words, settings, preferences, freed_bytes, ram)


def _larger(state: State, fits: Fits, missing_bytes: int) -> Remedy | None:
    """The smallest usual machine on which the job fits as it is."""
    on_cpu = state.card.device == "cpu"
    ladder = [gib for gib in (RAM_GIB if on_cpu else CARDS_GIB) if gib * GIB > state.card.total_bytes]
    gib = smallest(state, fits, ladder=ladder) if ladder else None
    if gib is None and not on_cpu:  # nor does RAM have room for what leaves the card
        roomy = replace(state, card=with_ram(state.card, RAM_GIB[-1]))
        gib = smallest(roomy, fits, ladder=ladder) if ladder else None
        if gib is not None:
            ram = next(one for one in RAM_GIB if fits(replace(state, card=of_size(with_ram(state.card, one), gib))))
            return Remedy((f"a card of {gib} GiB and {ram} GiB of RAM",), card_gib=gib, ram_gib=ram)
    if gib is None:
        return None
    return Remedy((f"{gib} GiB of RAM" if on_cpu else f"a card of {gib} GiB",), card_gib=gib)


def _ideas(sizes: ModelSizes, state: State, missing_bytes: int) -> Iterator[Idea]:
    job = state.job
    yield from _freeing(state, missing_bytes)
    if isinstance(job, GenerationRequest):
        yield from _slower(job)
        yield from _allowing(state, ("allow_tiles", "allow_fp8"))
        yield from _smaller_request(job)
    elif isinstance(job, Work):
        yield from _allowing(state, tuple(PREFERENCES) if job.targets else ("allow_tiles", "allow_fp8"))
        yield from _smaller_work(job, video=bool(sizes.geometry.get("video")))
    else:
        yield from _training(sizes, state)


def _freeing(state: State, missing_bytes: int) -> Iterator[Idea]:
    others, card = others_bytes(state.card), state.card
    where = "RAM" if card.device == "cpu" else "the card"
    wanted = math.ceil(missing_bytes / GIB * 10) * GIB // 10
    if 0 < wanted <= others:
        yield Idea(
            (wanted,),
            lambda nbytes: f"{nbytes / GIB:.1f} GiB more of {where} free, once other programs that use it are closed",
            lambda _, nbytes: Remedy((), freed_bytes=nbytes),
        )
    usual = Preferences().reserve_gib
    if state.preferences.reserve_gib > usual and card.device != "cpu":
        yield Idea(
            (usual,),
            lambda gib: f"a memory reserve of {gib:g} GiB (in the preferences)",
            lambda _, gib: Remedy((), preferences={"reserve_gib": gib}),
        )


def _allowing(state: State, names: Sequence[str]) -> Iterator[Idea]:
    for name in names:
        if not getattr(state.preferences, name):
            yield Idea(
                (name,),
                lambda name: f"{PREFERENCES[name]}, which the preferences do not allow",
                lambda _, name: Remedy((), preferences={name: True}),
            )


def setting(values: Sequence, words: Callable[[Any], str], change: Callable[[Any], dict]) -> Idea:
    """An idea that changes settings of the job alone."""
    return Idea(tuple(values), words, lambda _, value: Remedy((), change(value)))


def _slower(job: GenerationRequest) -> Iterator[Idea]:
    if job.step_cache:
        yield setting((0.0,), lambda _: "no step cache", lambda value: {"step_cache": value})
    if job.compile:
        yield setting((False,), lambda _: "no compiling", lambda value: {"compile": value})


def _smaller_request(job: GenerationRequest) -> Iterator[Idea]:
    if len(job.edit_images) > 1:
        counts = range(len(job.edit_images) - 1, 0, -1)
        yield setting(
            counts,
            lambda count: f"{count} picture{'s' * (count > 1)} to edit instead of {len(job.edit_images)}",
            lambda count: {"edit_images": job.edit_images[:count]},
        )
    yield from _sizes(job.width, job.height, step=16)


def _sizes(width: int, height: int, *, step: int) -> Iterator[Idea]:
    found = smaller_sizes(width, height, step=step)
    if found:
        yield setting(
            found,
            lambda size: f"{size[0]} × {size[1]} pixels instead of {width} × {height}",
            lambda size: {"width": size[0], "height": size[1]},
        )


def smaller_sizes(width: int, height: int, *, step: int) -> list[tuple[int, int]]:
    """Sizes in the same proportions, from the next smaller one down, both sides multiples of `step`."""
    long = max(width, height)
    least = SMALLEST_SIDE if long > SMALLEST_SIDE else 64
    span = range((long - 1) // step * step, least - 1, -step)
    if len(span) > MOST_CHOICES:
        span = span[:: -(-len(span) // MOST_CHOICES)]
    sizes = [
        (max(step, round(side * width / long / step) * step), max(step, round(side * height / long / step) * step))
        for side in span
    ]
    return [size for size in dict.fromkeys(sizes) if size != (width, height)]


def _smaller_work(job: Work, *, video: bool) -> Iterator[Idea]:
    if job.batch > 1:
        yield setting(
            tuple(range(job.batch - 1, 0, -1)), lambda count: f"a batch of {count}", lambda count: {"batch": count}
        )
    if video and job.frames > 5:
        counts = sorted({(job.frames - 1) * part // 16 // 4 * 4 + 1 for part in range(1, 16)} - {1}, reverse=True)
        yield setting(counts, lambda count: f"{count} frames instead of {job.frames}", lambda count: {"frames": count})
    yield from _sizes(job.width, job.height, step=16)


def _training(sizes: ModelSizes, state: State) -> Iterator[Idea]:
    assert isinstance(state.job, TrainingConfig)
    values = to_values(state.job)
    full = bool(state.job.trained_parts)
    yield from _fewer_extras(values)
    yield from _allowing(state, ("allow_8bit_optimizer",) if full else ("allow_fp8", "allow_8bit_optimizer"))
    yield from _batches(values)
    if (values.get("quant_options") or "").strip():
        yield setting(
            ("",),
            lambda _: "a transformer that is streamed instead of quantized",
            lambda value: {"quant_options": value},
        )
    yield from _optimizers(values)
    if not full and state.job.adapter_part is not None:
        yield from _adapters(sizes, values, state.job.adapter_part)
    yield from _areas(sizes, values)
    yield from _more_ram(state)
    if full:
        yield setting(
            tuple(dict.fromkeys(min(values["lora_rank"], rank) for rank in (32, 16, 4))),
            lambda rank: f"a LoRA of rank {rank} instead of training all weights",
            lambda rank: {"trainable_models": "", "lora_base_model": "dit", "lora_rank": rank},
        )


def _fewer_extras(values: dict) -> Iterator[Idea]:
    """Samples, then the running mean: the weights stay as they would be."""
    if values["sample_prompts"].strip():
        side = math.isqrt(values["max_pixels"])
        width, height = (values.get(f"sample_{one}") or values.get(one) or side for one in ("width", "height"))
        if found := smaller_sizes(width, height, step=32):
            yield setting(
                found,
                lambda size: f"samples of {size[0]} × {size[1]} pixels",
                lambda size: {"sample_width": size[0], "sample_height": size[1]},
            )
        yield setting(("",), lambda _: "no samples while it trains", lambda value: {"sample_prompts": value})
    if values.get("ema_decay"):
        yield setting((0.0,), lambda _: "no running mean of the weights (EMA)", lambda value: {"ema_decay": value})


def _batches(values: dict) -> Iterator[Idea]:
    batch, steps = values["batch_size"], values["gradient_accumulation_steps"]
    even = [count for count in range(batch - 1, 0, -1) if batch % count == 0]
    if even:
        yield setting(
            even,
            lambda count: f"a batch of {count} and {steps * batch // count} accumulated steps, which train alike",
            lambda count: {"batch_size": count, "gradient_accumulation_steps": steps * batch // count},
        )
        yield setting(
            range(batch - 1, 0, -1), lambda count: f"a batch of {count} instead of {batch}",
            lambda count: {"batch_size": count},
        )  # fmt: skip


def _optimizers(values: dict) -> Iterator[Idea]:
    name = values["customized_optimizer"].strip().lower().rpartition(".")[2]
    row = optimizer_of(name) or OPTIMIZERS["adamw"]
    if row.state_bytes > OPTIMIZERS["adafactor"].state_bytes:
        yield setting(
            ("adafactor",),
            lambda value: f"the optimizer {value} instead of {name or 'adamw'}",
            lambda value: {"customized_optimizer": value},
        )


def _adapters(sizes: ModelSizes, values: dict, name: str) -> Iterator[Idea]:
    rank, alpha = values["lora_rank"], values.get("lora_alpha")
    ranks = [one for one in (1024, 768, 512, 384, 256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4) if one < rank]
    if ranks and not values.get("lora_checkpoint"):  # whose rank it is
        yield setting(
            ranks,
            lambda value: f"rank {value} instead of {rank}",
            lambda value: {"lora_rank": value} | ({"lora_alpha": alpha * value / rank} if alpha else {}),
        )
    part = sizes.parts.get(name)
    known = published()["networks"].get(part.kind if part else "", {})
    wanted = values["lora_target_modules"].strip()
    if "attention" in known.get("lora", {}) and "attention" not in (wanted, known.get("means", {}).get(wanted)):
        yield setting(
            ("attention",), lambda _: "a LoRA on the attention layers alone",
            lambda value: {"lora_target_modules": value},
        )  # fmt: skip


def _areas(sizes: ModelSizes, values: dict) -> Iterator[Idea]:
    """Smaller pictures to train on, and to edit."""
    side = math.isqrt(values["max_pixels"])
    width, height = values.get("width") or side, values.get("height") or side
    found = smaller_sizes(width, height, step=32)
    said = [name for name in ("width", "height") if values.get(name)]

    def change(size: tuple[int, int]) -> dict:
        sides: dict[str, int] = {"width": size[0], "height": size[1]}
        return {"max_pixels": size[0] * size[1]} | {name: sides[name] for name in said}

    if found:
        yield setting(
            found, lambda size: f"pictures of {size[0]} × {size[1]} pixels instead of {width} × {height}", change
        )
    pixels = values.get("edit_pixels") or sizes.defaults.get("reference_pixels")
    if pixels:
        edited = [one * one for one, _ in smaller_sizes(math.isqrt(pixels), math.isqrt(pixels), step=32)]
        if edited:
            yield setting(
                edited,
                lambda area: f"pictures to edit of {math.isqrt(area)} × {math.isqrt(area)} pixels",
                lambda area: {"edit_pixels": area},
            )


def _more_ram(state: State) -> Iterator[Idea]:
    """Room for what leaves the card; of a machine without a card the RAM is what is asked about in the first place."""
    if state.card.device == "cpu" or not state.card.ram_total_bytes:
        return
    more = [gib for gib in RAM_GIB if gib * GIB > state.card.ram_total_bytes]
    if more:
        yield Idea(tuple(more), lambda gib: f"{gib} GiB of RAM", lambda _, gib: Remedy((), ram_gib=gib))


def sentence(remedy: Remedy | None, card: Card) -> str:
    """ "It fits with rank 16 instead of 64." """
    if remedy is None:
        return "no RAM that is usual would be enough" if card.device == "cpu" else "no card would be large enough"
    return f"it fits {'on' if remedy.card_gib and card.device != 'cpu' else 'with'} {_listed(remedy.words)}"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
