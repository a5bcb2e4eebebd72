"""Qwen-Image at its true size from disk on a CPU, predicted and measured: `python benchmarks/true_size.py [--layers 60]
[--draw] [--train]`.

The model's files are written first: headers of the true names and shapes, and holes for the numbers (all zeros, which
memory does not depend on), so that they take some megabytes of disk where the file system has sparse files, and 54 GB
where not (`--folder`: where). Weights are fetched block by block. With all 60 layers a step or a drawn picture takes an
hour or more of two cores, and some GiB of RAM; `--layers 4 --text_layers 2` has the same widths and takes some minutes.
Prints predicted and measured live bytes of each phase: of a picture of 256 x 256 in two steps, and of a LoRA of rank
16.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import struct
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backend.schema.paths import ASSETS

MIB = 2**20
FILES = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}


def write_model(folder: Path, *, layers: int, text_layers: int) -> Path:
    """A folder as diffusers saves Qwen-Image, of the true widths and `layers` and `text_layers` blocks, whose weights
    are holes."""
    import torch
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    parts = json.loads((ASSETS / "memory" / "published.json").read_text())["families"]["qwen_image"]["variants"][
        "qwen-image"
    ]["parts"]
    text = {**parts["text_encoder"]["config"], "num_hidden_layers": text_layers}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": text["hidden_size"],
        "patch_size": 14,
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        modules = {
            "transformer": QwenImageTransformer2DModel(**{**parts["dit"]["config"], "num_layers": layers}),
            "vae": AutoencoderKLQwenImage(),
            "text_encoder": Qwen2_5_VLForConditionalGeneration(config),
        }
    for name, module in modules.items():
        (folder / name).mkdir(parents=True)
        shapes = {key: list(value.shape) for key, value in module.state_dict().items()}
        _write_holes(folder / name / FILES[name], shapes)
        said = config.to_dict() if name == "text_encoder" else dict(module.config)
        kept = {key: value for key, value in said.items() if not key.startswith("_") or key == "_class_name"}
        (folder / name / "config.json").write_text(json.dumps(kept, default=str))
    for name in ("tokenizer", "scheduler"):
        shutil.copytree(ASSETS / "starter" / name, folder / name)
    index = json.loads((ASSETS / "starter" / "model_index.json").read_text())
    (folder / "model_index.json").write_text(
        json.dumps({key: value for key, value in index.items() if key != "_sizes"})
    )
    return folder


def _write_holes(file: Path, shapes: dict[str, list[int]]) -> None:
    """A safetensors file of bfloat16 zeros: its header, and a hole as long as the numbers."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, count = end, 1
        for side in shape:
            count *= side
        end += 2 * count
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


def draw(spec, data: Path) -> tuple[dict, dict]:
    """(predicted, measured) of a picture; weights stay in their files until they are needed."""
    import torch

    from backend.engine.devices import device_memory
    from backend.engine.pipeline.pipeline import Pipeline
    from backend.engine.tracing import live_tensors
    from backend.engine.worker.loaded_plan import Placing
    from backend.planner import predict_peak
    from backend.planner.costs.model_sizes import sizes_of
    from backend.planner.plan import fixed_of, plan, work_of
    from backend.schema.request import GenerationRequest

    card, request = (
        device_memory.probe(torch.device("cpu")),
        GenerationRequest(prompt="a red apple", width=256, height=256, num_inference_steps=2, guidance=1.0),
    )
    card = card.__class__(
        **{
            **card.__dict__,
            "total_bytes": 4 * 2**30,
            "free_bytes": 4 * 2**30,
            "used_by_others_bytes": 0,
            "reserve_bytes": 0,
        }
    )
    sizes = sizes_of(spec, folder=data / "user" / "memory")
    found = plan(sizes, card, request)
    print(f"plan: {found.verdict}, {[step.rung for step in found.steps]}", file=sys.stderr)
    predicted = predict_peak.live_bytes(found, sizes, work_of(request, sizes, card)[0], fixed_of(card))
    placing = Placing.of(found, request)
    pipeline = Pipeline(
        spec, dtype=torch.bfloat16, device="cpu", configs=placing.configs, vram_limit_bytes=placing.vram_limit_bytes,
        resident_blocks=placing.resident_blocks, tiled_vae=placing.tiled_vae, halves_apart=placing.halves_apart,
    )  # fmt: skip
    with live_tensors.measuring(pipeline) as peak:
        pipeline.generate(request)
    return predicted, dict(peak.by_phase)


