"""Whole runs of a tiny model: what they leave, how they stop, and that going on is as if they had not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open
from safetensors.torch import load_file

pytestmark = pytest.mark.torch
STATES = ("weights.safetensors", "optimizers.pt", "random.pt", "state.json")


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def same(one: Path, other: Path) -> bool:
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_lora_run_leaves_results_states_samples_and_events(run_training, events, tmp_path: Path, tiny_qwen: Path):
    flags = ("--num_epochs", 2, "--dataset_repeat", 2, "--trigger_word", "zubi", "--sample_prompts", "a ball\na cup")
    assert run_training(tmp_path / "run", *flags, "--sample_inference_steps", 2, "--name", "balls") == 0
    run = tmp_path / "run"
    assert sorted(path.name for path in run.glob("*.safetensors")) == ["epoch-0.safetensors", "epoch-1.safetensors"]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000010", "step-000020"]
    assert {path.name for path in (run / "checkpoints" / "step-000020").iterdir()} == set(STATES)
    assert sorted(str(path.relative_to(run / "samples")) for path in run.rglob("*.png")) == [
        f"step-{step:06d}/{number}.png" for step in (0, 10, 20) for number in (0, 1)
    ]
    said = events(run)
    assert [event["event"] for event in said if event["event"] in ("started", "saved", "checkpoint", "finished")] == [
        "started",
        "saved",
        "checkpoint",
        "saved",
        "checkpoint",
        "finished",
    ]
    assert [event["step"] for event in said if event["event"] == "step"] == list(range(1, 21))
    assert said[-1]["reason"] == "complete"
    facts = metadata(run / "epoch-1.safetensors")
    assert (facts["family"], facts["rank"], facts["alpha"], facts["trigger"], facts["steps"], facts["name"]) == (
        "qwen_image",
        "4",
        "4.0",
        "zubi",
        "20",
        "balls",
    )
    assert json.loads(facts["config"])["num_epochs"] == 2 and len(facts["base_hash"]) == 64
    assert facts["software"].startswith("Loft ") and facts["base"] and facts["targets"]
    assert (
        facts["modelspec.thumbnail"].startswith("data:image/jpeg;base64,")
        and len(facts["modelspec.thumbnail"]) < 30_720
    )
    assert str(tmp_path) not in json.dumps(facts) and str(tiny_qwen) not in json.dumps(facts)


def test_a_lora_is_recognised_and_moves_every_layer(run_training, tmp_path: Path):
    from backend.catalog.models.identify import identify_lora
    from backend.families import FAMILIES

    assert (
        run_training(tmp_path / "run", "--max_steps", 3, "--lora_alpha", 8, "--lora_target_modules", "to_q,img_mod.1")
        == 0
    )
    path = tmp_path / "run" / "step-3.safetensors"
    spec = identify_lora(path, FAMILIES)
    assert (spec.family, spec.ranks, spec.alphas, spec.num_modules) == ("qwen_image", (4,), (8.0,), 4)
    tensors = load_file(path)
    ups = [tensor for name, tensor in tensors.items() if name.endswith("lora_B.weight")]
    assert len(ups) == 4 and all(float(up.abs().max()) > 0 for up in ups)


def test_two_halves_are_the_whole_bit_for_bit(run_training, tmp_path: Path):
    flags = (
        "--batch_size",
        2,
        "--gradient_accumulation_steps",
        2,
        "--dataset_repeat",
        3,
        "--lora_dropout",
        0.2,
        "--ema_decay",
        0.9,
        "--caption_dropout",
        0.3,
        "--lr_scheduler",
        "cosine",
        "--lr_warmup_steps",
        2,
        "--save_dtype",
        "float32",
        "--save_steps",
        3,
        "--num_epochs",
        2,
    )
    assert run_training(tmp_path / "whole", *flags) == 0
    assert run_training(tmp_path / "halves", *flags, "--keep_checkpoints", 9) == 0
    halves = tmp_path / "halves"
    states = sorted(path.name for path in (halves / "checkpoints").iterdir())
    last = states[-1]
    whole = tmp_path / "whole" / "checkpoints" / last
    for name in states[1:]:  # as if killed after the first
        for path in (halves / "checkpoints" / name).iterdir():
            path.unlink()
        (halves / "checkpoints" / name).rmdir()
    assert run_training(halves, *flags, "--resume_from_checkpoint", "latest") == 0
    for name in ("weights.safetensors", "mean.safetensors"):
        assert same(halves / "checkpoints" / last / name, whole / name)
    first, second = (torch.load(folder / last / "optimizers.pt") for folder in (halves / "checkpoints", whole.parent))
    assert str(first["optimizers"]) == str(second["optimizers"])


def test_stopping_saves_and_going_on_ends_where_the_whole_does(run_training, events, tmp_path: Path, monkeypatch):
    from backend.training import loop

    flags = ("--max_steps", 6, "--save_dtype", "float32")
    assert run_training(tmp_path / "whole", *flags) == 0
    run, train_step = tmp_path / "run", loop.train_step

    def stopping(*arguments):
        (run / "stop").write_text("")
        return train_step(*arguments)

    monkeypatch.setattr(loop, "train_step", stopping)
    assert run_training(run, *flags) == 0
    monkeypatch.setattr(loop, "train_step", train_step)
    assert events(run)[-1]["reason"] == "stopped" and events(run)[-1]["step"] == 1
    assert (run / "step-1.safetensors").is_file()
    assert run_training(run, *flags, "--resume_from_checkpoint", "latest") == 0
    resumed = next(event for event in events(run) if event["event"] == "resumed")
    assert resumed["step"] == 1 and "place in the data" in resumed["restored"] and resumed["not_restored"] == []
    assert same(run / "step-6.safetensors", tmp_path / "whole" / "step-6.safetensors")
    rows = (run / "loss.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["step", "1", "2", "3", "4", "5", "6"]


def test_what_was_set_otherwise_rules_over_the_state_and_is_said(run_training, events, tmp_path: Path):
    def going_on(*flags) -> tuple[dict, dict, Path]:
        """The receipt, the optimizer's state after the step that was made, and its folder."""
        assert run_training(run, *flags, "--save_steps", 1, "--resume_from_checkpoint", "latest") == 0
        resumed = [event for event in events(run) if event["event"] == "resumed"][-1]
        state = run / "checkpoints" / f"step-{resumed['step'] + 1:06d}"
        return resumed, torch.load(state / "optimizers.pt")["optimizers"][0], state

    run = tmp_path / "run"
    assert run_training(run, "--max_steps", 1, "--customized_optimizer", "torch.optim.Adam") == 0
    flags = ("--customized_optimizer", "adam", "--weight_decay", 0.5, "--optimizer_args", '{"betas": [0.5, 0.6]}')
    receipt, optimizer, _ = going_on("--max_steps", 2, *flags)
    group = optimizer["param_groups"][0]
    assert "optimizer" in receipt["restored"] and "weight_decay (was 0.01, is 0.5)" in receipt["not_restored"]
    assert (group["weight_decay"], group["betas"], float(optimizer["state"][0]["step"])) == (0.5, (0.5, 0.6), 2)
    receipt, optimizer, state = going_on("--max_steps", 3, "--customized_optimizer", "adafactor", "--ema_decay", 0.9)
    assert {"optimizer", "running mean"} <= set(receipt["not_restored"]) and float(optimizer["state"][0]["step"]) == 1
    weights, mean = (load_file(state / f"{name}.safetensors") for name in ("weights", "mean"))
    begun = load_file(state.with_name("step-000002") / "weights.safetensors")
    for name, weight in weights.items():  # the mean began from the weights that were gone on from
        torch.testing.assert_close(mean[name], torch.lerp(begun[name], weight, 1 - 4 / 13))


