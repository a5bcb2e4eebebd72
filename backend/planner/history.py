"""What runs on this machine really took: kept in `user/measured.json`, and used to correct the next prediction."""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import replace
from pathlib import Path

from backend.planner.costs.device_speed import device_key
from backend.planner.costs.layout import Fixed
from backend.schema.json_values import dicts, finite
from backend.schema.memory_plan import GIB, Card
from backend.schema.request import GenerationRequest
from backend.schema.settings import to_values
from backend.schema.untrusted import read_object_or_empty
from backend.system.atomic_files import write_json

TRAINING = "train"
MATTERS = (  # settings of a run that its memory depends on besides
    "use_gradient_checkpointing",
    "use_gradient_checkpointing_offload",
    "fp8_models",
    "offload_models",
    "enable_model_cpu_offload",
    "enable_optimizer_cpu_offload",
    "quant_options",
    "customized_optimizer",
    "ema_decay",
    "gradient_accumulation_steps",
    "sample_prompts",
)
KEPT = 20  # last runs per device and family
LIMIT = 2 * GIB  # a correction beyond this means another cause than context and fragments


LARGEST = 2.0**60


def remember(
    file: Path,
    card: Card,
    family: str,
    *,
    kind: str,
    predicted_bytes: int,
    measured_bytes: int,
    seconds: float = 0.0,
    known: dict | None = None,
    phases: dict[str, list[int]] | None = None,
) -> None:
    """Keeps one run: the most bytes of live tensors, as predicted and as measured.

    `kind` says what ran ("generate 1024x1024", ...).

    `known`: what the run found out about its work (`known_of`); `phases`: [predicted, measured] of each.
    """
    held = corrected(Fixed(), card, family, file, kind=kind).correction(predicted_bytes)
    everything = _read(file)
    runs = everything[_key(card, family)] = dicts(everything.get(_key(card, family)))
    runs.append(
        {
            "kind": kind,
            "predicted_live": predicted_bytes,
            "measured_live": measured_bytes,
            "correction": held,
            "seconds": seconds,
            "time": time.time(),
            **({"known": known} if known else {}),
            **({"phases": phases} if phases else {}),
        }
    )
    del runs[:-KEPT]
    write_json(file, everything, indent=1)


def corrected(fixed: Fixed, card: Card, family: str, file: Path, *, kind: str = "generate") -> Fixed:
    """`fixed` with the median of what this device and family took more (or less) than was predicted without correction.

    Drawing and training run other code: the first word of `kind` says which of them counts.
    """
    runs = [run for run in _runs(file, card, family) if _job(run["kind"]) == _job(kind)]
    if len(runs) < 2:  # one run may have had a cause of its own
        return fixed
    more = statistics.median(
        run["measured_live"] - (run["predicted_live"] - run.get("correction", 0)) for run in runs[-5:]
    )
    return replace(fixed, learnt_bytes=int(max(-LIMIT, min(LIMIT, more))))


def _job(kind: str) -> str:
    return kind.partition(" ")[0]


def kind_of(job) -> str:
    """What makes two jobs take the same: requests the time, training configs the memory."""
    return _kind_of_request(job) if isinstance(job, GenerationRequest) else _kind_of_training(job)


def _kind_of_request(request: GenerationRequest) -> str:
    faster = [name for name in ("step_cache", "compile", "fp8_products") if getattr(request, name)]
    work = (
        f"generate {request.width}x{request.height}, {request.num_inference_steps} steps, {request.count}, "
        f"guidance {request.guidance > 1}"
    )
    edited = [f"{len(request.edit_images)} edited"] if request.edit_images else []
    return ", ".join([work, *edited, *faster])


def _kind_of_training(config) -> str:
    """Pictures, batch, what trains and how it is kept."""
    values = to_values(config)
    sides = f"{values['width'] or 'any'}x{values['height'] or 'any'} to {values['max_pixels']}"
    trains = (
        values["trainable_models"]
        or f"{values['lora_algorithm']} {values['lora_rank']} on {values['lora_target_modules'] or 'usual layers'}"
    )
    kept = [f"{name} {str(values[name])[:40]}" for name in MATTERS if values.get(name)]
    return ", ".join(
        [
            f"{TRAINING} {sides}, batch {values['batch_size']}, {trains}, {values['mixed_precision']}",
            *kept,
            data_of(config),
        ]
    )


def data_of(config) -> str:
    """What the pictures and captions of a run depend on."""
    values = to_values(config)
    names = ("dataset_base_path", "dataset_metadata_path", "width", "height", "max_pixels", "edit_pixels")
    parts = tuple(values[name] for name in names)
    return f"data {hashlib.sha256(repr(parts).encode()).hexdigest()[:8]}"


def known_of(file: Path, card: Card, family: str, config) -> dict:
    """What the latest run on the same pictures found out about its work: fields of `Work` such as `width` and
    `text_tokens`. Of a request nothing is."""
    if isinstance(config, GenerationRequest):
        return {}
    same = (
        run for run in reversed(_runs(file, card, family)) if run.get("known") and run["kind"].endswith(data_of(config))
    )
    return next((run["known"] for run in same), {})


def seconds_of(file: Path, card: Card, family: str, kind: str) -> tuple[float, float] | None:
    """(least, most) seconds of the last three runs of that kind here, a little widened."""
    found = [run["seconds"] for run in _runs(file, card, family) if run["kind"] == kind and run["seconds"] > 0][-3:]
    return (0.95 * min(found), 1.1 * max(found)) if found else None


def last(file: Path, card: Card, family: str, kind: str = "") -> tuple[int, int, float] | None:
    """(predicted, measured, seconds) of the latest run of that kind, for "last time: predicted 9.8, measured 9.6"."""
    for run in reversed(_runs(file, card, family)):
        if not kind or run["kind"] == kind:
            return run["predicted_live"], run["measured_live"], run["seconds"]
    return None


def _runs(file: Path, card: Card, family: str) -> list[dict]:
    """What is known of the device and family; entries of another form are passed over."""
    return [run for run in dicts(_read(file).get(_key(card, family))) if _is_whole(run)]


def _is_whole(run: dict) -> bool:
    """Whether an entry holds what it should, each of its type."""
    numbers = (run.get("measured_live"), run.get("predicted_live"), run.get("seconds"), run.get("correction", 0))
    known = run.get("known", {})
    return (
        isinstance(run.get("kind"), str)
        and all(finite(one, low=-LARGEST, high=LARGEST) is not None for one in numbers)
        and isinstance(known, dict)
        and all(isinstance(value, str | bool) or finite(value) is not None for value in known.values())
    )


def _key(card: Card, family: str) -> str:
    return f"{device_key(card)}/{family}"


def _read(file: Path) -> dict:
    return read_object_or_empty(file)
