"""FLUX.1 (dev, schnell, Krea, Kontext, Fill, Depth, Canny): recognition and names of its transformer; pictures are not made yet."""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Rule, Signature, SizeRule, TextSign
from backend.catalog.lora.module_names import CLIP, FIRST, T5
from backend.families._bfl_keys import DOUBLE, ENDS, SINGLE, denoiser, double_blocks, embedders, single_norms

NAME = "flux"
TITLE = "FLUX.1"
WORDS = ("flux-1", "flux1", "flux.1", "lora_flux")
PIPELINE = "FluxImagePipeline"

PARTS = {
    "dit": denoiser("diffusers.models.transformers.transformer_flux:FluxTransformer2DModel", "time_text_embed"),
}

_OURS = (
    "single_transformer_blocks.{}.proj_mlp.weight",
    "transformer_blocks.{}.attn.add_q_proj.weight",
    "x_embedder.weight",
)
_THEIRS = ("double_blocks.{}.img_attn.norm.key_norm.scale", "single_blocks.{}.linear1.weight", "img_in.weight")
_NOT = (
    "distilled_guidance_layer.in_proj.weight",
    "txt_in.individual_token_refiner.blocks.{}.norm1.weight",
    "single_stream_modulation.lin.weight",
)


def _signatures() -> tuple[Signature, ...]:
    found = []
    for dialect, must, embedder, guidance in (
        ("", _OURS, "x_embedder.weight", "time_text_embed.guidance_embedder.linear_1.weight"),
        ("bfl", _THEIRS, "img_in.weight", "guidance_in.in_layer.weight"),
    ):
        found.append(Signature("dit", "schnell", must, (*_NOT, guidance), dialect=dialect, title="FLUX.1 schnell"))
        found.append(Signature("dit", "dev", (*must, guidance), _NOT, dialect=dialect, title="FLUX.1 dev"))
        for variant, width in (("fill", 384), ("control", 128)):
            shapes = {embedder: (None, width)}
            found.append(Signature("dit", variant, (*must, guidance), _NOT, shapes, dialect, f"FLUX.1 {variant}"))
    return tuple(found)


SIGNATURES = _signatures()
WHOLE_CONFIG = {"guidance_embeds": True}

_QKV_MLP = (SINGLE + "attn.to_q", SINGLE + "attn.to_k", SINGLE + "attn.to_v", SINGLE + "proj_mlp")
_MLP = (("img_mlp.0", "ff.net.0.proj"), ("img_mlp.2", "ff.net.2"), ("txt_mlp.0", "ff_context.net.0.proj"))
BFL = (
    *double_blocks(),
    *(
        Rule("double_blocks.{}." + theirs, (DOUBLE + ours,))
        for theirs, ours in (*_MLP, ("txt_mlp.2", "ff_context.net.2"))
    ),
    Rule("double_blocks.{}.img_mod.lin", (DOUBLE + "norm1.linear",)),
    Rule("double_blocks.{}.txt_mod.lin", (DOUBLE + "norm1_context.linear",)),
    Rule("single_blocks.{}.linear1", _QKV_MLP, rows=(1, 1, 1, 4)),
    *(Rule(f"single_blocks.{{}}.linear1.{place}", (name,)) for place, name in enumerate(_QKV_MLP)),
    Rule("single_blocks.{}.qkv", _QKV_MLP[:3]),
    Rule("single_blocks.{}.linear2", (SINGLE + "proj_out",)),
    Rule("single_blocks.{}.modulation.lin", (SINGLE + "norm.linear",)),
    *single_norms(),
    *embedders("time_text_embed", {"time_in": "timestep", "vector_in": "text", "guidance_in": "guidance"}),
    *ENDS,
)
DIFFSYNTH = (  # a: the picture's stream, b: the text's
    Rule("blocks.{}.attn.a_to_qkv", tuple(DOUBLE + f"attn.to_{name}" for name in "qkv")),
    Rule("blocks.{}.attn.b_to_qkv", tuple(DOUBLE + f"attn.add_{name}_proj" for name in "qkv")),
    Rule("blocks.{}.attn.a_to_out", (DOUBLE + "attn.to_out.0",)),
    Rule("blocks.{}.attn.b_to_out", (DOUBLE + "attn.to_add_out",)),
    Rule("blocks.{}.ff_a.0", (DOUBLE + "ff.net.0.proj",)),
    Rule("blocks.{}.ff_a.2", (DOUBLE + "ff.net.2",)),
    Rule("blocks.{}.ff_b.0", (DOUBLE + "ff_context.net.0.proj",)),
    Rule("blocks.{}.ff_b.2", (DOUBLE + "ff_context.net.2",)),
    Rule("blocks.{}.norm1_a.linear", (DOUBLE + "norm1.linear",)),
    Rule("blocks.{}.norm1_b.linear", (DOUBLE + "norm1_context.linear",)),
    Rule("single_blocks.{}.to_qkv_mlp", _QKV_MLP, rows=(1, 1, 1, 4)),
    Rule("single_blocks.{}.proj_out", (SINGLE + "proj_out",)),
    Rule("single_blocks.{}.norm.linear", (SINGLE + "norm.linear",)),
)
NAME_MAPS = (NameMap("bfl", "dit", BFL), NameMap("diffsynth", "dit", DIFFSYNTH))

