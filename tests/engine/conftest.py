"""Small parts written to safetensors files, for tests of where weights lie."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def older_objects() -> Iterator[None]:
    """What lives before a file's tests is not looked through at each of their collections: that took most of their time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def deep_qwen(tmp_path_factory) -> Path:
    """A folder with a tiny Qwen-Image of four blocks."""
    from tests.tiny_models import make_qwen_image

    return make_qwen_image(tmp_path_factory.mktemp("models") / "deep_qwen", num_layers=4)


@pytest.fixture
def write_part(tmp_path):
    """write_part(module, network, config, dtype=None, name="dit", scales={}) -> PartSpec: the module's weights in a file, located by
    its header; those named in `scales` as FP8 codes with that factor beside them."""
    from safetensors.torch import save_file

    from backend.catalog.header import read_header
    from backend.catalog.spec import PartSpec

    def write(
        module, network: str = "unused:Unused", config=None, *, dtype=None, name: str = "dit", scales=None
    ) -> PartSpec:
        import torch

        scales = scales or {}
        kept = {}
        for key, tensor in module.state_dict().items():
            kept[key] = (tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor).contiguous().clone()
        for key, scale in scales.items():
            kept[key] = (kept[key].float() / scale).to(torch.float8_e4m3fn)
            kept[f"{key}.factor"] = torch.tensor(scale)
        path = Path(tmp_path) / f"{name}.safetensors"
        save_file(kept, path)
        found = read_header(path).tensors
        own = {key: at for key, at in found.items() if not key.endswith(".factor")}
        factors = {key: found[f"{key}.factor"] for key in scales}
        storage = str(dtype or torch.float32).removeprefix("torch.")
        return PartSpec(name=name, network=network, config=config or {}, tensors=own, scales=factors, storage=storage)

    return write


@pytest.fixture
def small(write_part):
    """small(dtype, num_blocks=4, scales=()) -> (part, build): a transformer-like module in a file, and how to build it on meta."""
    import torch

    from tests.engine.small import Small

    def make(dtype=torch.bfloat16, num_blocks: int = 4, scales=()):
        torch.manual_seed(0)
        module = Small(num_blocks)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.normal_(std=0.1 if parameter.ndim > 1 else 0.3).add_(1.0 if "norm" in name else 0.0)
        part = write_part(module, dtype=dtype, scales={key: 0.001 * (index + 1) for index, key in enumerate(scales)})

        def build():
            with torch.device("meta"):
                return Small(num_blocks)

        return part, build

    return make
