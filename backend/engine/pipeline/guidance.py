"""Guidance: the predictions of a step, of one network or several, combined into the one that the sampler follows.

Drawing, previews, samples of training and prior preservation all go through `guided`. What a family's branches are, at
which scale they are combined and how, it says itself (`branches`, `guidance_at`, `guide`); classifier-free guidance is
the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from backend.catalog.family import Branch, Conditioning, DrawSettings, Encoding, Family, Latents, Levels, each_stream
from backend.engine.acceleration.first_block_cache import StepCache
from backend.engine.pipeline.sampler import Denoise


def guided(
    family: Family,
    parts: dict,
    prompts: Mapping[str, Sequence[Encoding]],
    settings: DrawSettings,
    *,
    num_steps: int,
    device,
    together: bool,
    cache: StepCache | None = None,
    using: Callable[[str], AbstractContextManager] | None = None,
) -> Denoise:
    """dx / dsigma under guidance. `prompts`: "positive" and, where there are branches of it, "negative" -> encodings of
    `encode_text`, one for each picture of the batch.

    `together`: branches of one network run as one batch, so that a streamed block is moved once a step. Else one after
    the other, which takes half the working memory. `cache` lets steps reuse what earlier ones computed. `using(part)`:
    within it that network may be called, for families whose steps change networks.
    """
    return _Guided(
        family, parts, prompts, settings, num_steps, device, together, cache, using or (lambda _: nullcontext())
    )


@dataclass
class _Guided:
    family: Family
    parts: dict
    prompts: Mapping[str, Sequence[Encoding]]
    settings: DrawSettings
    num_steps: int
    device: object
    together: bool
    cache: StepCache | None
    using: Callable[[str], AbstractContextManager]
    known: dict[tuple[str, ...], Conditioning] = field(default_factory=dict)

    def __call__(self, x: Latents, sigma: Levels, sigma_next: Levels, step: int) -> Latents:
        here, then = (self._of_batch(x, levels) for levels in (sigma, sigma_next))
        scale = self.family.guidance_at(self.settings, step, self.num_steps)
        branches = self._branches(scale)
        first = next(iter(sigma.values())) if isinstance(sigma, dict) else sigma
        expert = self.family.expert(self.settings, float(first))
        predictions: dict[str, Latents] = {}
        for group in _groups(branches, expert, together=self.together):
            predictions |= self._predict(group, expert, x, here, then)
        combined = (
            self.family.guide(predictions, scale, x=x, sigma=here)
            if len(branches) > 1
            else predictions[branches[0].name]
        )
        return self.family.derivative(combined, x, here, self.settings)

    def _branches(self, scale: float) -> tuple[Branch, ...]:
        found = self.family.branches(self.settings)
        return found if scale > 1 and all(one.prompt in self.prompts for one in found) else found[:1]

    def _of_batch(self, x: Latents, levels: Levels) -> Levels:
        return each_stream(lambda one, level: level.to(one.device).expand(one.shape[0]), x, levels)

    def _predict(self, group: tuple[Branch, ...], expert: str, x: Latents, sigma: Levels, following: Levels) -> dict:
        """The predictions of branches that go through one network as one batch."""
        part, count = group[0].part or expert, len(group)
        if count > 1:
            x, sigma, following = (
                each_stream(lambda one: torch.cat([one] * count), each) for each in (x, sigma, following)
            )
        name = "together" if count > 1 else group[0].name
        with self.using(part), self.cache.step(name) if self.cache else nullcontext():
            cond = self._conditioning(group)
            found = self.family.predict(self.parts, x, sigma, cond, part=part, sigma_next=following)
        if count == 1:
            return {group[0].name: found}
        pieces = each_stream(lambda one: one.chunk(count), found)
        return {branch.name: each_stream(lambda one, at=at: one[at], pieces) for at, branch in enumerate(group)}

    def _conditioning(self, group: tuple[Branch, ...]) -> Conditioning:
        """Of a group, made when it is first called for."""
        key = tuple(branch.name for branch in group)
        if key not in self.known:
            encodings = [encoding for branch in group for encoding in self.prompts[branch.prompt]]
            alone = group[0] if group[0].alone else None
            cond = self.family.collate(encodings, self.settings, branch=alone, device=self.device)
            self.known[key] = self.family.prefill(self.parts, cond)
        return self.known[key]


def _groups(branches: Sequence[Branch], expert: str, *, together: bool) -> list[tuple[Branch, ...]]:
    """Branches that go through a network as one batch, in their order."""
    groups: dict[object, tuple[Branch, ...]] = {}
    for branch in branches:
        key = (branch.part or expert) if together and not branch.alone else branch.name
        groups[key] = (*groups.get(key, ()), branch)
    return list(groups.values())
