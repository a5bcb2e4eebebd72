"""FLUX.2 (dev, klein): recognition and names of its transformer; pictures are not made yet."""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Part, Rule, Signature, SizeRule

NAME = "flux2"
TITLE = "FLUX.2"
WORDS = ("flux.2", "flux2", "flux_2", "klein")

PARTS = {
    "dit": Part(
        network="diffusers.models.transformers.transformer_flux2:Flux2Transformer2DModel",
        folder="transformer",
        phase="denoise",
        blocks=("transformer_blocks", "single_transformer_blocks"),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "pos_embed", "x_embedder", "context_embedder", "time_guidance_embed", "proj_out"),
    ),
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

_DOUBLE, _SINGLE = "transformer_blocks.{}.", "single_transformer_blocks.{}."
_NORM = {"scale": "weight"}
_MLP = (
    ("img_mlp.0", "ff.linear_in"),
    ("img_mlp.2", "ff.linear_out"),
    ("txt_mlp.0", "ff_context.linear_in"),
    ("txt_mlp.2", "ff_context.linear_out"),
)
BFL = (
    Rule("double_blocks.{}.img_attn.qkv", tuple(_DOUBLE + f"attn.to_{name}" for name in "qkv")),
    Rule("double_blocks.{}.txt_attn.qkv", tuple(_DOUBLE + f"attn.add_{name}_proj" for name in "qkv")),
    *(Rule("double_blocks.{}.img_attn.qkv." + str(i), (_DOUBLE + f"attn.to_{name}",)) for i, name in enumerate("qkv")),
    *(
        Rule("double_blocks.{}.txt_attn.qkv." + str(i), (_DOUBLE + f"attn.add_{name}_proj",))
        for i, name in enumerate("qkv")
    ),
    Rule("double_blocks.{}.img_attn.proj", (_DOUBLE + "attn.to_out.0",)),
    Rule("double_blocks.{}.txt_attn.proj", (_DOUBLE + "attn.to_add_out",)),
    *(Rule("double_blocks.{}." + theirs, (_DOUBLE + ours,)) for theirs, ours in _MLP),
    Rule("double_blocks.{}.img_attn.norm.query_norm", (_DOUBLE + "attn.norm_q",), leaf=_NORM),
    Rule("double_blocks.{}.img_attn.norm.key_norm", (_DOUBLE + "attn.norm_k",), leaf=_NORM),
    Rule("double_blocks.{}.txt_attn.norm.query_norm", (_DOUBLE + "attn.norm_added_q",), leaf=_NORM),
    Rule("double_blocks.{}.txt_attn.norm.key_norm", (_DOUBLE + "attn.norm_added_k",), leaf=_NORM),
    Rule("single_blocks.{}.linear1", (_SINGLE + "attn.to_qkv_mlp_proj",)),
    *(
        Rule("single_blocks.{}.linear1." + str(i), (_SINGLE + "attn.to_qkv_mlp_proj",), place=place)
        for i, place in enumerate(((0, 1, 9), (1, 2, 9), (2, 3, 9), (3, 9, 9)))
    ),
    Rule("single_blocks.{}.linear2", (_SINGLE + "attn.to_out",)),
    Rule("single_blocks.{}.norm.query_norm", (_SINGLE + "attn.norm_q",), leaf=_NORM),
    Rule("single_blocks.{}.norm.key_norm", (_SINGLE + "attn.norm_k",), leaf=_NORM),
    *(
        Rule(f"{name}.lin", (f"{name}.linear",))
        for name in ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")
    ),
    *(
        Rule(f"{theirs}.{end}", (f"time_guidance_embed.{ours}_embedder.linear_{number}",))
        for theirs, ours in (("time_in", "timestep"), ("guidance_in", "guidance"))
        for number, end in ((1, "in_layer"), (2, "out_layer"))
    ),
    Rule("img_in", ("x_embedder",)),
    Rule("txt_in", ("context_embedder",)),
    Rule("final_layer.linear", ("proj_out",)),
    Rule("final_layer.adaLN_modulation.1", ("norm_out.linear",), swap_halves=True),
)
_SEPARATE = (  # trainers that split the fused projection of the single blocks name its parts so
    *(
        Rule("single_transformer_blocks.{}.attn." + theirs, (_SINGLE + "attn.to_qkv_mlp_proj",), place=place)
        for theirs, place in (("to_q", (0, 1, 9)), ("to_k", (1, 2, 9)), ("to_v", (2, 3, 9)))
    ),
    Rule("single_transformer_blocks.{}.proj_mlp", (_SINGLE + "attn.to_qkv_mlp_proj",), place=(3, 9, 9)),
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
        "num_layers": _count(shapes, "transformer_blocks."),
        "num_single_layers": _count(shapes, "single_transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "mlp_ratio": mlp / width,
        "axes_dims_rope": (head // 4,) * 4,
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def _count(shapes: dict[str, tuple[int, ...]], beginning: str) -> int:
    return len({name[len(beginning) :].partition(".")[0] for name in shapes if name.startswith(beginning)})
