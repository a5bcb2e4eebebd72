"""The shell scripts of DiffSynth-Studio's documents for Qwen-Image, as they are typed but for the script's path.

They run here on a working folder with a tiny Qwen-Image under `models/Qwen/Qwen-Image`. What trains is asked to stop after its second step.
"""

from __future__ import annotations

import json
import shlex
import shutil
import threading
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open
from safetensors.torch import load_file

from tests.tiny_models import make_qwen_edit

pytestmark = pytest.mark.torch

DIT = "Qwen/Qwen-Image:transformer/diffusion_pytorch_model*.safetensors"
TEXT, VAE = "Qwen/Qwen-Image:text_encoder/model*.safetensors", "Qwen/Qwen-Image:vae/diffusion_pytorch_model.safetensors"
DATA = """--dataset_base_path data/example_image_dataset --dataset_metadata_path data/example_image_dataset/metadata.csv
  --max_pixels 1048576 --dataset_repeat 50"""
LORA = """--learning_rate 1e-4 --num_epochs 5 --remove_prefix_in_ckpt "pipe.dit." --lora_base_model "dit"
  --lora_target_modules "to_q,to_k,to_v,add_q_proj,add_k_proj,add_v_proj,to_out.0,to_add_out,img_mlp.net.2,img_mod.1,txt_mlp.net.2,txt_mod.1"
  --lora_rank 32 --use_gradient_checkpointing --dataset_num_workers 8 --find_unused_parameters"""
ALL = f'--model_id_with_origin_paths "{DIT},{TEXT},{VAE}"'
ONE_STAGE = {
    "lora": f'{DATA} {ALL} {LORA} --output_path "./models/train/out"',
    "full": f"""{DATA} {ALL} --learning_rate 1e-5 --num_epochs 2 --remove_prefix_in_ckpt "pipe.dit." --output_path "./models/train/out"
        --trainable_models "dit" --use_gradient_checkpointing --find_unused_parameters""",
    "fp8": f'{DATA} {ALL} --fp8_models "{DIT},{TEXT},{VAE}" {LORA} --output_path "./models/train/out"',
    "quantized": f"""{DATA} {ALL} --quant_options "{DIT}:METHOD/img_mod.1,txt_mod.1,norm_out.linear,img_in,txt_in,proj_out,timestep_embedder.linear_1,timestep_embedder.linear_2"
        {LORA} --output_path "./models/train/out" """,
    "checkpoints in RAM": f'{DATA} {ALL} {LORA} --use_gradient_checkpointing_offload --output_path "./models/train/out"',
    "CPU offload": f"""{DATA} {ALL} {LORA} --output_path "./models/train/out" --enable_model_cpu_offload
        --enable_optimizer_cpu_offload --cpu_offload_split_threshold 1 --initialize_model_on_cpu""",
}  # fmt: skip


@pytest.fixture
def folder(data, pictures: Path, tiny_qwen: Path, monkeypatch) -> Path:
    """The working folder of the documents: a model and an example dataset, of one picture."""
    shutil.copytree(tiny_qwen, data.models / "Qwen" / "Qwen-Image")
    example = data.root / "data" / "example_image_dataset"
    example.mkdir(parents=True)
    shutil.copy(pictures / "0.png", example / "0.png")
    (example / "metadata.csv").write_text("image,prompt\n0.png,a ball\n")
    monkeypatch.chdir(data.root)
    return data.root


@pytest.fixture
def typed(folder: Path, run_training):
    """`typed(command)`: runs it as typed; what trains is asked to stop after two steps. Answers the output folder."""

    def run(command: str) -> Path:
        argv = shlex.split(command)
        out = Path(argv[argv.index("--output_path") + 1])
        shutil.rmtree(out, ignore_errors=True)
        stopper = threading.Thread(target=_stop_after, args=(out, 2), daemon=True)
        stopper.start()
        assert run_training.as_typed(argv) == 0
        return out

    return run


