"""How long what a text encoder is told is, in tokens: counted where the model's tokenizer is there, else guessed from the letters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from backend.families.qwen_image import prompt_template, reference_sizes
from backend.families.qwen_image.prompt_template import Told
from backend.planner.costs.model_sizes import ModelSizes

LEAST_TOKENS = 16
FAMILY = "qwen_image"  # whose templates are known


def tokens_of(num_characters: int) -> int:
    """Text tokens of so many characters, generously (English has about four to a token)."""
    return math.ceil(num_characters / 3)


def told(
    sizes: ModelSizes, prompts: Sequence[str], *, seen: Sequence[Sequence[int]] = (), tokenizer: Path | None = None
) -> list[Told]:
    """Tokens of each of `prompts`. `seen`: of each, how many tokens each of its pictures takes; `tokenizer`: the folder of another tokenizer
    than the model's own."""
    folder = tokenizer or sizes.tokenizer
    if sizes.family == FAMILY and folder is not None:
        found = prompt_template.told(folder, prompts, seen=seen, plus=sizes.variant != "edit")
        if found is not None:
            return found
    said = sizes.defaults
    if said.get("text_fixed"):
        return [Told(said["text_tokens"], said["text_tokens"])] * len(prompts)
    more = [sum(some) for some in seen] or [0] * len(prompts)
    return [_guessed(sizes, prompt, count) for prompt, count in zip(prompts, more, strict=True)]


def _guessed(sizes: ModelSizes, prompt: str, seen: int) -> Told:
    words = max(LEAST_TOKENS, tokens_of(len(prompt)))
    if sizes.family != FAMILY:
        return Told(words + seen, words + seen)
    words = min(words, prompt_template.MAX_EDIT_TOKENS if seen else prompt_template.MAX_TOKENS)
    return Told(
        words + seen + (prompt_template.EDIT_PREFIX_TOKENS if seen else prompt_template.PREFIX_TOKENS), words + seen
    )


def longest(found: Sequence[Told]) -> Told:
    """The most that any of them reads, and gives."""
    return Told(max(one.read for one in found), max(one.given for one in found))


def seen_each(sizes: ModelSizes, pictures: Sequence[tuple[int, int]], pixels: int | None = None) -> list[int]:
    """Text tokens that each of `pictures` (width, height) takes the places of, where they are brought to `pixels`."""
    return [reference_sizes.seen_tokens([one], pixels or sizes.defaults["seen_pixels"]) for one in pictures]
