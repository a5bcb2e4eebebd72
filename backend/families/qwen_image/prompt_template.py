"""How Qwen-Image's text encoder is told a prompt, and how many tokens that takes: the templates of diffusers' pipelines. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from backend.catalog.family import TokenCount
from backend.catalog.models import token_count

MAX_TOKENS = 512  # text tokens that condition a picture, as in diffusers' call
MAX_EDIT_TOKENS = 1024  # beside those of the pictures: the tokenizer's limit that diffusers' edit pipelines name
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
    "spatial relationships of the objects and background:<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
PREFIX_TOKENS = 34  # of the template before the prompt; their states are dropped
EDIT_TEMPLATE = (
    "<|im_start|>system\nDescribe the key features of the input image (color, shape, size, texture, objects, background), "
    "then explain how the user's text instruction should alter or modify the image. Generate a new image that meets the "
    "user's requirements while maintaining consistency with the original input where appropriate.<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
EDIT_PREFIX_TOKENS = 64
PICTURE = "<|vision_start|>{}<|vision_end|>"
IMAGE_TOKEN = "<|image_pad|>"


def shown_words(pictures: Sequence[str], *, plus: bool) -> str:
    """What stands before a prompt for pictures whose tokens are the words `pictures`; `plus`: they are numbered."""
    framed = [PICTURE.format(words) for words in pictures]
    return "".join(f"Picture {number}: {one}" for number, one in enumerate(framed, 1)) if plus else "".join(framed)


def most_tokens(variant: str, *, pictures: bool = False) -> TokenCount:
    """The most of a prompt's words that are read, with the template before them, and given to the transformer."""
    prefix, most = (EDIT_PREFIX_TOKENS, MAX_EDIT_TOKENS) if pictures else (PREFIX_TOKENS, MAX_TOKENS)
    return TokenCount(prefix + most, most)


def count_tokens(
    folders: Mapping[str, Path], prompts: Sequence[str], *, variant: str, seen: Sequence[Sequence[int]] = ()
) -> list[TokenCount] | None:
    """Of each of `prompts`, by the tokenizer in folders["tokenizer"]; None where that cannot be read. `seen`: of each prompt, how many tokens
    each of its pictures takes."""
    if "tokenizer" not in folders:
        return None
    seen = list(seen) or [()] * len(prompts)
    plus = variant != "edit"
    texts = [
        EDIT_TEMPLATE.format(shown_words([IMAGE_TOKEN] * len(some), plus=plus) + prompt)
        if some
        else TEMPLATE.format(prompt)
        for prompt, some in zip(prompts, seen, strict=True)
    ]
    counted = token_count.counts(folders["tokenizer"], texts)
    if counted is None:
        return None
    return [_cut(count, some) for count, some in zip(counted, seen, strict=True)]


def _cut(count: int, seen: Sequence[int]) -> TokenCount:
    prefix, most = (EDIT_PREFIX_TOKENS, MAX_EDIT_TOKENS) if seen else (PREFIX_TOKENS, MAX_TOKENS)
    read = min(count + sum(seen) - len(seen), prefix + sum(seen) + most)
    return TokenCount(read, max(read - prefix, 1))
