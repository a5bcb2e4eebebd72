"""Prompts for Z-Image, through Qwen3: the states below its last layer. Shapes as in `z_image`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from backend.catalog.family import Part, TokenCount
from backend.catalog.models import token_count
from backend.families._shared import tokenizers
from backend.families._shared.text_encoding import tapped

PART = Part(
    network="transformers.models.qwen3.modeling_qwen3:Qwen3Model",
    folder="text_encoder",
    phase="text",
    blocks=("layers",),
    prefixes=("model.",),
    unused=("lm_head.",),
    keep_precise=("norm", "embed_tokens", "rotary_emb"),
    taps=(-2,),
)
MAX_TOKENS = 512  # of a prompt in its template, all of which are given to the transformer
TEMPLATE = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # Qwen3's for one message, thinking switched on


def load_tokenizer(folder: Path, name: str = "tokenizer"):
    """The tokenizer in `folder`. Raises Trouble("missing_file") where there is none."""
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    return tokenizers.load_from(folder, Qwen2Tokenizer)


def encode_text(
    parts: dict, prompts, *, device=None, pictures=None, variant: str = "", negative: bool = False
) -> list[dict]:
    """One encoding a prompt: {"embeds": (L, D)}. Differentiable."""
    import torch

    encoder = parts["text_encoder"]
    device = device or next(encoder.parameters()).device
    rows = [_ids(parts["tokenizer"], prompt)[:MAX_TOKENS] for prompt in prompts]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
    mask = (torch.arange(ids.shape[1])[None] < torch.tensor([len(row) for row in rows])[:, None]).to(device)
    states = tapped(encoder, PART, input_ids=ids, attention_mask=mask, use_cache=False)[0]
    return [{"embeds": states[i, : len(row)]} for i, row in enumerate(rows)]


def _ids(tokenizer, prompt: str) -> list[int]:
    return tokenizer(TEMPLATE.format(prompt.encode("utf-8", "replace").decode()))["input_ids"]


def truncated(parts: dict, prompt: str, encoding: dict, pictures=()) -> int | None:
    """How many tokens were read of a longer prompt; None where all were."""
    return MAX_TOKENS if len(_ids(parts["tokenizer"], prompt)) > MAX_TOKENS else None


def most_tokens(variant: str, *, pictures: bool = False) -> TokenCount:
    return TokenCount(MAX_TOKENS, MAX_TOKENS)


def count_tokens(
    folders: Mapping[str, Path], prompts: Sequence[str], *, variant: str, seen: Sequence[Sequence[int]] = ()
) -> list[TokenCount] | None:
    """Of each of `prompts`, by the tokenizer in folders["tokenizer"]; None where that cannot be read."""
    found = (
        token_count.counts(folders["tokenizer"], [TEMPLATE.format(one) for one in prompts])
        if "tokenizer" in folders
        else None
    )
    return None if found is None else [TokenCount(min(one, MAX_TOKENS), min(one, MAX_TOKENS)) for one in found]