def test_a_run_folder_goes_on_by_itself_and_says_when_it_is_complete(
    run_training, events, tmp_path: Path, tiny_qwen, pictures, capsys
):
    from accelerate.state import AcceleratorState

    from backend.training.__main__ import main

    run = tmp_path / "run"
    run.mkdir()
    config = {
        "model": str(tiny_qwen),
        "dataset_base_path": str(pictures),
        "max_pixels": 4096,
        "lora_rank": 4,
        "max_steps": 2,
    }
    (run / "config.json").write_text(json.dumps(config))
    for extra, status in (([], 0), ([], 2), (["--max_steps", "4"], 0)):
        AcceleratorState._reset_state(reset_partial_state=True)
        assert main([str(run), *extra]) == status
    assert sorted(path.name for path in run.glob("*.safetensors")) == ["step-2.safetensors", "step-4.safetensors"]
    assert "already complete: it has made 2 of 2 steps" in capsys.readouterr().err
    assert (
        json.loads((run / "process.json").read_text())["argv"][-1] == "4"
    )  # started by hand, it keeps the record itself


def test_a_new_run_in_an_old_place_keeps_what_was_there(run_training, events, tmp_path: Path):
    run = tmp_path / "run"
    flags = ("--max_steps", 2, "--save_steps", 1, "--sample_prompts", "a ball", "--sample_inference_steps", 1)
    assert run_training(run, *flags) == 0
    made = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert run_training(run, *flags, "--seed", 5) == 0
    assert len(list(run.glob("checkpoints.before-*/step-000002"))) == 1
    for name, data in made.items():  # everything is there, under its first name or the one that it was set aside by
        first, *rest = name.parts
        if first != "process.json":
            kept = (
                [*run.glob(f"{first}.before-*/{'/'.join(rest)}")]
                if rest
                else [*run.glob(f"{first}.before-*"), *run.glob(f"results.before-*/{first}")]
            )
            assert any(path.read_bytes() == data for path in kept), name
    first = events(run)[0]
    assert first["event"] == "note" and "is kept there" in first["message"] and "results.before-" in first["message"]


