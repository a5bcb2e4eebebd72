"""The command lines of the documents as they are typed: killed, stopped, gone on with, by one process and by two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file

from backend.schema.paths import PROJECT
from backend.training.__main__ import main
from tests.training.kill_campaign import Held

pytestmark = [pytest.mark.torch, pytest.mark.slow]

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]
FILES = "MODEL:transformer/diffusion_pytorch_model*.safetensors,MODEL:text_encoder/model*.safetensors,MODEL:vae/diffusion_pytorch_model.safetensors"
TARGETS = "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1"


@pytest.fixture
def launch(data):
    """Starts a command in the data folder as the studio does; what is left of it is ended."""
    children: list[psutil.Popen] = []

    def start(argv: list[str]) -> psutil.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        if (
            "backend.training" in argv or "tests.training.several" in argv
        ):  # by name; a script finds its project by itself
            environment["PYTHONPATH"] = str(PROJECT)
        log = (data.root / f"log-{len(children)}.txt").open("wb")
        children.append(psutil.Popen(argv, cwd=data.root, env=environment, stdout=log, stderr=subprocess.STDOUT))
        return children[-1]

    yield start
    for child in children:
        for process in [*(child.children(recursive=True) if child.is_running() else []), child]:
            if process.is_running():
                process.kill()
        child.wait(10)


def log(data, number: int = 0) -> str:
    return (data.root / f"log-{number}.txt").read_text(errors="replace")


def steps(folder: Path) -> list[int]:
    try:
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    said = [json.loads(line) for line in lines if line.endswith("}")]
    return [event["step"] for event in said if event["event"] == "step"]


def wait_for_step(folder: Path, step: int, child: psutil.Popen, *, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while step not in steps(folder):
        assert child.poll() is None or step in steps(folder), "the run ended before that step"
        assert time.monotonic() < end, f"step {step} was not reached in {seconds} s"
        time.sleep(0.05)


def documented(dataset: Path, model: str = "loft/starter", epochs: int = 5) -> list[str]:
    """The LoRA command of the documents; a metadata file beside the pictures, as there."""
    return [
        "--dataset_base_path",
        str(dataset),
        "--dataset_metadata_path",
        str(dataset / "metadata.csv"),
        "--max_pixels",
        "16384",
        "--dataset_repeat",
        "2",
        "--model_id_with_origin_paths",
        FILES.replace("MODEL", model),
        "--learning_rate",
        "1e-4",
        "--num_epochs",
        str(epochs),
        "--remove_prefix_in_ckpt",
        "pipe.dit.",
        "--output_path",
        "./models/train/my_lora",
        "--lora_base_model",
        "dit",
        "--lora_target_modules",
        TARGETS,
        "--lora_rank",
        "32",
        "--use_gradient_checkpointing",
        "--dataset_num_workers",
        "2",
        "--find_unused_parameters",
    ]


@pytest.fixture
def table(tmp_path: Path, pictures: Path) -> Path:
    folder = tmp_path / "set"
    shutil.copytree(pictures, folder, ignore=shutil.ignore_patterns("*.txt", "3.*", "4.*"))
    (folder / "metadata.csv").write_text('image,prompt\n0.png,a ball\n1.png,"a ball, small"\n2.png,a big ball\n')
    return folder


def test_the_documented_command_killed_and_gone_on_with_by_the_script_is_the_uninterrupted(
    launch, data, table: Path, tiny_qwen: Path, run_training, monkeypatch
):
    """First as a module with a data folder, then as a script by its path, which works on the folder that it is started in."""
    from backend.catalog.models.identify import identify_model
    from backend.engine.loading.load import load_part
    from backend.engine.lora import adapters
    from backend.families import FAMILIES

    epochs = 15
    shutil.copytree(tiny_qwen, data.models / "Qwen" / "Qwen-Image")
    out = data.root / "models" / "train" / "my_lora"
    flags = [*documented(table, "Qwen/Qwen-Image", epochs), "--save_dtype", "float32"]
    child = launch([*LAUNCH, "-m", "backend.training", *flags])
    wait_for_step(out, 8, child)  # one epoch of six steps is saved
    for process in [*child.children(recursive=True), child]:
        process.send_signal(signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
    child.wait(20)
    assert 0 < len(list(out.glob("epoch-*"))) < epochs and load_file(out / "epoch-0.safetensors")
    shutil.rmtree(data.root / "cache")
    with monkeypatch.context() as patch:
        patch.delenv("LOFT_DATA")
        child = launch([*LAUNCH, str(PROJECT / "train.py"), *flags, "--resume_from_checkpoint", "latest"])
    assert child.wait(600) == 0, log(data, 1)
    assert (data.root / "cache" / "encodings").is_dir()
    assert steps(out)[-1] == 6 * epochs and {path.name for path in out.glob("epoch-*")} == {
        f"epoch-{n}.safetensors" for n in range(epochs)
    }
    whole = data.root / "models" / "train" / "whole"
    assert run_training.as_typed([*flags, "--output_path", str(whole)]) == 0
    last = f"epoch-{epochs - 1}.safetensors"
    one, two = load_file(out / last), load_file(whole / last)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    dit = load_part(identify_model(tiny_qwen, FAMILIES).parts["dit"], dtype=torch.float32)
    receipt = adapters.load(dit, out / last)  # as the pipeline takes it
    assert receipt.layers_applied == receipt.layers_found > 0 and not receipt.unused


WHOLE = ("--trainable_models", "dit,text_encoder", "--customized_optimizer", "muon")
SPREAD = (
    "--trainable_models",
    "dit",
    "--use_gradient_checkpointing",
    "--ema_decay",
    "0.9",
    "--gradient_accumulation_steps",
    "2",
)
LAST = Path("checkpoints/step-000004/weights.safetensors")
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"}


def test_two_processes_train_as_one_with_twice_the_turns(
    launch, data, tiny_qwen: Path, tiny_edit: Path, pictures: Path, pairs: Path, run_training, tmp_path
):
    """Whole weights, a LoRA beside offloaded ones, one of a model that edits, weights spread by FSDP; a save that does not end holds them up, and the first cause of a
    failure is said once."""
    shared = [
        "--model",
        str(tiny_qwen),
        "--dataset_base_path",
        str(pictures),
        "--max_pixels",
        "4096",
        "--max_steps",
        "4",
        "--lora_rank",
        "4",
        "--mixed_precision",
        "no",
        "--learning_rate",
        "1e-3",
        "--save_dtype",
        "float32",
    ]
    editing = [
        "--model",
        str(tiny_edit),
        "--dataset_base_path",
        str(pairs),
        "--dataset_metadata_path",
        str(pairs / "m.json"),
        "--max_steps",
        "2",
    ]
    runs = {
        "whole": {"flags": WHOLE},
        "offloaded": {"flags": ["--enable_model_cpu_offload"]},
        "editing": {"flags": editing},
        "spread": {"flags": (*SPREAD, "--save_steps", "2", *Held.flags), "environment": FSDP},
        "resumed": {
            "flags": (*SPREAD, "--resume_from_checkpoint", str(data.root / "spread/checkpoints/step-000002")),
            "environment": FSDP,
        },
        "dropping": {"flags": ["--lora_dropout", "0.3", "--save_steps", "2", *Held.flags]},
        "dropped": {
            "flags": [
                "--lora_dropout",
                "0.3",
                "--resume_from_checkpoint",
                str(data.root / "dropping/checkpoints/step-000002"),
            ]
        },
        "failing": {"flags": ["--dataset_base_path", str(tmp_path)]},
    }
    for name, run in runs.items():
        run["flags"] = [*shared, *run["flags"], "--output_path", str(data.root / name)]
    (data.root / "runs.json").write_text(json.dumps(list(runs.values())))
    several = [
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    held = {name: Held(data.root / name) for name in ("spread", "dropping")}
    child = launch([*LAUNCH, *several, "-m", "tests.training.several", str(data.root / "runs.json")])
    for name, saving in held.items():
        with saving:  # the first save does not come to its end: a kill now would lose what was made since the start
            time.sleep(0.5)
            assert steps(data.root / name) == [1, 2], name
    assert child.wait(600) != 0
    said = [json.loads(line) for line in (data.root / "failing" / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in said if event["event"] == "trouble"] == ["empty_dataset"], log(data)

    for name, flags, turns in (("whole", WHOLE, 2), ("offloaded", (), 2), ("spread", SPREAD, 4)):
        one, two = data.root / f"one-{name}", data.root / name
        assert (
            run_training.as_typed(
                [*shared, *flags, "--gradient_accumulation_steps", str(turns), "--output_path", str(one)]
            )
            == 0
        )
        assert losses(two) == pytest.approx(losses(one), rel=1e-4), name
        results = [load_file(max(run.glob("*.safetensors"))) for run in (two, one)]
        assert shapes(results[0]) == shapes(results[1]), name
        first, second = (load_file(run / LAST) for run in (two, one))
        assert all(torch.allclose(first[key], second[key], rtol=1e-3, atol=1e-5) for key in first), name
    assert (
        run_training.as_typed(
            [*shared, *editing, "--gradient_accumulation_steps", "2", "--output_path", str(data.root / "one-editing")]
        )
        == 0
    )
    assert losses(data.root / "editing") == pytest.approx(losses(data.root / "one-editing"), rel=1e-4)
    for pair in (
        ("spread", "resumed"),
        ("dropping", "dropped"),
    ):  # gone on with, every process with its own random state
        whole, resumed = (load_file(data.root / run / LAST) for run in pair)
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), pair


def shapes(tensors: dict) -> dict:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def losses(run: Path) -> list[float]:
    said = [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event["loss"] for event in said if event["event"] == "step"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM to catch")
def test_a_polite_end_saves_first(launch, data, tiny_qwen: Path, pictures: Path):
    out = data.root / "run"
    child = launch(
        [
            sys.executable,
            "-m",
            "backend.training",
            "--model",
            str(tiny_qwen),
            "--dataset_base_path",
            str(pictures),
            "--max_pixels",
            "4096",
            "--max_steps",
            "100000",
            "--save_steps",
            "100000",
            "--output_path",
            str(out),
        ]
    )
    wait_for_step(out, 2, child)
    child.terminate()
    assert child.wait(120) == 0, log(data)
    last = json.loads((out / "events.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["reason"]) == ("finished", "stopped")
    assert (out / f"step-{last['step']}.safetensors").is_file()
    record = json.loads((out / "process.json").read_text())
    assert record["pid"] == child.pid


def test_what_is_wrong_is_said_before_torch_is_loaded(launch, data):
    began = time.monotonic()
    child = launch([sys.executable, "-X", "importtime", "-m", "backend.training", "--nonsense", "1"])
    assert child.wait(60) == 2
    assert "--nonsense" in log(data) and "| torch\n" not in log(data)
    assert time.monotonic() - began < 60


def test_a_folder_that_cannot_be_had_is_said_and_left_alone(tmp_path, capsys):
    busy = tmp_path / "busy"
    busy.mkdir()
    with psutil.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE
    ) as other:  # stands for a run that is at work there
        record = json.dumps({"pid": other.pid, "created": other.create_time()})
        (busy / "process.json").write_text(record, encoding="utf-8")
        assert main(["--dataset_base_path", "x", "--output_path", str(busy)]) == 2
        other.communicate(b"\n")
    said = capsys.readouterr().err
    assert f"process {other.pid}" in said and "--output_path" in said
    assert [path.name for path in busy.iterdir()] == ["process.json"]
    (tmp_path / "file").touch()
    assert main(["--dataset_base_path", "x", "--output_path", str(tmp_path / "file" / "run")]) == 2
    said = capsys.readouterr().err
    assert "cannot be written" in said and "Traceback" not in said


def test_a_stage_of_zero_by_the_launcher_that_needs_no_package(launch, data, tiny_qwen: Path, pictures: Path):
    presets = PROJECT / "assets" / "presets" / "accelerate"
    flags = [
        "--model",
        str(tiny_qwen),
        "--dataset_base_path",
        str(pictures),
        "--max_pixels",
        "4096",
        "--max_steps",
        "2",
    ]
    flags += ["--trainable_models", "dit", "--mixed_precision", "no", "--output_path", str(data.root / "out")]
    argv = [sys.executable, "-m", "backend.training.launch", "--config_file", str(presets / "zero2.yaml")]
    child = launch([*argv, "--num_processes", "2", "--main_process_port", "0", "-m", "backend.training", *flags])
    assert child.wait(240) == 0, log(data)
    events = [json.loads(line) for line in (data.root / "out" / "events.jsonl").read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["reason"]) == ("finished", "complete")
    assert any("ZeRO stage 2 is carried out by torch's FSDP2" in event.get("message", "") for event in events)
    saved = load_file(data.root / "out" / "step-2.safetensors")
    assert saved["transformer_blocks.0.attn.to_q.weight"].shape == (48, 48)
