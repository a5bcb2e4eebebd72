"""Memory that runs out in each phase: the next rung is taken, the picture is the same, and nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import pytest
import torch

from backend.catalog.models.identify import identify_model
from backend.engine.devices import device_memory, out_of_memory
from backend.engine.pipeline import denoise
from backend.engine.pipeline.pipeline import Pipeline
from backend.families import FAMILIES
from backend.schema.request import GenerationRequest
from tests.engine.small_card import SmallCard, small_card
from tests.gpu.runner import Outcome
from tests.tiny_models import make_qwen_image

ALIKE = 0.05  # of the mean: for halves of a batch, and for tiles
MOST_DESCENTS = 4
LEFT_BYTES = 1 << 20  # that a phase may leave behind: a library's workspace


@dataclass(frozen=True)
class Card:
    """A card whose memory can be limited."""

    device: torch.device
    less_bytes: int = 1 << 20  # than the peak

    def limit(self, most_bytes: float) -> None:
        total = device_memory.card_memory(self.device)[0]
        torch.cuda.set_per_process_memory_fraction(min(1.0, most_bytes / total), self.device)

    def now(self) -> int:
        device_memory.empty_cache(self.device)
        return device_memory.allocated(self.device)

    def peak_of(self, work: Callable[[], torch.Tensor]) -> int:
        device_memory.empty_cache(self.device)
        peak = device_memory.Peak(self.device)
        work()
        return peak.look()


@dataclass(frozen=True)
class Counted:
    """Memory of a CPU that is counted, and refused beyond a limit."""

    card: SmallCard
    less_bytes: int = 1

    def limit(self, most_bytes: float) -> None:
        self.card.most_bytes = most_bytes

    def now(self) -> int:
        gc.collect()
        return self.card.now

    def peak_of(self, work: Callable[[], torch.Tensor]) -> int:
        gc.collect()
        self.card.highest = self.card.now
        work()
        return self.card.highest


def ladder(device: torch.device, tiny: bool) -> Outcome:
    if device.type not in ("cuda", "cpu"):
        return Outcome(None, note="only CUDA's memory can be limited")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patched:
        said = _recorded(patched)
        with _limited(patched, device) as card:
            found = {name: one for name, one in _all(card, Path(folder), device, tiny)}
    wrong = [f"{name}: {one['wrong']}" for name, one in found.items() if one.get("wrong")]
    return Outcome(not wrong, {**found, "errors": list(dict.fromkeys(said))}, "; ".join(wrong))


@contextlib.contextmanager
def _limited(patched: pytest.MonkeyPatch, device: torch.device) -> Iterator[Card | Counted]:
    if device.type == "cpu":
        with small_card(patched) as card:
            yield Counted(card)
    else:
        yield Card(device)


def _recorded(patched: pytest.MonkeyPatch) -> list[str]:
    """The words of errors that are asked about, as they are asked."""
    said, is_oom = [], out_of_memory.is_oom

    def asked(error, device=None) -> bool:
        found = is_oom(error, device)
        said.append(f"{type(error).__name__} ({'memory' if found else 'another'}): {str(error).splitlines()[0][:120]}")
        return found

    patched.setattr(out_of_memory, "is_oom", asked)
    return said


def _all(card: Card | Counted, folder: Path, device: torch.device, tiny: bool) -> Iterator[tuple[str, dict]]:
    """Of a card's model blocks are much larger than the pages by which its allocator grows (20 MiB), so that each rung shows."""
    model = make_qwen_image(folder / "model", num_layers=6, num_heads=3 if tiny else 64)
    for name in TINY_PHASES if tiny else CARD_PHASES:
        phase, exact, rung = PHASES[name]
        with _loaded(model, device) as pipeline:
            yield name, _down(card, pipeline, phase(pipeline, tiny), exact=exact, wanted=rung)
    if not tiny:
        with _loaded(_true_width(folder / "wide"), device, only="vae") as pipeline:
            yield "decode, 1328", _down(card, pipeline, _decode(pipeline, tiny), exact=None, wanted="tiles")


