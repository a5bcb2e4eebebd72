"""A training step of Loft, of DiffSynth-Studio's own trainer and of a loop by hand: `python benchmarks/training.py
peers --peers PEERS`.

DiffSynth writes the widths of its networks into their classes, so all three get a Qwen-Image of the true widths, random
weights in bf16, and few layers: 2 of 60 blocks of the transformer, 1 of 28 layers of the text encoder (without its
picture half and its head, the starter's tokenizer and as many words), the whole autoencoder. A LoRA of rank 32 on the
layers that DiffSynth's own example names, 256 x 256, batch 1.

Every figure is of a process of its own, one thread, the three taking turns; a step is what a process computes from the
end of one step to the end of the next, its median over all rounds.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parent
STARTER = PROJECT / "assets" / "starter"
SET = PROJECT / "assets" / "datasets" / "character"
TARGETS = (
    "to_q",
    "to_k",
    "to_v",
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_out.0",
    "to_add_out",
    "img_mlp.net.2",
    "img_mod.1",
    "txt_mlp.net.2",
    "txt_mod.1",
)
RANK, SIDE, PICTURES = 32, 256, 4
BLOCKS, LAYERS = 2, 1  # of 60 and 28
MIB = 2**20


def peers(folder: str | None = None, *, rounds: int = 3, steps: int = 5) -> None:
    """Steps with and without checkpointing, cached and as each trains by default, and the peak of each process.
    `folder`: where diffsynth is."""
    with tempfile.TemporaryDirectory() as place:
        made = Path(place)
        make_model(made / "model")
        make_set(made / "set")
        found: dict[str, list[dict]] = {}
        for _ in range(rounds):
            for name, argv in _programs(made, folder, steps):
                found.setdefault(name, []).append(_whole(argv, made))
                print(f"{name}: {_line(found[name][-1:])}  [load {os.getloadavg()[0]:.1f}]", flush=True)
        print("\n| | CPU s/step | peak RSS, MiB |\n|---|---|---|")
        for name, each in found.items():
            print(f"| {name} | {_line(each)} |", flush=True)
        for word in ("without", "with") if folder else ():
            cached, encoded = found[f"diffsynth sft:train, {word}"], found[f"diffsynth sft, {word}"]
            print(
                f"of the whole model, {word} checkpointing: sft / sft:train would be {_of_whole(cached, encoded):.2f}"
            )


def _of_whole(cached: list[dict], encoded: list[dict]) -> float:
    """How much longer a step is that encodes, with 60 blocks and 28 layers in the place of those measured."""
    text, picture = (statistics.median(one[key] for one in encoded) for key in ("text", "picture"))
    step = statistics.median(seconds for one in cached for seconds in one["steps"])
    return 1 + (28 / LAYERS * text + picture) / (60 / BLOCKS * step)


def _programs(made: Path, folder: str | None, steps: int) -> Iterator[tuple[str, list[str]]]:
    """Name and command of every program of a round."""
    model, data, count = str(made / "model"), str(made / "set"), str(steps + 1)
    for word, name in (("plain", "without"), ("checkpointed", "with")):
        fresh = str(made / f"loft-{word}")
        shutil.rmtree(fresh, ignore_errors=True)
        yield f"Loft, {name} checkpointing", [sys.executable, __file__, "loft", model, data, count, word, fresh]
        yield f"by hand, {name}", [sys.executable, str(HERE / "training_by_hand.py"), data, count, "1", model, word]
        if folder:
            theirs = [sys.executable, str(HERE / "training_by_diffsynth.py"), folder, model, data, count, word]
            cache = made / "cached"
            if not cache.exists():
                yield "diffsynth, sft:data_process", [*theirs, "sft:data_process", str(cache)]
            yield f"diffsynth sft:train, {name}", [*theirs, "sft:train", str(cache)]
            yield f"diffsynth sft, {name}", [*theirs, "sft", str(made / "sft")]


def _whole(argv: list[str], data: Path) -> dict:
    """What a program printed last (`steps`: CPU seconds of each; more by name), and its peak RSS in bytes."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{PROJECT}{os.pathsep}{HERE}",
        "LOFT_DATA": str(data),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as wrong:
        child = subprocess.Popen(argv, env=environment, stdout=said, stderr=wrong)
        _, status, usage = os.wait4(child.pid, 0)
        said.seek(0)
        wrong.seek(0)
        if status:
            raise SystemExit(f"{argv} failed:\n{wrong.read()[-3000:]}")
        return json.loads(said.read().strip().splitlines()[-1]) | {"rss": usage.ru_maxrss * 1024}


