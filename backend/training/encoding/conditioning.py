"""Conditioning of the network: prompt embeddings, latents of reference images, and the inputs of sample images."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from backend.catalog.models.capabilities import edits
from backend.dataset.bucket_sampler import size_of
from backend.dataset.captions import lines_of
from backend.dataset.dataset import Item
from backend.dataset.generated_prompts import EMPTY
from backend.dataset.reference_images import Shown, check_counts, reference_sizes, sample_pictures, shown, whole
from backend.engine.devices.oom_retry import attempt
from backend.schema.training.config import SampleSection
from backend.training.encoding.cache_key import folder_digest
from backend.training.encoding.distributed_encoding import EncodingContext, Parts, encode_distributed, report_broken
from backend.training.encoding.encoding_cache import View, cache_prompt_embeddings, cache_reference_latents, key_of
from backend.training.encoding.open_images import open_reference
from backend.training.encoding.sample_source import Sample, Source, prompt_name
from backend.training.model.base_model import BaseModel

PromptInputs = tuple[str, tuple[str, ...]]  # a prompt, and the keys of the pictures that go with it


def encoders_of(base: BaseModel, *, pictures: bool = False) -> tuple[str, ...]:
    """The parts that a prompt goes through; `pictures`: where some go with it."""
    return base.family.parts_of("text", base.spec.variant, pictures=pictures)


def is_editing(base: BaseModel) -> bool:
    """Whether the model makes pictures of pictures."""
    return edits(base.spec, base.family)


def add_references(source: Source, base: BaseModel, load: Parts, context: EncodingContext) -> set[int]:
    """Encodes what the samples are edited from, for every view. Returns the items that could not be, where those may be
    left out."""
    section, pixels, wanted = source.config.dataset, load([])["processor"].reference_pixels, {}
    key = _reference_key(context, pixels)
    for view in source.latents:
        item, size = source.items[view.item], source.sizes[view.item]
        some = shown(item, size, flip=view.flip, place=view.cut, zoom=section.crop_zoom)
        wanted |= source.refer(view, some, key)
    for number, (item, size) in enumerate(zip(source.items, source.sizes, strict=True)):
        some = shown(item, size, zoom=section.crop_zoom)
        source.reference_sizes[number] = reference_sizes(some, base.family, pixels=pixels)
    broken = _cache_reference_latents(source, wanted, base, load, context, skip_broken=section.skip_broken_pictures)
    return {view.item for view, keys in source.references.items() if broken.keys() & set(keys)}


def _reference_key(context: EncodingContext, pixels: int) -> Callable[[Shown], str]:
    """Names what a picture is encoded as, at an area of `pixels`."""
    vae = context.part_key("vae")
    return lambda one: key_of("reference", *one.words, pixels, vae, "mean")


def _cache_reference_latents(
    source: Source,
    wanted: dict[str, Shown],
    base: BaseModel,
    load: Parts,
    context: EncodingContext,
    *,
    skip_broken: bool,
) -> dict[str, str]:
    """Returns those that could not be read {key: why}."""
    section, broken = source.config.dataset, {}

    def work(missing: dict[str, Shown]) -> None:
        parts = load(["vae"])

        tiled: list[str] = []

        @torch.no_grad()
        def encode(picture) -> torch.Tensor:
            found = None if tiled else attempt(lambda: base.family.encode_references(parts, [picture])[0])
            if found is not None:
                return found
            if not tiled:
                tiled.append(
                    "Memory ran out while a picture to edit was encoded; they are encoded in tiles, which other runs "
                    "do not take over."
                )
                context.note(*tiled)
            return base.family.encode_references(parts, [picture], tiled=True)[0]

        broken.update(
            cache_reference_latents(
                source.latent_store,
                missing,
                encode=encode,
                workers=section.dataset_num_workers,
                skip_broken=skip_broken,
                exact=lambda: not tiled,
                progress=context.progress,
            )
        )

    encode_distributed(wanted, source.latent_store, context, work)
    return report_broken(broken, context)


def add_samples(source: Source, base: BaseModel, load: Parts, context: EncodingContext) -> None:
    """Says what the sample prompts are drawn from: of a model that edits, the pictures that were named, or the
    dataset's in turn."""
    section, data = source.config.samples, source.config.dataset
    prompts = lines_of(section.sample_prompts)
    size = (section.sample_height or source.sizes[0][0], section.sample_width or source.sizes[0][1])
    if not prompts or not is_editing(base):
        source.samples = [Sample(prompt, (), size) for prompt in prompts]
        return
    named = sample_pictures(section, prompts)
    if named is None:
        own = [number for number, item in enumerate(source.items) if not item.prior]
        turns = [own[number % len(own)] for number in range(len(prompts))]
        source.samples = [
            Sample(prompt, source.references[View(turn)], _sample_size(section, source.sizes[turn]))
            for prompt, turn in zip(prompts, turns, strict=True)
        ]
        return
    counts = zip(map("The sample of {!r}".format, prompts), map(len, named), strict=True)
    check_counts(counts, base.family, variant=base.spec.variant, title=base.spec.title)
    wanted, key = {}, _reference_key(context, load([])["processor"].reference_pixels)
    for prompt, pictures in zip(prompts, named, strict=True):
        some = {key(one): one for one in whole(pictures)}
        wanted |= some
        source.samples.append(
            Sample(prompt, tuple(some), _sample_size(section, _training_size(pictures[-1], data, base)))
        )
    source.shown |= wanted
    _cache_reference_latents(source, wanted, base, load, context, skip_broken=False)