_OTHERS = (
    "img_mlp_fc1",
    "img_mod_linear",
    "individual_token_refiner",
    "stream_modulation",
    "distilled_guidance",
    "to_qkv_mlp_proj",
)
LORA_SIGNS = (
    LoraSign((r"(?m)^single_blocks_\d+_linear2",), _OTHERS, {r"single_blocks_\d+_linear2$": (15360,)}),
    LoraSign(
        (r"(?m)^double_blocks_\d+_(?:img|txt)_mlp_2",),
        _OTHERS,
        {r"double_blocks_\d+_\w+_mlp_2$": (12288,), r"_(?:mlp_0|attn_qkv|attn_proj|linear1)$": (3072,)},
    ),
    *(
        LoraSign((names,), _OTHERS, {names: (3072,)}, {names: (rows,)})
        for names, rows in ((r"(?m)^double_blocks_\d+_\w+_mlp_0$", 12288), (r"(?m)^single_blocks_\d+_linear1$", 21504))
    ),
    LoraSign((r"(?m)^single_transformer_blocks_\d+_(?:attn_to_[qkv]|proj_mlp|proj_out|norm_linear)",), _OTHERS),
    LoraSign((r"(?m)^blocks_\d+_attn_[ab]_to_qkv",)),
    LoraSign(
        (r"(?m)^(?:double|single)_blocks_\d+_(?:img|txt|linear|modulation|processor|qkv|norm|to_qkv)",),
        _OTHERS,
        sure=False,
    ),
    LoraSign(
        (r"(?m)^transformer_blocks_\d+_attn_(?:to|add)_[qkv]",),
        (*_OTHERS, "img_m", "txt_m", "attn2"),
        {r"attn_(?:to|add)_[qkv]": (3072,)},
        sure=False,
    ),
)

LORA_TEXT_SIGNS = (TextSign(CLIP, (768, 3072), FIRST), TextSign(T5, (4096, 10240)))
LORA = LoraTargets(
    part="dit",
    presets={"attention": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")},
    default="attention",
)
DEFAULTS = Defaults(request={"width": 1024, "height": 1024, "num_inference_steps": 28, "guidance": 3.5})
SCHEDULER: dict = {}
SIZES = SizeRule(multiple=16, pixels=1024 * 1024)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The sizes that a FLUX.1 transformer's parameters show; rope axes as in the published models where the width is theirs."""
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    width = shapes["transformer_blocks.0.attn.to_q.weight"][0]
    axes = (16, 56, 56) if head == 128 else (head // 4, head // 8 * 3, head - head // 4 - head // 8 * 3)
    return {
        "patch_size": 1,
        "in_channels": shapes["x_embedder.weight"][1],
        "out_channels": shapes["proj_out.weight"][0],
        "num_layers": _count(shapes, "transformer_blocks."),
        "num_single_layers": _count(shapes, "single_transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "axes_dims_rope": axes,
    }


def _count(shapes: dict[str, tuple[int, ...]], beginning: str) -> int:
    return len({name[len(beginning) :].partition(".")[0] for name in shapes if name.startswith(beginning)})


def predict(parts: dict, x, sigma, cond: dict, *, part: str = "dit", sigma_next=None):
    """The velocity (noise - picture) at `x` (B, C, h, w) and `sigma` (B,). `cond`: "embeds" (B, L, 4096) of T5, "pooled" (B, 768) of CLIP and, of
    models distilled with it, "guidance" (B,)."""
    import torch

    rows, columns = x.shape[-2] // 2, x.shape[-1] // 2
    grid = torch.zeros(rows, columns, 3, device=x.device, dtype=x.dtype)
    grid[..., 1] += torch.arange(rows, device=x.device)[:, None]
    grid[..., 2] += torch.arange(columns, device=x.device)[None]
    velocity = parts[part](
        hidden_states=pack(x),
        encoder_hidden_states=cond["embeds"],
        pooled_projections=cond["pooled"],
        timestep=(sigma * 1000).to(x.dtype) / 1000,  # in this order, so that it rounds as in diffusers
        guidance=cond.get("guidance"),
        img_ids=grid.reshape(-1, 3),
        txt_ids=torch.zeros(cond["embeds"].shape[1], 3, device=x.device, dtype=x.dtype),
        return_dict=False,
    )[0]
    return unpack(velocity, rows, columns)


def pack(x):
    """Latents (B, C, h, w) as tokens of 2 x 2 cells (B, h/2 * w/2, 4C)."""
    batch, channels, height, width = x.shape
    x = x.reshape(batch, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(batch, (height // 2) * (width // 2), channels * 4)


def unpack(tokens, height: int, width: int):
    """The inverse of `pack` for a grid of `height` x `width` tokens."""
    batch, _, channels = tokens.shape
    x = tokens.reshape(batch, height, width, channels // 4, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(batch, channels // 4, height * 2, width * 2)


def example_inputs(module, point, dtype):
    """A point's tensors without numbers."""
    import torch

    batch, said = point["b"], module.config
    cond = {
        "embeds": torch.empty(batch, point["t"], said.joint_attention_dim, dtype=dtype),
        "pooled": torch.empty(batch, said.pooled_projection_dim, dtype=dtype),
    }
    if said.guidance_embeds:
        cond["guidance"] = torch.empty(batch, dtype=dtype)
    return torch.empty(batch, said.in_channels // 4, point["h"], point["w"], dtype=dtype), torch.empty(batch), cond
