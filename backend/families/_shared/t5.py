"""T5's encoder as a part: `T5Stack`, which has the embedding of tokens as its own, so that no weight is there under
two names."""

from __future__ import annotations

from backend.catalog.family import NameMap, Part, Rule, Signature

NETWORK = "transformers.models.t5.modeling_t5:T5Stack"
_LAYERS = (
    *(f"layer.0.SelfAttention.{name}" for name in ("q", "k", "v", "o", "relative_attention_bias")),
    "layer.0.layer_norm",
    *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
    "layer.1.layer_norm",
)


def encoder(folder: str) -> Part:
    return Part(
        network=NETWORK,
        folder=folder,
        phase="text",
        blocks=("block",),
        unused=("encoder.embed_tokens.", "decoder.", "lm_head."),  # the first is `shared` once more
        keep_precise=("norm", "embed_tokens", "relative_attention_bias"),
    )


def signatures(part: str) -> tuple[Signature, ...]:
    """T5 with gated GELU (v1.1 and XXL), as transformers saves the encoder."""
    ours = ("block.{}.layer.0.SelfAttention.q.weight", "block.{}.layer.1.DenseReluDense.wi_1.weight")
    theirs = tuple("encoder." + name for name in ours)
    return (
        Signature(part, "base", (*ours, "embed_tokens.weight"), title="T5 encoder"),
        Signature(part, "base", ("shared.weight", *theirs), dialect="t5", title="T5 encoder"),
    )


def names(part: str) -> NameMap:
    rules = [Rule(f"encoder.block.{{}}.{layer}", (f"block.{{}}.{layer}",)) for layer in _LAYERS]
    return NameMap(
        "t5", part, (Rule("shared", ("embed_tokens",)), Rule("encoder.final_layer_norm", ("final_layer_norm",)), *rules)
    )


def sizes(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Keyword arguments of T5Config from parameter shapes."""
    heads = shapes["block.0.layer.0.SelfAttention.relative_attention_bias.weight"][1]
    vocabulary, width = shapes["embed_tokens.weight"]
    return {
        "vocab_size": vocabulary,
        "d_model": width,
        "d_kv": shapes["block.0.layer.0.SelfAttention.q.weight"][0] // heads,
        "d_ff": shapes["block.0.layer.1.DenseReluDense.wi_0.weight"][0],
        "num_layers": len({name.split(".")[1] for name in shapes if name.startswith("block.")}),
        "num_heads": heads,
        "feed_forward_proj": "gated-gelu",
        "is_encoder_decoder": False,
        "use_cache": False,
    }
