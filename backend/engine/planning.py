"""From a plan to what the pipeline is loaded with, and when it has to be made anew."""

from __future__ import annotations

from dataclasses import dataclass, field

from backend.catalog.spec import ModelSpec
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
    predicted_bytes: int = 0
    notes: tuple[str, ...] = ()
    pixels: int = 0

    @classmethod
    def of(cls, plan: VramPlan, request: GenerationRequest) -> Placing:
        return cls(
            configs={name: config for name, config in plan.configs.items() if config.managed},
            vram_limit_bytes=None if plan.vram_limit_gib is None else int(plan.vram_limit_gib * GIB),
            tiled_vae=plan.tiled_vae,
            predicted_bytes=plan.peak_high_bytes,
            notes=tuple(step.sentence for step in plan.steps if step.lossy),
            pixels=request.width * request.height,
        )

    @property
    def placed(self) -> tuple:
        """What a pipeline has to be loaded anew for."""
        return self.configs, self.vram_limit_bytes, self.tiled_vae

    def covers(self, request: GenerationRequest) -> bool:
        """Whether a request fits into what was planned: not larger than what the plan was made for."""
        return request.width * request.height <= self.pixels


def plan_for(spec: ModelSpec, card: Card, request: GenerationRequest, preferences: Preferences) -> VramPlan:
    """The plan for `request` on `card`."""
    return VramPlan(
        fits=spec.nbytes <= card.free_bytes - card.reserve_bytes,
        verdict="green",
        phases=(),
        configs={},
        vram_limit_gib=None,
    )
