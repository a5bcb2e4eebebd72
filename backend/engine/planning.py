"""From a plan to what the pipeline is loaded with, and when it has to be made anew."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from backend.catalog import learnt
from backend.catalog.plan import plan_here
from backend.catalog.spec import ModelSpec
from backend.schema.places import places
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.vram import Card, VramConfig, VramPlan

GIB = 2**30


@dataclass(frozen=True)
class Placing:
    """How the weights of the loaded model are placed, for pictures of up to so many pixels."""

    configs: dict[str, VramConfig] = field(default_factory=dict)
    vram_limit_bytes: int | None = None
    tiled_vae: bool = False
    halves_apart: bool = False
    resident_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of streamed parts, what stays
    predicted_bytes: int = 0
    notes: tuple[str, ...] = ()
    pixels: int = 0

    @classmethod
    def of(cls, plan: VramPlan, request: GenerationRequest) -> Placing:
        return cls(
            configs={name: config for name, config in plan.configs.items() if config.managed},
            vram_limit_bytes=None if plan.vram_limit_gib is None else int(plan.vram_limit_gib * GIB),
            tiled_vae=plan.tiled_vae,
            halves_apart=plan.halves_apart,
            resident_blocks={name: plan.resident_blocks[name] for name, moved in plan.streamed_blocks.items() if moved},
            predicted_bytes=plan.peak_high_bytes,
            notes=(*(step.sentence for step in plan.steps if step.lossy), *([plan.advice] if plan.advice else [])),
            pixels=request.width * request.height,
        )

    @property
    def placed(self) -> tuple:
        """What a pipeline has to be loaded anew for."""
        return self.configs, self.vram_limit_bytes, self.tiled_vae, self.halves_apart, self.resident_blocks

    def covers(self, request: GenerationRequest) -> bool:
        """Whether a request fits into what was planned: not larger than what the plan was made for."""
        return request.width * request.height <= self.pixels


def plan_for(spec: ModelSpec, card: Card, request: GenerationRequest, preferences: Preferences) -> VramPlan:
    """The plan for `request` on `card`, with what this machine has taught."""
    return plan_here(spec, card, request, preferences, user=places().user)


def learn(
    spec: ModelSpec, card: Card, request: GenerationRequest, placing: Placing, *, peak_bytes: int, seconds: float
) -> None:
    """Keeps what a job really took on an accelerator, for the next plan. On a CPU the process's memory says too little."""
    if card.device == "cpu":
        return
    predicted = placing.predicted_bytes
    with contextlib.suppress(OSError):  # a full disk is no reason to lose a picture over statistics
        learnt.remember(
            places().user / "measured.json",
            card,
            spec.family,
            kind=learnt.kind_of(request),
            predicted_bytes=predicted,
            measured_bytes=peak_bytes,
            seconds=seconds,
        )
