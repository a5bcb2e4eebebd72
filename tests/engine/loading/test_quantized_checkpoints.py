"""Checkpoints in quantized storage forms with exactly known answers: read right, from memory and piece by piece, or refused by name."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from backend.catalog.formats.header import DTYPE_BITS
from backend.catalog.formats.read import read_header
from backend.catalog.models.identify import identify_model
from backend.catalog.quantization import understood
from backend.engine.loading.load import build_meta, load_part, read_tensor
from backend.engine.offload.placement import place
from backend.families import FAMILIES
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch
CASES = Path(__file__).parents[2] / "cases" / "forms"
ALL = {path.parent.name: json.loads(path.read_text()) for path in sorted(CASES.glob("*/answer.json"))}
EXPECTED = load_file(CASES / "expected.safetensors")  # of every parameter its largest magnitude and 128 numbers
NOT_READ = {"fp8_upcast_scale_left": "scale_weight"}
READ = [name for name, case in ALL.items() if case["outcome"] == "weights" and name not in NOT_READ]

ALIKE = {bits: [dtype for dtype, own in DTYPE_BITS.items() if own == bits] for bits in DTYPE_BITS.values()}


def samples(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.float().flatten()
    return flat[torch.randperm(flat.numel(), generator=torch.Generator().manual_seed(flat.numel()))[:128]]


def part_of(name: str):
    return identify_model(CASES / name / ALL[name]["file"], FAMILIES).parts["dit"]


def check(name: str, tensors: dict[str, torch.Tensor]) -> None:
    case, seen = ALL[name], 0
    for key, tensor in tensors.items():
        expected = EXPECTED.get(f"{name}|{key}")
        if expected is None:
            assert torch.equal(samples(tensor), EXPECTED[f"{case['model']}|{key}"]), key
            continue
        seen += 1
        error = (samples(tensor) - expected[1:]).abs().max() / expected[0]
        assert error <= case["tolerance"]["relative_to_max_abs_expected"], (key, float(error))
    assert seen == sum(key.startswith(f"{name}|") for key in EXPECTED)


@pytest.mark.parametrize("name", READ)
def test_read_right(name):
    part = part_of(name)
    check(name, load_part(part, dtype=torch.float32).state_dict())
    size = (CASES / name / ALL[name]["file"]).stat().st_size
    assert (
        0.7 * size < part.nbytes <= size * (1.2 if name == "svdquant_int4" else 1)
    )  # tensors of which several weights are made


DISK = dict.fromkeys(("offload_device", "onload_device", "preparing_device"), "disk")


@pytest.mark.parametrize("name", READ)
def test_read_right_piece_by_piece(name):
    part = part_of(name)
    placed = place(build_meta(part), part, VramConfig(**DISK, computation_dtype="float32"), device="cpu")
    check(name, {key: placed.read(key) for unit in placed.units for key in unit.names})
    placed.close()


@pytest.mark.parametrize(
    "states",
    [DISK, dict.fromkeys(("offload_dtype", "onload_dtype", "preparing_dtype"), "float8_e4m3fn")],
    ids=["disk", "FP8"],
)
@pytest.mark.parametrize(
    "name", ["nvfp4_comfy", "convrot_int8_comfy", "bnb_nf4_nested", "fp8_musubi_block", "torchao_int8"]
)
def test_blocks_that_are_fetched_or_rounded_compute_as_the_numbers_do(name, states, tmp_path):
    part = identify_model(with_two_blocks(CASES / name / "input.safetensors", tmp_path), FAMILIES).parts["dit"]
    module = build_meta(part)
    placed = place(module, part, VramConfig(**states, computation_dtype="float32"), vram_limit_bytes=0, device="cpu")
    assert len(placed.blocks) == 2
    seen = {}
    for key in ("attn.to_q", "attn.to_out.0"):
        linear = module.get_submodule(f"transformer_blocks.1.{key}")
        linear.register_forward_pre_hook(lambda layer, _, key=key: seen.update({key: layer.weight.detach().clone()}))
    with torch.no_grad():
        module(**drawing(module))
    numbers = load_part(part, dtype=torch.float32)
    for key, weight in seen.items():
        exact = numbers.get_submodule(f"transformer_blocks.1.{key}").weight
        error = float((weight - exact).abs().max() / exact.abs().max())
        assert error == 0 if states is DISK else error < 2**-4
    assert len(seen) == 2
    placed.close()


def with_two_blocks(path: Path, folder: Path) -> Path:
    """The one block of a handed file twice."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    again = {key.replace("blocks.0.", "blocks.1."): at for key, at in tensors.items() if "blocks.0." in key}
    said = {key.replace("blocks.0.", "blocks.1."): text for key, text in metadata.items() if "blocks.0." in key}
    save_file(
        tensors | {key: at.clone() for key, at in again.items()}, folder / "two.safetensors", {**metadata, **said}
    )
    return folder / "two.safetensors"


def drawing(module) -> dict:
    """Arguments of one call for four cells and three tokens."""
    config, numbers = module.config, torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 4, config.in_channels, generator=numbers),
        "encoder_hidden_states": torch.randn(1, 3, config.joint_attention_dim, generator=numbers),
        "encoder_hidden_states_mask": torch.ones(1, 3, dtype=torch.bool),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 2, 2)]],
    }


@pytest.mark.parametrize("name", [name for name, case in ALL.items() if case["outcome"] == "error" or name in NOT_READ])
def test_refused_in_words(name):
    with pytest.raises(Trouble, match=NOT_READ.get(name, "stores")) as caught:
        part_of(name)
    assert caught.value.kind == "not_supported" and "transformer_blocks" in caught.value.message


@pytest.mark.parametrize("name", [name for name in READ if ALL[name]["file"].endswith("safetensors")])
def test_what_is_changed_in_a_header_is_refused_or_read_without_a_crash(name):
    """One tensor gone, of another dtype or shape with as many bytes, or one word of the metadata cut off: a decision that can be carried out, or a sentence."""
    header, chance = read_header(CASES / name / "input.safetensors"), random.Random(0)
    mine = {
        key: at
        for key, at in header.tensors.items()
        if "blocks.0.attn.to_q." in key or "blocks.0.img_mlp.net.2." in key
    }
    settings = json.loads(text.read_text()) if (text := CASES / name / "config.json").exists() else None
    for _ in range(40):
        tensors, metadata, key = dict(mine), dict(header.metadata), chance.choice(list(mine))
        at, change = tensors[key], chance.randint(0, 3)
        if change == 0:
            del tensors[key]
        elif change == 1:
            tensors[key] = replace(at, dtype=chance.choice(ALIKE[DTYPE_BITS[at.dtype]]))
        elif change == 2:
            count = math.prod(at.shape)
            tensors[key] = replace(
                at, shape=chance.choice(((count,), (count, 1), (1, count), at.shape[::-1], (*at.shape, 1)))
            )
        elif metadata:
            word = chance.choice(list(metadata))
            metadata[word] = metadata[word][: chance.randint(0, len(metadata[word]))]
        stored = understood(tensors, metadata, settings)
        for weight, made in stored.tensors.items():
            if made.packed is not None and weight not in stored.refused:
                try:
                    assert read_tensor(made).shape == made.shape
                except Trouble as trouble:
                    assert trouble.kind == "not_finite"
