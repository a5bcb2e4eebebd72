"""Prompts that nobody wrote: what the untouched model draws to be trained along, and what guidance leads away from.

No torch.
"""

from __future__ import annotations

from backend.dataset.captions import lines_of

EMPTY = " "  # what guidance leads away from where there is no negative prompt

EVERYDAY = (
    "a dog",
    "a red car",
    "a tree",
    "a banana",
    "a blue fish",
    "a house",
    "a yellow flower",
    "a bird",
    "a cup of tea",
    "a book",
    "a green frog",
    "a cake",
    "a guitar",
    "a ball",
    "an umbrella",
    "a rocket",
    "a pear",
    "a horse",
    "a key",
    "a mushroom",
    "a strawberry",
    "a chair",
    "a sun",
    "a lemon",
)
EVERYDAY_EDITS = (
    "make it night",
    "turn it into a pencil drawing",
    "put it on a beach",
    "make it winter",
    "make it black and white",
    "turn it into an oil painting",
    "put a red hat on it",
    "make the background blue",
    "remove the background",
    "make it look old",
    "add a rainbow",
    "turn it into a comic",
)


def prior_prompts(section, *, editing: bool) -> list[str]:
    """What the untouched model draws."""
    return lines_of(section.prior_prompts) or list(EVERYDAY_EDITS if editing else EVERYDAY)
