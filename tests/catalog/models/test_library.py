"""A library of a thousand files: listed from headers, remembered, and honest about what cannot be read."""

from __future__ import annotations

import json
import os
import time

import pytest

from backend.catalog.models import library, scan_cache
from backend.catalog.models.identify import identify_lora
from backend.catalog.spec import LoraSpec, ModelSpec
from backend.families import FAMILIES
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS
from tests.catalog.files import lora_tensors, write_file, write_raw

QWEN = {
    f"transformer_blocks.{n}.{kind}": (3072, 3072)
    for n in range(60)
    for kind in ("attn.to_q", "attn.to_k", "attn.to_out.0", "img_mlp.net.2")
}


def dressed(modules: dict, prefix: str, *, flat=False, **suffixes) -> dict:
    return lora_tensors(
        {prefix + (name.replace(".", "_") if flat else name): size for name, size in modules.items()}, **suffixes
    )


def test_what_a_file_says_of_itself(tmp_path):
    metadata = {
        "ss_network_module": "networks.lora_qwen_image",
        "ss_network_alpha": "8.0",
        "ss_base_model_version": "qwen_image",
        "ss_sd_model_name": "C:\\models\\qwen.safetensors",
        "ss_tag_frequency": json.dumps({"10_cat": {"sks": 12, "a cat": 7}, "1_x": {}}),
    }
    tensors = dressed(QWEN, "lora_unet_", flat=True, rank=16, down="lora_down.weight", up="lora_up.weight")
    spec = identify_lora(write_file(tmp_path / "a.safetensors", tensors, metadata), FAMILIES)
    assert (spec.family, spec.ranks, spec.alphas, spec.num_modules) == ("qwen_image", (16,), (8.0,), 240)
    assert spec.trigger_words == ("sks",) and spec.trainer == "musubi-tuner" and spec.base == "qwen.safetensors"
    assert spec.algorithms == ("LoRA",) and "lora_unet_" in spec.dialect and spec.components == ("dit",)


