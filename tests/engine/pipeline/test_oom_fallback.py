"""Every phase of generating goes down its whole ladder as the memory gets less, with the same result on each rung, and nothing stays behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy
import pytest
import torch
from PIL import Image

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.acceleration import compile_blocks
from backend.engine.pipeline import denoise, oom_fallback
from backend.engine.pipeline.pipeline import Pipeline
from backend.schema.memory_plan import VramConfig
from backend.schema.request import GenerationRequest
from tests.engine.small_card import SmallCard, small_card

pytestmark = pytest.mark.torch
REQUEST = GenerationRequest(prompt="a red apple", width=64, height=64, num_inference_steps=1, seed=3)


def load(folder, **options) -> Pipeline:
    """Its weights are cast from the file's float32, so that they take memory."""
    return Pipeline(identify_model(folder, families.FAMILIES), dtype=torch.bfloat16, device="cpu", **options)


@pytest.fixture
def card(monkeypatch) -> Iterator[SmallCard]:
    with small_card(monkeypatch) as card:
        yield card


def descend(card: SmallCard, pipeline: Pipeline, work: Callable[[], torch.Tensor], *, exact: bool = True) -> list[str]:
    """`work` again and again with one byte less than it took, until it cannot be done: the rungs that were taken, in order. What it gives stays
    the same (with tiles: alike), and it leaves no more behind than at first."""
    card.most_bytes, expected, names, at_rest = float("inf"), work(), [], None
    for _ in range(20):
        known = set(pipeline.lower.taken)
        gc.collect()
        at_rest, card.highest = at_rest or card.now, card.now
        found = work()
        assert torch.equal(found, expected) if exact else (found - expected).abs().mean() < 0.05 * expected.abs().mean()
        del found
        gc.collect()
        assert card.now <= at_rest + 4096, "the tries left tensors behind"
        names += sorted(rung for _, rung in pipeline.lower.taken - known)
        card.most_bytes = card.highest - 1
    raise AssertionError("it never came to an end")


def rungs_of(card: SmallCard, pipeline: Pipeline, work: Callable[[], torch.Tensor], **options) -> list[str]:
    taken: list[str] = []
    original = oom_fallback._take

    def take(pipeline, rung):
        taken.append(rung.name)
        original(pipeline, rung)

    oom_fallback._take = take
    try:
        with pytest.raises(torch.OutOfMemoryError):
            descend(card, pipeline, work, **options)
    finally:
        oom_fallback._take = original
    assert len(set(taken)) == len(taken), "a rung was taken twice"
    return taken


def test_encoding_a_prompt(card, deep_qwen):
    pipeline = load(deep_qwen)

    def work() -> torch.Tensor:
        pipeline._encodings.clear()
        return pipeline.encode_prompt("a red apple")["embeds"]

    assert rungs_of(card, pipeline, work) == ["park", "fewer", "none"]
    assert pipeline.notes[0].startswith(
        "Out of memory while the prompt was encoded, so parts that are not at work now leave memory."
    )
    assert "2 of 2 blocks of the text encoder are now fetched" in pipeline.notes[-1]


def drawn(pipeline: Pipeline, guidance: float) -> Callable[[], torch.Tensor]:
    request = replace(REQUEST, guidance=guidance)
    towards, away = pipeline.encode_prompt("a red apple"), pipeline.encode_prompt("") if guidance > 1 else None

    def work() -> torch.Tensor:
        start = denoise.start(pipeline, request, 3, None, None)
        return denoise.denoise(pipeline, request, *start, towards, away, None, None)

    return work


def test_drawing(card, deep_qwen):
    pipeline = load(deep_qwen)
    assert rungs_of(card, pipeline, drawn(pipeline, 1.0)) == ["park", "fewer", "none"]
    with pytest.raises(torch.OutOfMemoryError):
        pipeline.generate(REQUEST)
    card.most_bytes = float("inf")  # at the foot of the ladder nothing is broken
    assert pipeline.generate(REQUEST)[0].size == (64, 64)


