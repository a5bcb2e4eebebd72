"""Small parts written to safetensors files, for tests of where weights lie."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def write_part(tmp_path):
    """write_part(module, network, config, dtype=None, name="dit") -> PartSpec: the module's weights in a file, located by its header."""
    from safetensors.torch import save_file

    from backend.catalog.header import read_header
    from backend.catalog.spec import PartSpec

    def write(module, network: str, config: dict, *, dtype=None, name: str = "dit", scales=None) -> PartSpec:
        import torch

        kept = {}
        for key, tensor in module.state_dict().items():
            kept[key] = (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).contiguous().clone()
        for key, scale in (scales or {}).items():
            kept[key] = (kept[key].float() / scale).to(torch.float8_e4m3fn)
            kept[f"{key}.factor"] = torch.tensor(scale)
        path = Path(tmp_path) / f"{name}.safetensors"
        save_file(kept, path)
        found = read_header(path).tensors
        storage = str(next(t.dtype for t in kept.values() if t.is_floating_point())).removeprefix("torch.")
        own = {key: at for key, at in found.items() if not key.endswith(".factor")}
        factors = {key: found[f"{key}.factor"] for key in (scales or {})}
        return PartSpec(name=name, network=network, config=config, tensors=own, scales=factors, storage=storage)

    return write


@pytest.fixture
def tiny_dit(write_part):
    """tiny_dit(dtype, num_layers=4) -> (part, inputs): a Qwen-Image transformer with random weights and something to feed it."""
    import torch
    from diffusers import QwenImageTransformer2DModel

    def make(dtype=torch.bfloat16, num_layers: int = 4, scales=()):
        torch.manual_seed(0)
        config = {
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 4,
            "num_layers": num_layers,
            "attention_head_dim": 16,
            "num_attention_heads": 3,
            "joint_attention_dim": 32,
            "axes_dims_rope": [4, 6, 6],
        }
        module = QwenImageTransformer2DModel(**config)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.normal_(std=0.1 if parameter.ndim > 1 else 0.3).add_(1.0 if "norm" in name else 0.0)
        factors = {key: 0.001 * (index + 1) for index, key in enumerate(scales)}
        network = "diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel"
        part = write_part(module, network, config, dtype=dtype, scales=factors)
        return part, dit_inputs()

    return make


def dit_inputs(batch: int = 1) -> dict:
    import torch

    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(batch, 5, 32, generator=generator),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, 4, 4)]] * batch,
    }
