"""The module that trains: the parts whose weights change (and those they flow through), from noisy latents to a loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from backend.training.objective import Draws, errors, level_weight, noisy


@dataclass(frozen=True)
class Material:
    """What one batch needs. `encodings` are the family's, one per sample, or None where `prompts` are to be encoded now."""

    latents: torch.Tensor  # (B, C, h, w)
    prompts: tuple[str, ...]
    encodings: list[dict] | None
    draws: Draws
    weights: torch.Tensor  # (B,) what each sample counts
    mask: torch.Tensor | None = None  # (B, 1, h, w)
    targets: torch.Tensor | None = None  # (B, C, h, w) velocities to learn in place of noise - latents

    def to(self, device: torch.device) -> Material:
        def move(value):
            return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        encodings = self.encodings
        if encodings is not None:
            encodings = [{name: move(value) for name, value in one.items()} for one in encodings]
        draws = Draws(noise=move(self.draws.noise), sigma=move(self.draws.sigma))
        return Material(
            latents=move(self.latents),
            prompts=self.prompts,
            encodings=encodings,
            draws=draws,
            weights=move(self.weights),
            mask=move(self.mask),
            targets=move(self.targets),
        )


class Learner(torch.nn.Module):
    """Holds parts under their own names, so that parameters are called `parts.dit.…`.

    `forward(material, loss)` gives (weighted sum over the samples of the batch, detached errors of the samples).
    """

    def __init__(self, family, parts: dict[str, torch.nn.Module], *, tokenizer=None, dtype: torch.dtype):
        super().__init__()
        self.parts = torch.nn.ModuleDict(parts)
        self.family, self.tokenizer, self.dtype = family, tokenizer, dtype

    def named_parts(self) -> dict:
        return {**self.parts, "tokenizer": self.tokenizer}

    def condition(self, material: Material):
        device = material.latents.device
        encodings = material.encodings
        if encodings is None:
            frozen = not any(weight.requires_grad for weight in self.parts["text_encoder"].parameters())
            with torch.no_grad() if frozen else contextlib.nullcontext():
                encodings = self.family.encode_text(self.named_parts(), list(material.prompts), device=device)
        encodings = [{name: value.to(self.dtype) for name, value in one.items()} for one in encodings]
        return self.family.collate(encodings, device=device)

    def forward(self, material: Material, loss) -> tuple[torch.Tensor, torch.Tensor]:
        x = noisy(material.latents, material.draws).to(self.dtype)
        velocity = self.family.predict(self.named_parts(), x, material.draws.sigma, self.condition(material))
        target = material.targets if material.targets is not None else material.draws.noise - material.latents
        each = errors(velocity, target, material.mask)
        weighted = each * level_weight(material.draws.sigma, loss) * material.weights
        return weighted.sum(), each.detach()


def named_trainable(learner: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """`part.parameter` -> what trains."""
    return {name.removeprefix("parts."): weight for name, weight in learner.named_parameters() if weight.requires_grad}


Forward = Callable[[Material, object], tuple[torch.Tensor, torch.Tensor]]
