"""Predicted before, predicted after and measured, of runs and requests made at random: `python benchmarks/foresight.py
[--count 60] [--seed 0]`.

Every job is one that has never run: its own pictures and captions, method, sizes, precision, model. *Before* is what
the page and the command line say of it with the tables that the tracer makes for it (a network or a method without one
is traced first, as the page asks for it; `--guess`: without); *after* is what the run itself says at its end;
*measured* are live tensor bytes of the real job on a CPU. Prints a table of all phases, then the median and the worst
errors. `--own N`: so many models with random weights, besides the starter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from backend.schema.paths import ASSETS

MIB = 2**20
WORDS = [
    "a",
    "red",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "in",
    "a",
    "forest",
    "at",
    "dawn",
    "while",
    "small",
    "birds",
    "sing",
    "and",
    "the",
    "river",
    "runs",
    "to",
    "the",
    "sea",
]
STEP = ("forward", "backward", "optimizer")


def own_model(folder: Path, draw: random.Random) -> Path:
    """A Qwen-Image of odd sizes with random weights, and the starter's tokenizer."""
    import torch
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    torch.manual_seed(draw.randrange(2**31))
    size = draw.choice((48, 64, 96))
    text, heads, base = draw.choice((128, 192, 320)), draw.choice((3, 5, 7)), draw.choice((16, 24, 32))
    axes = [size // 4, (size - size // 4) // 2, size - size // 4 - (size - size // 4) // 2]
    axes = [one - one % 2 for one in axes]
    axes[2] = size - axes[0] - axes[1]
    QwenImageTransformer2DModel(
        num_layers=draw.randint(2, 6),
        num_attention_heads=heads,
        attention_head_dim=size,
        joint_attention_dim=text,
        axes_dims_rope=tuple(axes),
    ).save_pretrained(folder / "transformer")
    AutoencoderKLQwenImage(base_dim=base, z_dim=16).save_pretrained(folder / "vae")
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": text,
        "patch_size": 14,
    }
    language = json.loads((ASSETS / "starter" / "text_encoder" / "config.json").read_text())["text_config"] | {
        "hidden_size": text, "intermediate_size": 3 * text, "num_hidden_layers": draw.randint(2, 4), "num_attention_heads": 4,
        "num_key_value_heads": 2, "layer_types": None,
        "rope_parameters": {"mrope_section": [text // 4 // 8, text // 4 // 8, text // 8 - 2 * (text // 4 // 8)], "rope_theta": 1e6, "rope_type": "default"},
    }  # fmt: skip
    config = Qwen2_5_VLConfig(text_config=language, vision_config=vision)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / "text_encoder")
    for name in ("tokenizer", "scheduler"):
        shutil.copytree(ASSETS / "starter" / name, folder / name)
    shutil.copy(ASSETS / "starter" / "model_index.json", folder)
    return folder


def pictures(folder: Path, draw: random.Random) -> Path:
    """Some pictures of some sizes with captions of some length."""
    from PIL import Image

    folder.mkdir(parents=True)
    sizes = [
        (draw.choice((128, 160, 256, 320)), draw.choice((128, 192, 256))) for _ in range(draw.choice((1, 1, 2, 3)))
    ]
    longest = draw.choice((3, 12, 40, 150, 420))
    for number in range(draw.choice((3, 5, 9))):
        Image.new("RGB", draw.choice(sizes), (number * 20, 90, 120)).save(folder / f"{number}.png")
        count = draw.randint(1, longest) if number else longest
        (folder / f"{number}.txt").write_text(" ".join(draw.choice(WORDS) for _ in range(count)))
    return folder


def run_flags(draw: random.Random) -> str:
    """Flags of a run: each of what memory depends on is there now and then."""
    sides = draw.choice((96, 128, 192, 256))
    flags = [
        f"--max_pixels {sides * sides}",
        f"--batch_size {draw.choice((1, 1, 1, 2, 4))}",
        f"--lora_rank {draw.choice((4, 8, 16, 32, 64))}",
    ]
    method = draw.choice(
        ("lora",) * 6 + ("dora", "rslora", "loha", "lokr", "oft", "full", "full", "dropout", "distill")
    )
    if method in ("dora", "rslora", "loha", "lokr"):
        flags.append(f"--lora_algorithm {method}")
    flags += {
        "oft": ["--lora_algorithm oft --lora_rank 4"], "full": ["--trainable_models dit"], "dropout": ["--lora_dropout 0.1"],
        "distill": [f"--task direct_distill --distill_steps {draw.choice((2, 4))}"],
    }.get(method, [])  # fmt: skip
    lora = method not in ("full", "distill")
    for chance, flag in (
        (0.4, "--use_gradient_checkpointing"), (0.25, "--mixed_precision no"), (0.15, "--ema_decay 0.9"), (0.2, "--gradient_accumulation_steps 2"),
        (0.35, (f"--sample_prompts {draw.choice(('apple', 'a_red_fox_in_the_snow'))} --sample_inference_steps 2 " "" "" "" "" "" "" "" "" "" "" "" "--sample_every 2")),
        (0.15, "--save_dtype float32"), (0.15, "--customized_optimizer " + draw.choice(("sgd", "lion", "adafactor"))),
        (0.15 if lora else 0, "--lora_target_modules attention"), (0.1 if lora and method != "dora" else 0, "--fp8_models dit"),
        (0.15, "--validation_split 0.3 --validation_every 2"), (0.1, "--prior_pictures 2 --prior_prompts cat"),
    ):  # fmt: skip
        if draw.random() < chance:
            flags.append(flag)
    if any("--sample_prompts" in one for one in flags) and draw.random() < 0.4:
        flags.append(f"--sample_width {draw.choice((128, 256, 384))} --sample_height {draw.choice((128, 256))}")
    return " ".join(flags)


def request_values(draw: random.Random) -> dict:
    return {
        "prompt": " ".join(draw.choice(WORDS) for _ in range(draw.choice((2, 10, 60, 300)))),
        "width": draw.choice((64, 128, 256, 384, 512)), "height": draw.choice((64, 128, 256, 320)), "num_inference_steps": 3,
        "guidance": draw.choice((1.0, 4.0)), "count": draw.choice((1, 1, 2)), "seed": 1,
    }  # fmt: skip


def traced(spec, missing: dict, folder: Path) -> None:
    """What the tracer does for the page, here and now."""
    from backend.engine.tracing import server, trace
    from backend.host.background_estimates import _digest
    from backend.planner.costs.model_sizes import sizes_of

    folder.mkdir(parents=True, exist_ok=True)
    known = sizes_of(spec, folder=folder)
    for name, wants in missing.items():
        part = spec.parts[name]
        file = folder / f"{part.network.rpartition(':')[2]}-{_digest(part.config)}.json"
        asked = {
            "network": part.network,
            "config": part.config,
            "wants": wants,
            "shipped": bool(known.parts[name].table) and not file.exists(),
        }
        server.answer(file, asked, trace.published()["networks"])


def of_run(spec, flags: list[str], data: Path, *, guess: bool) -> tuple[dict, dict, dict]:
    """(before, after, measured): phase -> bytes."""
    import torch
    from accelerate.state import AcceleratorState

    from backend.dataset.look_ahead import look_ahead
    from backend.engine.devices import device_memory
    from backend.families import by_name
    from backend.planner import page_estimate, predict_peak
    from backend.planner.costs.model_sizes import sizes_of
    from backend.planner.plan import fixed_of
    from backend.schema.settings import from_flags
    from backend.schema.training.config import TrainingConfig
    from backend.training.__main__ import main

    config, tables, card = (
        from_flags(TrainingConfig, flags),
        data / "user" / "memory",
        device_memory.probe(torch.device("cpu")),
    )
    family = by_name(spec.family)
    sizes = sizes_of(spec, folder=tables)
    known = look_ahead(config, sizes, family).known
    if not guess:
        estimate = page_estimate.estimate_for_page(spec, card, config, user=data / "user", known=known)
        own = {
            name: names
            for name, names in page_estimate.missing_of(
                estimate.plan.__class__(**{**estimate.plan.__dict__, "settings": {}}), sizes, card, config, known
            ).items()
        }
        traced(spec, own, tables)
        sizes = sizes_of(spec, folder=tables)
    before = predict_peak.run_bytes(config, sizes, fixed_of(card), **known)
    (data / "user" / "measured.json").unlink(missing_ok=True)  # what earlier jobs taught
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.redirect_stdout(sys.stderr):
        assert main(flags) == 0, flags
    events = [
        json.loads(line)
        for line in (Path(config.output.output_path) / "events.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    phases = [event["phases"] for event in events if event["event"] == "memory" and "phases" in event][-1]
    return before, {name: pair[0] for name, pair in phases.items()}, {name: pair[1] for name, pair in phases.items()}


def of_request(spec, values: dict, data: Path, *, guess: bool) -> tuple[dict, dict, dict]:
    import torch

    from backend.engine.devices import device_memory
    from backend.engine.pipeline.pipeline import Pipeline
    from backend.engine.tracing import live_tensors
    from backend.planner import page_estimate
    from backend.planner.costs.model_sizes import sizes_of
    from backend.schema.request import GenerationRequest
    from backend.schema.settings import from_values

    request, tables, card = (
        from_values(GenerationRequest, values),
        data / "user" / "memory",
        device_memory.probe(torch.device("cpu")),
    )
    estimate = page_estimate.estimate_for_page(spec, card, request, user=data / "user")
    if not guess:
        traced(spec, estimate.missing, tables)
        estimate = page_estimate.estimate_for_page(sizes_of(spec, folder=tables), card, request, user=data / "user")
    before = {phase.name: phase.live_bytes for phase in estimate.plan.phases}
    pipeline = Pipeline(spec, dtype=torch.bfloat16, device="cpu")
    with live_tensors.measuring(pipeline) as measure:
        pipeline.generate(request)
    return before, before, {name: value for name, value in measure.by_phase.items() if name in before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own", type=int, default=2)
    parser.add_argument("--guess", action="store_true")
    parser.add_argument(
        "--only", action="append", help="flags of a run, in the place of a random job; may be said more than once"
    )
    said = parser.parse_args()
    draw = random.Random(said.seed)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        os.environ["LOFT_DATA"] = folder
        from backend.catalog.models.identify import identify_model
        from backend.families import FAMILIES

        models = [
            ASSETS / "starter",
            *(own_model(data / "models" / f"own-{number}", draw) for number in range(said.own)),
        ]
        specs = [identify_model(model, FAMILIES) for model in models]
        print(
            "| # | model | job | phase | before | after | measured MiB | error before | error after |\n|---|---|---|---|---|---|---|---|---|"
        )
        peaks, phases = [], []
        for number in range(len(said.only) if said.only else said.count):
            which = draw.randrange(len(models))
            if said.only or draw.random() < 0.7:
                base = pictures(data / "pictures" / str(number), draw)
                words = said.only[number] if said.only else run_flags(draw)
                flags = [
                    *shlex.split(words),
                    "--model",
                    str(models[which]),
                    "--dataset_base_path",
                    str(base),
                    "--output_path",
                    str(data / f"run-{number}"),
                ]
                flags += ["--dataset_repeat", "2"] if "--max_steps" not in words else []
                job, found = words, partial(of_run, specs[which], flags, data, guess=said.guess)
            else:
                values = request_values(draw)
                job = f"draw {values['width']}x{values['height']}, {len(values['prompt'].split())} words, guidance {values['guidance']:g}, {values['count']}"
                found = partial(of_request, specs[which], values, data, guess=said.guess)
            try:
                before, after, measured = found()
            except Exception as error:  # one job that cannot be is no reason to lose the others
                print(f"| {number} | {models[which].name} | {job} | {type(error).__name__}: {error} |", flush=True)
                continue
            for phase, value in measured.items():
                errors = [one.get(phase, 0) / value - 1 for one in (before, after)]
                phases.append((phase, *errors))
                print(
                    f"| {number} | {models[which].name} | {job} | {phase} | {before.get(phase, 0) / MIB:.2f} | {after.get(phase, 0) / MIB:.2f} "
                    f"| {value / MIB:.2f} | {errors[0]:+.2%} | {errors[1]:+.2%} |",
                    flush=True,
                )
            highest = max(measured.values())
            peaks.append([max(one.get(name, 0) for name in measured) / highest - 1 for one in (before, after)])
    print("\n| | jobs | median before | worst before | median after | worst after |\n|---|---|---|---|---|---|")
    for name in ("peak", *dict.fromkeys(phase for phase, *_ in phases)):
        some = peaks if name == "peak" else [errors for phase, *errors in phases if phase == name]
        cells = [
            f"{value:.2%}"
            for side in (0, 1)
            for value in (statistics.median(abs(one[side]) for one in some), max(abs(one[side]) for one in some))
        ]
        print(f"| {name} | {len(some)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