def _stop_after(out: Path, step: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        said = _events(out)
        if any(event["event"] == "step" and event["step"] >= step for event in said):
            (out / "stop").touch()
        if said and said[-1]["event"] in ("finished", "trouble"):
            return
        time.sleep(0.02)


def _events(out: Path) -> list[dict]:
    try:
        lines = (out / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]  # the last may be half written


def result(out: Path) -> Path:
    """The one result of a stopped run."""
    said = _events(out)
    assert (said[-1]["event"], said[-1]["reason"]) == ("finished", "stopped")
    return out / f"step-{said[-1]['step']}.safetensors"


@pytest.mark.parametrize("name", ONE_STAGE)
def test_a_script_of_one_stage(typed, name: str):
    out = typed(ONE_STAGE[name].replace("METHOD", "int8"))
    started = next(event for event in _events(out) if event["event"] == "started")
    assert started["total_steps"] == (100 if name == "full" else 250)
    with safe_open(result(out), "pt") as file:
        names = set(file.keys())
    if name == "full":
        assert "transformer_blocks.0.attn.to_q.weight" in names and not any("lora" in key for key in names)
    else:
        assert "transformer_blocks.1.txt_mod.1.lora_B.weight" in names and len(names) == 2 * 2 * 12


def test_the_script_of_a_quantized_base_as_typed(typed):
    pytest.importorskip("bitsandbytes")
    assert load_file(result(typed(ONE_STAGE["quantized"].replace("METHOD", "bitsandbytes_nf4"))))


@pytest.mark.parametrize("fp8", [False, True], ids=["split", "split, little memory"])
def test_the_scripts_of_two_stages(typed, fp8: bool):
    offload = " --use_gradient_checkpointing_offload" if fp8 else ""
    first = typed(f"""{DATA.replace(" 50", " 1")} --model_id_with_origin_paths "{TEXT},{VAE}" {LORA}{offload}
        --output_path "./models/train/cache" --task "sft:data_process" {f'--fp8_models "{TEXT},{VAE}"' if fp8 else ""}""")
    shutil.rmtree("data")  # what the second stage does not need
    out = typed(f"""--dataset_base_path "./models/train/cache" --max_pixels 1048576 --dataset_repeat 50
        --model_id_with_origin_paths "{DIT}" {f'--fp8_models "{DIT}"' if fp8 else ""} {LORA}{offload}
        --output_path "./models/train/out" --task "sft:train" """)
    assert first == Path("models/train/cache") and load_file(result(out))


def test_the_script_of_a_differential_lora(typed):
    first = typed(ONE_STAGE["lora"].replace("train/out", "train/first"))
    shutil.move(result(first), first / "epoch-4.safetensors")
    for method in ("", f'--quant_options "{DIT}:int8"'):
        command = f"""{ONE_STAGE["lora"]} {method} --preset_lora_path "./models/train/first/epoch-4.safetensors" --preset_lora_model "dit" """
        assert load_file(result(typed(command)))


def test_the_script_of_a_direct_distillation(typed, folder: Path):
    table = folder / "data" / "example_image_dataset" / "metadata_distill_qwen.csv"
    table.write_text("image,prompt,seed,rand_device,num_inference_steps,cfg_scale\n0.png,a ball,0,cpu,4,1\n")
    out = typed(f"""{DATA.replace("metadata.csv", table.name).replace("--max_pixels 1048576", "--height 64 --width 64")} {ALL} {LORA}
        --data_file_keys "image" --extra_inputs "seed,rand_device,num_inference_steps,cfg_scale" --output_path "./models/train/out"
        --task direct_distill""")
    assert load_file(result(out))


@pytest.mark.parametrize("name", ["Qwen-Image-Edit", "Qwen-Image-Edit-2511"])
def test_the_scripts_of_models_that_edit(typed, folder: Path, name: str):
    """The transformer alone is of the model that edits; its processor is found where the documents' default is, as it comes from there."""
    example, models = folder / "data" / "example_image_dataset", folder / "models" / "Qwen"
    processor, old = models / "Qwen-Image-Edit", {"image": "0.png", "prompt": "turn it", "edit_image": "edit/old.png"}
    made = make_qwen_edit(folder / "made", "edit-2511" if name.endswith("2511") else "edit")
    shutil.copytree(made / "processor", processor / "processor")
    shutil.copy(made / "model_index.json", processor)  # says how small tiny models want pictures
    shutil.copytree(made / "transformer", models / name / "transformer")
    (example / "edit").mkdir()
    shutil.copy(example / "0.png", example / "edit" / "old.png")
    (example / "metadata_edit.csv").write_text(",".join(old) + "\n" + ",".join(old.values()) + "\n")
    table = "metadata_edit.csv"
    if name.endswith("2511"):
        table = "metadata_qwen_imgae_edit_multi.json"
        (example / table).write_text(json.dumps([{**old, "edit_image": ["edit/old.png", "0.png"]}]))
    what = (
        LORA
        if name.endswith("2511")
        else """--learning_rate 1e-5 --num_epochs 2 --remove_prefix_in_ckpt "pipe.dit." --trainable_models "dit"
        --use_gradient_checkpointing --find_unused_parameters"""
    )
    data = DATA.replace("metadata.csv", table)
    out = typed(f"""{data} --data_file_keys "image,edit_image" --extra_inputs "edit_image" --model_id_with_origin_paths "{DIT.replace("Qwen-Image", name)},{TEXT},{VAE}"
        {what} --output_path "./models/train/out" {"--zero_cond_t" if name.endswith("2511") else ""}""")
    started = next(event for event in _events(out) if event["event"] == "started")
    assert started["model"] == name and load_file(result(out))


@pytest.mark.parametrize("prefix", ["pipe.dit.", "pipe.", "", "nonsense."])
def test_the_prefix_is_cut_from_the_names_of_a_lora_too(run_training, tmp_path: Path, prefix: str):
    """DiffSynth's names in full are `pipe.dit.MODULE…`; each file is read again, whatever was cut."""
    from backend.catalog.models.identify import identify_lora
    from backend.families import FAMILIES

    assert run_training(tmp_path / "run", "--max_steps", 1, "--remove_prefix_in_ckpt", prefix) == 0
    file = tmp_path / "run" / "step-1.safetensors"
    with safe_open(file, "pt") as stored:
        names = list(stored.keys())
    whole = "pipe.dit.transformer_blocks.0.attn.to_q.lora_A.weight"
    assert whole.removeprefix(prefix) in names and all(
        name == f"pipe.dit.{name}".removeprefix(prefix) or prefix != "pipe.dit." for name in names
    )
    assert identify_lora(file, FAMILIES).family == "qwen_image"
    assert run_training(tmp_path / "again", "--max_steps", 1, "--lora_checkpoint", file) == 0
    assert run_training(tmp_path / "over", "--max_steps", 1, "--preset_lora_path", file) == 0


def test_a_local_path_stands_among_ids(typed, folder: Path):
    """`--model_id_with_origin_paths` takes files that are there, as entries of `--fp8_models` too."""
    mine = folder / "mine.safetensors"
    shutil.copy(next((folder / "models/Qwen/Qwen-Image/transformer").glob("*.safetensors")), mine)
    shutil.copy(folder / "models/Qwen/Qwen-Image/transformer/config.json", folder / "config.json")
    command = ONE_STAGE["fp8"].replace(DIT, "mine.safetensors")
    assert load_file(result(typed(command)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--template_model_id_or_path", "x"], "Template models"),
        (["--enable_lora_hot_loading"], "always acts beside the weights"),
        (["--dmd2_student_update_freq", "5"], "Distillation by DMD2"),
        (["--task", "train_dpo"], "train_dpo"),
        (["--extra_inputs", "controlnet_image"], "controlnet_image"),
        (["--extra_inputs", "layer_input_image"], "layer_input_image"),
        (["--extra_inputs", "eligen_entity_masks"], "eligen_entity_masks"),
        (["--quant_options", "dit:comfy_kitchen_int4_w4a4"], "no quantization method 'comfy_kitchen_int4_w4a4'"),
    ],
)
def test_what_is_not_trained_here_is_one_sentence(
    run_training, data, tmp_path: Path, capsys, flags: list[str], words: str
):
    import os

    (tmp_path / "set").mkdir()
    from PIL import Image

    Image.new("RGB", (16, 16)).save(tmp_path / "set" / "a.png")
    keys = "".join(f",{name}" for name in flags[1:] if flags[0] == "--extra_inputs")
    (tmp_path / "set" / "m.csv").write_text(f"image,prompt{keys}\na.png,a ball{',a.png' if keys else ''}\n")
    table = ("--dataset_metadata_path", tmp_path / "set" / "m.csv")
    assert run_training(tmp_path / "run", *table, *flags, dataset=tmp_path / "set") == 2
    said = capsys.readouterr().err.strip()
    assert words in said and "Traceback" not in said and os.linesep * 2 not in said
    assert not list(data.cache.rglob("*.safetensors"))
