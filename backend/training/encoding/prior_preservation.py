"""Pictures that the untouched model draws, to be trained along so that it keeps what it knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from backend.dataset.dataset import Item
from backend.dataset.generated_prompts import EMPTY, prior_prompts
from backend.engine.devices.oom_retry import SmallerBatches, attempt
from backend.training.encoding.conditioning import encode_told, encoders_of
from backend.training.encoding.distributed_encoding import Parts, Wishes, in_shares
from backend.training.encoding.draw import draw_latents, num_at_once
from backend.training.encoding.encoding_cache import View, key_of
from backend.training.encoding.sample_source import Source
from backend.training.model.base_model import Base

PRIOR_STEPS = 12  # in which they are drawn


def add_drawn(source: Source, base: Base, load: Parts, wishes: Wishes) -> None:
    """Adds the pictures that the untouched model draws, as latents straight from the sampler.

    A model that edits is given what the dataset's own pictures are edited from, in turn, and told something else.
    """
    section, seed = source.config.prior, source.config.training.seed
    own = [number for number, item in enumerate(source.items) if not item.prior]
    prompts = prior_prompts(section, editing=bool(source.references))
    size = max(set(source.sizes), key=source.sizes.count)
    drawn_by = [
        *(wishes.made_by(name) for name in ("dit", *encoders_of(base, pictures=bool(source.references)))),
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
        key = key_of("prior", prompt, place, own_size, section.prior_guidance, *drawn_by, *references)
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
    in_shares(wanted, source.latent_store, wishes, lambda missing: _draw_missing(missing, source, base, load, wishes))


@torch.no_grad()
def _draw_missing(missing: dict, source: Source, base: Base, load: Parts, wishes: Wishes) -> None:
    """Draws {key: (prompt, seed, references, size)}: several at once where they are edited from nothing, and so have all one size."""
    editing = any(references for _, _, references, _ in missing.values())
    parts = load([*encoders_of(base, pictures=editing), "dit"])
    told = {(prompt, references) for prompt, _, references, _ in missing.values()}
    empty = {(EMPTY, references) for _, references in told}
    groups = [[one] for one in sorted(told | empty)] if editing else [sorted(empty), sorted(told)]
    words = {}
    for group in groups:
        words |= zip(group, encode_told(group, parts, source, base), strict=True)

    def draw(some: list, together: bool = True) -> torch.Tensor:
        return draw_latents(
            base.family,
            parts,
            replace(source.levels.settings(some[0][3]), guidance=source.config.prior.prior_guidance),
            [source.with_references(words[prompt, references], references) for prompt, _, references, _ in some],
            [source.with_references(words[EMPTY, references], references) for _, _, references, _ in some],
            seeds=[seed for _, seed, _, _ in some],
            steps=PRIOR_STEPS,
            dtype=wishes.dtype,
            together=together,
        )

    def draw_somehow(some: list) -> torch.Tensor:
        found = attempt(lambda: draw(some)) if len(some) == 1 else draw(some)
        return draw(some, together=False) if found is None else found

    keys = list(missing)
    count = 1 if editing else num_at_once(missing[keys[0]][3])
    fewer = SmallerBatches(draw_somehow, wishes.note, what="pictures that are trained along")
    for start in range(0, len(keys), count):
        for key, one in zip(
            keys[start : start + count], fewer([missing[key] for key in keys[start : start + count]]), strict=True
        ):
            source.latent_store.put(key, {"latents": one.float()})
        wishes.progress(min(start + count, len(keys)), len(keys))
