"""A LoRA by DiffSynth-Studio's own trainer: `training_by_diffsynth.py PEERS MODEL SET STEPS plain|checkpointed TASK
FOLDER`, a program of `training_peers.py`.

Everything is diffsynth's own, imported from PEERS where it is installed: model loading, pipeline, units, LoRA
injection, loss, data set, `launch_training_task` with accelerate. What is said here is what its examples say in theirs:
which inputs a sample has. What is bent, so that a cut model loads at all: the fingerprints of the cut files are added
to its table, and its text encoder drops the layers and the picture half that the file does not have.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(sys.argv[1])

from peers import _without_torchvisions_kernels
from training_peers import LAYERS, RANK, SIDE, TARGETS, Ends

_without_torchvisions_kernels()

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from diffsynth.configs import MODEL_CONFIGS  # noqa: E402
from diffsynth.core import ModelConfig, UnifiedDataset  # noqa: E402
from diffsynth.core.loader import hash_model_file  # noqa: E402
from diffsynth.diffusion import (  # noqa: E402
    DiffusionTrainingModule,
    FlowMatchSFTLoss,
    ModelLogger,
    launch_data_process_task,
    launch_training_task,
)
from diffsynth.diffusion.parsers import add_general_config  # noqa: E402
from diffsynth.models.qwen_image_text_encoder import QwenImageTextEncoder  # noqa: E402
from diffsynth.pipelines.qwen_image import QwenImagePipeline  # noqa: E402

FILES = {
    "dit": "transformer/diffusion_pytorch_model.safetensors",
    "text_encoder": "text_encoder/model.safetensors",
    "vae": "vae/diffusion_pytorch_model.safetensors",
}
FLAGS = ["--learning_rate", "1e-4", "--dataset_num_workers", "0"]  # the worker's seconds would be another process's
NEEDED = {"sft": tuple(FILES), "sft:data_process": ("text_encoder", "vae"), "sft:train": ("dit",)}


class CutTextEncoder(QwenImageTextEncoder):
    """Its own text encoder with the first layers only, as many words as the file has, no picture half and no head."""

    def __init__(self, words: int = 0):
        super().__init__()
        text = self.model.language_model
        text.layers = text.layers[:LAYERS]
        text.config.num_hidden_layers = LAYERS
        text.embed_tokens = torch.nn.Embedding(words, 3584)
        del self.model.visual, self.lm_head


class Trainer(DiffusionTrainingModule):
    """A sample in, a loss out."""

    def __init__(self, model: Path, task: str, *, checkpointed: bool):
        super().__init__()
        configs = [ModelConfig(path=str(model / FILES[part])) for part in NEEDED[task]]
        pipe = QwenImagePipeline.from_pretrained(
            torch.bfloat16, "cpu", configs, tokenizer_config=ModelConfig(path=str(model / "tokenizer"))
        )
        self.pipe = self.split_pipeline_units(task, pipe, None, "dit")
        self.switch_pipe_to_training_mode(self.pipe, None, "dit", ",".join(TARGETS), RANK, task=task)
        self.task, self.checkpointed = task, checkpointed
        self.encoding = {"text": 0.0, "picture": 0.0}  # CPU seconds

    def forward(self, data: dict, inputs=None):
        inputs = self.transfer_data_to_device(inputs or self._inputs(data), self.pipe.device, self.pipe.torch_dtype)
        for unit in self.pipe.units:
            began = time.process_time()
            inputs = self.pipe.unit_runner(unit, self.pipe, *inputs)
            self.encoding["text" if "Prompt" in type(unit).__name__ else "picture"] += time.process_time() - began
        if self.task.endswith(":data_process"):
            return inputs
        shared, positive, _ = inputs
        shared = {**shared, "use_gradient_checkpointing": self.checkpointed}
        return FlowMatchSFTLoss(self.pipe, **shared, **positive)

    def _inputs(self, data: dict) -> tuple[dict, dict, dict]:
        shared = {
            "input_image": data["image"],
            "height": data["image"].height,
            "width": data["image"].width,
            "cfg_scale": 1,
            "rand_device": "cpu",
            "use_gradient_checkpointing": self.checkpointed,
            "use_gradient_checkpointing_offload": False,
            "tiled": False,
            "tile_size": 128,
            "tile_stride": 64,
            "edit_image": None,
            "edit_image_auto_resize": True,
            "layer_num": None,
        }
        return shared, {"prompt": data["prompt"]}, {"negative_prompt": ""}


class Clocked(ModelLogger):
    """Its own logger, which also notes the ends of steps."""

    def __init__(self, folder: Path):
        super().__init__(str(folder))
        self.ends = Ends()

    def on_step_end(self, *arguments, **named) -> None:
        super().on_step_end(*arguments, **named)
        self.ends()


def teach(model: Path) -> None:
    """Adds the cut files to the table by which diffsynth knows models."""
    said = {
        part: json.loads((model / part / "config.json").read_text(encoding="utf-8"))
        for part in ("text_encoder", "transformer")
    }
    words, blocks = said["text_encoder"]["text_config"]["vocab_size"], said["transformer"]["num_layers"]
    known = {one["model_name"]: one for one in reversed(MODEL_CONFIGS) if one["model_name"].startswith("qwen_image_")}
    changed = {
        "dit": known["qwen_image_dit"] | {"extra_kwargs": {"num_layers": blocks}},
        "text_encoder": known["qwen_image_text_encoder"]
        | {"model_class": "training_by_diffsynth.CutTextEncoder", "extra_kwargs": {"words": words}},
    }  # the autoencoder is whole, and known
    for part, entry in changed.items():
        MODEL_CONFIGS.append({**entry, "model_hash": hash_model_file(str(model / FILES[part]))})


def main(model: Path, data: Path, steps: int, checkpointed: bool, task: str, folder: Path) -> None:
    torch.set_num_threads(1)
    teach(model)
    trainer = Trainer(model, task, checkpointed=checkpointed)
    operator = UnifiedDataset.default_image_operator(str(data), height=SIDE, width=SIDE)
    cached = task.endswith(":train")
    dataset = UnifiedDataset(
        str(folder if cached else data),
        None if cached else str(data / "metadata.csv"),
        repeat=1,
        data_file_keys=("image",),
        main_data_operator=operator,
    )
    logger = Clocked(folder if task.endswith(":data_process") else folder.with_name("results"))
    flags = [*FLAGS, "--dataset_base_path", str(data), "--output_path", logger.output_path]
    accelerator, flags = Accelerator(cpu=True), add_general_config(argparse.ArgumentParser()).parse_args(flags)
    if task.endswith(":data_process"):
        launch_data_process_task(accelerator, dataset, trainer, logger, args=flags)
    else:
        dataset.repeat, dataset.max_data_items = 100, steps
        launch_training_task(accelerator, dataset, trainer, logger, args=flags)
    print(
        json.dumps(
            {"steps": logger.ends.steps, **{name: spent / len(dataset) for name, spent in trainer.encoding.items()}}
        )
    )


if __name__ == "__main__":
    model, data, steps, word, task, folder = sys.argv[2:]
    main(Path(model), Path(data), int(steps), word == "checkpointed", task, Path(folder))