@pytest.mark.parametrize("flag", ["--resume_from_checkpoint", "--lora_checkpoint", "--preset_lora_path"])
def test_a_run_may_begin_from_a_result_in_its_own_folder(run_training, tmp_path: Path, flag: str):
    run = tmp_path / "run"
    assert run_training(run, "--max_steps", 1) == 0
    file = run / "step-1.safetensors"
    before = file.read_bytes()
    assert run_training(run, "--max_steps", 1, flag, file) == 0
    (kept,) = run.glob("results.before-*/step-1.safetensors")
    assert kept.read_bytes() == before != file.read_bytes()


def test_a_refused_run_puts_everything_back(run_training, tmp_path: Path):
    run = tmp_path / "run"
    assert run_training(run, "--max_steps", 1) == 0
    assert run_training(run, "--max_steps", 1, "--lora_target_modules", "to_z") == 2
    assert (run / "step-1.safetensors").is_file() and (run / "checkpoints").is_dir()
    assert not list(run.glob("results.before-*"))


def test_full_training_of_two_parts_with_muon(run_training, tmp_path: Path, tiny_qwen: Path):
    flags = (
        "--trainable_models",
        "dit,text_encoder",
        "--customized_optimizer",
        "muon",
        "--learning_rates",
        "text_encoder=1e-4",
        "--timestep_sampling",
        "logit_normal",
        "--high_noise_share",
        0.4,
        "--batch_size",
        2,
        "--max_steps",
        3,
    )
    assert run_training(tmp_path / "run", *flags, "--save_dtype", "float32", "--mixed_precision", "no") == 0
    saved = load_file(next((tmp_path / "run").glob("*.safetensors")))
    before = load_file(tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors")
    dit = {name: tensor for name, tensor in saved.items() if not name.startswith("pipe.")}
    assert dit.keys() == before.keys()
    moved = [name for name in before if not torch.equal(before[name].float(), dit[name])]
    assert "transformer_blocks.0.attn.to_q.weight" in moved and "img_in.weight" in moved
    words = load_file(tiny_qwen / "text_encoder" / "model.safetensors")
    name = "layers.0.self_attn.q_proj.weight"
    old = next(tensor for key, tensor in words.items() if key.endswith(name) and "visual" not in key)
    assert not torch.equal(old.float(), saved[f"pipe.text_encoder.{name}"])


def test_batches_and_accumulation_give_the_mean_of_single_samples(run_training, tmp_path: Path, pictures: Path):
    """One step over four pictures of one size and unlike captions: together (padded), in turns, or two and two."""
    import shutil

    shutil.copytree(pictures, tmp_path / "set", ignore=shutil.ignore_patterns("4.*"))
    flags = (
        "--num_epochs",
        1,
        "--height",
        48,
        "--width",
        48,
        "--mixed_precision",
        "no",
        "--save_dtype",
        "float32",
        "--customized_optimizer",
        "sgd",
        "--max_grad_norm",
        0,
        "--learning_rate",
        0.1,
    )
    found = {}
    for batch, turns in ((4, 1), (1, 4), (2, 2)):
        out = tmp_path / f"{batch}"
        sizes = ("--batch_size", batch, "--gradient_accumulation_steps", turns)
        assert run_training(out, *flags, *sizes, dataset=tmp_path / "set") == 0
        state = load_file(out / "checkpoints" / "step-000001" / "weights.safetensors")
        found[batch] = torch.cat([tensor.flatten() for name, tensor in sorted(state.items()) if "lora_B" in name])
    assert float(found[1].abs().max()) > 1e-4
    for batch in (2, 4):
        torch.testing.assert_close(found[batch], found[1], rtol=1e-3, atol=1e-7)


def test_encodings_are_made_once_and_shared_between_runs(run_training, events, tmp_path: Path, data):
    flags = ("--max_steps", 1, "--flip")
    assert run_training(tmp_path / "one", *flags) == 0
    files = sorted(data.cache.rglob("*.safetensors"))
    assert len([path for path in files if "latents" in path.parts]) == 10  # five pictures, both ways round
    files_were = [path.stat().st_ino for path in files]
    assert run_training(tmp_path / "two", *flags) == 0
    assert [path.stat().st_ino for path in sorted(data.cache.rglob("*.safetensors"))] == files_were
    assert not [
        event
        for event in events(tmp_path / "two")
        if event["event"] == "phase" and event["name"] == "caching" and event["total"]
    ]
    files[0].write_bytes(b"torn")
    assert run_training(tmp_path / "three", *flags) == 0
    assert files[0].stat().st_size > 100
    assert run_training(tmp_path / "four", *flags, "--no-data_cache") == 0
    assert same(tmp_path / "two" / "step-1.safetensors", tmp_path / "four" / "step-1.safetensors")


def test_what_the_untouched_model_draws_is_trained_along(run_training, tmp_path: Path, data):
    flags = ("--prior_pictures", 3, "--prior_prompts", "a cat\na dog", "--height", 32, "--width", 32, "--max_steps", 2)
    assert run_training(tmp_path / "run", *flags) == 0
    latents = list((data.cache / "encodings" / "latents").rglob("*.safetensors"))
    assert len(latents) == 8


def test_a_picture_that_breaks_half_way_is_named(run_training, events, tmp_path: Path, pictures: Path):
    import shutil

    shutil.copytree(pictures, tmp_path / "set")
    broken = tmp_path / "set" / "1.png"
    broken.write_bytes(broken.read_bytes()[:120])  # the header is right, the rest is missing
    assert run_training(tmp_path / "run", "--max_steps", 1, dataset=tmp_path / "set") == 2
    last = events(tmp_path / "run")[-1]
    assert last["kind"] == "broken_picture" and "1.png" in last["message"]
    assert run_training(tmp_path / "again", "--max_steps", 1, "--skip_broken_pictures", dataset=tmp_path / "set") == 0
    assert metadata(tmp_path / "again" / "step-1.safetensors")["pictures"] == "4"


def test_a_loss_that_is_no_number_ends_the_run_with_the_last_state_good(
    run_training, events, tmp_path: Path, monkeypatch
):
    from backend.training.model import training_module

    assert run_training(tmp_path / "run", "--max_steps", 2) == 0
    good = training_module.errors
    calls = []

    def bad(*arguments):
        calls.append(1)
        return good(*arguments) * (float("nan") if len(calls) > 1 else 1.0)

    monkeypatch.setattr(training_module, "errors", bad)
    flags = ("--max_steps", 20, "--save_steps", 1, "--resume_from_checkpoint", "latest")
    assert run_training(tmp_path / "run", *flags) == 2
    last = events(tmp_path / "run")[-1]
    assert last["kind"] == "not_finite" and "5 steps in a row" in last["message"]
    states = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in states.iterdir()) == ["step-000002", "step-000003"]  # none of a bad step
    calls.clear()

    def now_and_then(*arguments):
        calls.append(1)
        return good(*arguments) * (float("nan") if len(calls) == 3 else 1.0)

    monkeypatch.setattr(training_module, "errors", now_and_then)
    flags = ("--max_steps", 10, "--save_steps", 3, "--keep_checkpoints", 9, "--resume_from_checkpoint", "latest")
    assert run_training(tmp_path / "run", *flags) == 0  # step 6 is bad: what it owes is saved after step 7
    assert [path.name for path in sorted(states.iterdir())][2:] == ["step-000007", "step-000009", "step-000010"]


