"""FLUX.2 (dev, klein): recognition and names of its transformer; pictures are not made yet."""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Rule, Signature, SizeRule, TextSign
from backend.catalog.lora.module_names import DECODER
from backend.families._shared.bfl_keys import DOUBLE, ENDS, SINGLE, denoiser, double_blocks, embedders, single_norms
from backend.families._shared.shapes import count_blocks

NAME = "flux2"
TITLE = "FLUX.2"
WORDS = ("flux.2", "flux2", "flux_2", "klein")
PIPELINE = "Flux2ImagePipeline"

PARTS = {
    "dit": denoiser("diffusers.models.transformers.transformer_flux2:Flux2Transformer2DModel", "time_guidance_embed"),
}
SIGNATURES = tuple(
    Signature(
        "dit",
        variant,
        (f"single_stream_modulation.{leaf}.weight", f"{embedder}.weight"),
        shapes={f"{embedder}.weight": (None, width)} if width else {},
        dialect=dialect,
        title=f"FLUX.2 {variant}",
    )
    for dialect, leaf, embedder in (("", "linear", "context_embedder"), ("bfl", "lin", "txt_in"))
    for variant, width in (("other", None), ("dev", 15360), ("klein-9B", 12288), ("klein-4B", 7680))
)

_QKV_MLP = SINGLE + "attn.to_qkv_mlp_proj"  # one matrix here too
_ROWS = ((0, 1, 9), (1, 2, 9), (2, 3, 9), (3, 9, 9))  # of q, k, v and mlp in it
_MLP = (
    ("img_mlp.0", "ff.linear_in"),
    ("img_mlp.2", "ff.linear_out"),
    ("txt_mlp.0", "ff_context.linear_in"),
    ("txt_mlp.2", "ff_context.linear_out"),
)
BFL = (
    *double_blocks(),
    *(Rule("double_blocks.{}." + theirs, (DOUBLE + ours,)) for theirs, ours in _MLP),
    Rule("single_blocks.{}.linear1", (_QKV_MLP,)),
    *(Rule(f"single_blocks.{{}}.linear1.{i}", (_QKV_MLP,), place=rows) for i, rows in enumerate(_ROWS)),
    Rule("single_blocks.{}.linear2", (SINGLE + "attn.to_out",)),
    *single_norms(),
    *(
        Rule(f"{name}.lin", (f"{name}.linear",))
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    ),
    *embedders("time_guidance_embed", {"time_in": "timestep", "guidance_in": "guidance"}),
    *ENDS,
)
_SEPARATE = tuple(  # trainers that split the fused projection of the single blocks name its parts so
    Rule(SINGLE + theirs, (_QKV_MLP,), place=rows)
    for theirs, rows in zip(("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), _ROWS, strict=True)
)
NAME_MAPS = (NameMap("bfl", "dit", BFL), NameMap("separate", "dit", _SEPARATE))

_LINEAR2, _DIFFUSERS = r"(?m)^single_blocks_\d+_linear2$", r"(?m)^transformer_blocks_\d+_attn_(?:to|add)_[qkv]"
LORA_SIGNS = (
    LoraSign((r"to_qkv_mlp_proj|ff_linear_in|ff_context_linear_in|stream_modulation",)),
    *(
        LoraSign(
            (r"(?m)^double_blocks_\d+_",),
            ("img_mlp_fc1", "img_mod"),
            {r"(?:mlp_0|attn_qkv|attn_proj|linear1)$": (width,)},
        )
        for width in (6144, 4096)
    ),
    LoraSign((_LINEAR2,), ("img_mod",), {_LINEAR2: (12288, 16384, 24576)}),
    *(
        LoraSign((names,), ("img_mod",), {names: (3072,)}, {names: (rows,)})
        for names, rows in ((r"(?m)^double_blocks_\d+_\w+_mlp_0$", 18432), (r"(?m)^single_blocks_\d+_linear1$", 27648))
    ),
    LoraSign((r"(?m)^double_blocks_\d+_",), ("img_mod",), {r"(?:img|txt)_mlp_2$": (9216,)}),
    LoraSign(
        (r"(?m)^(?:double|single)_blocks_\d+_",),
        ("img_mlp_fc1", "img_mod", "individual_token_refiner", "modulation_lin"),
        {r"(?:mlp_0|attn_qkv|attn_proj|linear1)$": (3072,)},
        sure=False,
    ),
    LoraSign((_DIFFUSERS,), (r"ff_net|img_m|txt_m|attn2|norm1",), {_DIFFUSERS: (4096, 6144)}),
    LoraSign(
        (_DIFFUSERS,),
        (
            r"(?m)ff_net|img_m|txt_m|attn2|norm1|^transformer_blocks_\d\d|single_transformer_blocks_\d+_(?:attn_to_[qkv]|proj|norm)",
        ),
        {_DIFFUSERS: (3072,)},
        sure=False,
    ),
)
LORA_TEXT_SIGNS = (TextSign(DECODER, (2560, 9728)), TextSign(DECODER, (4096, 12288, 5120, 32768)))
COMPUTE_DTYPES = ("bfloat16", "float32")  # activations leave float16's range
LORA = LoraTargets(part="dit", presets={"attention": ("to_q", "to_k", "to_v", "to_out.0")}, default="attention")
DEFAULTS = Defaults(request={"width": 1024, "height": 1024, "num_inference_steps": 28})
SCHEDULER: dict = {}
SIZES = SizeRule(multiple=16, pixels=1024 * 1024)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The sizes that a FLUX.2 transformer's parameters show; rope axes are equal shares of a head."""
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    width, mlp = shapes["transformer_blocks.0.ff.linear_out.weight"]
    return {
        "patch_size": 1,
        "in_channels": shapes["x_embedder.weight"][1],
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": count_blocks(shapes, "transformer_blocks."),
        "num_single_layers": count_blocks(shapes, "single_transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": mlp / width,
        "axes_dims_rope": (head // 4,) * 4,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
    }
