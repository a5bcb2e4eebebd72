"""Whether a LoRA fits a model, told from headers, against what the engine does with the same files."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from backend.catalog.lora import fit as lora_fit
from backend.catalog.models.identify import identify_model
from backend.engine.lora import adapters
from backend.families import FAMILIES, by_name
from backend.schema.messages import Trouble
from tests.lora_models import CASES, saved, shared

pytestmark = pytest.mark.torch
HANDED = Path(__file__).parents[2] / "cases" / "lora2"
FILES = [
    path
    for path in (*sorted(CASES.glob("*.safetensors")), *sorted(HANDED.glob("*/*.safetensors")))
    if not any(word in path.name for word in ("expected", "answer", "ckpt", "err_truncated", "err_missing"))
    and path.parent.name != "dup_different_values"  # which only its values show
]
Q = "transformer_blocks.0.attn.to_q"


def model_of(name: str):
    spec = identify_model(CASES / "models" / name, FAMILIES)
    return spec, by_name(spec.family)


@pytest.mark.parametrize("model", ["tiny_qwen_image", "tiny_flux"])
def test_headers_tell_what_the_engine_does(model: str):
    spec, family = model_of(model)
    module = shared(model)
    for path in FILES:
        found = lora_fit.fit_of(path, spec, family)
        try:
            receipt = adapters.load(module, path)
        except Trouble:
            receipt = None
        finally:
            adapters.clear(module)
        if receipt is None:
            assert not found.fits, path
        else:
            missing = any("no such module" in why for why in receipt.unused.values())
            assert not found.refused and bool(found.partly) == missing, (path, found)


SIZES = {  # tensors of one module -> whether they are for 48 x 48
    "LoRA": ({"lora_A.weight": (4, 48), "lora_B.weight": (48, 4)}, True),
    "LoRA of another width": ({"lora_A.weight": (4, 64), "lora_B.weight": (48, 4)}, False),
    "LoRA of another height": ({"lora_A.weight": (4, 48), "lora_B.weight": (64, 4)}, False),
    "LoRA of four dimensions": ({"lora_down.weight": (4, 48, 1, 1), "lora_up.weight": (48, 4, 1, 1)}, True),
    "LoHa": ({f"hada_w{n}": (48, 2) if n[-1] == "a" else (2, 48) for n in ("1_a", "1_b", "2_a", "2_b")}, True),
    "LoHa of another width": (
        {f"hada_w{n}": (48, 2) if n[-1] == "a" else (2, 40) for n in ("1_a", "1_b", "2_a", "2_b")},
        False,
    ),
    "LoKr": ({"lokr_w1": (4, 6), "lokr_w2_a": (12, 2), "lokr_w2_b": (2, 8)}, True),
    "LoKr of another size": ({"lokr_w1": (4, 4), "lokr_w2": (16, 16)}, False),
    "OFT": ({"oft_R.weight": (12, 6)}, True),
    "OFT of one block for all": ({"oft_R.weight": (1, 28)}, True),
    "OFT of another width": ({"oft_R.weight": (10, 10)}, False),
    "diag-OFT": ({"oft_blocks": (12, 4, 4), "alpha": ()}, True),
    "diag-OFT of another height": ({"oft_blocks": (10, 4, 4), "alpha": ()}, False),
    "diff": ({"diff": (48, 48)}, True),
    "diff of another size": ({"diff": (48, 32)}, False),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_every_algorithm(name: str, tmp_path: Path):
    tensors, fits = SIZES[name]
    spec, family = model_of("tiny_qwen_image")
    path = tmp_path / "a.safetensors"
    save_file(
        {f"diffusion_model.{Q}.{key}": torch.full(shape, 0.01 if shape else 0.0) for key, shape in tensors.items()},
        path,
    )
    found = lora_fit.fit_of(path, spec, family)
    assert found.fits == fits and (fits or Q in found.refused)
    if fits:
        lora_fit.check(path, spec, family)
        assert adapters.load(shared("tiny_qwen_image"), path).layers_applied == 1
        adapters.clear(shared("tiny_qwen_image"))
    else:
        with pytest.raises(Trouble, match="does not fit the chosen model"):
            lora_fit.check(path, spec, family)
        with pytest.raises(Trouble):
            adapters.load(shared("tiny_qwen_image"), path)


def test_fused_modules_norms_and_encoders(tmp_path: Path):
    spec, family = model_of("tiny_flux")

    def fit(tensors: dict) -> lora_fit.Fit:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
        save_file({key: torch.zeros(shape) for key, shape in tensors.items()}, path)
        return lora_fit.fit_of(path, spec, family)

    fused = {
        "double_blocks.0.img_attn.qkv.lora_A.weight": (4, 32),
        "double_blocks.0.img_attn.qkv.lora_B.weight": (96, 4),
    }
    assert fit(fused).fits
    assert fit({**fused, "double_blocks.0.img_attn.qkv.lora_B.weight": (144, 4)}).refused
    norm = "double_blocks.0.img_attn.norm.query_norm.scale"
    width = shared("tiny_flux").get_parameter("transformer_blocks.0.attn.norm_q.weight").shape[0]
    assert fit({**fused, norm: (width,)}).fits and norm in fit({**fused, norm: (width + 1,)}).refused
    encoder = "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    partly = fit({**fused, f"{encoder}.lora_down.weight": (4, 768), f"{encoder}.lora_up.weight": (3072, 4)})
    assert not partly.refused and "text encoder" in partly.partly
    missing = fit(
        {
            **fused,
            "double_blocks.7.img_mod.lin.lora_A.weight": (4, 32),
            "double_blocks.7.img_mod.lin.lora_B.weight": (9, 4),
        }
    )
    assert not missing.refused and "double_blocks.7.img_mod.lin" in missing.partly


@pytest.mark.parametrize("name", ["wan", "sd3", "sd15", "sdxl", "flux2"])
def test_every_family(name: str, tmp_path: Path):
    """A file with every linear layer fits its own model, and none of another size."""
    module, spec = shared(name), identify_model(saved(name, tmp_path / "m"), FAMILIES)
    linear = [(key, layer.weight.shape) for key, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)]
    for more in (0, 8):
        file = {}
        for key, (rows, columns) in linear:
            file |= {
                f"{key}.lora_A.weight": torch.zeros(2, columns + more),
                f"{key}.lora_B.weight": torch.zeros(rows, 2),
            }
        save_file(file, tmp_path / f"{more}.safetensors")
        assert lora_fit.fit_of(tmp_path / f"{more}.safetensors", spec, by_name(spec.family)).fits == (not more)
