"""What a header alone tells of a network that was never traced: its lists of blocks, widths, and roughly what a pass
takes. No torch.

These are guesses, and whoever shows a figure that rests on one says so. The factors are those of the networks that were
traced.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LIST = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\.(\d+)\.")
ONCE = re.compile(
    r"(^|[._])(\w*norm\w*|\w*mod\w*|ada\w*|\w*modulation\w*)\."
)  # layers that see a picture's timestep, not its tokens
TEXT_SIDE = re.compile(r"attn2\.(to_k|to_v)\.|time_emb|time_embedding|add_embedding")
STREAM = 14  # numbers of a stream's width that a block has alive for each token: 12 to 15 in what was traced
LEVEL = 16  # numbers of a UNet's first width for each cell: SDXL 15
# Of an autoencoder whose class `assets/memory/published.json` does not know: numbers for each pixel, in widths of the
# largest level (decode in 16 bits, in float32, encode in 16 bits, in float32), of pictures and clips ("untraced"); and
# how many times as much it takes where 16-bit convolutions copy what they read (decode, encode: "copies").
AUTOENCODER = {"untraced": [[6.0, 6.0, 5.03, 5.03], [6.0, 6.0, 5.03, 5.03]], "copies": [1.25, 1.3]}


@dataclass(frozen=True)
class Seen:
    """`width`: channels of a UNet's first level.

    `cell_numel`: numbers that each cell of its latents goes through, coarser levels counting less. `decoded`,
    `encoded`: channels of an autoencoder at the picture's own size.
    """

    width: int = 0
    cell_numel: float = 0.0
    decoded: int = 0
    encoded: int = 0


def block_lists(names: Iterable[str]) -> tuple[str, ...]:
    """Lists of alike blocks of a transformer whose class is not known, in their order; none of a UNet's, whose blocks
    differ."""
    counts: dict[str, set[str]] = {}
    for name in names:
        found = LIST.match(name)
        if found is not None:
            counts.setdefault(found[1], set()).add(found[2])
    if (
        "down_blocks" in counts
        or "up_blocks" in counts
        or any(name.startswith(("encoder.", "decoder.")) for name in counts)
    ):
        return ()
    return tuple(name for name, indices in counts.items() if len(indices) > 2)


def seen(shapes: Mapping[str, tuple[int, ...]]) -> Seen:
    """What the shapes of the tensors tell."""
    decoder, encoder = shapes.get("decoder.conv_out.weight", ()), shapes.get("encoder.conv_in.weight", ())
    if len(decoder) > 1 or len(encoder) > 1:
        return Seen(decoded=decoder[1] if len(decoder) > 1 else 0, encoded=encoder[0] if len(encoder) > 1 else 0)
    if "conv_in.weight" not in shapes or not any(name.startswith("up_blocks.") for name in shapes):
        return Seen()
    levels = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("down_blocks."))
    total = 0.0
    for name, shape in shapes.items():
        if len(shape) < 2 or TEXT_SIDE.search(name):
            continue
        head, _, rest = name.partition(".")
        index = int(rest.split(".")[0]) if head in ("down_blocks", "up_blocks") else 0
        level = {"down_blocks": index, "up_blocks": levels - 1 - index, "mid_block": levels - 1}.get(head, 0)
        total += math.prod(shape) / 4**level
    return Seen(width=shapes["conv_in.weight"][0], cell_numel=total)


def autoencoder_bytes(
    facts: Mapping, known: Seen, point: dict, stage: str, number_bytes: int, *, converts: bool
) -> float | None:
    """Bytes of working memory of a decode or an encode (`stage`) at `point`; None of an autoencoder whose widths the
    header does not tell. `facts`: what is published of its class."""
    width = known.decoded if stage == "decode" else known.encoded
    if not width:
        return None
    clip = point["f"] > 1
    facts = {**AUTOENCODER, **facts}
    factors = facts["untraced"][clip]
    factor = factors[(0 if stage == "decode" else 2) + (number_bytes == 4)]
    if converts and number_bytes == 2:
        factor *= facts["copies"][stage != "decode"]
    frames = 1 + 4 * (point["f"] - 1)
    return 64 * point["h"] * point["w"] * frames * width * factor * number_bytes
