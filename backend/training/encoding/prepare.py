"""From a dataset to a data loader: bucket sizes, cached latents and prompt embeddings, prior preservation images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch

from backend.dataset.bucket_sampler import kept_aside, size_of
from backend.dataset.crops import cut, num_cuts
from backend.dataset.dataset import Dataset, Item
from backend.dataset.reference_images import check_counts, check_cuts
from backend.engine.devices import device_memory
from backend.engine.devices.oom_retry import TiledOnOom
from backend.schema.messages import Trouble
from backend.schema.paths import places
from backend.schema.training.config import DatasetSection, TrainingConfig
from backend.training.encoding.conditioning import (
    add_references,
    add_samples,
    all_prompt_inputs,
    cache_text_encoder_outputs,
    is_editing,
)
from backend.training.encoding.distributed_encoding import EncodingContext, Parts, encode_distributed, report_broken
from backend.training.encoding.encoding_cache import EncodingCache, View, cache_latents, key_of, prune
from backend.training.encoding.prior_preservation import add_prior_images
from backend.training.encoding.sample_source import Source
from backend.training.model.base_model import BaseModel
from backend.training.model.flow_matching_loss import NoiseLevels

T = TypeVar("T")


def prepare_source(
    dataset: Dataset,
    base: BaseModel,
    config: TrainingConfig,
    load: Parts,
    context: EncodingContext,
    *,
    folder: Path | None = None,
    processor: str = "",
) -> Source:
    """A source over `dataset` and the pictures that are trained along. Loads encoders through `load` only where needed.

    Encodings go to `folder`, or else to the cache that runs share. `processor`: a hash of how pictures are prepared for
    the text encoder.
    """
    section, cache = config.dataset, places().cache / "encodings"
    shared = folder is None and section.data_cache
    folder = folder or (cache if shared else None)
    items = list(dataset.items)
    sizes = [_size(item, section, base, config.training.batch_size) for item in items]
    source = Source(
        items=items,
        sizes=sizes,
        latents={},
        texts=None,
        config=config,
        latent_store=EncodingCache(folder and folder / "latents", shared=shared),
        text_store=EncodingCache(folder and folder / "texts"),
        levels=NoiseLevels(base.family, base.spec),
        reference_sizes=[()] * len(items),
        processor=processor,
    )
    counts = ((item.path.name, len(item.edits)) for item in items)
    check_counts(counts, base.family, variant=base.spec.variant, title=base.spec.title)
    check_cuts(items, sizes, crops=section.crops, zoom=section.crop_zoom)
    _cache_latents_of(source, base, load, context)
    if is_editing(base):
        _drop_items(source, add_references(source, base, load, context))
    add_samples(source, base, load, context)
    if config.prior.prior_pictures and not config.prior.regularisation_path:
        add_prior_images(source, base, load, context)
    if not context.trains_text and not section.caption_shuffle:
        cache_text_encoder_outputs(source, base, load, context, all_prompt_inputs(source))
    if shared and context.rank == 0:
        used = {*source.latents.values(), *source.shown, *(source.texts or {}).values()}
        prune(cache, section.data_cache_gib * 2**30, keep=used)
    return source


def _size(item: Item, section: DatasetSection, base: BaseModel, batch_size: int) -> tuple[int, int]:
    return size_of(
        item,
        height=section.height,
        width=section.width,
        max_pixels=section.max_pixels,
        multiple=base.family.sizes(base.spec.variant).multiple,
        snap=batch_size > 1,
    )


def _cache_latents_of(source: Source, base: BaseModel, load: Parts, context: EncodingContext) -> None:
    config = source.config
    vae = context.part_key("vae") if "vae" in base.spec.parts else ""
    for view in _views(source):
        item, size = source.items[view.item], source.sizes[view.item]
        box = cut(item, size, view.cut, zoom=config.dataset.crop_zoom)
        words = (item.digest, size, view.flip, vae, "mean", *([box] if box else []))
        source.latents[view] = key_of(*words)
    broken: dict[int, str] = {}

    def work(missing: dict) -> None:
        parts = load(["vae"])
        weights = next(parts["vae"].parameters())

        @torch.no_grad()
        def encode(pixels: torch.Tensor, *, tiled: bool) -> torch.Tensor:
            return base.family.encode_image(parts, pixels.to(weights.device, weights.dtype), tiled=tiled)

        each = TiledOnOom(encode, context.note)
        found = cache_latents(
            source.latent_store,
            missing,
            source.items,
            source.sizes,
            encode=each,
            exact=lambda: each.exact,
            workers=config.dataset.dataset_num_workers,
            skip_broken=config.dataset.skip_broken_pictures,
            progress=context.progress,
            zoom=config.dataset.crop_zoom,
        )
        broken.update(found)

    encode_distributed({key: where for where, key in source.latents.items()}, source.latent_store, context, work)
    lost = {source.items[number].digest for number in report_broken(broken, context)}
    _drop_items(source, {number for number, item in enumerate(source.items) if item.digest in lost})


def _views(source: Source) -> Iterator[View]:
    """Every way in which a picture of `source` may be shown."""
    section = source.config.dataset
    for number, item in enumerate(source.items):
        for flip in (False, True) if section.flip and not item.prior else (False,):
            for place in range(num_cuts(item, source.sizes[number], **_cutting(section))):
                yield View(number, flip, place)


def _cutting(section: DatasetSection) -> dict:
    return {"crops": section.crops, "zoom": section.crop_zoom}


def _drop_items(source: Source, broken: set[int]) -> None:
    if not broken:
        return
    kept = [number for number in range(len(source.items)) if number not in broken]
    if not kept:
        raise Trouble("empty_dataset", "None of the pictures can be read.")
    renamed = {old: new for new, old in enumerate(kept)}
    source.latents = _renumbered(source.latents, renamed)
    source.references = _renumbered(source.references, renamed)
    source.items = [source.items[number] for number in kept]
    source.sizes = [source.sizes[number] for number in kept]
    source.reference_sizes = [source.reference_sizes[number] for number in kept]


def _renumbered(by_view: dict[View, T], renamed: dict[int, int]) -> dict[View, T]:
    """`by_view` without the items that are not in `renamed` {old number: new number}."""
    return {view._replace(item=renamed[view.item]): key for view, key in by_view.items() if view.item in renamed}


def split_validation(source: Source, share: float, *, seed: int) -> list[int]:
    """Takes `share` of the own pictures out of the training and returns their numbers; they stay in `items`."""
    aside = kept_aside(source.items, share, seed=seed)
    for number in aside:
        source.items[number] = replace(source.items[number], weight=0.0)
    return sorted(aside)


def free_memory() -> None:
    """Gives back what nothing refers to any more, to the card and to the system."""
    device_memory.empty_cache("cuda" if torch.cuda.is_available() else "cpu")
