"""What runs on this machine really took: kept in `user/measured.json`, and used to correct the next prediction."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

from backend.catalog.estimate import Fixed
from backend.catalog.speed import device_key, write_json
from backend.schema.request import GenerationRequest
from backend.schema.vram import GIB, Card

TRAINING = "train"
KEPT = 20  # last runs per device and family
LIMIT = 2 * GIB  # a correction beyond this means another cause than context and fragments


def remember(
    file: Path, card: Card, family: str, *, kind: str, predicted_bytes: int, measured_bytes: int, seconds: float = 0.0,
) -> None:  # fmt: skip
    """Keeps one run: the most bytes of live tensors, as predicted and as measured. `kind` says what ran ("generate 1024x1024", ...)."""
    held = corrected(Fixed(), card, family, file).learnt_bytes  # the correction that was in the prediction
    known = _read(file)
    runs = known.setdefault(_key(card, family), [])
    runs.append({
        "kind": kind, "predicted_live": predicted_bytes, "measured_live": measured_bytes, "correction": held,
        "seconds": seconds, "time": time.time(),
    })  # fmt: skip
    del runs[:-KEPT]
    write_json(file, known)


def corrected(fixed: Fixed, card: Card, family: str, file: Path) -> Fixed:
    """`fixed` with the median of what this device and family took more (or less) than was predicted without correction."""
    runs = _runs(file, card, family)
    if len(runs) < 2:  # one run may have had a cause of its own
        return fixed
    more = statistics.median(run["measured_live"] - (run["predicted_live"] - run.get("correction", 0)) for run in runs[-5:])
    return replace(fixed, learnt_bytes=int(max(-LIMIT, min(LIMIT, more))))


def kind_of(request: GenerationRequest) -> str:
    """What makes two requests take the same time."""
    faster = [name for name in ("step_cache", "compile", "fp8_products") if getattr(request, name)]
    work = f"generate {request.width}x{request.height}, {request.num_inference_steps} steps, {request.count}, guidance {request.guidance > 1}"
    return ", ".join([work, *faster])


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
    return [run for run in _read(file).get(_key(card, family), []) if "measured_live" in run]


def _key(card: Card, family: str) -> str:
    return f"{device_key(card)}/{family}"


def _read(file: Path) -> dict:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
