"""Exported weights: LoRA or full weights under the names that other software reads, with metadata in the header."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from backend import __version__
from backend.catalog.hub.part_entries import listed_paths
from backend.schema.settings import to_values
from backend.schema.training.config import ModelSection
from backend.schema.untrusted import exists
from backend.training.checkpoint.thumbnail import thumbnail_of
from backend.training.model import fsdp
from backend.training.model.base_model import part_digest
from backend.training.model.peft_adapters import adapter_state, peft_metadata
from backend.training.run.state import Run

SAVE_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def exported_tensors(run: Run) -> dict[str, torch.Tensor]:
    """What is saved as a result: the adapter and the parts that trained, under `pipe.<part>.` without the prefix to cut
    (`remove_prefix_in_ckpt`)."""
    dtype = SAVE_DTYPES[run.config.output.save_dtype]
    adapted = run.adapter.part if run.adapter else None
    state = {}
    if run.adapter:
        own = {name: weight for name, weight in run.weights.items() if name.startswith(f"{adapted}.")}
        named = adapter_state(run.adapter, fsdp.whole(own), dtype=dtype)
        state.update({f"pipe.{adapted}.{name}": tensor for name, tensor in named.items()})
    for part in run.resolved.trained:
        for name, tensor in fsdp.whole(dict(run.learner.parts[part].state_dict())).items():
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            state[f"pipe.{part}.{name}"] = tensor.detach().to(device="cpu", dtype=kind).contiguous()
    prefix = run.config.output.remove_prefix_in_ckpt
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def exported_metadata(run: Run, *, step: int, epoch: int) -> dict[str, str]:
    """Where a result comes from, in the header of its file; text only, without paths of this machine."""
    config, defaults = to_values(run.config), to_values(type(run.config)())
    changed = {name: value for name, value in config.items() if value != defaults[name]}
    metadata = {
        "format": "pt",
        "software": f"Loft {__version__}",
        "family": run.base.spec.family,
        "base": _model_name(run.config.model),
        "base_hash": part_digest(run.base, "dit" if "dit" in run.base.spec.parts else next(iter(run.base.spec.parts))),
        "name": run.config.output.name,
        "trigger": run.config.dataset.trigger_word,
        "steps": str(step),
        "epochs": str(epoch),
        "pictures": str(sum(not item.prior for item in run.source.items)),
        "config": json.dumps(
            {name: value for name, value in changed.items() if not (_is_private(name) or _tells_place(value))},
            ensure_ascii=False,
        ),
    }
    picture = thumbnail_of(run.folder, step)
    if picture:
        metadata["modelspec.thumbnail"] = picture
    if run.adapter:
        alpha = {round(run.adapter.alpha_of(module), 6) for module in run.adapter.modules}
        metadata |= {
            "algorithm": run.adapter.algorithm,
            "part": run.adapter.part,
            "rank": str(run.adapter.largest_rank),
            "alpha": str(max(alpha)),
            **peft_metadata(run.adapter, run.base.family),
            "targets": ",".join(sorted({_kind(name) for name in run.adapter.modules})),
        }
    return metadata


def _kind(module: str) -> str:
    pieces = module.split(".")
    last = max((place for place, piece in enumerate(pieces[:-1]) if piece.isdigit() and place < 2), default=-1)
    return ".".join(pieces[last + 1 :])


def _is_private(name: str) -> bool:
    return name.endswith(("_path", "_paths", "_project")) or name in (
        "prior_prompts",
        "sample_edit_images",
        "lora_checkpoint",
        "resume_from_checkpoint",
    )


def _tells_place(value) -> bool:
    """Whether a setting's text is or holds a path of this machine."""
    if not isinstance(value, str) or "\n" in value:
        return False
    pieces = [value, *re.split(r"[,;:=]", value)]
    return any(Path(piece.strip()).is_absolute() or _is_there(piece.strip()) for piece in pieces)


def _is_there(text: str) -> bool:
    """Whether `text` is a relative path of something; a bare word is not one, whatever the working folder holds."""
    try:
        return ("/" in text or "\\" in text or bool(Path(text).suffix)) and exists(Path(text))
    except (OSError, ValueError):  # too long or odd for a path
        return False


def _model_name(section: ModelSection) -> str:
    if section.model_id_with_origin_paths:
        return section.model_id_with_origin_paths.partition(":")[0]
    if section.model_paths:
        return Path(listed_paths(section.model_paths)[0][0]).stem
    return Path(section.model).name if exists(Path(section.model)) else section.model
