"""Memory that runs out beside the steps of a run: in encoding, sampling, validation and saving it goes on with less, and says so."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


def refuse() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def final(run):
    from safetensors.torch import load_file

    return load_file(next(run.glob("step-*.safetensors")))


@pytest.mark.usefixtures("data")
def test_a_run_goes_on_with_less_and_learns_the_same(run_training, events, tmp_path, monkeypatch):
    from backend.families import qwen_image
    from backend.training.run import evaluation, save

    flags = [
        "--max_steps",
        "2",
        "--save_steps",
        "1",
        "--sample_prompts",
        "a ball",
        "--sample_inference_steps",
        "1",
        "--sample_guidance",
        "3",
        "--validation_split",
        "0.2",
        "--validation_every",
        "1",
        "--no-data_cache",
        "--prior_pictures",
        "2",
        "--prior_prompts",
        "a dog",
    ]
    assert run_training(tmp_path / "whole", *flags) == 0
    whole, encode_text, predict, decode = (
        qwen_image.encode_image,
        qwen_image.encode_text,
        qwen_image.predict,
        qwen_image.decode,
    )
    errors = evaluation._errors

    def small_encode(parts, pixels, *, generator=None, tiled=False):
        return refuse() if len(pixels) > 1 else whole(parts, pixels, generator=generator, tiled=tiled)

    monkeypatch.setattr(qwen_image, "encode_image", small_encode)
    monkeypatch.setattr(
        qwen_image,
        "encode_text",
        lambda parts, some, **more: refuse() if len(some) > 2 else encode_text(parts, some, **more),
    )
    monkeypatch.setattr(
        qwen_image,
        "predict",
        lambda parts, x, *more, **said: refuse() if len(x) > 1 else predict(parts, x, *more, **said),
    )
    monkeypatch.setattr(
        qwen_image, "decode", lambda parts, z, *, tiled=False: decode(parts, z, tiled=tiled) if tiled else refuse()
    )
    monkeypatch.setattr(
        evaluation,
        "_errors",
        lambda run, number, places, levels: refuse() if len(levels) > 1 else errors(run, number, places, levels),
    )
    monkeypatch.setattr(save, "_in_ram", lambda state: refuse())
    assert run_training(tmp_path / "less", *flags) == 0
    said = events(tmp_path / "less")
    notes = " ".join(event["message"] for event in said if event["event"] == "note")
    for words in (
        "while pictures that are trained along",
        "while a sample was drawn; guidance is computed in two passes",
    ):
        assert notes.count(words) == 1, (words, notes)
    for kind in ("sample", "checkpoint", "validation"):
        assert [event["step"] for event in said if event["event"] == kind] == [
            event["step"] for event in events(tmp_path / "whole") if event["event"] == kind
        ]
    found, expected = [
        [event["loss"] for event in events(tmp_path / name) if event["event"] == "validation"]
        for name in ("less", "whole")
    ]
    assert found == pytest.approx(expected, rel=1e-3)
    for name, tensor in final(tmp_path / "whole").items():
        assert torch.allclose(final(tmp_path / "less")[name].float(), tensor.float(), atol=2e-4), name


def test_a_sample_for_which_there_is_no_memory_at_all_is_left_out(run_training, events, tmp_path, monkeypatch):
    from backend.families import qwen_image

    monkeypatch.setattr(qwen_image, "decode", lambda *_, **__: refuse())
    assert (
        run_training(
            tmp_path / "run", "--max_steps", "1", "--sample_prompts", "a ball", "--sample_inference_steps", "1"
        )
        == 0
    )
    said = events(tmp_path / "run")
    missing = [event for event in said if event["event"] == "note" and "is missing: memory ran out" in event["message"]]
    assert len(missing) == 2 and said[-1]["reason"] == "complete"  # before the first step and after the last


def test_a_picture_that_is_too_large_is_encoded_in_tiles_for_this_run_alone(data, tmp_path):
    from backend.engine.devices.oom_retry import TiledOnOom
    from backend.training.encoding.encoding_cache import EncodingCache

    notes = []
    each = TiledOnOom(lambda pixels, tiled: pixels if tiled or pixels.shape[-1] < 8 else refuse(), notes.append)
    assert each(torch.zeros(1, 3, 4, 4)).shape[-1] == 4 and each.exact
    assert each(torch.zeros(1, 3, 8, 8)).shape[-1] == 8 and not each.exact and len(notes) == 1
    assert each(torch.zeros(2, 3, 9, 9)).shape[-1] == 9 and len(notes) == 1  # larger ones at once
    for shared in (True, False):
        store = EncodingCache(tmp_path / str(shared), shared=shared)
        store.put("ab", {"latents": torch.zeros(1)}, exact=False)
        assert store.has("ab") and any(tmp_path.glob(f"{shared}/*/*")) is not shared


def test_one_thing_alone_that_is_too_much_is_raised():
    from backend.engine.devices.oom_retry import SmallerBatches

    fewer = SmallerBatches(lambda some: refuse(), lambda _: None, what="prompts")
    with pytest.raises(torch.OutOfMemoryError):
        fewer(["a", "b", "c"])
    assert fewer.most == 1


@pytest.mark.parametrize("phase", ["loading", "caching"])
def test_before_the_first_step_only_weights_go_lower(phase):
    from backend.schema.settings import from_flags
    from backend.schema.training.config import TrainingConfig
    from backend.training.run import oom_restart

    taken, flags = [], []
    while found := oom_restart.next_fallback(from_flags(TrainingConfig, flags), phase):
        flags += found[0]
        taken.append(found[0][0])
    assert taken == ["--enable_model_cpu_offload", "--fp8_models"]
    whole = from_flags(TrainingConfig, ["--trainable_models", "dit"])
    assert oom_restart.next_fallback(whole, phase)[0] == ["--enable_model_cpu_offload"]


def test_memory_that_runs_out_in_loading_starts_the_run_anew_a_rung_lower(run_training, events, tmp_path, monkeypatch):
    import os

    from backend.training.model import base_model

    load_part, started = base_model.load_part, []
    monkeypatch.setattr(base_model, "load_part", lambda *_, **__: refuse())

    def anew(program, command):
        started.append(command[3:])
        raise SystemExit(77)

    monkeypatch.setattr(os, "execv", anew)
    flags = ["--max_steps", "1"]
    with pytest.raises(SystemExit):
        run_training(tmp_path / "run", *flags)
    assert started[0][-3:] == ["--enable_model_cpu_offload", "--resume_from_checkpoint", "latest"]
    assert run_training.as_typed(started[0]) == 0  # weights are not loaded whole any more
    monkeypatch.setattr(base_model, "load_part", load_part)
    said = events(tmp_path / "run")
    assert any("going on from the last state by keeping frozen weights away" in str(event) for event in said)
    assert said[-1]["reason"] == "complete"


def test_memory_that_runs_out_in_the_saving_thread_starts_the_run_anew_from_the_state_before(
    run_training, events, tmp_path, monkeypatch
):
    import os

    from backend.training.run import save

    save_state, started = save.save_state, []

    def fails_at_two(folder, state):
        if state.step == 2 and not started:
            raise MemoryError
        return save_state(folder, state)

    def anew(program, command):
        started.append(command[3:])
        raise SystemExit(77)

    monkeypatch.setattr(save, "save_state", fails_at_two)
    monkeypatch.setattr(os, "execv", anew)
    with pytest.raises(SystemExit):
        run_training(tmp_path / "run", "--max_steps", "3", "--save_steps", "1")
    assert "--use_gradient_checkpointing" in started[0]
    assert run_training.as_typed(started[0]) == 0
    said = events(tmp_path / "run")
    assert [event["step"] for event in said if event["event"] == "resumed"] == [1]
    assert (
        any("Memory ran out; going on from the last state" in str(event) for event in said)
        and said[-1]["reason"] == "complete"
    )
