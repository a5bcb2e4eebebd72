"""Where a part's weights are, and the bytes that they take there: on the card, in RAM, moved in a pass. No torch."""

from __future__ import annotations

from backend.planner.costs import acceleration_bytes
from backend.planner.costs.layout import PartLayout
from backend.planner.costs.model_sizes import PartSizes
from backend.schema.memory_plan import DTYPE_BYTES

STAGING_BUFFERS = 2


def on_card(part: PartSizes, layout: PartLayout, active: bool, computing: str) -> tuple[int, int]:
    """(weights, staging) bytes on the card while the part computes, or while it does not."""
    tables = part.table.get("tables", 0)
    if not active:
        return (part.bytes(layout.storage, computing) + tables, 0) if layout.mode == "resident" else (0, 0)
    if layout.mode != "streamed":
        return part.bytes(layout.storage, computing) + tables, _cast(part, layout, computing)
    stays = part.resident_bytes(layout.on_card, layout.storage, computing)
    from_file = layout.home == "disk"  # where blocks are as they are, whatever the storage
    largest = part.largest_in_file(computing) if from_file else part.largest_block(layout.storage, computing)
    fetched = max(0, len(part.blocks) - layout.on_card)  # a form may keep the count of a model with more blocks
    buffers = min(STAGING_BUFFERS, fetched) * largest
    return part.around(layout.storage, computing) + stays + tables, buffers + _cast(part, layout, computing)


def _cast(part: PartSizes, layout: PartLayout, computing: str) -> int:
    """The buffer in which weights of another dtype become what is computed with."""
    others = layout.mode == "streamed" and layout.home == "disk" and part.file_dtype != computing
    narrow = layout.storage == "bfloat16" and computing == "float32"
    if not (layout.storage.startswith("float8") or narrow or others):
        return 0
    return acceleration_bytes.largest_cast(part, whole=layout.whole, codes=layout.codes) * DTYPE_BYTES[computing]


def moved_bytes(part: PartSizes, layout: PartLayout, computing: str) -> int:
    """Bytes that one pass over the blocks brings to the card."""
    if layout.mode != "streamed" or not part.blocks:
        return 0
    if layout.home == "disk":
        return part.file_bytes_of(layout.on_card, computing)
    whole = part.resident_bytes(len(part.blocks), layout.storage, computing)
    return whole - part.resident_bytes(layout.on_card, layout.storage, computing)


def off_card(part: PartSizes, layout: PartLayout, computing: str) -> int:
    """Bytes in RAM of a part that waits there."""
    waits = layout.mode != "resident" and layout.home == "ram"
    return part.bytes(layout.storage, computing) if waits else 0
