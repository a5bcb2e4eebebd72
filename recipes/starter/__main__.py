"""Make the starter model from nothing: ``python -m recipes.starter WORK_FOLDER``.

Steps, each skipped when its result is in the work folder: sprites, pictures, autoencoder, words, the model folder with
a fresh transformer, the training run itself (the project's own trainer), some more for the decoder, and the finished
model in ``WORK_FOLDER/starter``.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch

from recipes.starter import sprites, training_images

RUN = {
    "task": "sft",
    "trainable_models": "dit,text_encoder",
    "max_steps": 4400,
    "batch_size": 40,
    "max_pixels": 16384,
    "customized_optimizer": "muon",
    "learning_rate": 2e-3,
    "learning_rates": "dit=2e-3,text_encoder=4e-4",
    "weight_decay": 0.0,
    "lr_warmup_steps": 60,
    "lr_scheduler": "linear_from_half",
    "ema_decay": 0.998,
    "max_grad_norm": 1.0,
    "timestep_sampling": "logit_normal",
    "high_noise_share": 0.3,
    "high_noise_from": 0.8,
    "loss_weighting": "none",
    "caption_dropout": 0.1,
    "mixed_precision": "bf16",
    "save_steps": 400,
    "keep_checkpoints": 2,
    "remove_prefix_in_ckpt": "pipe.",
    "name": "starter",
}


def module(name: str, *arguments: object) -> None:
    """Run one of the making's modules on its own, so that each sets its threads for itself."""
    subprocess.run([sys.executable, "-m", name, *map(str, arguments)], check=True, env=environment())


def environment() -> dict[str, str]:
    """One thread a process, and no spinning: two such processes beat two threads several times over on a busy
    machine."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ACCELERATE_USE_CPU": "true"}


def train_command(work: Path, *, processes: int, changes: dict | None = None) -> list[str]:
    """The trainer's command line, as a list. (`accelerate launch --cpu` starts one process only, so torch's launcher
    does it.)"""
    settings = {
        **RUN,
        "dataset_base_path": work / "dataset",
        "dataset_metadata_path": work / "dataset" / "metadata.jsonl",
        "model": work / "base",
        "output_path": work / "run",
        **(changes or {}),
    }
    flags = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    launch = (
        [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    )
    launch += ["-m", "backend.training"]
    return [sys.executable, *launch, *flags]


def newest(run: Path) -> Path | None:
    """The weights of the run's highest step."""
    found = sorted(run.glob("step-*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
    return found[-1] if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--processes", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--minutes", type=float, default=24, help="of the autoencoder's training")
    parser.add_argument("--steps", type=int, default=RUN["max_steps"])
    parser.add_argument("--until", choices=("pictures", "base", "train"), default="train")
    options = parser.parse_args()
    work = options.work
    work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    sprites.render(work)
    training_images.draw(work)
    if options.until == "pictures":
        return
    if not (work / "vae.done").is_file():
        module(
            "recipes.starter.train_vae",
            work / "sprites.npy",
            work / "vae",
            "--minutes",
            options.minutes,
            "--processes",
            options.processes,
            *(["--compile"] if os.name == "posix" else []),
        )
        (work / "vae.done").touch()
    if not (work / "words" / "text_encoder" / "model.safetensors").is_file():
        module("recipes.starter.text_encoder", work / "dataset", work / "words")
    from recipes.starter.assemble_model import assemble, install

    base = assemble(work)
    if options.until == "base":
        return
    if not (work / "run" / f"step-{options.steps}.safetensors").is_file():
        changes = {"max_steps": options.steps}
        if any((work / "run" / "checkpoints").glob("step-*")):
            changes["resume_from_checkpoint"] = "latest"
        subprocess.run(train_command(work, processes=options.processes, changes=changes), check=True, env=environment())
    if not (work / "decoder.done").is_file():
        module(
            "recipes.starter.train_vae",
            work / "sprites.npy",
            work / "decoder",
            "--resume",
            base / "vae",
            "--decoder-only",
            "--minutes",
            options.minutes / 4,
            "--lr",
            5e-4,
            "--processes",
            options.processes,
        )
        (work / "decoder.done").touch()
    install(newest(work / "run"), base, work / "starter", autoencoder=work / "decoder")
    print(f"The model is in {work / 'starter'}.")


if __name__ == "__main__":
    main()
