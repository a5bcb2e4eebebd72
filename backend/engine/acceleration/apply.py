"""Apply a request's acceleration to a loaded pipeline: torch.compile, FP8 matmul, step cache (first-block cache)."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from backend.catalog.family import Family
from backend.engine.acceleration import compile_blocks, fp8_matmul
from backend.engine.acceleration.first_block_cache import StepCache
from backend.engine.offload.blocks import Unit
from backend.engine.offload.placement import Placement
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest

PART = "dit"


def check(device: torch.device, *, compile: bool, fp8_products: bool) -> None:
    """Raises Trouble for what `device` cannot do; nothing has to be loaded for it."""
    if compile:
        compile_blocks.check(device)
    if fp8_products:
        fp8_matmul.check(device)


def configs(planned: dict[str, VramConfig], fp8_products: bool) -> dict[str, VramConfig]:
    """A plan's settings, with the network's weights in the format that FP8 matmuls take: never more bytes than
    planned."""
    if not fp8_products or PART not in planned:
        return planned
    return {**planned, PART: fp8_matmul.in_codes(planned[PART])}


class Accelerated(Protocol):
    """What acceleration uses of a `Pipeline`."""

    device: torch.device
    fp8_products: bool
    parts: dict[str, Any]  # name -> network
    placements: dict[str, Placement]

    @property
    def family(self) -> Family: ...

    def note(self, sentence: str) -> None: ...


def arrange(pipeline: Accelerated, request: GenerationRequest) -> None:
    """Compiles the network's blocks, or sets them to FP8 matmuls, as `request` asks, and undoes either where it does
    not. Raises Trouble for what the device cannot do or the model was not loaded for."""
    module, placed = pipeline.parts[PART], pipeline.placements.get(PART)
    if request.fp8_products and not pipeline.fp8_products:
        raise Trouble(
            "bad_value", "This model was loaded without fp8_products.", hint="Load it with fp8_products=True."
        )
    step_cache(pipeline, request)
    if request.compile:
        compile_blocks.check(pipeline.device)
    if request.fp8_products:
        pipeline.note(
            "Layers were multiplied in FP8, inputs rounded too: the picture is close to the exact one, not the same."
        )
    lists = pipeline.family.PARTS[PART].blocks
    compiles = request.compile != compile_blocks.is_compiled(module, lists)
    codes = fp8_matmul.chosen if request.fp8_products else _none
    if placed is not None and (
        request.compile != placed.whole or any(unit.fp8_codes != codes(unit) for unit in placed.blocks)
    ):
        if request.compile:
            compile_blocks.check_whole(module, lists, [unit.module for unit in placed.blocks])
        placed.set_casting(whole=request.compile, codes=codes)
    if compiles and request.compile:
        compile_blocks.compile_blocks(module, lists)
        pipeline.note("The blocks are compiled: the first step waits for it, and so does the first with other LoRAs.")
    elif compiles:
        compile_blocks.undo(module, lists)


def step_cache(pipeline: Accelerated, request: GenerationRequest) -> StepCache | None:
    """The first-block cache of one picture; None where every step is to be computed."""
    if request.step_cache <= 0:
        return None
    return StepCache(pipeline.family, pipeline.parts[PART], request.step_cache)


def _none(unit: Unit) -> frozenset[int]:
    return frozenset()