def _sample_size(section: SampleSection, size: tuple[int, int]) -> tuple[int, int]:
    return section.sample_height or size[0], section.sample_width or size[1]


def _training_size(picture, data, base: BaseModel) -> tuple[int, int]:
    """The size at which a picture would be trained: what is made of it has its proportions."""
    like = Item(path=picture.path, captions=(), width=picture.width, height=picture.height)
    return size_of(
        like,
        height=data.height,
        width=data.width,
        max_pixels=data.max_pixels,
        multiple=base.family.sizes(base.spec.variant).multiple,
        snap=False,
    )


def all_prompt_inputs(source: Source) -> list[PromptInputs]:
    """Everything that the network will be told: each caption with the pictures of each view, empty ones, and the
    samples."""
    dropped = ("", " ") if source.config.dataset.caption_dropout else ()
    found = [("", ()), (" ", ())] if not source.references else []
    for view in source.latents:
        references = source.references.get(view, ())
        found += [
            (prompt, references) for prompt in (*source.items[view.item].captions, *(dropped if references else ()))
        ]
    return [*found, *sample_prompt_inputs(source)]


def sample_prompt_inputs(source: Source) -> list[PromptInputs]:
    return [(prompt, one.references) for one in source.samples for prompt in (one.prompt, EMPTY)]


def cache_text_encoder_outputs(
    source: Source, base: BaseModel, load: Parts, context: EncodingContext, told: Iterable[PromptInputs]
) -> None:
    """Sees to it that everything told has its encoding; a text encoder is needed only for what has none."""
    named = {prompt_name(*one): one for one in dict.fromkeys(told)}
    seeing = any(references for _, references in named.values())
    words = tuple(map(context.part_key, encoders_of(base))) + base.family.cache_key(base.spec.variant)
    seers = [name for name in encoders_of(base, pictures=True) if name not in encoders_of(base)]
    eyes = (*map(context.part_key, seers), source.processor) if seeing else ()
    keys = {
        name: key_of(prompt, *words, *((*eyes, *references) if references else ()))
        for name, (prompt, references) in named.items()
    }
    source.texts = {**(source.texts or {}), **keys}

    def work(missing: dict[str, PromptInputs]) -> None:
        parts = load(encoders_of(base, pictures=seeing))

        @torch.no_grad()
        def encode(some: list[PromptInputs]) -> list[dict]:
            return encode_prompts(some, parts, source, base)

        cache_prompt_embeddings(source.text_store, missing, encode=encode, progress=context.progress)

    encode_distributed({keys[name]: one for name, one in named.items()}, source.text_store, context, work)


def encode_prompts(some: list[PromptInputs], parts: dict, source: Source, base: BaseModel) -> list[dict]:
    """The family's encodings of prompts and the pictures that go with them."""
    device = next(parts[encoders_of(base)[0]].parameters()).device
    prompts, given = [prompt for prompt, _ in some], {}
    if any(references for _, references in some):
        given["pictures"] = [tuple(open_reference(source.shown[key]) for key in references) for _, references in some]
    return base.family.encode_text(parts, prompts, device=device, variant=base.spec.variant, **given)


def processor_of(folder: Path, base: BaseModel, *, pixels: int | None) -> tuple[object, str]:
    """The model's processor in `folder`, which brings pictures to an area of `pixels` where that is given, and a hash
    of its settings."""
    found = base.family.load_processor(folder, base.spec.variant, pixels=pixels)
    return found, key_of(folder_digest(folder), found.reference_pixels, found.seen_pixels)
