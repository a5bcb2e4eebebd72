"""CLIP's text encoder as a part."""

from __future__ import annotations

from backend.catalog.family import Part, Signature

NETWORK = "transformers.models.clip.modeling_clip:CLIPTextModel"
MAX_TOKENS = 77


def encoder(folder: str = "text_encoder") -> Part:
    return Part(
        network=NETWORK,
        folder=folder,
        phase="text",
        blocks=("encoder.layers",),
        prefixes=("text_model.", "text_encoders.clip_l.transformer.text_model."),
        unused=("embeddings.position_ids", "text_projection"),
        keep_precise=("norm", "embedding"),
    )


def signature(part: str, title: str = "CLIP text encoder") -> Signature:
    must = (
        "embeddings.token_embedding.weight",
        "encoder.layers.{}.self_attn.q_proj.bias",
        "encoder.layers.{}.mlp.fc1.weight",
        "final_layer_norm.weight",
    )
    return Signature(part, "base", must, title=title)


def sizes(shapes: dict[str, tuple[int, ...]]) -> dict:
    """Keyword arguments of CLIPTextConfig from parameter shapes; heads are 64 wide, as in the published encoders."""
    vocabulary, width = shapes["embeddings.token_embedding.weight"]
    rows = shapes["encoder.layers.0.mlp.fc1.weight"][0]
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": rows,
        "num_hidden_layers": len({name.split(".")[2] for name in shapes if name.startswith("encoder.layers.")}),
        "num_attention_heads": max(width // 64, 1),
        "max_position_embeddings": shapes["embeddings.position_embedding.weight"][0],
        "projection_dim": width,
        "hidden_act": "quick_gelu" if width == 768 else "gelu",
        "bos_token_id": 0,
        "eos_token_id": 2,  # as in the published configuration: the pooled state is then that of the highest token, which ends the text
    }
