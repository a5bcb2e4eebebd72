"""Z-Image (Turbo, Base): recognition and names of its transformer; pictures are not made yet."""

from __future__ import annotations

from backend.catalog.family import Defaults, LoraSign, LoraTargets, NameMap, Part, Rule, Signature, SizeRule, TextSign
from backend.catalog.lora.module_names import DECODER

NAME = "z_image"
TITLE = "Z-Image"
WORDS = ("z-image", "zimage", "z_image")
PIPELINE = "ZImagePipeline"

PARTS = {
    "dit": Part(
        network="diffusers.models.transformers.transformer_z_image:ZImageTransformer2DModel",
        folder="transformer",
        phase="denoise",
        blocks=("noise_refiner", "context_refiner", "layers"),
        prefixes=("model.diffusion_model.", "diffusion_model.", "transformer.", "model."),
        keep_precise=("norm", "embedder", "final_layer", "adaLN"),
    ),
}
_WIDTH = {"cap_embedder.1.weight": (3840, None)}
SIGNATURES = (
    Signature(
        "dit",
        "base",
        ("cap_embedder.1.weight", "noise_refiner.{}.attention.to_q.weight", "layers.{}.adaLN_modulation.0.weight"),
        shapes=_WIDTH,
        title="Z-Image",
    ),
    Signature(
        "dit",
        "base",
        ("cap_embedder.1.weight", "noise_refiner.{}.attention.qkv.weight", "layers.{}.adaLN_modulation.0.weight"),
        shapes=_WIDTH,
        dialect="native",
        title="Z-Image",
    ),
)


def _inside(block: str) -> tuple[Rule, ...]:
    ours = block + ".{}.attention."
    return (
        Rule(ours + "qkv", tuple(ours + f"to_{name}" for name in "qkv")),
        Rule(block + ".{}.attention_qkv", tuple(ours + f"to_{name}" for name in "qkv")),
        Rule(ours + "out", (ours + "to_out.0",)),
        Rule(ours + "q_norm", (ours + "norm_q",)),
        Rule(ours + "k_norm", (ours + "norm_k",)),
    )


NATIVE = (
    *(rule for block in ("layers", "noise_refiner", "context_refiner") for rule in _inside(block)),
    Rule("x_embedder", ("all_x_embedder.2-1",)),
    Rule("final_layer.linear", ("all_final_layer.2-1.linear",)),
    Rule("final_layer.adaLN_modulation.1", ("all_final_layer.2-1.adaLN_modulation.1",)),
)
NAME_MAPS = (NameMap("native", "dit", NATIVE),)

_BLOCK = r"(?m)^(?:layers|noise_refiner|context_refiner)_\d+_(?:attention|feed_forward|adaLN)"
LORA_SIGNS = (
    LoraSign((_BLOCK,), widths={r"_(?:attention_\w+|feed_forward_w[13])$": (3840,)}),
    LoraSign((_BLOCK,), widths={r"_feed_forward_w2$": (10240,)}),
    LoraSign((_BLOCK,), widths={r"_adaLN_modulation_0$": (256,)}),
)
LORA_TEXT_SIGNS = (TextSign(DECODER, (2560, 9728)),)
COMPUTE_DTYPES = ("bfloat16", "float32")  # activations leave float16's range
LORA = LoraTargets(part="dit", presets={"attention": ("to_q", "to_k", "to_v", "to_out.0")}, default="attention")
DEFAULTS = Defaults(request={"width": 1024, "height": 1024, "num_inference_steps": 9, "guidance": 1.0})
SCHEDULER: dict = {}
SIZES = SizeRule(multiple=16, pixels=1024 * 1024)


def config_from_shapes(part: str, shapes: dict[str, tuple[int, ...]]) -> dict:
    """The sizes that a Z-Image transformer's parameters show; rope axes as published, a quarter and two times three eighths of a head."""
    head = shapes["layers.0.attention.norm_q.weight"][0]
    width = shapes["cap_embedder.1.weight"][0]
    return {
        "in_channels": shapes["all_x_embedder.2-1.weight"][1] // 4,
        "dim": width,
        "n_layers": _count(shapes, "layers."),
        "n_refiner_layers": _count(shapes, "noise_refiner."),
        "n_heads": width // head,
        "n_kv_heads": shapes["layers.0.attention.to_k.weight"][0] // head,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        "axes_dims": [head - head // 8 * 6, head // 8 * 3, head // 8 * 3],
        "axes_lens": [1536, 512, 512],
    }


def _count(shapes: dict[str, tuple[int, ...]], beginning: str) -> int:
    return len({name[len(beginning) :].partition(".")[0] for name in shapes if name.startswith(beginning)})


def predict(parts: dict, x, sigma, cond: dict, *, part: str = "dit", sigma_next=None):
    """The velocity (noise - picture) at `x` (B, C, h, w) and `sigma` (B,). `cond`: "embeds", a list of (L_i, D). The network counts time from noise
    to picture and gives the negative."""
    import torch

    pictures = list(x.unsqueeze(2).unbind(0))
    found = parts[part](pictures, 1 - sigma, cond["embeds"], return_dict=False)[0]
    return -torch.stack(found).squeeze(2)


def example_inputs(module, point, dtype):
    """A point's tensors without numbers."""
    import torch

    batch, said = point["b"], module.config
    cond = {"embeds": [torch.empty(point["t"], said.cap_feat_dim, dtype=dtype) for _ in range(batch)]}
    return (
        torch.empty(batch, said.in_channels, point["h"], point["w"], dtype=dtype),
        torch.empty(batch, dtype=dtype),
        cond,
    )
