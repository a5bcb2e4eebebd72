"""Tiny transformers and UNets of every family whose LoRA files are read, and what tests of LoRA files have in common."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

CASES = Path(__file__).parent / "cases" / "lora"


def build(name: str) -> torch.nn.Module:
    """The handed tiny model `name`, float32; random weights where none were handed."""
    import diffusers

    folder = CASES / "models" / name
    config = json.loads((folder / "config.json").read_text())
    torch.manual_seed(0)
    model = getattr(diffusers, config.pop("_class_name"))(**config).eval().requires_grad_(False)
    weights = folder / "diffusion_pytorch_model.safetensors"
    if weights.exists():
        model.load_state_dict(load_file(weights))
    return model


@cache
def shared(name: str) -> torch.nn.Module:
    """`build(name)`, one for all tests of a session: whoever changes it puts it back."""
    return build(name) if (CASES / "models" / name).is_dir() else make(name)


def make(family: str) -> torch.nn.Module:
    """A tiny model of `family` with random weights, float32."""
    import diffusers

    torch.manual_seed(1)
    kind, config = {
        "flux2": (
            "Flux2Transformer2DModel",
            {
                "in_channels": 4,
                "num_layers": 2,
                "num_single_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 24,
                "timestep_guidance_channels": 16,
                "axes_dims_rope": (4, 4, 4, 4),
            },
        ),
        "z_image": (
            "ZImageTransformer2DModel",
            {
                "in_channels": 4,
                "dim": 32,
                "n_layers": 2,
                "n_refiner_layers": 1,
                "n_heads": 2,
                "n_kv_heads": 2,
                "cap_feat_dim": 24,
                "axes_dims": [4, 6, 6],
                "axes_lens": [32, 32, 32],
            },
        ),
        "wan": (
            "WanTransformer3DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "in_channels": 4,
                "out_channels": 4,
                "text_dim": 24,
                "freq_dim": 16,
                "ffn_dim": 48,
                "num_layers": 2,
            },
        ),
        "wan_i2v": (
            "WanTransformer3DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 16,
                "in_channels": 8,
                "out_channels": 4,
                "text_dim": 24,
                "freq_dim": 16,
                "ffn_dim": 48,
                "num_layers": 2,
                "image_dim": 20,
                "added_kv_proj_dim": 32,
            },
        ),
        "sd3": (
            "SD3Transformer2DModel",
            {
                "sample_size": 8,
                "in_channels": 4,
                "num_layers": 2,
                "attention_head_dim": 16,
                "num_attention_heads": 2,
                "joint_attention_dim": 24,
                "caption_projection_dim": 32,
                "pooled_projection_dim": 20,
                "out_channels": 4,
                "pos_embed_max_size": 8,
                "dual_attention_layers": (0,),
                "qk_norm": "rms_norm",
            },
        ),
        "sd15": (
            "UNet2DConditionModel",
            {
                "sample_size": 8,
                "layers_per_block": 2,
                "block_out_channels": (8, 16, 16, 16),
                "norm_num_groups": 4,
                "attention_head_dim": 4,
                "cross_attention_dim": 12,
            },
        ),
        "sdxl": (
            "UNet2DConditionModel",
            {
                "sample_size": 8,
                "layers_per_block": 2,
                "block_out_channels": (8, 16, 16),
                "norm_num_groups": 4,
                "attention_head_dim": 4,
                "cross_attention_dim": 12,
                "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                "transformer_layers_per_block": (1, 2, 3),
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": 60,
            },
        ),
    }[family]
    return getattr(diffusers, kind)(**config).eval().requires_grad_(False)


def saved(name: str, folder: Path) -> Path:
    """`shared(name)` as a folder in the layout of diffusers."""
    model = shared(name)
    folder.mkdir()
    weights = {key: tensor.contiguous().clone() for key, tensor in model.state_dict().items()}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": type(model).__name__, **model.config}
    (folder / "config.json").write_text(json.dumps(config, default=list))
    return folder


def snapshot(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model: torch.nn.Module, before: dict[str, torch.Tensor]) -> bool:
    """Whether every tensor is bit for bit what it was."""
    now = model.state_dict()
    return set(now) == set(before) and all(torch.equal(before[name], tensor) for name, tensor in now.items())


def assert_changed_by(
    model: torch.nn.Module, before: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Every tensor in `expected` has changed by that much, and nothing else has changed at all."""
    now = model.state_dict()
    assert set(expected) <= set(now), sorted(set(expected) - set(now))
    for name, tensor in now.items():
        if name in expected:
            change = tensor.double() - before[name].double()
            wrong = float((change - expected[name].double()).abs().max())
            largest = float(expected[name].abs().max())
            assert wrong <= tolerance * largest, f"{name}: off by {wrong:.3g}, largest {largest:.3g}"
        else:
            assert torch.equal(tensor, before[name]), f"{name} has changed"


def inputs_of(layer: torch.nn.Module) -> torch.Tensor:
    """Something to call a single layer with."""
    torch.manual_seed(2)
    if isinstance(layer, torch.nn.Conv3d):
        return torch.randn(1, layer.in_channels, 2, 6, 6)
    if isinstance(layer, torch.nn.Conv2d):
        return torch.randn(2, layer.in_channels, 6, 6)
    if isinstance(layer, torch.nn.GroupNorm):
        return torch.randn(2, layer.num_channels, 4, 4)
    width = layer.in_features if isinstance(layer, torch.nn.Linear) else layer.weight.shape[-1]
    return torch.randn(2, 5, width)


def assert_acts_as(
    model: torch.nn.Module, expected: dict[str, torch.Tensor], tolerance: float = 2e-5, strength: float = 1.0
) -> None:
    """Every layer computes as if its parameters had changed by `strength` times `expected`, though none has."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, delta in expected.items():
        layer, _, leaf = name.rpartition(".")
        layers.setdefault(layer, {})[leaf] = delta
    for name, deltas in layers.items():
        layer = model.get_submodule(name)
        x = inputs_of(layer)
        got = layer(x)
        plain = getattr(type(layer), "adapted_class", None)
        assert plain is not None, f"{name} carries no branch"
        bare = plain.__new__(plain)
        bare.__dict__ = {key: value for key, value in layer.__dict__.items() if key != "_adapters"}
        parameters = dict(bare.named_parameters())
        changed = {
            leaf: parameters[leaf].double() + strength * delta.double().view(parameters[leaf].shape)
            for leaf, delta in deltas.items()
        }
        whole = {key: value.double() for key, value in parameters.items()} | changed
        wanted = torch.func.functional_call(bare, whole, (x.double(),))
        unchanged = torch.func.functional_call(bare, {k: v.double() for k, v in parameters.items()}, (x.double(),))
        assert float((wanted - unchanged).abs().max()) > 0
        wrong = float((got.double() - wanted).abs().max())
        assert wrong <= tolerance * float(wanted.abs().max()), f"{name}: off by {wrong:.3g}"
