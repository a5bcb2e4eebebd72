"""From a plan to what the pipeline is loaded with, and when it has to be made anew."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from backend.catalog import foresee, learnt
from backend.catalog.plan import computing_of, fixed_of, plan_here
from backend.catalog.sizes import sizes_of
from backend.catalog.spec import ModelSpec
from backend.catalog.work import work_of_request
from backend.schema.places import places
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.vram import Card, VramConfig, VramPlan

GIB = 2**30


@dataclass(frozen=True)
class Placing:
    """How the weights of the loaded model are placed, for pictures of up to so many pixels, made of up to so many others."""

    configs: dict[str, VramConfig] = field(default_factory=dict)
    vram_limit_bytes: int | None = None
    tiled_vae: bool = False
    halves_apart: bool = False
    resident_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of streamed parts, what stays
    plan: VramPlan | None = None
    notes: tuple[str, ...] = ()
    pixels: int = 0
    num_edited: int = 1

    @classmethod
    def of(cls, plan: VramPlan, request: GenerationRequest) -> Placing:
        return cls(
            configs={name: config for name, config in plan.configs.items() if config.managed},
            vram_limit_bytes=None if plan.vram_limit_gib is None else int(plan.vram_limit_gib * GIB),
            tiled_vae=plan.tiled_vae,
            halves_apart=plan.halves_apart,
            resident_blocks={name: plan.resident_blocks[name] for name, moved in plan.streamed_blocks.items() if moved},
            plan=plan,
            notes=(*(step.sentence for step in plan.steps if step.lossy), *([plan.advice] if plan.advice else [])),
            pixels=request.width * request.height,
            num_edited=max(1, len(request.edit_images)),
        )

    @property
    def placed(self) -> tuple:
        """What a pipeline has to be loaded anew for."""
        return self.configs, self.vram_limit_bytes, self.tiled_vae, self.halves_apart, self.resident_blocks

    def covers(self, request: GenerationRequest) -> bool:
        """Whether a request fits into what was planned: not larger than what the plan was made for, and of no more pictures."""
        return request.width * request.height <= self.pixels and len(request.edit_images) <= self.num_edited


def plan_for(spec: ModelSpec, card: Card, request: GenerationRequest, preferences: Preferences) -> VramPlan:
    """The plan for `request` on `card`, with what this machine has taught."""
    return plan_here(spec, card, request, preferences, user=places().user)


def predicted_bytes(spec: ModelSpec, card: Card, request: GenerationRequest, placing: Placing) -> int:
    """The most bytes of tensors that `request` should have alive at once on the device, as the model is placed now."""
    if placing.plan is None:
        return 0
    user = places().user
    sizes = sizes_of(spec, folder=user / "memory")
    work = work_of_request(request, sizes, computing=computing_of(card))
    fixed = learnt.corrected(fixed_of(card), card, spec.family, user / "measured.json")
    return max(foresee.live_bytes(placing.plan, sizes, work, fixed).values(), default=0)


def learn(
    spec: ModelSpec,
    card: Card,
    request: GenerationRequest,
    *,
    predicted_bytes: int,
    measured_bytes: int,
    seconds: float,
) -> None:
    """Keeps what a job really took, for the next plan and for "last time"."""
    with contextlib.suppress(OSError):  # a full disk is no reason to lose a picture over statistics
        learnt.remember(
            places().user / "measured.json",
            card,
            spec.family,
            kind=learnt.kind_of(request),
            predicted_bytes=predicted_bytes,
            measured_bytes=measured_bytes,
            seconds=seconds,
        )
