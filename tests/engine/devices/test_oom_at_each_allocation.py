"""Memory runs out at each place of the code that takes some, in each phase: afterwards nothing is held, and the same again gives the same bits.
`LOFT_EVERY_ALLOCATION=1` tries all places, which takes minutes."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch")

from PIL import Image

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory, out_of_memory
from backend.engine.offload import block_storage, placement, prefetch
from backend.engine.pipeline import denoise, oom_fallback
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.memory_plan import VramConfig
from backend.schema.request import GenerationRequest
from backend.training.checkpoint import state as checkpoint
from tests.engine.offload.test_autograd import adapt
from tests.engine.pipeline.test_oom_fallback import lora
from tests.engine.small import inputs
from tests.engine.small_card import SmallCard

pytestmark = pytest.mark.torch

CODES = "float8_e4m3fn"
DISK = VramConfig(offload_device="disk", onload_device="disk", preparing_device="disk")
MAY_STAY = VramConfig(offload_device="disk", onload_device="disk")
FP8 = VramConfig(offload_device="disk", onload_device="disk", preparing_dtype=CODES)
STREAMED = {"dit": DISK, "text_encoder": MAY_STAY}
IN_FP8 = {"dit": FP8, "vae": MAY_STAY}
ALL = bool(os.environ.get("LOFT_EVERY_ALLOCATION"))  # else at most so many of them, evenly spread, in each test
MOST = 32
OWN = str(Path(__file__).parents[3] / "backend")
REQUEST = GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=1, guidance=1.0, seed=3)


class Refusing(SmallCard):
    """Refuses what is asked for at number `at`, once. `places` are the numbers of the first and the last time at each line of Loft's, and of the
    network's, that takes memory."""

    def __init__(self):
        super().__init__()
        self.at = self.number = 0
        self.places: dict[tuple, list[int]] | None = None

    def _made(self, storage: torch.UntypedStorage) -> None:
        self.number += 1
        if self.places is not None:
            self.places.setdefault(_place(), []).append(self.number)
        if self.number == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        super()._made(storage)


