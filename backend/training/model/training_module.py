"""The training module: forward pass from noisy latents and conditioning to the weighted loss."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from backend.catalog.family import Conditioning, DrawSettings, Family
from backend.schema.training.config import LossSection
from backend.training.model.flow_matching_loss import Draws, errors, level_weight


@dataclass(frozen=True)
class TrainingBatch:
    """What one batch needs. `encodings` are the family's, one per sample, or None where `prompts` (and `pictures`) are
    to be encoded now."""

    latents: torch.Tensor  # (B, C, h, w)
    prompts: tuple[str, ...]
    encodings: list[dict] | None
    draws: Draws
    settings: DrawSettings  # the size of its pictures, and what the model's family asks of it
    weights: torch.Tensor  # (B,) what each sample counts
    mask: torch.Tensor | None = None  # (B, 1, h, w)
    references: list[tuple[torch.Tensor, ...]] | None = None  # of each sample, (C, h, w) of what it is edited from
    pictures: list[tuple] | None = None  # of each sample, the same as PIL pictures, where they are still to be seen
    levels: torch.Tensor | None = None  # (N + 1,): draw from noise in these N steps, and learn the picture at their end

    def to(self, device: torch.device) -> TrainingBatch:
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


class TrainingModule(torch.nn.Module):
    """Holds parts under their own names, so that parameters are called `parts.dit.…`.

    `forward(material, loss)` gives (weighted sum over the samples of the batch, detached losses of the samples).
    """

    def __init__(
        self,
        family: Family,
        parts: dict[str, torch.nn.Module],
        *,
        processors: Mapping[str, object] = MappingProxyType({}),
        dtype: torch.dtype,
    ):
        """`processors`: tokenizers by their names, and of models that work from pictures "processor"."""
        super().__init__()
        self._ddp_params_and_buffers_to_ignore: list[str] = []  # the name that torch's DDP looks for
        self.parts = torch.nn.ModuleDict(parts)
        self.family, self.processors, self.dtype = family, dict(processors), dtype
        self.adapters_cast = False  # the adapters compute in `dtype` by themselves
        self.autocasts = False  # casting is left to this module, not to what wraps it

    def named_parts(self) -> dict:
        return {**self.parts, **self.processors}

    def _autocast(self, device: torch.device):
        """With lean adapters the network computes as when a picture is drawn; other weights that train are float32 and
        need autocast."""
        return torch.autocast(device.type, enabled=False) if self.adapters_cast else self._own_autocast(device)

    def _own_autocast(self, device: torch.device):
        wanted = self.autocasts and self.dtype != torch.float32
        return torch.autocast(device.type, dtype=self.dtype) if wanted else contextlib.nullcontext()

    def condition(self, inputs: TrainingBatch) -> Conditioning:
        """The batch's conditioning: prompt embeddings (encoded now where the text encoder trains) and reference
        latents."""
        device, settings = inputs.latents.device, inputs.settings
        encodings = inputs.encodings
        if encodings is None:
            encoders = self.family.parts_of("text", settings.variant, pictures=bool(inputs.pictures))
            weights = (weight for name in encoders for weight in self.parts[name].parameters())
            frozen = not any(weight.requires_grad for weight in weights)
            with torch.no_grad() if frozen else contextlib.nullcontext():
                seen = {"pictures": inputs.pictures} if inputs.pictures else {}
                encodings = self.family.encode_text(
                    self.named_parts(), list(inputs.prompts), device=device, variant=settings.variant, **seen
                )
        encodings = [{name: self._in_dtype(value) for name, value in one.items()} for one in encodings]
        if inputs.references is not None:
            encodings = [{**one, "references": some} for one, some in zip(encodings, inputs.references, strict=True)]
        return self.family.collate(encodings, settings, device=device)

    def _in_dtype(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value

    def forward(self, inputs: TrainingBatch, loss: LossSection) -> tuple[torch.Tensor, torch.Tensor]:
        """(weighted sum of the losses: scalar float32 with gradient, detached loss of each sample: (B,) float32)."""
        family, settings, latents = self.family, inputs.settings, inputs.latents
        noise, sigma = inputs.draws.noise, inputs.draws.sigma
        with self._own_autocast(latents.device):
            condition = self.condition(inputs)
        if inputs.levels is not None:
            each = errors(self._drawn(inputs, inputs.levels, condition), latents, inputs.mask)
            return (each * inputs.weights).sum(), each.detach()
        x = family.noised(latents, noise, sigma, settings).to(self.dtype)
        with self._autocast(x.device):
            prediction = family.predict(self.named_parts(), x, sigma, condition, part=self.part)
        each = errors(prediction, family.target(latents, noise, sigma, settings), inputs.mask)
        said = family.prediction(settings.variant, settings.scheduler)
        each = each * level_weight(sigma, loss, family.TRAINING_SCHEDULE, said)
        return (each * inputs.weights).sum(), each.detach()

    @property
    def part(self) -> str:
        """The network that predicts."""
        return next(name for name in self.parts if self.family.PARTS[name].phase == "denoise")

    def _drawn(self, inputs: TrainingBatch, levels: torch.Tensor, condition: Conditioning) -> torch.Tensor:
        """The picture that the student draws in its few steps, between `levels` (N + 1,); gradients pass through all of
        them."""
        settings = inputs.settings
        x = self.family.initial(inputs.draws.noise, levels, settings)
        for step in range(len(levels) - 1):
            sigma = levels[step].expand(len(x))
            at = x.to(self.dtype)
            with self._autocast(x.device):
                prediction = self.family.predict(self.named_parts(), at, sigma, condition, part=self.part)
            slope = self.family.derivative(prediction, at, sigma, settings)
            x = x + (levels[step + 1] - levels[step]) * slope.float()
        return x


def may_use_cpu_attention(family: Family, module: torch.nn.Module, *, tokens: int) -> bool:
    """Whether the family's attention for CPUs pays: on a CPU, for sequences of few picture tokens."""
    return next(module.parameters()).device.type == "cpu" and tokens <= family.CPU_ATTENTION_TOKENS


def named_trainable(learner: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """`part.parameter` -> what trains."""
    return {name.removeprefix("parts."): weight for name, weight in learner.named_parameters() if weight.requires_grad}
