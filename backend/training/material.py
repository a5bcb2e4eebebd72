"""From a dataset to a source of batches: sizes, encodings from the cache, pictures that are trained along."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from backend.engine import memory
from backend.schema.messages import Trouble
from backend.schema.places import places
from backend.training.base import Base, part_digest
from backend.training.batches import size_of
from backend.training.cache import Store, View, fill_latents, fill_texts, key_of, prune
from backend.training.captions import lines_of
from backend.training.crops import cut, num_cuts
from backend.training.dataset import Dataset, Item
from backend.training.samples import EMPTY, EVERYDAY, draw_latents, num_at_once
from backend.training.source import Source

Parts = Callable[..., dict[str, torch.nn.Module]]
PRIOR_STEPS = 12  # in which the pictures that are trained along are drawn


@dataclass(frozen=True)
class Wishes:
    """What the filling of a cache needs to know: what trains, and how its progress is said."""

    trains_text: bool
    dtype: torch.dtype
    rank: int
    processes: int
    wait: Callable[[], None]
    gather: Callable[[object], list]
    progress: Callable[[int, int], None]


def prepare_source(
    dataset: Dataset,
    base: Base,
    config,
    load: Parts,
    wishes: Wishes,
    *,
    more_prompts: list[str],
    folder: Path | None = None,
) -> Source:
    """A source over `dataset` and the pictures that are trained along. Loads encoders through `load` only where needed.

    Encodings go to `folder`, or else to the cache that runs share.
    """
    section, cache = config.dataset, places().cache / "encodings"
    shared = folder is None and section.data_cache
    folder = folder or (cache if shared else None)
    items = list(dataset.items)
    sizes = [_size(item, section, base, config.training.batch_size) for item in items]
    source = Source(
        items=items, sizes=sizes, latents={}, texts=None, config=config,
        latent_store=Store(folder and folder / "latents"), text_store=Store(folder and folder / "texts"),
        schedule=schedules(base),
    )  # fmt: skip
    _fill_pictures(source, base, load, wishes)
    if config.prior.prior_pictures and not config.prior.regularisation_path:
        _add_drawn(source, base, load, wishes)
    prompts = {caption for item in source.items for caption in item.captions} | {"", " ", *more_prompts}
    if not wishes.trains_text and not section.caption_shuffle:
        fill_prompts(source, base, load, wishes, sorted(prompts))
    if shared and wishes.rank == 0:
        used = {*source.latents.values(), *(source.texts or {}).values()}
        prune(cache, section.data_cache_gib * 2**30, keep=used)
    return source


def _size(item: Item, section, base: Base, batch_size: int) -> tuple[int, int]:
    return size_of(
        item, height=section.height, width=section.width, max_pixels=section.max_pixels,
        multiple=base.family.SIZES.multiple, snap=batch_size > 1,
    )  # fmt: skip


def schedules(base: Base) -> Callable[..., torch.Tensor]:
    """`schedule(size, steps)`: the model's own noise levels, remembered."""

    @functools.cache
    def schedule(size: tuple[int, int], steps: int = 1000) -> torch.Tensor:
        return base.family.sigmas(base.spec.scheduler, steps, width=size[1], height=size[0])

    return schedule


def _fill_pictures(source: Source, base: Base, load: Parts, wishes: Wishes) -> None:
    config = source.config
    digest = part_digest(base, "vae") if "vae" in base.spec.parts else ""
    for view in _views(source):
        item, size = source.items[view.item], source.sizes[view.item]
        box = cut(item, size, view.cut, zoom=config.dataset.crop_zoom)
        words = (item.digest, size, view.flip, base.spec.family, digest, "mean", *([box] if box else []))
        source.latents[view] = key_of(*words)
    broken: dict[int, str] = {}

    def work(missing: dict) -> None:
        parts = load(["vae"])
        weights = next(parts["vae"].parameters())

        @torch.no_grad()
        def encode(pixels: torch.Tensor) -> torch.Tensor:
            return base.family.encode_image(parts, pixels.to(weights.device, weights.dtype))

        found = fill_latents(
            source.latent_store, missing, source.items, source.sizes, encode=encode,
            workers=config.dataset.dataset_num_workers, skip_broken=config.dataset.skip_broken_pictures,
            progress=wishes.progress, zoom=config.dataset.crop_zoom,
        )  # fmt: skip
        broken.update(found)

    _in_shares({key: where for where, key in source.latents.items()}, source.latent_store, wishes, work)
    lost = {source.items[number].digest for some in wishes.gather(broken) for number in some}
    if lost:
        _leave_out(source, {number for number, item in enumerate(source.items) if item.digest in lost})


def _views(source: Source) -> Iterator[View]:
    """Every way in which a picture of `source` may be shown."""
    section = source.config.dataset
    for number, item in enumerate(source.items):
        for flip in (False, True) if section.flip and not item.prior else (False,):
            for place in range(num_cuts(item, source.sizes[number], **_cutting(section))):
                yield View(number, flip, place)


