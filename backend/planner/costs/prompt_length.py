"""How long what a text encoder is told is, in tokens: counted where the model's tokenizer is there, else guessed from
the letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from backend.catalog.family import TokenCount
from backend.families import by_name
from backend.planner.costs.model_sizes import ModelSizes

LEAST_TOKENS = 16


def tokens_of(num_characters: int) -> int:
    """Text tokens of so many characters, generously (English has about four to a token)."""
    return math.ceil(num_characters / 3)


def told(
    sizes: ModelSizes, prompts: Sequence[str], *, seen: Sequence[Sequence[int]] = (), tokenizer: Path | None = None
) -> list[TokenCount]:
    """Tokens of each of `prompts`.

    `seen`: of each, how many tokens each of its pictures takes; `tokenizer`: the folder of another tokenizer than the
    model's own.
    """
    folders = sizes.tokenizers | ({"tokenizer": tokenizer} if tokenizer is not None else {})
    if folders:
        found = by_name(sizes.family).count_tokens(folders, prompts, variant=sizes.variant, seen=seen)
        if found is not None:
            return found
    said = sizes.defaults
    if said.get("text_fixed"):
        return [TokenCount(said["text_tokens"], said["text_tokens"])] * len(prompts)
    more = [sum(some) for some in seen] or [0] * len(prompts)
    return [_guessed(sizes, prompt, count) for prompt, count in zip(prompts, more, strict=True)]


def _guessed(sizes: ModelSizes, prompt: str, seen: int) -> TokenCount:
    words = max(LEAST_TOKENS, tokens_of(len(prompt)))
    most = by_name(sizes.family).most_tokens(sizes.variant, pictures=seen > 0)
    if most is None:
        return TokenCount(words + seen, words + seen)
    words = min(words, most.given)
    return TokenCount(words + seen + most.read - most.given, words + seen)


def longest(found: Sequence[TokenCount]) -> TokenCount:
    """The most that any of them reads, and gives."""
    return TokenCount(max(one.read for one in found), max(one.given for one in found))


def seen_each(sizes: ModelSizes, pictures: Sequence[tuple[int, int]], pixels: int | None = None) -> list[int]:
    """Text tokens that each of `pictures` (width, height) takes the places of, where they are brought to `pixels`."""
    family = by_name(sizes.family)
    return [family.seen_tokens([one], pixels or sizes.defaults["seen_pixels"]) for one in pictures]
