"""Joint attention of the Qwen-Image transformer in plain matrix products, for training small models on the CPU.

There the fused kernel's backward pass takes a third of a step and complex numbers are slow; this gives the stock processor's
numbers, to rounding, in about half the time. Memory grows with the square of the tokens, so it is for short sequences only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_TOKENS = 512


class PlainAttention:
    """An attention processor with the stock processor's call and results."""

    def __call__(
        self,
        attn,
        hidden_states,
        encoder_hidden_states=None,
        encoder_hidden_states_mask=None,
        attention_mask=None,
        image_rotary_emb=None,
    ):
        """Pictures' tokens (B, I, C) and text's (B, T, C), the text's mask (B, T): (B, I, C) and (B, T, C)."""
        import torch

        assert attention_mask is None and image_rotary_emb is not None
        text_tokens, heads = encoder_hidden_states.shape[1], (attn.heads, attn.inner_dim // attn.heads)
        query = _joined(
            attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(-1, heads)),
            attn.norm_q(attn.to_q(hidden_states).unflatten(-1, heads)),
        )
        key = _joined(
            attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(-1, heads)),
            attn.norm_k(attn.to_k(hidden_states).unflatten(-1, heads)),
        )
        value = _joined(
            attn.add_v_proj(encoder_hidden_states).unflatten(-1, heads), attn.to_v(hidden_states).unflatten(-1, heads)
        )
        turns = torch.cat([image_rotary_emb[1], image_rotary_emb[0]])
        query, key = turned(query, turns), turned(key, turns)
        scores = (query @ key.transpose(2, 3)) * heads[1] ** -0.5
        if encoder_hidden_states_mask is not None:
            shift = torch.zeros(encoder_hidden_states_mask.shape, dtype=scores.dtype, device=scores.device)
            shift.masked_fill_(~encoder_hidden_states_mask.bool(), float("-inf"))
            scores = scores + torch.nn.functional.pad(shift, (0, hidden_states.shape[1]))[:, None, None]
        out = (torch.softmax(scores.float(), -1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
        picture = out[:, text_tokens:].contiguous()
        for layer in attn.to_out:
            picture = layer(picture)
        return picture, attn.to_add_out(out[:, :text_tokens].contiguous())


def _joined(text: torch.Tensor, picture: torch.Tensor) -> torch.Tensor:
    """(B, T, H, D) and (B, I, H, D) to (B, H, T + I, D)."""
    import torch

    return torch.cat([text, picture.to(text.dtype)], 1).transpose(1, 2).contiguous()


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of (B, H, L, D) by complex `turns` (L, D / 2), neighbouring numbers being one complex number."""
    cosine = turns.real.repeat_interleave(2, -1).to(x.dtype)
    sine = turns.imag.repeat_interleave(2, -1).to(x.dtype)
    return x * cosine + (x @ _quarter(x.shape[-1], x.dtype, x.device)) * sine


def _quarter(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The matrix of a quarter turn of each pair: (a, b) to (-b, a)."""
    import torch

    matrix = torch.zeros(size, size, dtype=dtype, device=device)
    even = torch.arange(0, size, 2)
    matrix[even + 1, even] = -1
    matrix[even, even + 1] = 1
    return matrix


def use_cpu_attention(module: torch.nn.Module) -> bool:
    """Gives a transformer that has the stock joint attention this one; whether it had any."""
    found = [
        m
        for m in module.modules()
        if type(getattr(m, "processor", None)).__name__ == "QwenDoubleStreamAttnProcessor2_0"
    ]
    for attention in found:
        attention.processor = PlainAttention()
    return bool(found)
