"""What a sample is made of: cuts, mirrored pictures and their masks belong together; pictures kept aside are judged alike."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from PIL import Image
from safetensors.torch import load_file

from backend.dataset.crops import cut
from backend.dataset.dataset import read_folder
from backend.training.encoding.encoding_cache import EncodingCache, open_pixels, prune, read_mask

pytestmark = pytest.mark.torch
BASE = ("--max_steps", 2, "--save_dtype", "float32", "--height", 32, "--width", 32)


def test_masks_are_cut_and_mirrored_as_their_pictures(tmp_path: Path):
    """The mask is white exactly where the picture is red, so that it must be so in every view."""
    picture = Image.new("RGBA", (256, 64), (0, 0, 255, 0))
    picture.paste((255, 0, 0, 255), (0, 0, 96, 64))
    picture.save(tmp_path / "a.png")
    item = read_folder(tmp_path).items[0]
    shares = set()
    for flip in (False, True):
        for number in range(6):
            box = cut(item, (64, 64), number, zoom=1.0)
            pixels = open_pixels(item, (64, 64), flip=flip, box=box)
            mask = read_mask(item, (64, 64), (64, 64), kind="alpha", flip=flip, box=box)
            red = (pixels[1] < 0).float()  # what is see-through is white
            assert float((mask[0] - red).abs().mean()) < 0.02
            shares.add(round(float(mask.mean()), 2))
    assert len(shares) >= 3 and min(shares) < 0.2 and max(shares) > 0.8


def test_cuts_of_a_picture_are_encoded_once_and_all_are_shown(run_training, tmp_path: Path, data):
    wide = Image.linear_gradient("L").resize((64, 256)).rotate(90, expand=True).convert("RGB")
    (tmp_path / "set").mkdir()
    wide.save(tmp_path / "set" / "a.png")
    flags = (*BASE, "--crops", 3, "--flip", "--dataset_repeat", 12)
    assert run_training(tmp_path / "one", *flags, dataset=tmp_path / "set") == 0
    found = [load_file(path)["latents"] for path in (data.cache / "encodings" / "latents").rglob("*.safetensors")]
    assert len(found) == 6 and len({round(float(latents.mean()), 4) for latents in found}) >= 4
    assert run_training(tmp_path / "data", *flags, "--task", "sft:data_process", dataset=tmp_path / "set") == 0
    assert run_training(tmp_path / "two", *flags, "--task", "sft:train", dataset=tmp_path / "data") == 0
    one, two = (load_file(tmp_path / name / "step-2.safetensors") for name in ("one", "two"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_loss_on_pictures_kept_aside_is_measured_with_the_same_noise_each_time(run_training, events, tmp_path: Path):
    flags = (*BASE, "--validation_split", 0.4, "--validation_every", 1, "--flip", "--caption_dropout", 0.5)
    found = []
    for rate in (0, 0.01):
        run = tmp_path / str(len(found))
        assert run_training(run, *flags, "--learning_rate", rate) == 0
        found.append([event["loss"] for event in events(run) if event["event"] == "validation"])
    assert found[0] == [found[0][0]] * 2 and found[1][1] != found[0][1]


def test_samples_at_several_strengths(run_training, events, tmp_path: Path, capsys):
    flags = (*BASE, "--sample_prompts", "a ball", "--sample_inference_steps", 2, "--learning_rate", 0.05)
    run = tmp_path / "run"
    assert run_training(run, *flags, "--sample_strengths", "0, 1,1.5") == 0
    names = [f"0-strength-{strength}.png" for strength in ("0", "1", "1.5")]
    assert {path.name for path in (run / "samples" / "step-000002").iterdir()} == set(names)

    def drawn(step: int) -> list[bytes]:
        return [Image.open(run / "samples" / f"step-{step:06d}" / name).tobytes() for name in names]

    before, after = drawn(0), drawn(2)
    assert before[0] == before[1] == before[2] == after[0] and len(set(after)) == 3
    assert [event["prompt"] for event in events(run) if event["event"] == "sample"][-2:] == [
        "a ball",
        "a ball (strength 1.5)",
    ]
    assert next(event["event"] for event in events(run) if event["event"] in ("sample", "step")) == "sample"
    assert run_training(tmp_path / "plain", *flags) == 0
    one, two = (load_file(tmp_path / name / "step-2.safetensors") for name in ("run", "plain"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    full = ("--trainable_models", "dit", "--sample_strengths", "0.5")
    assert run_training(tmp_path / "full", *flags, *full) == 2
    assert "need a LoRA" in capsys.readouterr().err


def test_a_sample_that_cannot_be_written_does_not_end_the_run(run_training, events, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "samples").write_text("a file where the folder should be")
    flags = (
        *BASE,
        "--sample_prompts",
        "a ball",
        "--sample_inference_steps",
        1,
        "--sample_every",
        1,
        "--resume_from_checkpoint",
        "latest",
    )
    assert run_training(run, *flags) == 0
    said = events(run)
    notes = [event["message"] for event in said if event["event"] == "note" and "A sample of" in event["message"]]
    assert len(notes) == 3 and "step 0 is missing" in notes[0] and said[-1]["reason"] == "complete"
    state = load_file(run / "checkpoints" / "step-000002" / "weights.safetensors")
    assert all(weight.dtype == torch.float32 for weight in state.values())  # though the networks compute in bfloat16


def test_a_full_cache_loses_what_was_used_longest_ago_and_never_what_a_run_needs(tmp_path: Path):
    import os

    store = EncodingCache(tmp_path)
    for number, key in enumerate(("aa", "bb", "cc", "dd")):
        store.put(key, {"x": torch.zeros(1000)})
        os.utime(store._path(key), (1000 + number, 1000 + number))
    assert EncodingCache(tmp_path).get("aa") is not None  # used again
    (tmp_path / "aa" / ".torn.1.tmp").write_bytes(b"x")
    os.utime(tmp_path / "aa" / ".torn.1.tmp", (1000, 1000))
    prune(tmp_path, 8300, keep={"bb"})
    assert sorted(path.stem for path in tmp_path.rglob("*.safetensors")) == ["aa", "bb"]
    assert not list(tmp_path.rglob("*.tmp"))


def test_encoders_have_left_memory_before_the_first_step(run_training, tmp_path: Path, monkeypatch):
    import gc

    from backend.training import loop

    def alive() -> dict[str, int]:
        gc.collect()
        names = [type(thing).__name__ for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)]
        return {
            start: sum(name.startswith(start) for name in names)
            for start in ("Qwen2_5_VL", "QwenImageEncoder3d", "QwenImageT")
        }

    before, found, train_step = alive(), [], loop.train_step
    monkeypatch.setattr(loop, "train_step", lambda *arguments: (found.append(alive()), train_step(*arguments))[1])
    assert run_training(tmp_path / "run", *BASE, "--max_steps", 1) == 0
    more = {name: found[0][name] - before[name] for name in before}
    assert more["Qwen2_5_VL"] <= 0 and more["QwenImageEncoder3d"] <= 0 < more["QwenImageT"]