def _place() -> tuple:
    """The innermost line of Loft's own, and how it was come by from there."""
    frame, found = sys._getframe(3), []
    while frame is not None and len(found) < 2:
        file = frame.f_code.co_filename
        if file.startswith(OWN) or ("/diffusers/" in file or "/transformers/" in file):
            found.append((file, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@pytest.fixture
def card(monkeypatch):
    card = Refusing()
    monkeypatch.setattr(block_storage, "allocate", card.allocate)
    monkeypatch.setattr(prefetch, "allocate", card.allocate)
    monkeypatch.setattr(device_memory, "_trim", lambda: None)
    monkeypatch.setattr(oom_fallback, "_next", lambda *_, **__: None)  # what the rungs do then is `test_rungs.py`'s
    card.watch()
    yield card
    card.rest()


def flat(value) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [one for name in sorted(value) for one in flat(value[name])]
    if isinstance(value, list | tuple):
        return [one for inner in value for one in flat(inner)]
    return [torch.from_numpy(numpy.asarray(value).copy())] if isinstance(value, Image.Image) else [value]


def at_each_place(
    card: Refusing,
    work: Callable,
    *,
    clear: Callable[[], None] = lambda: None,
    check: Callable[[], None] = lambda: None,
    every: bool = False,
) -> int:
    """Runs `work` with one refusal at each place (the first or the last time, by turns, or `every` time), and after each again without. How often memory ran
    out. `clear` undoes what a run leaves on purpose, `check` looks at what a refusal has left."""
    for _ in range(2):  # what is made once is made
        clear()
        want = flat(work())
    clear()
    gc.collect()
    card.number, card.places, at_rest = 0, {}, card.now
    work()
    clear()
    places, card.places, refused = card.places, None, 0
    chosen = [
        at for index, numbers in enumerate(places.values()) for at in (numbers if every else [numbers[-(index % 2)]])
    ]
    for at in chosen if ALL else chosen[:: len(chosen) // MOST + 1]:
        card.number, card.at, known = 0, at, refused
        try:
            work()
        except out_of_memory.OOM_TYPES as error:
            assert out_of_memory.is_oom(error)
            out_of_memory.release_tensors(error)
            refused += 1
        if refused > known:
            check()
        card.at = 0
        clear()
        got = flat(work())
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True)), at
        del got
        clear()
    gc.collect()
    assert card.now <= at_rest + 4096, f"{card.now - at_rest} bytes stayed after {refused} refusals"
    return refused


def put_away(pipeline: Pipeline) -> None:
    pipeline._encodings.clear()
    for placed in pipeline.placements.values():
        placed.offload()


def load(folder, configs=None) -> Pipeline:
    spec = identify_model(folder, families.FAMILIES)
    return Pipeline(spec, dtype=torch.bfloat16, device="cpu", configs=configs)


def nothing_held(pipeline: Pipeline) -> None:
    for placed in pipeline.placements.values():
        slots = [slot for pool in (placed.transfer.fetched, placed.transfer.cast) for slot in pool.slots]
        assert not any(slot.num_users for slot in slots) and not placed.calls and not placed.passes
        assert all(len(pool.slots) <= pool.count for pool in (placed.transfer.fetched, placed.transfer.cast))


@pytest.mark.parametrize("configs", [None, STREAMED], ids=["resident", "streamed"])
def test_encoding(card, tiny_qwen, configs):
    pipeline = load(tiny_qwen, configs)
    picture = Image.linear_gradient("L").resize((64, 64)).convert("RGB")

    def work():
        return pipeline.encode_prompt("a red apple"), pipeline.encode_picture(picture, 64, 64)

    assert at_each_place(card, work, clear=lambda: put_away(pipeline), check=lambda: nothing_held(pipeline)) > 15
    pipeline.close()


@pytest.mark.parametrize("configs", [None, IN_FP8], ids=["resident", "FP8 and streamed"])
def test_denoising_and_decoding(card, tiny_qwen, configs):
    pipeline = load(tiny_qwen, configs)
    pipeline.add_lora("dit", lora(), hot=True) if configs else None
    towards = {name: one.clone() for name, one in pipeline.encode_prompt("a red apple").items()}

    def work():
        start = denoise.start(pipeline, REQUEST, 3, None, None)
        return pipeline.decode(denoise.denoise(pipeline, REQUEST, *start, towards, None, None, None))

    assert at_each_place(card, work, clear=lambda: put_away(pipeline), check=lambda: nothing_held(pipeline)) > 15
    pipeline.close()


@pytest.mark.parametrize("hot", [True, False])
def test_adding_a_lora(card, tiny_qwen, hot):
    pipeline, tensors = load(tiny_qwen), lora()
    weights = {name: weight.clone() for name, weight in pipeline.parts["dit"].named_parameters()}

    def work():
        pipeline.add_lora("dit", tensors, hot=hot)
        layer = pipeline.parts["dit"].transformer_blocks[0].attn.to_out[0]
        return layer(torch.ones(1, layer.in_features, dtype=torch.bfloat16))

    def check() -> None:
        if pipeline.adapters.loaded:  # it was the layer that ran out
            return
        now = dict(pipeline.parts["dit"].named_parameters())
        assert not [name for name, weight in weights.items() if not torch.equal(now[name], weight)]

    assert at_each_place(card, work, clear=pipeline.clear_loras, check=check) > 5
    pipeline.close()


def test_loading(card, tiny_qwen):
    def work():
        pipeline = load(tiny_qwen, IN_FP8)
        found = [placed.read(name) for placed in pipeline.placements.values() for name in list(placed._by_name)[:3]]
        pipeline.close()
        return found

    assert at_each_place(card, work) > 5


@pytest.mark.parametrize(
    ("config", "checkpoints"), [(DISK, False), (FP8, None)], ids=["disk, checkpoints", "FP8 stays"]
)
def test_a_training_step(card, small, config, checkpoints):
    """Forwards, backwards, and the optimizer's first step: begun anew, it is the same step."""
    part, build = small(torch.float32, num_blocks=2)
    module = build()
    asked = VramConfig(**{**config.to_values(), "computation_dtype": "bfloat16"})
    placed = placement.place(module, part, asked, device="cpu")
    placed.onload()
    added = adapt(module)
    before = [parameter.detach().clone() for parameter in added]
    module.checkpoints = checkpoints
    optimizer: list = []

    def begin() -> None:
        optimizer[:] = [torch.optim.AdamW(added, lr=0.01)]
        with torch.no_grad():
            for parameter, value in zip(added, before, strict=True):
                parameter.grad = None
                parameter.copy_(value)

    def work():
        module(**inputs(2)).float().square().mean().backward()
        optimizer[0].step()
        return [parameter.detach().clone() for parameter in added]

    def check() -> None:
        placed.offload()
        placed.onload()
        slots = [slot for pool in (placed.transfer.fetched, placed.transfer.cast) for slot in pool.slots]
        assert not any(slot.num_users for slot in slots) and not placed.calls and not placed.passes

    begin()
    assert at_each_place(card, work, clear=begin, check=check, every=True) > 15
    placed.close()


def test_saving(card, tmp_path):
    """What could not be saved has left nothing, and what was saved before is whole."""
    weights = {"w": torch.randn(300, 7).t(), "v": torch.randn(5).to(torch.bfloat16)}
    state = checkpoint.TrainingState(
        3, weights, [{"state": torch.randn(9)}], {"w": torch.randn(4, 4).t()}, None, {}, {}
    )

    def work():
        saved = checkpoint.save_state(tmp_path, state)
        card.rest()  # reading is another matter
        found = checkpoint.load_state(saved)
        card.watch()
        return [found.weights, found.ema]

    def clear() -> None:
        for one in (tmp_path / "checkpoints").glob("*"):
            shutil.rmtree(one)

    def check() -> None:
        assert not list((tmp_path / "checkpoints").glob("*"))

    assert at_each_place(card, work, clear=clear, check=check, every=True) > 1