WIDE = (3072, 3072)
KNOWN = {
    "qwen_image by a high block": ("qwen_image", {"transformer_blocks.40.attn.to_q": WIDE}),
    "flux native": ("flux", {"double_blocks.0.img_attn.qkv": (9216, 3072), "single_blocks.0.linear2": (3072, 15360)}),
    "flux diffusers": ("flux", {"single_transformer_blocks.0.attn.to_q": WIDE, "transformer_blocks.0.attn.to_q": WIDE}),
    "flux2 dev": ("flux2", {"double_blocks.0.img_attn.qkv": (18432, 6144)}),
    "flux2 klein": ("flux2", {"single_blocks.0.linear1": (27648, 3072), "single_blocks.0.linear2": (3072, 12288)}),
    "flux2 diffusers": ("flux2", {"single_transformer_blocks.0.attn.to_qkv_mlp_proj": (27648, 3072)}),
    "flux by rows": ("flux", {"double_blocks.0.img_mlp.0": (12288, 3072)}),
    "flux, single blocks by rows": ("flux", {"single_blocks.0.linear1": (21504, 3072)}),
    "flux2 klein 4B by rows": ("flux2", {"double_blocks.0.img_mlp.0": (18432, 3072)}),
    "flux2 klein 4B, single blocks by rows": ("flux2", {"single_blocks.0.linear1": (27648, 3072)}),
    "flux2 klein 9B": ("flux2", {"single_blocks.0.linear2": (4096, 16384)}),
    "flux2 klein 9B diffusers": ("flux2", {"transformer_blocks.0.attn.to_q": (4096, 4096)}),
    "hunyuan is none of ours": (
        "",
        {"double_blocks.0.img_mlp.fc1": (12288, 3072), "double_blocks.0.img_attn.qkv": (9216, 3072)},
    ),
    "lumina2 is none of ours": ("", {"layers.3.attention.qkv": (4608, 2304), "layers.3.feed_forward.w2": (2304, 9216)}),
    "cosmos is none of ours": ("", {"blocks.0.self_attn.q_proj": (2048, 2048)}),
    "sd2 is none of ours": ("", {"down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (320, 1024)}),
    "sdxl refiner": ("sdxl", {"input_blocks.4.1.transformer_blocks.0.attn2.to_k": (768, 1280)}),
    "z_image without attention": ("z_image", {"layers.3.feed_forward.w2": (3840, 10240)}),
    "z_image": ("z_image", {"layers.3.attention.qkv": (11520, 3840)}),
    "wan": ("wan", {"blocks.0.self_attn.q": (5120, 5120), "blocks.0.cross_attn.k": (5120, 5120)}),
    "wan diffusers": ("wan", {"blocks.0.attn1.to_q": (1536, 1536)}),
    "sd15": ("sd15", {"down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k": (320, 768)}),
    "sdxl": ("sdxl", {"input_blocks.4.1.transformer_blocks.0.attn2.to_k": (640, 2048)}),
    "sd3": ("sd3", {"joint_blocks.0.x_block.attn.qkv": (4608, 1536)}),
    "sd3 diffusers": ("sd3", {"transformer_blocks.0.attn.to_q": (2432, 2432)}),
}


@pytest.mark.parametrize("style", ["dotted", "flat"])
@pytest.mark.parametrize("name", KNOWN)
def test_families_are_told_apart(name, style, tmp_path):
    family, modules = KNOWN[name]
    prefix = "lora_unet_" if style == "flat" else "diffusion_model."
    spec = identify_lora(
        write_file(tmp_path / "a.safetensors", dressed(modules, prefix, flat=style == "flat")), FAMILIES
    )
    assert spec.family == family, spec.evidence


def test_what_cannot_be_told_is_left_open_and_metadata_decides(tmp_path):
    modules = {"transformer_blocks.3.attn.to_q": WIDE, "transformer_blocks.3.attn.add_q_proj": WIDE}
    spec = identify_lora(write_file(tmp_path / "a.safetensors", dressed(modules, "transformer.")), FAMILIES)
    assert spec.family == "" and {"qwen_image", "flux"} <= set(spec.families_possible)
    for said, family in (("Qwen-Image/lora", "qwen_image"), ("flux-1-dev/lora", "flux")):
        path = write_file(
            tmp_path / "b.safetensors", dressed(modules, "transformer."), {"modelspec.architecture": said}
        )
        assert identify_lora(path, FAMILIES).family == family


@pytest.mark.parametrize(
    "metadata",
    [
        {"ss_tag_frequency": "{" * 10_000},
        {"ss_tag_frequency": '{"a": [1]}', "lora_adapter_metadata": "[]", "ss_network_alpha": "None"},
        {"software": "null", "training_info": "\x00", "ss_network_args": "{"},
        {"modelspec.trigger_phrase": "  ", "trigger_words": "[1, 2"},
    ],
)
def test_broken_metadata_is_no_error(metadata, tmp_path):
    spec = identify_lora(write_file(tmp_path / "a.safetensors", dressed(QWEN, ""), metadata), FAMILIES)
    assert spec.family == "qwen_image" and spec.alphas == ()


def make_library(folder, count: int) -> None:
    for number in range(count):
        prefix = ("diffusion_model.", "transformer.", "")[number % 3]
        words = {"ss_tag_frequency": json.dumps({"1_a": {f"word{number}": 2}}), "note": "x" * 500}
        write_file(
            folder / f"{number % 10}" / f"l{number:04d}.safetensors",
            dressed(QWEN, prefix, rank=(4, 8, 16)[number // 3 % 3]),
            words,
        )


def test_a_thousand_files(tmp_path):
    make_library(tmp_path / "loras", 1000)
    start = time.process_time()
    found = library.scan_loras([tmp_path / "loras"], FAMILIES, tmp_path / "cache")
    cold = time.process_time() - start
    scan_cache.forget()
    start = time.process_time()
    again = library.scan_loras([tmp_path / "loras"], FAMILIES, tmp_path / "cache")
    warm = time.process_time() - start
    assert len(found) == 1000 and found == again
    assert found[7].trigger_words == ("word7",) and {spec.family for spec in found} == {"qwen_image"}
    start = time.process_time()
    for path in (tmp_path / "loras").rglob("*.safetensors"):
        data = path.read_bytes()
        json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    least = time.process_time() - start  # what parsing the headers alone takes on this machine, as busy as it is
    said = f"cold {cold:.2f} s, warm {warm:.2f} s, parsing alone {least:.2f} s of CPU time"
    assert cold < 6 * least and warm < 0.6 * least, said


def test_only_headers_are_read(tmp_path, monkeypatch):
    write_file(tmp_path / "a.safetensors", dressed(QWEN, ""))
    size = (tmp_path / "a.safetensors").stat().st_size
    read = 0
    import backend.catalog.formats.header as header

    class Counting:
        def __init__(self, file):
            self.file = file

        def read(self, count):
            nonlocal read
            read += count
            return self.file.read(count)

        def fileno(self):
            return self.file.fileno()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    original = header.Path.open
    monkeypatch.setattr(
        header.Path,
        "open",
        lambda path, *args, **keywords: (
            Counting(original(path, *args, **keywords))
            if path.suffix == ".safetensors"
            else original(path, *args, **keywords)
        ),
    )
    assert len(library.scan_loras([tmp_path], FAMILIES)) == 1
    assert 0 < read < 100_000 < size


def test_damaged_and_foreign_files_are_listed_with_their_reason(tmp_path):
    write_file(tmp_path / "good.safetensors", dressed(QWEN, ""))
    write_raw(tmp_path / "bad.safetensors", b"{}", length=10**9)
    write_file(tmp_path / "model.safetensors", {"img_in.weight": ("F32", (2, 2))})
    (tmp_path / "readme.txt").write_text("x")
    for _ in range(2):
        bad, good, model = library.scan_loras([tmp_path, tmp_path], FAMILIES, tmp_path / "cache")
        assert isinstance(good, LoraSpec) and isinstance(bad, Trouble) and bad.path.name == "bad.safetensors"
        assert model.kind == "not_recognised" and "cut off" in bad.message


def test_changes_are_seen_and_broken_memories_forgotten(tmp_path):
    path, cache = tmp_path / "loras" / "a.safetensors", tmp_path / "cache"
    write_file(path, dressed(QWEN, "", rank=4))
    assert library.scan_loras([path.parent], FAMILIES, cache)[0].ranks == (4,)
    write_file(path, dressed(QWEN, "", rank=8))
    os.utime(path, (1, 1))
    assert library.scan_loras([path.parent], FAMILIES, cache)[0].ranks == (8,)
    for broken in ("", "{", "[]", '{"key": 5}', '{"key": 1, "files": []}'):
        (cache / "loras.json").write_text(broken)
        assert library.scan_loras([path.parent], FAMILIES, cache)[0].ranks == (8,)
    path.unlink()
    assert library.scan_loras([path.parent, tmp_path / "absent"], FAMILIES, cache) == ()


def test_links_in_a_circle(tmp_path):
    write_file(tmp_path / "a" / "l.safetensors", dressed(QWEN, ""))
    (tmp_path / "a" / "again").symlink_to(tmp_path / "a", target_is_directory=True)
    (tmp_path / "a" / "nowhere").symlink_to(tmp_path / "gone")
    assert len(library.scan_loras([tmp_path], FAMILIES)) == 1


@pytest.mark.parametrize("kind", ["above", "circles"])
def test_links_to_what_lies_above_and_in_circles_cost_nothing(tmp_path, kind):
    home = tmp_path / "data" / "loras"
    home.mkdir(parents=True)
    write_file(home / "a.safetensors", dressed(QWEN, "transformer."))
    write_file(tmp_path / "beside.safetensors", dressed(QWEN, "transformer."))
    if kind == "above":
        for name, target in {"root": "/", "here": home, "data": home.parent, "up": tmp_path}.items():
            (home / name).symlink_to(target, target_is_directory=True)
    else:
        for number in range(20):
            (home / str(number)).mkdir()
            for other in range(20):
                (home / str(number) / f"to-{other}").symlink_to(home / str(other), target_is_directory=True)
    began = time.process_time()
    loras = library.scan_loras([home], FAMILIES, tmp_path / "cache")
    models = library.scan_models([home], FAMILIES, tmp_path / "cache")
    assert time.process_time() - began < 3
    assert [entry.path.name for entry in loras if isinstance(entry, LoraSpec)] == ["a.safetensors"]
    told = {str(entry.path.name): str(entry) for entry in (*loras, *models) if isinstance(entry, Trouble)}
    assert set(told) == ({"root", "here", "data", "up"} if kind == "above" else set())
    assert all("is a link to a folder in which loras itself lies" in words for words in told.values())


def test_of_a_folder_with_too_much_in_it_the_nearest_is_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "MOST_ENTRIES", 50)
    many, few = tmp_path / "many", tmp_path / "few"
    for folder in (many / "deep" / "deeper", few):
        folder.mkdir(parents=True)
        write_file(folder / "a.safetensors", dressed(QWEN, "transformer."))
    write_file(many / "z.safetensors", dressed(QWEN, "transformer.", rank=8))
    for number in range(60):
        (many / "deep" / f"{number}.txt").touch()
    found = library.scan_loras([many, few], FAMILIES)
    assert {entry.path for entry in found if isinstance(entry, LoraSpec)} == {
        many / "z.safetensors",
        few / "a.safetensors",
    }
    (told,) = [entry for entry in found if isinstance(entry, Trouble)]
    assert told.path == many and "There is more in many than is looked through" in str(told)
    monkeypatch.setattr(library, "MOST_SECONDS", -1.0)
    assert {str(entry.path) for entry in library.scan_models([few], FAMILIES)} == {str(few)}


def test_a_family_corrected_by_hand(tmp_path):
    path = write_file(tmp_path / "loras" / "a.safetensors", dressed({"transformer_blocks.3.attn.to_q": WIDE}, ""))
    library.correct_family(tmp_path / "user", path, "flux")
    said = library.read_corrections(tmp_path / "user")
    (spec,) = library.scan_loras([path.parent], FAMILIES, tmp_path / "cache", corrections=said)
    assert spec.family == "flux" and spec.families_possible == ("flux",)
    library.correct_family(tmp_path / "user", path, "")
    assert library.read_corrections(tmp_path / "user") == {}


def test_models(tmp_path):
    write_file(tmp_path / "l.safetensors", dressed(QWEN, ""))
    write_file(tmp_path / "strange.safetensors", {"a.weight": ("F32", (2, 2))})
    for _ in range(2):
        found = library.scan_models([ASSETS / "starter", tmp_path], FAMILIES, tmp_path / "cache")
        scan_cache.forget()
        assert [type(entry) for entry in found] == [ModelSpec, Trouble]
        assert found[0].family == "qwen_image" and found[0].path == ASSETS / "starter" and not found[0].missing
        assert found[1].path == tmp_path / "strange.safetensors"
    plain = library.scan_models([ASSETS / "starter"], FAMILIES)[0]
    assert {name: part.tensors for name, part in plain.parts.items()} == {
        name: part.tensors for name, part in found[0].parts.items()
    }


def test_files_of_our_own_trainer(tmp_path):
    modules = {"transformer_blocks.3.attn.to_q": WIDE}
    said = {
        "software": "Loft 0.1.0",
        "family": "qwen_image",
        "base": "loft/starter",
        "trigger": "sks cat",
        "alpha": "8.0",
    }
    spec = identify_lora(write_file(tmp_path / "a.safetensors", dressed(modules, ""), said), FAMILIES)
    assert (spec.family, spec.base, spec.trigger_words) == ("qwen_image", "loft/starter", ("sks cat",))
    assert spec.trainer == "Loft" and spec.alphas == (8.0,)
