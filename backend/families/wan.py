"""Wan 2.1 and 2.2: recognition and names of its transformer; pictures are not made yet."""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Part, Rule, Signature, SizeRule
from backend.families._shared.shapes import count_blocks

NAME = "wan"
TITLE = "Wan"
WORDS = ("wan2", "wan_2", "wan-2", "lora_wan")
PIPELINE = "WanVideoPipeline"

PARTS = {
    "dit": Part(
        network="diffusers.models.transformers.transformer_wan:WanTransformer3DModel",
        folder="transformer",
        phase="denoise",
        blocks=("blocks",),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "patch_embedding", "condition_embedder", "proj_out", "scale_shift_table"),
    ),
}
_VARIANTS = (
    ("1.3B", (1536, 16), "Wan 2.1 T2V 1.3B"),
    ("14B", (5120, 16), "Wan T2V 14B"),
    ("14B-I2V", (5120, 36), "Wan I2V 14B"),
    ("5B", (3072, 48), "Wan 2.2 TI2V 5B"),
)
SIGNATURES = tuple(
    Signature(
        "dit",
        variant,
        must,
        shapes={"patch_embedding.weight": (*size, None, None, None)} if size else {},
        dialect=dialect,
        title=title,
    )
    for dialect, must in (
        (
            "",
            (
                "blocks.{}.attn1.to_q.weight",
                "patch_embedding.weight",
                "condition_embedder.text_embedder.linear_1.weight",
            ),
        ),
        ("native", ("blocks.{}.self_attn.q.weight", "patch_embedding.weight", "head.modulation")),
    )
    for variant, size, title in (("other", (), "Wan"), *_VARIANTS)
)
WHOLE_CONFIG = {"image_dim": 1280, "added_kv_proj_dim": 5120}


def _attention(theirs: str, ours: str) -> tuple[Rule, ...]:
    names = (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"), ("norm_q", "norm_q"), ("norm_k", "norm_k"))
    image = (("k_img", "add_k_proj"), ("v_img", "add_v_proj"), ("norm_k_img", "norm_added_k"))
    return tuple(
        Rule(f"blocks.{{}}.{theirs}.{original}", (f"blocks.{{}}.{ours}.{name}",))
        for original, name in (*names, *(image if theirs == "cross_attn" else ()))
    )


_EMBEDDERS = (
    ("time_embedding", "time_embedder"),
    ("text_embedding", "text_embedder"),
)
NATIVE = (
    *_attention("self_attn", "attn1"),
    *_attention("cross_attn", "attn2"),
    Rule("blocks.{}.ffn.0", ("blocks.{}.ffn.net.0.proj",)),
    Rule("blocks.{}.ffn.2", ("blocks.{}.ffn.net.2",)),
    Rule("blocks.{}.norm3", ("blocks.{}.norm2",)),
    Rule("blocks.{}.modulation", ("blocks.{}",), parameter="scale_shift_table"),
    *(
        Rule(f"{theirs}.{index}", (f"condition_embedder.{ours}.linear_{number}",))
        for theirs, ours in _EMBEDDERS
        for number, index in ((1, 0), (2, 2))
    ),
    Rule("time_projection.1", ("condition_embedder.time_proj",)),
    *(
        Rule(f"img_emb.proj.{index}", (f"condition_embedder.image_embedder.{name}",))
        for index, name in ((0, "norm1"), (1, "ff.net.0.proj"), (3, "ff.net.2"), (4, "norm2"))
    ),
    Rule("head.head", ("proj_out",)),
    Rule("head.modulation", ("",), parameter="scale_shift_table"),
)
NAME_MAPS = (NameMap("native", "dit", NATIVE),)

LORA_SIGNS = (
    LoraSign(
        (r"(?m)^blocks_\d+_(?:self_attn|cross_attn|attn[12])_|(?m:^)blocks_\d+_ffn_(?:0|2|net)",),
        (r"(?:self|cross)_attn_(?:[qkv]|output)_proj|adaln_modulation",),  # Cosmos and its kin
    ),
)
LORA = LoraTargets(part="dit", presets={"attention": ("to_q", "to_k", "to_v", "to_out.0")}, default="attention")
DEFAULTS = Defaults(request={"width": 832, "height": 480, "num_inference_steps": 50, "guidance": 5.0})
SCHEDULER: dict = {}
SIZES = SizeRule(multiple=16, pixels=832 * 480)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The sizes that a Wan transformer's parameters show; a head has 128 numbers where the width divides by it."""
    width, channels, *patch = shapes["patch_embedding.weight"]
    head = 128 if width % 128 == 0 else 16
    image = shapes.get("condition_embedder.image_embedder.ff.net.0.proj.weight")
    cells = patch[0] * patch[1] * patch[2]
    return {
        "patch_size": tuple(patch),
        "num_attention_heads": width // head,
        "attention_head_dim": head,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // cells,
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "num_layers": count_blocks(shapes, "blocks."),
        "cross_attn_norm": "blocks.0.norm2.weight" in shapes,
        "image_dim": image[1] if image else None,
        "added_kv_proj_dim": width if "blocks.0.attn2.add_k_proj.weight" in shapes else None,
    }


def predict(parts: dict, x, sigma, cond: dict, *, part: str = "dit", sigma_next=None):
    """The velocity (noise - video) at `x` (B, C, F, h, w) and `sigma` (B,). `cond`: "embeds" (B, L, D), and of models that begin from a
    picture "image" (B, 257, 1280)."""
    return parts[part](
        x, sigma * 1000, cond["embeds"], encoder_hidden_states_image=cond.get("image"), return_dict=False
    )[0]


def example_inputs(module, point, dtype):
    """A point's tensors without numbers."""
    import torch

    batch, said = point["b"], module.config
    cond = {"embeds": torch.empty(batch, 512, said.text_dim, dtype=dtype)}
    if said.image_dim:
        cond["image"] = torch.empty(batch, 257, said.image_dim, dtype=dtype)
    x = torch.empty(batch, said.in_channels, point["f"], point["h"], point["w"], dtype=dtype)
    return x, torch.empty(batch), cond