def test_drawing_with_guidance(card, deep_qwen):
    pipeline = load(deep_qwen)
    assert rungs_of(card, pipeline, drawn(pipeline, 4.0), exact=False) == ["park", "halves", "fewer", "none"]
    assert (
        "4 of 4 blocks of the transformer" in pipeline.notes[-1] and "reserve in the preferences" in pipeline.notes[-1]
    )


def test_encoding_and_decoding_a_picture(card, deep_qwen):
    pipeline = load(deep_qwen)
    picture = Image.linear_gradient("L").resize((288, 64)).convert("RGB")
    assert rungs_of(card, pipeline, lambda: pipeline.encode_picture(picture, 288, 64), exact=False) == [
        "park",
        "tiles, encode, 288",
    ]
    latents = torch.randn((1, 16, 8, 36), generator=torch.Generator().manual_seed(0))
    decode = lambda: torch.from_numpy(numpy.asarray(pipeline.decode(latents), dtype=numpy.float32))  # noqa: E731
    assert rungs_of(card, pipeline, decode, exact=False) == ["tiles, decode, 288"]
    card.most_bytes = float("inf")
    pipeline = load(deep_qwen, allow_tiles=False)
    assert rungs_of(card, pipeline, decode, exact=False) == ["park"]


def lora(rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [f"transformer.transformer_blocks.{block}.attn.to_out.0" for block in range(4)]
    pairs = {"lora_A.weight": (rank, 48), "lora_B.weight": (48, rank)}
    return {
        f"{name}.{end}": 0.3 * torch.randn(shape, generator=generator) for name in names for end, shape in pairs.items()
    }


@pytest.mark.parametrize("hot", [False, True])
def test_a_lora_that_acts_goes_along(card, deep_qwen, hot):
    """One that was fused acts beside the weights once these are read anew."""
    pipeline = load(deep_qwen)
    bare = drawn(pipeline, 1.0)()
    pipeline.add_lora("dit", lora(), hot=hot)
    work = drawn(pipeline, 1.0)
    before = work()
    assert (before - bare).abs().max() > 0.05
    assert rungs_of(card, pipeline, work, exact=hot) == ["park", "fewer", "none"]
    card.most_bytes = float("inf")
    assert (work() - before).abs().max() <= 0.02 * before.abs().max() and pipeline.adapters.receipts[0].mode == "hot"
    pipeline.clear_loras()
    assert torch.equal(work(), bare)


def test_adding_a_lora(card, deep_qwen):
    pipeline = load(deep_qwen)
    tensors = lora(16)
    gc.collect()
    card.most_bytes = card.now + 10_000  # less than the branches take
    receipt = pipeline.add_lora("dit", tensors, hot=True)
    assert receipt.layers_applied == 4 and pipeline.lower.taken == {("dit", "park")}
    pipeline.notes.clear()
    card.most_bytes = float("inf")
    pipeline.generate(REQUEST)
    assert "Out of memory while a LoRA was added" in pipeline.notes[0]  # in the receipt of the next picture
    pipeline.notes.clear()
    pipeline.generate(REQUEST)
    assert not pipeline.notes


@pytest.mark.parametrize("names, share, rung", [(("text_encoder", "vae"), 1.05, "park"), (("vae",), 0.5, "wait")])
def test_loading(card, deep_qwen, names, share, rung):
    """There is memory for the autoencoder alone, or not even for that: it is left on disk until it is used."""
    spec = identify_model(deep_qwen, families.FAMILIES)
    spec = replace(spec, parts={name: spec.parts[name] for name in names})
    latents = torch.randn((1, 16, 8, 8), generator=torch.Generator().manual_seed(0))
    whole = Pipeline(spec, dtype=torch.bfloat16, device="cpu")
    expected = whole.decode(latents)
    whole.close()
    del whole
    gc.collect()
    card.most_bytes = card.now + share * spec.parts["vae"].nbytes / 2
    pipeline = Pipeline(spec, dtype=torch.bfloat16, device="cpu")
    assert pipeline.lower.taken == {("vae", rung)}
    card.most_bytes = float("inf")
    assert numpy.array_equal(numpy.asarray(pipeline.decode(latents)), numpy.asarray(expected))
    assert "Out of memory while the VAE was loaded" in pipeline.lower.news[0]


def test_a_job_and_the_next_keep_what_was_taken(card, deep_qwen):
    pipeline = load(deep_qwen)
    card.highest = card.now
    expected = pipeline.generate(replace(REQUEST, count=2))
    card.most_bytes = card.highest - 1
    found = pipeline.generate(replace(REQUEST, count=2))
    assert card.num_refused == 1 and len(pipeline.notes) == 1
    again = pipeline.generate(replace(REQUEST, count=2))
    assert card.num_refused == 1
    for pictures in (found, again):
        assert [numpy.array_equal(numpy.asarray(a), numpy.asarray(b)) for a, b in zip(pictures, expected)] == [
            True,
            True,
        ]


def test_fp8_comes_only_where_it_is_allowed_and_is_in_every_later_receipt(card, deep_qwen, monkeypatch):
    monkeypatch.setattr(
        oom_fallback, "_frees_blocks", lambda *_: False
    )  # else the blocks, fetched from disk, would come in the file's format

    def runs_out(*_) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for allowed, taken in ((False, ["park"]), (True, ["fp8", "park"])):
        pipeline = load(deep_qwen, allow_fp8=allowed)
        work, plain = drawn(pipeline, 1.0), drawn(pipeline, 1.0)()
        hook = pipeline.parts["dit"].register_forward_pre_hook(runs_out)
        with pytest.raises(torch.OutOfMemoryError):
            work()
        hook.remove()
        assert sorted(rung for _, rung in pipeline.lower.taken) == taken
    assert 0 < (work() - plain).abs().mean() < 0.1 * plain.abs().mean()
    pipeline.notes.clear()
    standing = "The transformer is stored in FP8, since memory ran out before."
    for expected in (3, 1):  # what happened before, and what stays so
        pipeline.generate(REQUEST)
        assert len(pipeline.notes) == expected and pipeline.notes[-1] == standing
        pipeline.notes.clear()


def test_where_ram_runs_out_beside_a_card_weights_wait_on_disk(card, deep_qwen, monkeypatch):
    in_ram = VramConfig(
        offload_dtype="float32",
        offload_device="cpu",
        onload_dtype="float32",
        onload_device="cpu",
        preparing_dtype="bfloat16",
    )
    pipeline = load(deep_qwen, configs={"dit": in_ram, "text_encoder": in_ram})
    work = drawn(pipeline, 1.0)
    expected, tries = work(), []

    def runs_out(*_) -> None:
        if len(tries) < 2:
            tries.append(1)
            raise MemoryError

    monkeypatch.setattr(oom_fallback.out_of_memory, "is_ram_oom", lambda *_: True)
    pipeline.parts["dit"].register_forward_pre_hook(runs_out)
    assert torch.equal(work(), expected)
    assert pipeline.lower.taken == {("dit", "disk"), ("dit", "all on disk")}
    assert [pipeline.placements[name].states.offload.on_disk for name in ("dit", "text_encoder")] == [True, True]


def test_compiled_blocks_are_compiled_after_weights_were_placed_anew(card, deep_qwen, monkeypatch):
    monkeypatch.setattr(compile_blocks, "BACKEND", "eager")
    pipeline, request = load(deep_qwen), replace(REQUEST, compile=True, guidance=1.0)
    expected, again = pipeline.generate(request)[0], []

    def runs_out(*_) -> None:
        if len(again) < 3:
            again.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    pipeline.parts["dit"].register_forward_pre_hook(runs_out)
    found = pipeline.generate(request)[0]
    assert {name for _, name in pipeline.lower.taken} == {"park", "fewer", "none"} and pipeline.placements["dit"].whole
    assert numpy.array_equal(numpy.asarray(found), numpy.asarray(expected))
