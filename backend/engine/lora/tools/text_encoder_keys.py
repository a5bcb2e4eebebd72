"""Key names of text encoders in LoRA files, for each layout, without a loaded model."""

from __future__ import annotations

import re
from functools import lru_cache

from backend.catalog.family import Family
from backend.catalog.state_dict_keys import fill, flatten

CLIP = tuple(
    f"text_model.encoder.layers.{{}}.{name}"
    for name in (*(f"self_attn.{letter}_proj" for letter in ("q", "k", "v", "out")), "mlp.fc1", "mlp.fc2")
)
T5 = tuple(
    f"encoder.block.{{}}.layer.{{}}.{name}"
    for name in (
        *(f"SelfAttention.{letter}" for letter in "qkvo"),
        *(f"DenseReluDense.{name}" for name in ("wi", "wi_0", "wi_1", "wo")),
    )
)
DECODER = tuple(  # encoders that are language models
    f"model.layers.{{}}.{name}"
    for name in (
        *(f"self_attn.{letter}_proj" for letter in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
)
TEMPLATES = (*CLIP, *T5, *DECODER, "text_projection")
MARK = ":"  # between the encoder and the module in the names that contents go by
NUMBERS = {"text_encoder": "1", "text_encoder_2": "2", "text_encoder_3": "3"}


def text_module(component: str, name: str) -> str | None:
    """The name that contents know an encoder's module by, whether `name` is dotted or flattened; None where it is none
    of theirs."""
    if component not in NUMBERS:
        return None
    flat = flatten(name)
    for pattern, template in _patterns():
        match = pattern.fullmatch(flat)
        if match:
            return f"{component}{MARK}{fill(template, match.groups())}"
    return None


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern, str], ...]:
    return tuple((re.compile(re.escape(flatten(one)).replace(r"\{\}", r"(\d+)")), one) for one in TEMPLATES)


def text_stem(module: str, layout: str, family: Family) -> str:
    """How a file in `layout` spells a module of an encoder."""
    component, _, name = module.partition(MARK)
    number = NUMBERS[component]
    if layout == "diffusers":
        return f"{component}.{name}"
    own = family.LORA_TEXT_NAMES.get(layout, {}).get(component)
    if layout == "kohya":
        return f"{own or f'lora_te{number}'}_{flatten(name)}"
    if own is None and name.startswith("encoder.block."):
        own = "t5xxl"
    return f"text_encoders.{own or ('clip_g' if number == '2' else 'clip_l')}.transformer.{name}"
