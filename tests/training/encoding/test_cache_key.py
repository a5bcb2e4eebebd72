"""Encodings are shared between runs only where each run would have made the same itself: everything they depend on is in their keys."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from backend.engine.quantization.config import QuantizeConfig
from backend.schema.paths import PROJECT
from backend.schema.training.config import ModelSection
from backend.training.encoding.cache_key import content_digests, encoder_key, folder_digest
from backend.training.encoding.encoding_cache import key_of
from backend.training.model.base_model import find_base_model
from backend.training.model.frozen_weights import Kept

pytestmark = pytest.mark.torch

FP8 = ("--fp8_models", "text_encoder,vae")
INT8 = ("--quant_options", "text_encoder:int8/o_proj")
SHORT = ("--mixed_precision", "no", "--save_dtype", "float32", "--max_steps", 2)


@pytest.mark.parametrize("other", [FP8, INT8, ("--prior_pictures", 2, "--fp8_models", "dit,text_encoder")])
def test_a_run_is_that_of_an_empty_cache_whatever_ran_before(run_training, tmp_path: Path, data, other):
    """With encoders in full after encoders in fewer bits, and the other way round."""
    plain = ("--prior_pictures", 2) if "--prior_pictures" in other else ()
    clean = {}
    for flags in (plain, other):
        shutil.rmtree(data.cache, ignore_errors=True)
        assert run_training(tmp_path / "clean", *SHORT, *flags) == 0
        clean[flags] = (tmp_path / "clean" / "step-2.safetensors").read_bytes()
        shutil.rmtree(tmp_path / "clean")
    for flags in (plain, other):  # the cache holds what the other one made
        assert run_training(tmp_path / "after", *SHORT, *flags) == 0
        assert tensors_of(tmp_path / "after") == tensors_in(clean[flags], tmp_path)
        shutil.rmtree(tmp_path / "after")
    assert tensors_in(clean[plain], tmp_path) != tensors_in(clean[other], tmp_path)


def test_what_is_encoded_beside_it_changes_no_encoding(run_training, tmp_path: Path, data, pictures: Path):
    """A set whose first pictures are known already teaches bit for bit what it teaches with an empty cache."""
    few = tmp_path / "few"
    shutil.copytree(pictures, few, ignore=shutil.ignore_patterns("[24].*"))
    assert run_training(tmp_path / "few_run", *SHORT, dataset=few) == 0
    assert run_training(tmp_path / "all", *SHORT) == 0
    shutil.rmtree(data.cache)
    assert run_training(tmp_path / "clean", *SHORT) == 0
    assert tensors_of(tmp_path / "all") == tensors_of(tmp_path / "clean")


def tensors_of(run: Path) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(run / "step-2.safetensors").items()}


def tensors_in(data: bytes, folder: Path) -> dict[str, bytes]:
    (folder / "x").mkdir(exist_ok=True)
    (folder / "x" / "step-2.safetensors").write_bytes(data)
    return tensors_of(folder / "x")


def key(model: Path, part: str = "text_encoder", **changes) -> str:
    values = {"dtype": torch.bfloat16, "device": torch.device("cpu"), **changes}
    return encoder_key(find_base_model(ModelSection(model=str(model))), part, **values)


def kept(**states) -> Kept:
    from backend.schema.memory_plan import VramConfig

    plain = {f"{state}_dtype": "bfloat16" for state in ("offload", "onload", "preparing", "computation")}
    return Kept(VramConfig(**{**plain, **states}))


def test_every_ingredient_changes_the_key(data, tiny_qwen: Path, tmp_path: Path, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(tiny_qwen, model)
    adapter = tmp_path / "lora.safetensors"
    adapter.write_bytes(b"one")
    known = {"plain": key(model), "same": key(model)}
    assert known.pop("same") == known["plain"]
    known["another dtype"] = key(model, dtype=torch.float32)
    known["another kind of device"] = key(model, device=torch.device("cuda"))
    known["FP8"] = key(model, kept=kept(onload_dtype="float8_e4m3fn"))
    known["int8"] = key(model, quantized=QuantizeConfig("int8"))
    known["int8, a layer left out"] = key(model, quantized=QuantizeConfig("int8", exclude_modules=["q_proj"]))
    known["a LoRA"] = key(model, adapter=adapter)
    adapter.write_bytes(b"two")
    known["another LoRA of that name"] = key(model, adapter=adapter)
    monkeypatch.setattr("backend.training.encoding.cache_key._version", lambda package: f"{package} 99")
    known["another library"] = key(model)
    monkeypatch.undo()
    monkeypatch.setenv("LOFT_DATA", str(data.root))
    config = model / "text_encoder" / "config.json"
    said = json.loads(config.read_text())
    said.get("text_config", said)["rms_norm_eps"] = 1e-3
    config.write_text(json.dumps(said))
    known["another configuration"] = key(model)
    weights = next((model / "text_encoder").glob("*.safetensors"))
    bytes_ = bytearray(weights.read_bytes())
    bytes_[len(bytes_) // 2 + 7] ^= 1
    weights.write_bytes(bytes_)
    known["one bit of the weights"] = key(model)
    assert len(set(known.values())) == len(known), known
    assert (
        key(model, kept=kept(offload_dtype=None)) == known["one bit of the weights"]
    )  # where weights wait changes nothing


def test_a_large_file_is_hashed_whole_and_only_once(data, tmp_path: Path, monkeypatch):
    file = tmp_path / "large.safetensors"
    save_file({"a": torch.zeros(2**25, dtype=torch.int32)}, file)
    before = content_digests([file])
    with file.open("r+b") as stream:
        stream.seek(100_000_123)
        stream.write(b"\1")
    after = content_digests([file])
    assert before != after
    monkeypatch.setattr("backend.training.encoding.cache_key._sha256", lambda file: pytest.fail("it was read again"))
    assert content_digests([file]) == after


def test_a_tokenizer_and_words_are_known_by_all_they_hold(data, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{}")
    before = folder_digest(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<zork>": 7}))
    assert folder_digest(tmp_path) != before
    assert key_of("a\0b", "c") != key_of("a", "b\0c") and key_of("a", "bc") != key_of("ab", "c")


def test_a_preset_lora_of_the_text_encoder_is_in_what_it_encodes(run_training, events, tmp_path: Path, data):
    """It is merged before words are encoded, and what was encoded without it is not taken."""
    words = ("--lora_base_model", "text_encoder", "--lora_target_modules", "q_proj", "--learning_rate", 0.1)
    assert run_training(tmp_path / "first", *words, *SHORT) == 0
    preset = ("--preset_lora_path", tmp_path / "first" / "step-2.safetensors", "--preset_lora_model", "text_encoder")
    losses = []
    for name, flags in (("without", ()), ("with", preset), ("again", preset)):
        assert run_training(tmp_path / name, *SHORT, *flags) == 0
        losses.append([event["loss"] for event in events(tmp_path / name) if event["event"] == "step"])
    assert losses[0] != losses[1] == losses[2]


def test_all_code_of_a_family_and_what_families_share_is_in_the_key(monkeypatch):
    """A changed template, a helper of several families, or how weights are dequantized: other encodings."""
    from backend.families import FAMILIES
    from backend.training.encoding import cache_key

    digest = cache_key._source_digest.__wrapped__
    watched = [PROJECT / "backend" / "engine" / "loading" / "dequantize.py"]
    watched.append(PROJECT / "backend" / "families" / "_shared" / "text_encoding.py")
    watched.append(PROJECT / "backend" / "families" / "qwen_image" / "prompt_template.py")
    names = [*cache_key.CODE, *(family.__name__ for family in FAMILIES if family.DRAWS)]
    before = {name: digest(name) for name in names}
    read = Path.read_bytes
    for path in watched:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", lambda one, path=path: read(one) + (b"#" if one == path else b""))
            assert sum(digest(name) != before[name] for name in names) == 1, path
