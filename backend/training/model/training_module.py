"""The module that trains: the parts whose weights change (and those they flow through), from noisy latents to a loss."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import torch

from backend.training.model.flow_matching_loss import Draws, errors, level_weight, noisy


@dataclass(frozen=True)
class Material:
    """What one batch needs. `encodings` are the family's, one per sample, or None where `prompts` (and `pictures`) are to be encoded now."""

    latents: torch.Tensor  # (B, C, h, w)
    prompts: tuple[str, ...]
    encodings: list[dict] | None
    draws: Draws
    weights: torch.Tensor  # (B,) what each sample counts
    mask: torch.Tensor | None = None  # (B, 1, h, w)
    references: list[tuple[torch.Tensor, ...]] | None = None  # of each sample, (C, h, w) of what it is edited from
    pictures: list[tuple] | None = None  # of each sample, the same as PIL pictures, where they are still to be seen
    levels: torch.Tensor | None = None  # (N + 1,): draw from noise in these N steps, and learn the picture at their end

    def to(self, device: torch.device) -> Material:
        def move(value):
            return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

        encodings, references = self.encodings, self.references
        if encodings is not None:
            encodings = [{name: move(value) for name, value in one.items()} for one in encodings]
        if references is not None:
            references = [tuple(map(move, some)) for some in references]
        draws = Draws(noise=move(self.draws.noise), sigma=move(self.draws.sigma))
        return replace(
            self,
            latents=move(self.latents),
            encodings=encodings,
            draws=draws,
            weights=move(self.weights),
            mask=move(self.mask),
            references=references,
            levels=move(self.levels),
        )


class Learner(torch.nn.Module):
    """Holds parts under their own names, so that parameters are called `parts.dit.…`.

    `forward(material, loss)` gives (weighted sum over the samples of the batch, detached losses of the samples).
    """

    def __init__(
        self, family, parts: dict[str, torch.nn.Module], *, tokenizer=None, processor=None, dtype: torch.dtype
    ):
        super().__init__()
        self.parts = torch.nn.ModuleDict(parts)
        self.family, self.tokenizer, self.processor, self.dtype = family, tokenizer, processor, dtype
        self.lean = False  # the adapters compute in `dtype` by themselves
        self.casts = False  # casting is left to this module, not to what wraps it

    def named_parts(self) -> dict:
        return {**self.parts, "tokenizer": self.tokenizer, "processor": self.processor}

    def _casting(self, device: torch.device):
        """With lean adapters the network computes as when a picture is drawn; other weights that train are float32 and need autocast."""
        return torch.autocast(device.type, enabled=False) if self.lean else self._own_casting(device)

    def _own_casting(self, device: torch.device):
        wanted = self.casts and self.dtype != torch.float32
        return torch.autocast(device.type, dtype=self.dtype) if wanted else contextlib.nullcontext()

    def condition(self, material: Material):
        device = material.latents.device
        encodings = material.encodings
        if encodings is None:
            frozen = not any(weight.requires_grad for weight in self.parts["text_encoder"].parameters())
            with torch.no_grad() if frozen else contextlib.nullcontext():
                seen = {"pictures": material.pictures} if material.pictures else {}
                encodings = self.family.encode_text(self.named_parts(), list(material.prompts), device=device, **seen)
        encodings = [{name: value.to(self.dtype) for name, value in one.items()} for one in encodings]
        if material.references is not None:
            encodings = [{**one, "references": some} for one, some in zip(encodings, material.references, strict=True)]
        return self.family.collate(encodings, device=device)

    def forward(self, material: Material, loss) -> tuple[torch.Tensor, torch.Tensor]:
        with self._own_casting(material.latents.device):
            condition = self.condition(material)
        if material.levels is not None:
            each = errors(self._drawn(material, condition), material.latents, material.mask)
            return (each * material.weights).sum(), each.detach()
        x = noisy(material.latents, material.draws).to(self.dtype)
        with self._casting(x.device):
            velocity = self.family.predict(self.named_parts(), x, material.draws.sigma, condition)
        each = errors(velocity, material.draws.noise - material.latents, material.mask)
        each = each * level_weight(material.draws.sigma, loss, self.family.TRAINING_SCHEDULE)
        return (each * material.weights).sum(), each.detach()

    def _drawn(self, material: Material, condition) -> torch.Tensor:
        """The picture that the student draws in its few steps; gradients pass through all of them."""
        x, levels = material.draws.noise, material.levels
        for step in range(len(levels) - 1):
            sigma = levels[step].expand(len(x))
            with self._casting(x.device):
                velocity = self.family.predict(self.named_parts(), x.to(self.dtype), sigma, condition)
            x = x + (levels[step + 1] - levels[step]) * velocity.float()
        return x


def named_trainable(learner: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """`part.parameter` -> what trains."""
    return {name.removeprefix("parts."): weight for name, weight in learner.named_parameters() if weight.requires_grad}
