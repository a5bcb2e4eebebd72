"""What a job has on disk: the model's files; of a training run also its results, its full states and the encodings that
it keeps. No torch."""

from __future__ import annotations

import re

from backend.planner.costs.layout import Layout, Work
from backend.planner.costs.model_sizes import ModelSizes, PartSizes
from backend.schema.memory_plan import DTYPE_BYTES, GIB

READS_TEXT = re.compile(r"(^|\.)(txt_in|context_embedder|cap_embedder\.1|text_embedder\.linear_1)$")
PICTURES = 100  # whose encodings the sentence tells


def on_disk(sizes: ModelSizes, point: dict, work: Work, layout: Layout) -> dict[str, int]:
    """Bytes of the "model"; of training one "result", one full "state" (weights, moments, running mean) and what is
    kept of one "picture" with its caption, 0 where nothing is. Names in the files are not counted (some kilobytes)."""
    found = {"model": sizes.file_bytes}
    if work.targets:
        moments = int(layout.state_bytes * (work.trained_numel - work.idle_numel))
        found |= {
            "result": work.saved_number_bytes * work.trained_numel,
            "state": 4 * work.trained_numel + moments,
            "picture": _encoded(sizes.parts["dit"], point, work) if work.caches and work.keeps_encodings else 0,
        }
    return found


def _encoded(part: PartSizes, point: dict, work: Work) -> int:
    """Latents in float32, as the trainer's autoencoder gives them, and the caption's embeddings.

    The narrowest layer around the blocks gives a token's latents; the widest of those that read text, a word's
    embedding.
    """
    latents = min((rows for rows, _ in part.outside.values()), default=64)
    words = max((columns for name, (_, columns) in part.outside.items() if READS_TEXT.search(name)), default=0)
    return 4 * point["n"] * latents + DTYPE_BYTES[work.computing] * point["t"] * words


def sentence(disk: dict[str, int], keeps: int) -> str:
    """Of a training run; "" of anything else."""
    if "state" not in disk:
        return ""
    words = [
        f"{_size(disk['result'])} for each result",
        f"{_size(disk['state'])} for each full state (the newest {keeps} stay)",
    ]
    if disk["picture"]:
        words.append(f"{_size(PICTURES * disk['picture'])} for the encodings of {PICTURES} pictures")
    return f"On disk: {', '.join(words)}."


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / 2**20:.1f} MiB"