def train(spec, model: Path, data: Path, flags: list[str]) -> tuple[dict, dict]:
    """(predicted, measured) of two steps of a LoRA of rank 16, all frozen weights from their files."""
    import torch
    from PIL import Image

    from backend.dataset.look_ahead import look_ahead
    from backend.engine.devices import device_memory
    from backend.families import by_name
    from backend.planner.costs import required_traces
    from backend.planner.costs.model_sizes import sizes_of
    from backend.planner.costs.phase_costs import point_of
    from backend.planner.plan import work_of
    from backend.schema.settings import from_flags
    from backend.schema.training.config import TrainingConfig
    from backend.training.__main__ import main
    from benchmarks.foresight import traced

    (data / "pictures").mkdir()
    Image.new("RGB", (256, 256), (180, 90, 40)).save(data / "pictures" / "1.png")
    (data / "pictures" / "1.txt").write_text("a red apple on a table")
    said = [
        "--model", str(model), "--dataset_base_path", str(data / "pictures"), "--output_path", str(data / "run"), "--lora_rank", "16", "--max_steps", "3",
        "--height", "256", "--width", "256", "--use_gradient_checkpointing", "--offload_models", "dit,text_encoder", "--dataset_repeat", "3", *flags,
    ]  # fmt: skip
    config, sizes, card = (
        from_flags(TrainingConfig, said),
        sizes_of(spec, folder=data / "user" / "memory"),
        device_memory.probe(torch.device("cpu")),
    )
    known = look_ahead(config, sizes, by_name(spec.family)).known
    work, own = work_of(config, sizes, card, known)
    traced(
        spec, required_traces.missing(sizes, work, own, point_of(sizes, work), on_cpu=True), data / "user" / "memory"
    )  # as the page asks for it
    with contextlib.redirect_stdout(sys.stderr):
        assert main(said) == 0
    events = [json.loads(line) for line in (data / "run" / "events.jsonl").read_text().splitlines()]
    phases = [event["phases"] for event in events if event["event"] == "memory" and "phases" in event][-1]
    return {name: pair[0] for name, pair in phases.items()}, {name: pair[1] for name, pair in phases.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--text_layers", type=int, default=28)
    parser.add_argument("--folder", help="where the files are written [default: a temporary folder]")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--train", action="store_true")
    said, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory(dir=said.folder) as folder:
        data = Path(folder)
        os.environ["LOFT_DATA"] = folder
        from backend.catalog.models.identify import identify_model
        from backend.families import FAMILIES

        model = write_model(data / "model", layers=said.layers, text_layers=said.text_layers)
        spec = identify_model(model, FAMILIES)
        print("| job | phase | predicted GiB | measured GiB | error |\n|---|---|---|---|---|")
        jobs = [("draw", lambda: draw(spec, data))] if said.draw or not said.train else []
        jobs += [("train", lambda: train(spec, model, data, flags))] if said.train or not said.draw else []
        for name, job in jobs:
            predicted, measured = job()
            for phase, value in measured.items():
                if phase in predicted:
                    print(
                        (
                            f"| {name} | {phase} | {predicted[phase] / 2**30:.3f} | {value / 2**30:.3f} | "
                            f"{predicted[phase] / value - 1:+.2%} |"
                        ),
                        flush=True,
                    )


if __name__ == "__main__":
    main()