def _line(each: list[dict]) -> str:
    steps = [seconds for one in each for seconds in one["steps"]]
    more = {key: statistics.median(one[key] for one in each) for key in each[0] if key not in ("steps", "rss")}
    words = "".join(f", {key} {value:.2f}" for key, value in more.items())
    seconds = f"{statistics.median(steps):.2f}" if steps else "-"
    return f"{seconds}{words} | {statistics.median(one['rss'] for one in each) / MIB:.0f}"


class Ends:
    """Notes how much CPU time has passed at the end of each step; the first does not count."""

    def __init__(self):
        self.at: list[float] = []

    def __call__(self) -> None:
        self.at.append(time.process_time())

    @property
    def steps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.at, self.at[1:], strict=False)]


def run_loft(model: Path, data: Path, steps: int, word: str, output: Path) -> None:
    """Loft's own command, whole; its steps are noted as they end."""
    from backend.training import loop
    from backend.training.__main__ import main

    ends = Ends()
    loop.train_step = _noted(loop.train_step, ends)
    flags = ["--use_gradient_checkpointing"] if word == "checkpointed" else []
    status = main(
        [
            "--model",
            str(model),
            "--dataset_base_path",
            str(data),
            "--dataset_metadata_path",
            str(data / "metadata.csv"),
            "--height",
            str(SIDE),
            "--width",
            str(SIDE),
            "--dataset_repeat",
            "100",
            "--max_steps",
            str(steps),
            "--output_path",
            str(output),
            "--lora_base_model",
            "dit",
            "--lora_target_modules",
            ",".join(TARGETS),
            "--lora_rank",
            str(RANK),
            *flags,
        ]
    )
    if status:
        raise SystemExit(status)
    print(json.dumps({"steps": ends.steps}))


def _noted(work: Callable, ends: Ends) -> Callable:
    def noted(*arguments):
        found = work(*arguments)
        ends()
        return found

    return noted


def make_set(folder: Path) -> None:
    """A few pictures with a table of their captions."""
    folder.mkdir()
    lines = ["image,prompt"]
    for picture in sorted(SET.glob("*.png"))[:PICTURES]:
        shutil.copyfile(picture, folder / picture.name)
        caption = picture.with_suffix(".txt").read_text(encoding="utf-8").strip().replace('"', '""')
        lines.append(f'{picture.name},"{caption}"')
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def make_model(folder: Path, *, blocks: int = BLOCKS, layers: int = LAYERS) -> None:
    """A folder in the layout of Qwen/Qwen-Image."""
    import torch
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    shutil.copytree(STARTER, folder, ignore=shutil.ignore_patterns("transformer", "text_encoder", "vae"))
    said = json.loads((STARTER / "text_encoder" / "config.json").read_text(encoding="utf-8"))
    words = said["text_config"]["vocab_size"]
    said["text_config"] |= {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": layers,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "layer_types": ["full_attention"] * layers,
        "rms_norm_eps": 1e-6,
        "vocab_size": words,
        "rope_parameters": {"mrope_section": [16, 24, 24], "rope_theta": 1000000.0, "rope_type": "default"},
    }
    with torch.device("meta"):
        networks = {
            "transformer": QwenImageTransformer2DModel(num_layers=blocks),
            "text_encoder": Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**said["text_config"])),
            "vae": AutoencoderKLQwenImage(),
        }
    for name, network in networks.items():
        (folder / name).mkdir()
        prefix = "model." if name == "text_encoder" else ""
        file = "model.safetensors" if name == "text_encoder" else "diffusion_pytorch_model.safetensors"
        _write(folder / name / file, network, prefix)
        config = said if name == "text_encoder" else {"_class_name": type(network).__name__, **dict(network.config)}
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _write(path: Path, network, prefix: str) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    weights = {}
    for key, value in network.state_dict().items():
        weight = torch.empty(value.shape, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)
        weights[prefix + key] = weight.add_(1) if "norm" in key and weight.ndim == 1 else weight
    save_file(weights, path)


if __name__ == "__main__":
    assert sys.argv[1] == "loft"
    run_loft(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5], Path(sys.argv[6]))