@contextlib.contextmanager
def _loaded(model: Path, device: torch.device, only: str | None = None) -> Iterator[Pipeline]:
    spec = identify_model(model, FAMILIES)
    if only:
        spec = replace(spec, parts={only: spec.parts[only]})
    pipeline = Pipeline(spec, dtype=torch.bfloat16, device=device)
    try:
        yield pipeline
    finally:
        pipeline.close()


def _down(card: Card | Counted, pipeline: Pipeline, work: Callable, *, exact: bool | None, wanted: str) -> dict:
    """Down the ladder, each time with a little less than the phase takes by now, until the rung `wanted` was taken. `exact`: whether the bits are to be
    the same; None: any picture will do."""
    expected = work()  # what is made once is there from now on
    start, off, peaks, wrong = card.now(), 0.0, [], []
    while not _taken(pipeline, wanted) and len(peaks) < MOST_DESCENTS and not wrong:
        peaks.append(card.peak_of(work))
        card.limit(peaks[-1] - card.less_bytes)
        try:
            found = work()
            off = max(off, float((found.float() - expected.float()).abs().mean() / expected.float().abs().mean()))
            del found
        except out_of_memory.OOM_TYPES as error:
            if not out_of_memory.is_oom(error, pipeline.device):
                raise
            wrong.append("the foot of the ladder was reached")
            out_of_memory.release_tensors(error)
        finally:
            card.limit(float("inf"))
    left = card.now() - start
    if not _taken(pipeline, wanted):
        wrong.append(f"no rung {wanted}")
    if not off < float("inf") or (exact is not None and off > (0 if exact else ALIKE)):
        wrong.append(f"another result, {off:.2g} off")
    if left > LEFT_BYTES:
        wrong.append(f"{left} bytes stayed behind")
    rungs = sorted(rung for _, rung in pipeline.lower.taken)
    return {"peaks MiB": [one / 2**20 for one in peaks], "rungs": rungs, "off": off, "wrong": "; ".join(wrong)}


def _taken(pipeline: Pipeline, wanted: str) -> bool:
    return any(rung.startswith(wanted) for _, rung in pipeline.lower.taken)


def _encode(pipeline: Pipeline, tiny: bool) -> Callable[[], torch.Tensor]:
    def work() -> torch.Tensor:
        pipeline._encodings.clear()
        return pipeline.encode_prompt("a red apple")["embeds"]

    return work


def _draw(guidance: float) -> Callable[[Pipeline, bool], Callable[[], torch.Tensor]]:
    def phase(pipeline: Pipeline, tiny: bool) -> Callable[[], torch.Tensor]:
        side = 64 if tiny else 512
        request = GenerationRequest(
            prompt="a red apple", width=side, height=side, num_inference_steps=1, seed=3, guidance=guidance
        )
        towards, away = pipeline.encode_prompt("a red apple"), pipeline.encode_prompt("") if guidance > 1 else None

        def work() -> torch.Tensor:
            start = denoise.start(pipeline, request, 3, None, None)
            return denoise.denoise(pipeline, request, *start, towards, away, None, None)

        return work

    return phase


def _decode(pipeline: Pipeline, tiny: bool) -> Callable[[], torch.Tensor]:
    shape = (1, 16, 8, 36) if tiny else (1, 16, 166, 166)
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return lambda: torch.from_numpy(numpy.asarray(pipeline.decode(latents), dtype=numpy.float32))


PHASES = {
    "encode": (_encode, True, "park"),
    "draw": (_draw(1.0), True, "fewer"),
    "draw with guidance": (_draw(4.0), False, "halves"),
    "decode": (_decode, False, "tiles"),
}
CARD_PHASES = ("encode", "draw", "draw with guidance")
TINY_PHASES = ("encode", "draw with guidance", "decode")


def _true_width(folder: Path) -> Path:
    """A model whose autoencoder has Qwen-Image's own widths, with random weights."""
    from diffusers import AutoencoderKLQwenImage

    make_qwen_image(folder)
    AutoencoderKLQwenImage().to(torch.bfloat16).save_pretrained(folder / "vae")
    return folder
