"""What a LoRA file can have wrong with it: one sentence, and no weight has changed."""

from __future__ import annotations

import numpy
import pytest
import torch
from safetensors.torch import save_file

from backend.engine.lora import adapters
from backend.schema.messages import Trouble
from tests.lora_models import same, shared, snapshot

pytestmark = pytest.mark.torch
Q, K = "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_k"


def pair(stem=Q, rank=2, rows=48, columns=48) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        f"{stem}.lora_A.weight": torch.randn(rank, columns, generator=random),
        f"{stem}.lora_B.weight": torch.randn(rows, rank, generator=random),
    }


def hada(**changes) -> dict[str, torch.Tensor]:
    shapes = {"w1_a": (48, 2), "w1_b": (2, 48), "w2_a": (48, 2), "w2_b": (2, 48)} | changes
    return {f"{Q}.hada_{name}": torch.ones(shape) for name, shape in shapes.items() if shape}


def poisoned(value: float, dtype=torch.float32) -> dict[str, torch.Tensor]:
    file = pair()
    file[f"{Q}.lora_B.weight"][3, 1] = value
    return {key: tensor.to(dtype) for key, tensor in file.items()}


WRONG = {
    "a down without its up": ({f"{Q}.lora_A.weight": torch.ones(2, 48)}, "incomplete_pair", "to_q"),
    "an up without its down": ({f"{Q}.lora_up.weight": torch.ones(48, 2)}, "incomplete_pair", "to_q"),
    "half a LoHa": (hada(w2_a=(), w2_b=()), "incomplete_pair", "to_q"),
    "a quarter of a LoHa": (hada(w1_b=()), "incomplete_pair", "w1"),
    "one Kronecker factor": ({f"{Q}.lokr_w1": torch.ones(4, 4)}, "incomplete_pair", "Kronecker"),
    "half a Kronecker factor": (
        {f"{Q}.lokr_w1": torch.ones(4, 4), f"{Q}.lokr_w2_a": torch.ones(12, 2)},
        "incomplete_pair",
        "lokr_w2_a",
    ),
    "a magnitude alone": ({f"{Q}.dora_scale": torch.ones(48, 1)}, "incomplete_pair", "magnitude"),
    "ranks that disagree": (
        {f"{Q}.lora_A.weight": torch.ones(2, 48), f"{Q}.lora_B.weight": torch.ones(48, 3)},
        "rank_mismatch",
        "2 and 3",
    ),
    "too few columns": (pair(columns=47), "shape_mismatch", r"\[48, 47\].*\[48, 48\]"),
    "too many rows": (pair(rows=96), "shape_mismatch", r"\[96, 48\].*\[48, 48\]"),
    "a LoHa of another size": (hada(w2_a=(24, 2)), "shape_mismatch", "24"),
    "Kronecker factors of another size": (
        {f"{Q}.lokr_w1": torch.ones(4, 4), f"{Q}.lokr_w2": torch.ones(12, 11)},
        "shape_mismatch",
        "44",
    ),
    "a magnitude of another size": ({**pair(), f"{Q}.dora_scale": torch.ones(47, 1)}, "shape_mismatch", "47"),
    "a bias of another size": ({f"{Q}.diff_b": torch.ones(47)}, "shape_mismatch", "47"),
    "a whole change of another size": ({f"{Q}.diff": torch.ones(48, 24)}, "shape_mismatch", "24"),
    "NaN": (poisoned(float("nan")), "not_finite", "to_q"),
    "infinity": (poisoned(float("-inf")), "not_finite", "lora_B"),
    "NaN in 8 bits": (poisoned(float("nan"), torch.float8_e4m3fn), "not_finite", "lora_B"),
    "NaN in 16 bits": (poisoned(float("nan"), torch.bfloat16), "not_finite", "lora_B"),
    "an alpha that is NaN": ({**pair(), f"{Q}.alpha": torch.tensor(float("nan"))}, "not_finite", "alpha"),
    "an alpha that is infinite": ({**pair(), f"{Q}.alpha": torch.tensor(1e10).half()}, "not_finite", "alpha"),
    "an alpha of many numbers": ({**pair(), f"{Q}.alpha": torch.ones(3)}, "shape_mismatch", "one number"),
    "OFT": ({f"oft_unet_{Q.replace('.', '_')}.oft_blocks": torch.ones(4, 12, 12)}, "unknown_algorithm", "OFT"),
    "GLoRA": (
        {f"{Q}.{name}.weight": torch.ones(2, 2) for name in ("a1", "a2", "b1", "b2")},
        "unknown_algorithm",
        "GLoRA",
    ),
    "(IA)3": ({f"{Q}.weight": torch.ones(48), f"{Q}.on_input": torch.tensor(False)}, "unknown_algorithm", "IA"),
    "a layer that is resized": (
        {**pair(), f"{Q}.reshape_weight": torch.tensor([48, 96])},
        "shape_mismatch",
        r"reshape_weight .*\[48, 96\].*\[48, 48\]",
    ),
    "integer codes": ({key: torch.ones_like(t).to(torch.int8) for key, t in pair().items()}, "not_supported", "int8"),
    "factors with scales": (
        {**pair(), f"{Q}.lora_A.weight_scale": torch.tensor(2.0), f"{Q}.lora_B.weight_scale": torch.ones(())},
        "not_supported",
        "a scale beside numbers in float32",
    ),
    "BOFT": ({f"{Q}.boft_R": torch.ones(1, 4, 12, 12)}, "unknown_algorithm", "BOFT"),
    "VeRA": ({f"{Q}.vera_lambda_b": torch.ones(48)}, "unknown_algorithm", "VeRA"),
    "(IA)3 of PEFT": ({f"{Q}.ia3_l.default": torch.ones(48)}, "unknown_algorithm", "IA"),
    "a factor of no dimension": (
        {f"{Q}.lora_A.weight": torch.tensor(1.0), f"{Q}.lora_B.weight": torch.ones(48, 2)},
        "shape_mismatch",
        "down",
    ),
    "a Kronecker factor of one dimension": (
        {f"{Q}.lokr_w1": torch.ones(16), f"{Q}.lokr_w2": torch.ones(12, 12)},
        "shape_mismatch",
        "lokr w1",
    ),
    "a LoHa of four dimensions": (hada(w1_a=(48, 2, 1, 1)), "shape_mismatch", "hada_w1_a"),
    "sizes of a thousand dimensions": (
        {**pair(), f"{Q}.reshape_weight": torch.ones(1000)},
        "shape_mismatch",
        "the sizes of a weight",
    ),
    "sizes in 8 bits that are no numbers": (
        {**pair(), f"{Q}.reshape_weight": torch.full((2,), float("nan")).to(torch.float8_e4m3fn)},
        "shape_mismatch",
        "the sizes of a weight",
    ),
    "no sizes": ({**pair(), f"{Q}.reshape_weight": torch.ones(0)}, "shape_mismatch", "the sizes of a weight"),
    "small factors of an endless matrix": (
        {f"{Q}.lokr_w1": torch.ones(2000, 2000), f"{Q}.lokr_w2": torch.ones(2000, 2000)},
        "shape_mismatch",
        "4000000",
    ),
    "two changes of unlike sizes": (
        {**pair(), f"{Q}.lokr_w1": torch.ones(4, 4), f"{Q}.lokr_w2": torch.ones(12, 11)},
        "shape_mismatch",
        "44",
    ),
    "a weight replaced that is not there": (
        {"transformer_blocks.0.attn.norm_q.set_weight": torch.ones(16), f"{Q}.set_weight": torch.ones(48)},
        "shape_mismatch",
        "set_weight",
    ),
    "complex numbers": ({f"{Q}.diff": torch.ones(48, 48, dtype=torch.complex64)}, "shape_mismatch", "diff"),
    "another model": (pair("blocks.7.attention.nothing"), "no_keys_match", "none of its 1"),
    "no adapter at all": ({"img_in.weight": torch.ones(48, 16)}, "no_keys_match", "not a LoRA"),
    "an empty file": ({}, "no_keys_match", "empty"),
    "names that are no texts": ({5: torch.ones(1)}, "bad_value", "named tensor"),
}


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_files(name, hot):
    file, kind, words = WRONG[name]
    model = shared("tiny_qwen_image")
    before = snapshot(model)
    fine = (
        pair(K) if kind not in ("no_keys_match", "bad_value") else {}
    )  # nothing of a broken file is applied, not even this
    with pytest.raises(Trouble, match=words) as caught:
        adapters.load(model, {**fine, **file}, hot=hot)
    assert caught.value.kind == kind and len(caught.value.message) < 300
    assert same(model, before) and adapters.of(model).receipts == ()
    assert not any(hasattr(module, "_adapters") for module in model.modules())