def _cutting(section) -> dict:
    return {"crops": section.crops, "zoom": section.crop_zoom}


def _in_shares(wanted: dict, store: Store, wishes: Wishes, work: Callable[[dict], None]) -> None:
    """Has `work` make what `store` lacks of `wanted` {key: …}: each process its share, then what it still cannot see.

    The cache of another machine is not this one's; a store without a folder is each process's own.
    """
    for shared in (store.folder is not None, False):
        missing = {key: wanted[key] for key in sorted(wanted) if not store.has(key)}
        if shared:
            missing = {key: missing[key] for key in list(missing)[wishes.rank :: wishes.processes]}
        if missing:
            work(missing)
        wishes.wait()


def _leave_out(source: Source, broken: set[int]) -> None:
    kept = [number for number in range(len(source.items)) if number not in broken]
    if not kept:
        raise Trouble("empty_dataset", "None of the pictures can be read.")
    renamed = {old: new for new, old in enumerate(kept)}
    source.latents = {
        view._replace(item=renamed[view.item]): key for view, key in source.latents.items() if view.item in renamed
    }
    source.items = [source.items[number] for number in kept]
    source.sizes = [source.sizes[number] for number in kept]


def prior_prompts(section) -> list[str]:
    return lines_of(section.prior_prompts) or list(EVERYDAY)


def _add_drawn(source: Source, base: Base, load: Parts, wishes: Wishes) -> None:
    """Adds the pictures that the untouched model draws, as latents straight from the sampler."""
    section, seed = source.config.prior, source.config.training.seed
    prompts = prior_prompts(section)
    size = max(set(source.sizes), key=source.sizes.count)
    digests = [part_digest(base, name) for name in ("dit", "text_encoder")]
    wanted = {}
    for number in range(section.prior_pictures):
        prompt, place = prompts[number % len(prompts)], seed * 100003 + number
        key = key_of("prior", prompt, place, size, section.prior_guidance, str(wishes.dtype), *digests)
        source.latents[View(len(source.items))] = key
        source.items.append(
            Item(path=Path(key), captions=(prompt,), width=size[1], height=size[0], digest=key, prior=True)
        )
        source.sizes.append(size)
        wanted[key] = (prompt, place)
    _in_shares(
        wanted, source.latent_store, wishes, lambda missing: _draw_missing(missing, source, base, load, wishes, size)
    )


@torch.no_grad()
def _draw_missing(
    missing: dict, source: Source, base: Base, load: Parts, wishes: Wishes, size: tuple[int, int]
) -> None:
    parts = load(["text_encoder", "dit"])
    device = next(parts["dit"].parameters()).device
    away = base.family.encode_text(parts, [EMPTY], device=device)[0]
    prompts = sorted({prompt for prompt, _ in missing.values()})
    towards = {prompt: base.family.encode_text(parts, [prompt], device=device)[0] for prompt in prompts}
    keys, count = list(missing), num_at_once(size)
    for start in range(0, len(keys), count):
        some = keys[start : start + count]
        latents = draw_latents(
            base.family, parts, base.spec.scheduler, [towards[missing[key][0]] for key in some], away,
            seeds=[missing[key][1] for key in some], steps=PRIOR_STEPS, guidance=source.config.prior.prior_guidance, size=size,
            dtype=wishes.dtype,
        )  # fmt: skip
        for key, one in zip(some, latents, strict=True):
            source.latent_store.put(key, {"latents": one.float()})
        wishes.progress(start + len(some), len(keys))


def fill_prompts(source: Source, base: Base, load: Parts, wishes: Wishes, prompts: list[str]) -> None:
    """Sees to it that every prompt has its encoding; a text encoder is needed only for those that have none."""
    digest = part_digest(base, "text_encoder")
    named = {prompt: key_of(prompt, base.spec.family, digest, str(wishes.dtype)) for prompt in prompts}
    source.texts = {**(source.texts or {}), **named}

    def work(missing: dict) -> None:
        parts = load(["text_encoder"])
        device = next(parts["text_encoder"].parameters()).device

        @torch.no_grad()
        def encode(some: list[str]) -> list[dict]:
            return base.family.encode_text(parts, some, device=device)

        fill_texts(source.text_store, missing, encode=encode, progress=wishes.progress)

    _in_shares({key: prompt for prompt, key in source.texts.items()}, source.text_store, wishes, work)


def split_off(source: Source, share: float, *, seed: int) -> list[int]:
    """Takes `share` of the own pictures out of the training and returns their numbers; they stay in `items`."""
    own = [number for number, item in enumerate(source.items) if not item.prior]
    Random(f"{seed}/validation").shuffle(own)
    aside = own[: max(1, round(len(own) * share))] if share and len(own) > 1 else []
    for number in aside:
        source.items[number] = replace(source.items[number], weight=0.0)
    return sorted(aside)


def free_memory() -> None:
    """Gives back what nothing refers to any more, to the card and to the system."""
    memory.give_back("cuda" if torch.cuda.is_available() else "cpu")
