"""From a plan to what the pipeline is loaded with, and when it has to be made anew."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from backend.catalog.spec import ModelSpec
from backend.planner import history, predict_peak
from backend.planner.costs.layout import Fixed
from backend.planner.costs.model_sizes import ModelSizes, sizes_of
from backend.planner.plan import budget_of, computing_of, fixed_of, plan_here
from backend.planner.workload import lora_bytes, work_of_request
from backend.schema.memory_plan import GIB, Card, VramConfig, VramPlan
from backend.schema.paths import places
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest


@dataclass(frozen=True)
class Room:
    """What a plan was made with: model sizes, fixed costs and the budget in bytes, which decide whether it covers
    another request."""

    sizes: ModelSizes
    fixed: Fixed
    budget_bytes: int
    computing: str


@dataclass(frozen=True)
class Placing:
    """How the weights of the loaded model are placed, and for which request."""

    configs: dict[str, VramConfig] = field(default_factory=dict)
    vram_limit_bytes: int | None = None
    tiled_vae: bool = False
    halves_apart: bool = False
    resident_blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of streamed parts, what stays
    plan: VramPlan | None = None
    notes: tuple[str, ...] = ()
    request: GenerationRequest = field(default_factory=GenerationRequest)
    room: Room | None = None

    @classmethod
    def of(cls, plan: VramPlan, request: GenerationRequest, *, room: Room | None = None) -> Placing:
        return cls(
            configs={name: config for name, config in plan.configs.items() if config.managed},
            vram_limit_bytes=None if plan.vram_limit_gib is None else int(plan.vram_limit_gib * GIB),
            tiled_vae=plan.tiled_vae,
            halves_apart=plan.halves_apart,
            resident_blocks={name: plan.resident_blocks[name] for name, moved in plan.streamed_blocks.items() if moved},
            plan=plan,
            notes=(*(step.sentence for step in plan.steps if step.lossy), *([plan.advice] if plan.advice else [])),
            request=request,
            room=room,
        )

    @property
    def placed(self) -> tuple:
        """The placement settings: where they differ, the pipeline has to be reloaded."""
        return self.configs, self.vram_limit_bytes, self.tiled_vae, self.halves_apart, self.resident_blocks

    def covers(self, request: GenerationRequest) -> bool:
        """Whether `request` may be drawn as the model is placed: in no phase it needs more than what was planned for or
        than there is room for. Of a longer series the whole time counts, so that is planned anew as well."""
        if self.plan is None or request.count > self.request.count:
            return False
        if self.room is None:
            return not_larger(request, self.request)
        planned, needed = self._needed(self.request), self._needed(request)
        return all(high <= max(planned.get(phase, 0), self.room.budget_bytes) for phase, high in needed.items())

    def _needed(self, request: GenerationRequest) -> dict[str, int]:
        """Phase -> predicted peak bytes of `request` under this plan."""
        assert self.plan is not None and self.room is not None, "only a planned placement predicts"
        work = work_of_request(request, self.room.sizes, computing=self.room.computing)
        return predict_peak.high_bytes(self.plan, self.room.sizes, work, self.room.fixed)


def not_larger(request: GenerationRequest, planned: GenerationRequest) -> bool:
    """Whether nothing that memory depends on is more in `request`: sides, guidance, words, LoRA files, pictures to
    start from or to edit, what a cache of steps keeps, how much is cast at once; nor are there more pictures. Without
    the model: by the requests alone."""
    return all(less <= more for less, more in zip(_measures(request), _measures(planned), strict=True))


def _measures(request: GenerationRequest) -> tuple[float, ...]:
    words = (request.prompt, request.negative_prompt if request.guidance > 1 else "")
    return (
        request.width * request.height,
        max(request.width, request.height),
        request.guidance > 1,
        max(len(one.encode()) for one in words),  # a letter of some scripts is a token or more
        lora_bytes(request),
        bool(request.input_image),
        len(request.edit_images),
        request.step_cache > 0,
        request.compile,
        not request.fp8_products,  # blocks are cast where they are not multiplied with as they are
        request.fp8_products,
        request.count,
    )


def plan_for(spec: ModelSpec, card: Card, request: GenerationRequest, preferences: Preferences) -> VramPlan:
    """The VRAM plan for `request` on `card`, corrected by what was measured on this machine."""
    return plan_here(spec, card, request, preferences, user=places().user)


def room_of(spec: ModelSpec, card: Card) -> Room:
    """What requests for the model are held against on `card`, with what this machine has taught."""
    user = places().user
    fixed = history.corrected(fixed_of(card), card, spec.family, user / "measured.json")
    return Room(sizes_of(spec, folder=user / "memory"), fixed, budget_of(card), computing_of(card, spec.family))


def predicted_bytes(spec: ModelSpec, card: Card, request: GenerationRequest, placing: Placing) -> int:
    """The most bytes of tensors that `request` should have alive at once on the device, as the model is placed now."""
    if placing.plan is None:
        return 0
    room = room_of(spec, card)
    work = work_of_request(request, room.sizes, computing=room.computing)
    return max(predict_peak.live_bytes(placing.plan, room.sizes, work, room.fixed).values(), default=0)


def learn(
    spec: ModelSpec,
    card: Card,
    request: GenerationRequest,
    *,
    predicted_bytes: int,
    measured_bytes: int,
    seconds: float,
) -> None:
    """Records the measured peak memory and time of a job, which correct later plans."""
    with contextlib.suppress(OSError):  # a full disk is no reason to lose a picture over statistics
        history.remember(
            places().user / "measured.json",
            card,
            spec.family,
            kind=history.kind_of(request),
            predicted_bytes=predicted_bytes,
            measured_bytes=measured_bytes,
            seconds=seconds,
        )