def test_an_alpha_beyond_the_format_means_nothing_where_there_is_no_rank():
    model, before = shared("tiny_qwen_image"), snapshot(shared("tiny_qwen_image"))
    file = {
        f"{Q}.lokr_w1": torch.ones(4, 4),
        f"{Q}.lokr_w2": torch.ones(12, 12),
        f"{Q}.alpha": torch.tensor(float("inf")),
    }
    adapters.load(model, file, hot=False)
    change = model.state_dict()[f"{Q}.weight"] - before[f"{Q}.weight"]
    adapters.clear(model)
    assert torch.allclose(change, torch.ones(48, 48), atol=1e-6)


def test_a_lora_of_another_family_that_matches_by_half():
    """FLUX.1 in diffusers' names shares its first blocks' names with Qwen-Image."""
    model = shared("tiny_qwen_image")
    before = snapshot(model)
    file = {**pair(Q), **pair("single_transformer_blocks.0.attn.to_q")}
    with pytest.raises(Trouble, match=r"FLUX\.1") as caught:
        adapters.load(model, file)
    assert caught.value.kind == "wrong_family" and "Qwen-Image" in caught.value.message
    assert same(model, before)


@pytest.mark.parametrize("strength", [float("nan"), float("inf"), "1", None])
def test_strengths_that_are_no_number(strength):
    with pytest.raises(Trouble, match="strength"):
        adapters.load(shared("tiny_qwen_image"), pair(), strength=strength)