def test_weights_that_are_no_numbers_are_not_saved(run_training, events, tmp_path: Path):
    flags = ("--max_steps", 9, "--save_steps", 1, "--customized_optimizer", f"{__name__}.Lost", "--allow_custom_code")
    assert run_training(tmp_path / "run", *flags) == 2
    assert (
        events(tmp_path / "run")[-1]["kind"] == "not_finite"
        and "After step 3" in events(tmp_path / "run")[-1]["message"]
    )
    assert sorted(path.name for path in (tmp_path / "run").glob("*/step-*")) == ["step-000001", "step-000002"]
    assert not (tmp_path / "run" / "step-3.safetensors").exists()


class Lost(torch.optim.SGD):
    """Its third step loses the weights."""

    def step(self, closure=None):
        super().step(closure)
        self.made = getattr(self, "made", 0) + 1
        if self.made == 3:
            self.param_groups[0]["params"][0].data[0] = float("nan")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lora_target_modules", "to_z"), "No module of dit is called 'to_z'"),
        (("--lora_target_modules", "("), "'(' is no regular expression"),
        (("--lora_rank_pattern", '{"to_q": 0}'), "says 0 for to_q; it has to be a whole number above 0"),
        (("--lora_base_model", "vae"), "'vae' cannot be trained"),
        (("--trainable_models", "dit", "--lora_base_model", "dit"), "cannot both train whole and get a LoRA"),
        (("--customized_optimizer", "nonsense"), "no optimizer called 'nonsense'"),
        (("--customized_optimizer", "torch.nn.Linear"), "which is of no package known for optimizers"),
        (("--customized_optimizer", "torch.optim.Optimizer"), "does not take"),
        (("--learning_rates", "vae=1"), "names 'vae', which does not train"),
        (("--learning_rates", "dit=1,dit=2"), "names the part dit twice"),
        (("--optimizer_args", '{"no_such": 1}'), "does not take 'no_such'"),
        (("--optimizer_args", "{"), "not a JSON object"),
        (("--mixed_precision", "fp16"), "does not train in fp16"),
        (("--resume_from_checkpoint", "nowhere.safetensors"), "no file nowhere.safetensors"),
        (("--fp8_modells", "x"), "unrecognized arguments: --fp8_modells"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(run_training, tmp_path: Path, capsys, flags, words):
    assert run_training(tmp_path / "run", "--max_steps", 1, *flags) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_a_run_folder_with_wrong_settings_says_so_in_its_events(run_training, events, tmp_path: Path):
    from backend.training.__main__ import main

    (tmp_path / "config.json").write_text('{"lora_rnk": 4}')
    assert main([str(tmp_path)]) == 2
    said = events(tmp_path)[-1]
    assert said["event"] == "trouble" and "lora_rnk" in said["message"] and "lora_rank" in said["hint"]
