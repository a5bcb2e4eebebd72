"""What a request may trade for speed, put into effect on a loaded pipeline: compiled blocks, FP8 products, cached steps."""

from __future__ import annotations

import torch

from backend.engine.acceleration import compile_blocks, fp8_matmul
from backend.engine.acceleration.first_block_cache import StepCache
from backend.engine.offload.blocks import Unit
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
    """A plan's settings, with the network's weights in the format that FP8 products take: never more bytes than planned."""
    if not fp8_products or PART not in planned:
        return planned
    return {**planned, PART: fp8_matmul.in_codes(planned[PART])}


def arrange(pipeline, request: GenerationRequest) -> None:
    """Makes the network's blocks compute as `request` asks, where they do not yet. Raises Trouble for what was not loaded for it."""
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


def step_cache(pipeline, request: GenerationRequest) -> StepCache | None:
    """For one picture; None where every step is to be computed."""
    if request.step_cache <= 0:
        return None
    return StepCache(pipeline.family, pipeline.parts[PART], request.step_cache)


def _none(unit: Unit) -> frozenset[int]:
    return frozenset()
