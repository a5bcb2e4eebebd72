"""Put the parts together as a model folder: a fresh transformer to train, or the trained weights to ship."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from PIL import Image
from safetensors.torch import load_file, save_file

from recipes.starter import vae_2d

TRANSFORMER = dict(
    num_layers=7,
    num_attention_heads=3,
    attention_head_dim=64,
    axes_dims_rope=(16, 24, 24),
    in_channels=64,
    out_channels=16,
    patch_size=2,
    joint_attention_dim=192,
)
INDEX = {
    "_class_name": "QwenImagePipeline",
    "_diffusers_version": "0.42.1",
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
    "tokenizer": ["transformers", "Qwen2Tokenizer"],
    "transformer": ["diffusers", "QwenImageTransformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLQwenImage"],
    "_defaults": {"width": 128, "height": 128, "num_inference_steps": 12, "guidance": 3.0},  # what a request is best
    "_sizes": [[128, 128]],  # nothing else looks right
}


def fresh_transformer() -> QwenImageTransformer2DModel:
    """Random weights; every block and the output begin at zero, so that the first steps are calm (Peebles & Xie
    2023)."""
    torch.manual_seed(0)
    model = QwenImageTransformer2DModel(**TRANSFORMER)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.xavier_uniform_(weight)
            elif name.endswith("bias"):
                weight.zero_()
            if "_mod." in name or name.startswith(("norm_out.linear", "proj_out")):
                weight.zero_()
            if name.startswith("time_text_embed") and weight.ndim == 2:
                weight.normal_(std=0.02)
    return model


def measure_latents(model: AutoencoderKLQwenImage, dataset: Path, *, count: int = 1200) -> None:
    """Set ``latents_mean`` and ``latents_std`` in the config from pictures of the training set."""
    names = sorted({json.loads(line)["image"] for line in (dataset / "metadata.jsonl").read_text("utf-8").splitlines()})
    flat, parts = vae_2d.flatten(model.float()), []
    for start in range(0, count, 16):
        chosen = [names[i * len(names) // count] for i in range(start, min(start + 16, count))]
        pictures = np.stack([np.asarray(Image.open(dataset / name).convert("RGB")) for name in chosen])
        with torch.no_grad():
            x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
            parts.append(vae_2d.encode(flat, x)[0])
    latents = torch.cat(parts)
    model.register_to_config(
        latents_mean=[round(x, 5) for x in latents.mean((0, 2, 3)).tolist()],
        latents_std=[round(x, 5) for x in latents.std((0, 2, 3)).tolist()],
    )


def strip_paths(folder: Path) -> None:
    """Drop the local path that saving writes into configs, and make all files readable."""
    for path in folder.rglob("*.json"):
        values = json.loads(path.read_text("utf-8"))
        if isinstance(values, dict) and values.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)


def assemble(work: Path) -> Path:
    """``work/base``: the trained autoencoder and text encoder with a fresh transformer, as one model folder."""
    base = work / "base"
    if (base / "model_index.json").is_file():
        return base
    model = AutoencoderKLQwenImage.from_pretrained(work / "vae", torch_dtype=torch.float32)
    measure_latents(model, work / "dataset")
    model.to(torch.bfloat16).save_pretrained(base / "vae")
    for part in ("text_encoder", "tokenizer"):
        shutil.copytree(work / "words" / part, base / part, dirs_exist_ok=True)
    fresh_transformer().to(torch.bfloat16).save_pretrained(base / "transformer")
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(base / "scheduler")
    (base / "model_index.json").write_text(json.dumps(INDEX, indent=2) + "\n", "utf-8")
    strip_paths(base)
    return base


def install(weights: Path, base: Path, target: Path, *, autoencoder: Path | None = None) -> None:
    """Copy ``base`` to ``target`` with the trainer's ``weights`` (names ``dit.*`` and ``text_encoder.*``) in place.

    ``autoencoder``: a folder whose autoencoder takes the place of the base's; its encoder must be the same.

    Raises ValueError where a name of the file has no place in the model, or a part of the model did not train.
    """
    shutil.copytree(base, target, dirs_exist_ok=True)
    (target / "model_index.json").write_text(json.dumps(INDEX, indent=2) + "\n", "utf-8")
    trained = load_file(weights)
    places = {
        "dit": (target / "transformer" / "diffusion_pytorch_model.safetensors", ""),
        "text_encoder": (target / "text_encoder" / "model.safetensors", "model."),
    }
    for part, (path, prefix) in places.items():
        found = {
            name.removeprefix("pipe.").removeprefix(part + "."): value
            for name, value in trained.items()
            if name.removeprefix("pipe.").startswith(part + ".")
        }
        whole = load_file(path)
        strange = [name for name in found if prefix + name not in whole]
        if strange or not found:
            raise ValueError(
                f"{weights.name} has {len(found)} weights of {part}; {len(strange)} have no place in the model."
            )
        for name, value in found.items():
            whole[prefix + name] = value.to(torch.bfloat16).contiguous()
        part_file = path.with_suffix(".part")
        save_file(whole, part_file, metadata={"format": "pt"})
        part_file.replace(path)
    if autoencoder is not None:
        name = "diffusion_pytorch_model.safetensors"
        shutil.copyfile(autoencoder / name, target / "vae" / name)
    strip_paths(target)
