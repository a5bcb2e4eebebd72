"""A valid LoRA spoilt at random, under any prefix: what headers tell of it is what the engine does with it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file

from backend.catalog.lora import fit
from backend.catalog.models.identify import identify_model
from backend.engine.lora import adapters
from backend.families import FAMILIES, by_name
from backend.schema.messages import Trouble
from tests.lora_models import CASES, shared

pytestmark = pytest.mark.torch
JOINED = ("lora_unet_", "lycoris_")  # dots become underscores
PREFIXES = ("", "transformer.", "diffusion_model.", "base_model.model.", "pipe.dit.", "module.", "_orig_mod.", *JOINED)
SPOILT = ("nothing", "wider", "taller", "transposed", "rank 0", "half", "alpha alone", "two ranks", "a bias")
STRANGE = {  # modules that this model has not
    "one module more": "transformer_blocks.0.attn.to_z",
    "a deeper model's": "transformer_blocks.9.attn.to_q",
    "another family's": "single_transformer_blocks.0.attn.to_q",
}


def spoilt(chance: random.Random, weights: dict[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
    """(what was done, the tensors of a LoRA of a few modules)."""
    what, prefix = chance.choice((*SPOILT, *STRANGE)), chance.choice(PREFIXES)
    names = chance.sample(sorted(weights), chance.choice([1, 2, 5]))
    peft = prefix not in JOINED and chance.random() < 0.5
    ends = (".lora_A.weight", ".lora_B.weight") if peft else (".lora_down.weight", ".lora_up.weight")
    tensors: dict[str, torch.Tensor] = {}
    for name in (*names, *([STRANGE[what]] if what in STRANGE else [])):
        rows, columns = weights[name].shape if name in weights else (48, 48)
        rank, other, key = chance.choice([1, 4]), 0, prefix + (name.replace(".", "_") if prefix in JOINED else name)
        if name == names[0]:
            columns *= 2 if what == "wider" else 1
            rows += 16 if what == "taller" else 0
            rows, columns = (columns, rows) if what == "transposed" else (rows, columns)
            rank, other = 0 if what == "rank 0" else rank, int(what == "two ranks")
        tensors[key + ends[0]], tensors[key + ends[1]] = torch.ones(rank, columns), torch.ones(rows, rank + other)
        if not peft:
            tensors[f"{key}.alpha"] = torch.tensor(float(max(rank, 1)))
        if name == names[0] and what in ("half", "alpha alone"):
            del tensors[key + ends[1]]
        if name == names[0] and what == "alpha alone":
            del tensors[key + ends[0]]
            tensors[f"{key}.alpha"] = torch.tensor(1.0)
        if name == names[0] and what == "a bias":
            tensors[f"{key}.diff_b"] = torch.ones(rows + chance.choice([0, 1]))
    return what, {key: tensor * 0.01 for key, tensor in tensors.items()}


def test_headers_tell_what_the_engine_does_with_spoilt_files(tmp_path: Path):
    spec = identify_model(CASES / "models" / "tiny_qwen_image", FAMILIES)
    family, model = by_name(spec.family), shared("tiny_qwen_image")
    weights = {name: module.weight for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    seen: dict[str, set[bool]] = {}
    for seed in range(150):
        what, tensors = spoilt(random.Random(seed), weights)
        path = tmp_path / f"{seed}.safetensors"
        save_file(tensors, path)
        found = fit.fit_of(path, spec, family)
        try:
            left_out = any("no such module" in why for why in adapters.load(model, path).unused.values())
            acts = True
        except Trouble:
            left_out = acts = False
        finally:
            adapters.clear(model)
        seen.setdefault(what, set()).add(acts)
        assert bool(found.refused) != acts or (found.partly and not acts), (seed, what, found)
        assert not acts or bool(found.partly) == left_out, (seed, what, found)
    assert seen.keys() == {*SPOILT, *STRANGE} and seen["half"] == seen["two ranks"] == {False}
