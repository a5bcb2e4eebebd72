"""Prior preservation: class images that the base model generates, trained on alongside the dataset (DreamBooth).

Ruiz et al. 2023, "DreamBooth", section 3.3.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from backend.dataset.dataset import Item
from backend.dataset.generated_prompts import EMPTY, prior_prompts
from backend.engine.devices.oom_retry import SmallerBatches, attempt
from backend.training.encoding.conditioning import encode_prompts, encoders_of
from backend.training.encoding.distributed_encoding import EncodingContext, Parts, encode_distributed
from backend.training.encoding.draw import draw_latents, images_per_batch
from backend.training.encoding.encoding_cache import View, key_of
from backend.training.encoding.sample_source import Source
from backend.training.model.base_model import BaseModel

PRIOR_STEPS = 12  # in which they are drawn


def add_prior_images(source: Source, base: BaseModel, load: Parts, context: EncodingContext) -> None:
    """Adds prior preservation (class) images that the base model generates, as latents straight from the sampler.

    A model that edits is given what the dataset's own pictures are edited from, in turn, and told something else.
    """
    section, seed = source.config.prior, source.config.training.seed
    own = [number for number, item in enumerate(source.items) if not item.prior]
    prompts = prior_prompts(section, editing=bool(source.references))
    size = max(set(source.sizes), key=source.sizes.count)
    generator_key = [
        *(context.part_key(name) for name in ("dit", *encoders_of(base, pictures=bool(source.references)))),
        source.processor if source.references else "",
        json.dumps(base.spec.scheduler, sort_keys=True),
        PRIOR_STEPS,
    ]
    wanted = {}
    for number in range(section.prior_pictures):
        prompt, place = prompts[number % len(prompts)], seed * 100003 + number
        like = own[number % len(own)]
        references = source.references.get(View(like), ())
        own_size = source.sizes[like] if references else size
        key = key_of("prior", prompt, place, own_size, section.prior_guidance, *generator_key, *references)
        view = View(len(source.items))
        source.latents[view] = key
        if references:
            source.references[view] = references
        source.items.append(
            Item(
                path=Path(key),
                captions=(prompt,),
                width=own_size[1],
                height=own_size[0],
                digest=key,
                prior=True,
                edits=source.items[like].edits,
            )
        )
        source.sizes.append(own_size)
        source.reference_sizes.append(source.reference_sizes[like])
        wanted[key] = (prompt, place, references, own_size)
    encode_distributed(
        wanted, source.latent_store, context, lambda missing: _generate_missing(missing, source, base, load, context)
    )


@torch.no_grad()
def _generate_missing(missing: dict, source: Source, base: BaseModel, load: Parts, context: EncodingContext) -> None:
    """Draws {key: (prompt, seed, references, size)}: several at once where they are edited from nothing, and so have
    all one size."""
    editing = any(references for _, _, references, _ in missing.values())
    parts = load([*encoders_of(base, pictures=editing), "dit"])
    told = {(prompt, references) for prompt, _, references, _ in missing.values()}
    empty = {(EMPTY, references) for _, references in told}
    groups = [[one] for one in sorted(told | empty)] if editing else [sorted(empty), sorted(told)]
    words = {}
    for group in groups:
        words |= zip(group, encode_prompts(group, parts, source, base), strict=True)

    def draw(some: Sequence, together: bool = True) -> torch.Tensor:
        return draw_latents(
            base.family,
            parts,
            replace(source.levels.settings(some[0][3]), guidance=source.config.prior.prior_guidance),
            [source.with_references(words[prompt, references], references) for prompt, _, references, _ in some],
            [source.with_references(words[EMPTY, references], references) for _, _, references, _ in some],
            seeds=[seed for _, seed, _, _ in some],
            steps=PRIOR_STEPS,
            dtype=context.dtype,
            together=together,
        )

    def with_oom_fallback(some: Sequence) -> list[torch.Tensor]:
        found = attempt(lambda: draw(some)) if len(some) == 1 else draw(some)
        return list(draw(some, together=False) if found is None else found)

    keys = list(missing)
    count = 1 if editing else images_per_batch(missing[keys[0]][3])
    fewer = SmallerBatches(with_oom_fallback, context.note, what="pictures that are trained along")
    for start in range(0, len(keys), count):
        for key, one in zip(
            keys[start : start + count], fewer([missing[key] for key in keys[start : start + count]]), strict=True
        ):
            source.latent_store.put(key, {"latents": one.float()})
        context.progress(min(start + count, len(keys)), len(keys))
