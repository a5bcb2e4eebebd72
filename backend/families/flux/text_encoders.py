"""FLUX.1's two text encoders: CLIP's pooled state, and T5's states of every token. Shapes as in `flux`."""

from __future__ import annotations

from pathlib import Path

from backend.families._shared import clip, tokenizers

MAX_TOKENS = 512  # that T5 reads; shorter prompts are filled up to it, as in training


def load_tokenizer(folder: Path, name: str = "tokenizer"):
    """CLIP's tokenizer ("tokenizer") or T5's ("tokenizer_2") in `folder`. Raises Trouble("missing_file") where there
    is none."""
    from transformers import CLIPTokenizer, T5TokenizerFast

    if name == "tokenizer":
        return tokenizers.load_from(folder, CLIPTokenizer)
    return tokenizers.load_from(folder, T5TokenizerFast, files=("tokenizer.json", "spiece.model"), name=name)


def encode_text(
    parts: dict, prompts, *, device=None, pictures=None, variant: str = "", negative: bool = False
) -> list[dict]:
    """One encoding a prompt: {"embeds": (L, D), "pooled": (P,)}. Differentiable. Both encoders read the same words."""
    encoder, long_encoder = parts["text_encoder"], parts["text_encoder_2"]
    short = min(parts["tokenizer"].model_max_length, clip.MAX_TOKENS)
    pooled = encoder(input_ids=_ids(parts["tokenizer"], prompts, short, encoder, device)).pooler_output
    ids = _ids(parts["tokenizer_2"], prompts, MAX_TOKENS, long_encoder, device)
    embeds = long_encoder(input_ids=ids, use_cache=False).last_hidden_state
    return [{"embeds": embeds[i], "pooled": pooled[i].to(embeds.device)} for i in range(len(prompts))]


def _ids(tokenizer, prompts, length: int, encoder, device):
    """(B, length) on the encoder's device, filled up and cut."""
    words = [prompt.encode("utf-8", "replace").decode() for prompt in prompts]
    found = tokenizer(words, padding="max_length", max_length=length, truncation=True, return_tensors="pt").input_ids
    return found.to(device or next(encoder.parameters()).device)


def truncated(parts: dict, prompt: str, encoding: dict, pictures=()) -> int | None:
    """How many tokens T5 read of a longer prompt; None where it read all."""
    words = prompt.encode("utf-8", "replace").decode()
    return MAX_TOKENS if len(parts["tokenizer_2"](words)["input_ids"]) > MAX_TOKENS else None


def trace_encoder(part: str, module, point, dtype):
    """T5 for `t` tokens and `b` prompts, on tensors that are never read; None: CLIP, as it is usually called."""
    import torch

    if part != "text_encoder_2":
        return None
    return module(input_ids=torch.zeros(point["b"], point["t"], dtype=torch.long), use_cache=False).last_hidden_state