def test_bundled_embeddings_and_lone_alphas_are_named():
    model = shared("tiny_qwen_image")
    file = {**pair(), "bundle_emb.word.string_to_param.*": torch.ones(2, 768), f"{K}.alpha": torch.tensor(4.0)}
    receipt = adapters.load(model, file, hot=True)
    adapters.clear(model)
    assert "textual inversion" in receipt.unused["bundle_emb.word.string_to_param.*"]
    assert "alpha" in receipt.unused[K] and receipt.layers_applied == 1


def test_pickles_are_read_as_weights_alone(tmp_path):
    model, before = shared("tiny_qwen_image"), snapshot(shared("tiny_qwen_image"))
    torch.save({"state_dict": {"module": pair()}}, tmp_path / "a.pt")
    receipt = adapters.load(model, tmp_path / "a.pt", hot=False)
    assert receipt.layers_applied == 1 and receipt.hash
    adapters.clear(model)
    assert same(model, before)
    torch.save({"weights": numpy.array, "x": print}, tmp_path / "evil.pt")
    for name in ("evil.pt", "absent.pt"):
        with pytest.raises(Trouble):
            adapters.load(model, tmp_path / name)
    (tmp_path / "text.pt").write_text("no pickle")
    with pytest.raises(Trouble, match=r"text\.pt"):
        adapters.load(model, tmp_path / "text.pt")


def test_a_folder_with_one_file_and_with_several(tmp_path):
    model = shared("tiny_qwen_image")
    save_file(pair(), tmp_path / "pytorch_lora_weights.safetensors")
    assert adapters.load(model, tmp_path, hot=True).layers_applied == 1
    adapters.clear(model)
    (tmp_path / "pytorch_lora_weights.safetensors").rename(tmp_path / "a.safetensors")
    save_file(pair(), tmp_path / "b.safetensors")
    with pytest.raises(Trouble, match="2 safetensors files"):
        adapters.load(model, tmp_path)
