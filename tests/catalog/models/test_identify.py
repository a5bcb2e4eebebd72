"""Models in every container, recognised from their headers; strangers named, missing pieces named, nothing guessed."""

from __future__ import annotations

import json
import shutil

import pytest

from backend.catalog.formats.read import read_header
from backend.catalog.models.identify import identify_files, identify_model
from backend.families import FAMILIES
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS
from tests.catalog.files import write_file

STARTER = ASSETS / "starter"
TRANSFORMER = STARTER / "transformer" / "diffusion_pytorch_model.safetensors"


def shapes(path) -> dict:
    return {name: (at.dtype, at.shape) for name, at in read_header(path).tensors.items()}


@pytest.fixture(scope="module")
def dit() -> dict:
    return shapes(TRANSFORMER)


def test_the_starter():
    spec = identify_model(STARTER, FAMILIES)
    assert (spec.family, spec.missing, spec.tokenizer) == ("qwen_image", (), STARTER / "tokenizer")
    assert set(spec.parts) == {"dit", "text_encoder", "vae"} and spec.scheduler["num_train_timesteps"] == 1000
    assert spec.parts["dit"].config["num_layers"] == 7 and spec.parts["dit"].storage == "bfloat16"
    stored = {name for name in shapes(STARTER / "text_encoder" / "model.safetensors") if name.startswith("model.")}
    assert {f"model.{name}" for name in spec.parts["text_encoder"].tensors} == stored
    assert spec.nbytes == sum(at.nbytes for part in spec.parts.values() for at in part.tensors.values())


def test_a_part_alone_a_component_folder_and_a_list_of_files():
    for path in (TRANSFORMER, TRANSFORMER.parent, [TRANSFORMER]):
        spec = identify_model(path, FAMILIES)
        assert list(spec.parts) == ["dit"] and set(spec.missing) == {"text_encoder", "vae"}
    spec = identify_files([TRANSFORMER, STARTER / "vae", STARTER / "text_encoder" / "model.safetensors"], FAMILIES)
    assert set(spec.parts) == {"dit", "text_encoder", "vae"} and not spec.missing


@pytest.mark.parametrize(
    "prefix", ["model.diffusion_model.", "diffusion_model.", "model.", "net.", "pipe.dit.", "transformer.", ""]
)
def test_every_prefix_and_sizes_from_shapes(prefix, dit, tmp_path):
    path = write_file(tmp_path / "one.safetensors", {prefix + name: at for name, at in dit.items()})
    part = identify_model(path, FAMILIES).parts["dit"]
    assert set(part.tensors) == set(dit)
    said = json.loads((STARTER / "transformer" / "config.json").read_text())
    for key in (
        "num_layers",
        "num_attention_heads",
        "attention_head_dim",
        "in_channels",
        "out_channels",
        "joint_attention_dim",
    ):
        assert part.config[key] == said[key], key


def test_all_in_one_file(dit, tmp_path):
    parts = {
        "model.diffusion_model.": dit,
        "text_encoders.qwen25_7b.transformer.": shapes(STARTER / "text_encoder" / "model.safetensors"),
        "vae.": shapes(STARTER / "vae" / "diffusion_pytorch_model.safetensors"),
    }
    whole = {prefix + name: at for prefix, tensors in parts.items() for name, at in tensors.items()}
    spec = identify_model(write_file(tmp_path / "aio.safetensors", whole), FAMILIES)
    assert set(spec.parts) == {"dit", "text_encoder", "vae"} and not spec.missing
    assert spec.parts["dit"].tensors.keys() == dit.keys()
    assert not any(name.startswith("visual.") for name in spec.parts["text_encoder"].tensors)
    assert spec.parts["vae"].config["base_dim"] == 16 and spec.parts["vae"].config["z_dim"] == 16


def test_split_files_of_comfyui(dit, tmp_path):
    write_file(tmp_path / "diffusion_models" / "q.safetensors", dit)
    shutil.copy(STARTER / "text_encoder" / "model.safetensors", tmp_path / "te.safetensors")
    shutil.copytree(STARTER / "vae", tmp_path / "vae")
    (tmp_path / "text_encoders").mkdir()
    (tmp_path / "te.safetensors").rename(tmp_path / "text_encoders" / "te.safetensors")
    shutil.rmtree(tmp_path / "vae")
    write_file(tmp_path / "other" / "vae.safetensors", shapes(STARTER / "vae" / "diffusion_pytorch_model.safetensors"))
    assert set(identify_model(tmp_path, FAMILIES).parts) == {"dit", "text_encoder", "vae"}


def test_shards_by_index_by_name_and_one_missing(dit, tmp_path):
    names = list(dit)
    files = [f"diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for number, file in enumerate(files):
        write_file(tmp_path / file, {name: dit[name] for name in names[number::3]})
    for path in (tmp_path / files[0], tmp_path, [tmp_path / file for file in files]):
        spec = identify_model(path, FAMILIES)
        assert set(spec.parts["dit"].tensors) == set(dit) and len(spec.parts["dit"].files) == 3
    index = {"weight_map": {name: files[number % 3] for number, name in enumerate(names)}}
    (tmp_path / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(STARTER / "transformer" / "config.json", tmp_path)
    assert set(identify_model(tmp_path, FAMILIES).parts["dit"].tensors) == set(dit)
    (tmp_path / files[1]).unlink()
    for path in (tmp_path, tmp_path / files[0], [tmp_path / files[0], tmp_path / files[2]]):
        with pytest.raises(Trouble, match=files[1]) as caught:
            identify_model(path, FAMILIES)
        assert caught.value.kind == "missing_file"


@pytest.mark.parametrize(
    "index",
    ["{", '{"weight_map": []}', '{"weight_map": {"a": "../../secret.safetensors"}}', "[1]", '{"weight_map": {"a": 5}}'],
)
def test_broken_indexes(index, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.safetensors.index.json").write_text(index)
    with pytest.raises(Trouble) as caught:
        identify_model(tmp_path, FAMILIES)
    assert caught.value.kind == "damaged"


def eight_bit(dit: dict, extra, *, dtype="F8_E4M3") -> dict:
    """The transformer with its blocks' matrices as 8-bit codes, and what `extra(layer)` puts beside each."""
    out = {}
    for name, (_, shape) in dit.items():
        block = name.startswith("transformer_blocks.") and name.endswith(".weight") and len(shape) == 2
        out[name] = (dtype if block else "BF16", shape)
        if block:
            out |= {f"{name.removesuffix('weight')}{leaf}": at for leaf, at in extra(shape).items()}
    return out


@pytest.mark.parametrize(
    ("extra", "marker"),
    [
        (lambda shape: {"scale_weight": ("F32", ()), "scale_input": ("F32", ())}, {"scaled_fp8": ("F8_E4M3", (0,))}),
        (lambda shape: {"scale_weight": ("F32", (1,))}, {"scaled_fp8": ("F32", (2,))}),
        (lambda shape: {"weight_scale": ("F32", ()), "input_scale": ("F32", ())}, {}),
        (lambda shape: {"weight_scale": ("F32", (shape[0],))}, {}),
        (lambda shape: {"weight_scale": ("BF16", (shape[0], 1))}, {}),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_scaled_eight_bit(extra, marker, prefix, dit, tmp_path):
    tensors = {prefix + name: at for name, at in {**eight_bit(dit, extra), **marker}.items()}
    part = identify_model(write_file(tmp_path / "fp8.safetensors", tensors), FAMILIES).parts["dit"]
    matrices = [name for name, at in part.tensors.items() if at.dtype == "F8_E4M3"]
    assert set(part.tensors) == set(dit) and set(part.scales) == set(matrices) and len(matrices) > 70
    assert part.storage == "float8_e4m3fn"


def test_factors_of_blocks(dit, tmp_path):
    tensors = eight_bit(dit, lambda shape: {"weight_scale": ("F32", (shape[0] // 32, shape[1] // 32))})
    part = identify_model(write_file(tmp_path / "fp8.safetensors", tensors), FAMILIES).parts["dit"]
    assert {name: at.shape for name, at in part.tensors.items()} == {name: shape for name, (_, shape) in dit.items()}
    made = [at for at in part.tensors.values() if at.packed is not None]
    assert len(made) > 70 and part.storage == "FP8 in blocks" and not part.scales
    assert all(at.nbytes == at.shape[0] * at.shape[1] * (1 + 4 / 32**2) for at in made)


def test_plain_casts_have_no_scales(dit, tmp_path):
    part = identify_model(write_file(tmp_path / "a.safetensors", eight_bit(dit, lambda shape: {})), FAMILIES).parts[
        "dit"
    ]
    assert not part.scales and part.storage == "float8_e4m3fn"
    tensors = eight_bit(dit, lambda shape: {}, dtype="F8_E5M2")
    assert (
        identify_model(write_file(tmp_path / "b.safetensors", tensors), FAMILIES).parts["dit"].storage == "float8_e5m2"
    )


@pytest.mark.parametrize(
    ("extra", "dtype", "words"),
    [
        (lambda shape: {"mystery": ("F32", ())}, "F8_E4M3", "mystery"),
        (lambda shape: {"weight_scale": ("F32", ()), "zero_point": ("I8", ())}, "I8", "zero"),
        (lambda shape: {"weight_scale": ("F32", (2, 3))}, "F8_E4M3", "shape"),
        (lambda shape: {"weight_scale": ("F8_E4M3", (shape[0], 2)), "weight_scale_2": ("F32", ())}, "U8", "NVFP4"),
        (lambda shape: {"absmax": ("F32", (3,)), "quant_map": ("F32", (16,))}, "U8", "bitsandbytes"),
        (lambda shape: {}, "I8", "without a factor"),
        (lambda shape: {"weight.scale": ("F32", ())}, "F8_E4M3", "weight.scale"),
        (lambda shape: {"weight.absmax": ("F32", (3,))}, "F8_E4M3", "bitsandbytes"),
        (lambda shape: {"weight_scale": ("F8_E8M0", (shape[0], shape[1] // 32))}, "F8_E4M3", "F8_E8M0 factor"),
    ],
)
def test_unknown_companions_are_an_error(extra, dtype, words, dit, tmp_path):
    path = write_file(tmp_path / "a.safetensors", eight_bit(dit, extra, dtype=dtype))
    with pytest.raises(Trouble, match=words) as caught:
        identify_model(path, FAMILIES)
    assert caught.value.kind == "not_supported"


def test_a_scaled_file_with_a_factor_missing(dit, tmp_path):
    tensors = eight_bit(dit, lambda shape: {"scale_weight": ("F32", ())})
    del tensors["transformer_blocks.2.attn.to_k.scale_weight"]
    with pytest.raises(Trouble, match="to_k"):
        identify_model(write_file(tmp_path / "a.safetensors", tensors), FAMILIES)


def comfy_quant(path, words: bytes):
    """Writes `words` into the file's one comfy_quant tensor."""
    at = read_header(path).tensors["transformer_blocks.0.attn.to_q.comfy_quant"]
    with path.open("r+b") as file:
        file.seek(at.start)
        file.write(words)


@pytest.mark.parametrize(
    ("words", "fine"),
    [
        (b'{"format": "float8_e4m3fn"}', True),
        (b'{"format": "float8_e4m3fn", "full_precision_matrix_mult": true}', True),
        (b'{"format": "float8_e4m3fn", "group_size": null, "orig_dtype": "torch.bfloat16"}', True),
        (b'{"format": "int8_tensorwise", "convrot": false, "convrot_groupsize": 256}', False),
        (b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}', False),
        (b'{"format": "nvfp4"}        ', False),
        (b"{broken                    ", False),
    ],
)
def test_the_newer_marker_of_comfyui(words, fine, dit, tmp_path):
    tensors = eight_bit(dit, lambda shape: {"weight_scale": ("F32", ())})
    tensors["transformer_blocks.0.attn.to_q.comfy_quant"] = ("U8", (len(words),))
    path = write_file(tmp_path / "a.safetensors", tensors)
    comfy_quant(path, words)
    if fine:
        assert "transformer_blocks.0.attn.to_q.weight" in identify_model(path, FAMILIES).parts["dit"].scales
    else:
        with pytest.raises(Trouble):
            identify_model(path, FAMILIES)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize(
    ("entry", "words"),
    [({"format": "mxfp8"}, "MXFP8"), ({"format": "int8_tensorwise", "convrot": True}, "ConvRot")],
)
def test_a_format_named_in_the_metadata(entry, words, prefix, dit, tmp_path):
    tensors = eight_bit(dit, lambda shape: {"weight_scale": ("F32", ())})
    tensors = {prefix + name: at for name, at in tensors.items()}
    said = {
        "layers": {prefix + "transformer_blocks.0.attn.to_q": entry, prefix + "img_in": {"format": "float8_e4m3fn"}}
    }
    path = write_file(tmp_path / "a.safetensors", tensors, {"_quantization_metadata": json.dumps(said)})
    with pytest.raises(Trouble, match=words):
        identify_model(path, FAMILIES)


def test_a_companion_joined_by_an_underscore(dit, tmp_path):
    tensors = eight_bit(dit, lambda shape: {}) | {"transformer_blocks.0.attn.to_q_scale": ("F32", ())}
    with pytest.raises(Trouble, match=r"to_q\.weight") as caught:
        identify_model(write_file(tmp_path / "a.safetensors", tensors), FAMILIES)
    assert caught.value.kind == "not_supported"


def test_strangers_are_named(tmp_path, dit):
    with pytest.raises(Trouble, match=r"foo\.bar") as caught:
        identify_model(write_file(tmp_path / "a.safetensors", {"foo.bar": ("F32", (1,))}), FAMILIES)
    assert caught.value.kind == "not_recognised"
    lora = {
        "transformer_blocks.0.attn.to_q.lora_A.weight": ("F32", (1, 2)),
        "transformer_blocks.0.attn.to_q.lora_B.weight": ("F32", (2, 1)),
    }
    with pytest.raises(Trouble, match="is a LoRA"):
        identify_model(write_file(tmp_path / "b.safetensors", lora), FAMILIES)
    control = {f"control_model.{name}": at for name, at in dit.items()}
    with pytest.raises(Trouble, match="ControlNet"):
        identify_model(write_file(tmp_path / "c.safetensors", control), FAMILIES)
    with pytest.raises(Trouble, match="There is no file or folder"):
        identify_model(tmp_path / "absent", FAMILIES)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Trouble, match="holds no model"):
        identify_model(tmp_path / "empty", FAMILIES)


def test_stray_adapter_keys_in_a_merged_checkpoint_are_left_out(tmp_path, dit):
    stray = {"transformer_blocks.0.attn.to_q.lora_A.weight": ("BF16", (1, 192))}
    assert set(
        identify_model(write_file(tmp_path / "a.safetensors", {**dit, **stray}), FAMILIES).parts["dit"].tensors
    ) == set(dit)


def test_the_edit_variants_are_told_apart(tmp_path, dit):
    for marker, variant in (
        (("__index_timestep_zero__", ("BF16", (1,))), "edit-2511"),
        (("time_text_embed.addition_t_embedding.weight", ("BF16", (2, 192))), "layered"),
    ):
        path = write_file(tmp_path / f"{variant}.safetensors", {**dit, marker[0]: marker[1]})
        assert identify_model(path, FAMILIES).variant == variant


NATIVE_FLUX = {
    "double_blocks.0.img_attn.norm.key_norm.scale": ("F32", (128,)),
    "double_blocks.0.img_attn.norm.query_norm.scale": ("F32", (128,)),
    "double_blocks.0.img_attn.qkv.weight": ("F32", (9216, 3072)),
    "double_blocks.0.img_attn.qkv.bias": ("F32", (9216,)),
    "single_blocks.0.linear1.weight": ("F32", (21504, 3072)),
    "img_in.weight": ("F32", (3072, 64)),
    "txt_in.weight": ("F32", (3072, 4096)),
    "vector_in.in_layer.weight": ("F32", (3072, 768)),
    "guidance_in.in_layer.weight": ("F32", (3072, 256)),
    "final_layer.linear.weight": ("F32", (64, 3072)),
    "final_layer.adaLN_modulation.1.weight": ("F32", (6144, 3072)),
}


def test_native_names_become_our_own_with_rows_cut(tmp_path):
    path = write_file(
        tmp_path / "flux.safetensors", {f"model.diffusion_model.{k}": at for k, at in NATIVE_FLUX.items()}
    )
    spec = identify_model(path, FAMILIES)
    assert (spec.family, spec.variant) == ("flux", "dev")
    part, whole = spec.parts["dit"], read_header(path).tensors["model.diffusion_model.single_blocks.0.linear1.weight"]
    mlp, key = (
        part.tensors["single_transformer_blocks.0.proj_mlp.weight"],
        part.tensors["single_transformer_blocks.0.attn.to_k.weight"],
    )
    assert mlp.shape == (12288, 3072) and mlp.end == whole.end and mlp.start == whole.start + 3 * 3072 * 3072 * 4
    assert key.shape == (3072, 3072) and key.start == whole.start + 3072 * 3072 * 4
    assert part.tensors["transformer_blocks.0.attn.to_v.bias"].shape == (3072,)
    assert part.tensors["norm_out.linear.weight"].swapped and not mlp.swapped
    assert part.tensors["transformer_blocks.0.attn.norm_k.weight"].shape == (128,)
    assert part.config["num_attention_heads"] == 24 and part.config["guidance_embeds"]


def test_each_family_knows_its_own_signature_and_no_other():
    """Synthetic headers of just what a signature asks for."""
    from backend.catalog.models import match_parts as parts
    from backend.catalog.spec import TensorAt

    for family in FAMILIES:
        for signature in family.SIGNATURES:
            tensors = {}
            for name in (*signature.must, *signature.shapes):
                shape = tuple(size or 1 for size in signature.shapes.get(name, ()))
                tensors[name.replace("{}", "0")] = TensorAt(TRANSFORMER, name, "F32", shape, 0, 0)
            knowing = [other.NAME for other in FAMILIES if parts._best_match(tensors, other, signature.part)]
            alike = [other.NAME for other in FAMILIES if _shape_of(signature) in map(_shape_of, other.SIGNATURES)]
            assert knowing == alike and family.NAME in alike and (len(alike) == 1 or signature.part != "dit"), signature


def _shape_of(signature):
    """What a signature asks for; families may share an autoencoder or a text encoder, never a denoiser."""
    return signature.part, signature.must, signature.must_not, tuple(sorted(signature.shapes.items()))


def test_a_file_too_incomplete_to_tell_its_sizes(tmp_path, dit):
    known = ("img_in.weight", "txt_norm.weight")
    some = {name: at for name, at in dit.items() if name in known or name.startswith("transformer_blocks.0.")}
    del some["transformer_blocks.0.attn.norm_q.weight"]
    with pytest.raises(Trouble, match="sizes") as caught:
        identify_model(write_file(tmp_path / "a.safetensors", some), FAMILIES)
    assert caught.value.kind == "damaged"


def folder_of(tmp_path, class_name: str = "", **config):
    """The starter as a folder of its own, with another pipeline's class and settings of the transformer's."""
    folder = tmp_path / "some model"
    for part in ("transformer", "text_encoder", "vae", "tokenizer"):
        shutil.copytree(STARTER / part, folder / part)
    if class_name:
        (folder / "model_index.json").write_text(json.dumps({"_class_name": class_name}))
    said = folder / "transformer" / "config.json"
    said.write_text(json.dumps({**json.loads(said.read_text()), **config}))
    shutil.copytree(STARTER / "tokenizer", folder / "processor")
    (folder / "processor" / "preprocessor_config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("class_name", "config", "variant"),
    [
        ("QwenImageEditPipeline", {}, "edit"),
        ("QwenImageEditPlusPipeline", {}, "edit-2509"),
        ("QwenImageEditPlusPipeline", {"zero_cond_t": True}, "edit-2511"),
        ("QwenImagePipeline", {}, "base"),
        ("", {}, "base"),
    ],
)
def test_edit_variants_are_told_by_class_and_configuration_and_alone_have_the_vision_tower(
    class_name, config, variant, tmp_path
):
    folder = folder_of(tmp_path, class_name, **config)
    spec = identify_model(folder, FAMILIES)
    edits = variant != "base"
    assert spec.variant == variant and ("Edit" in spec.title) == edits and not spec.missing
    assert set(spec.parts) == {"dit", "text_encoder", "vae"} | ({"vision"} if edits else set())
    assert spec.processor == folder / "processor" and spec.tokenizer == folder / "tokenizer"
    shutil.rmtree(folder / "tokenizer")
    (folder / "processor" / "preprocessor_config.json").rename(
        folder / "processor" / "processor_config.json"
    )  # as newer versions write it
    again = identify_model(folder, FAMILIES)
    assert again.tokenizer == again.processor == folder / "processor"
    if edits:
        shutil.copy(
            STARTER / "vae" / "config.json", folder / "text_encoder"
        )  # speaks of another class: sizes come from shapes
        vision, said = spec.parts["vision"], identify_model(folder, FAMILIES).parts["vision"].config
        assert all(
            said[name] == value
            for name, value in vision.config.items()
            if name in said and name not in ("num_heads", "fullatt_block_indexes")
        )
        assert {name for name in said if vision.config.get(name) is None} == set()
        assert all(at.key.startswith("visual.") for at in vision.tensors.values())


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("qwen_image_edit_2509_fp8_e4m3fn.safetensors", "edit-2509"),
        ("Qwen-Image-Edit-2511-Lightning.safetensors", "edit-2511"),
        ("qwen_image_edit_plus.safetensors", "edit-2509"),
        ("FireRed-Image-Edit-1.0.safetensors", "edit-2509"),
        ("firered_image_edit_1.1_bf16.safetensors", "edit-2509"),
        ("qwen_image_edit_fp8.safetensors", "edit"),
        ("qwen_image_fp8.safetensors", "base"),
        ("edited.safetensors", "base"),
        ("Qwen-Image-Edit/transformer/model.safetensors", "edit"),
        ("qwen-image-edit/Qwen-Image/transformer/model.safetensors", "base"),
    ],
)
def test_single_files_of_edit_variants_are_told_by_what_they_are_called(name, variant, dit, tmp_path):
    spec = identify_model(write_file(tmp_path / name, dit), FAMILIES)
    assert spec.variant == variant and bool(spec.parts["dit"].config["zero_cond_t"]) == (variant == "edit-2511")
    assert ("vision" in spec.missing) == (variant != "base")
    assert (f"it is called {name.partition('/')[0].removesuffix('.safetensors')}" in spec.evidence) == (
        variant != "base"
    )


def test_the_vision_tower_in_lists_of_files(dit, tmp_path):
    made = write_file(tmp_path / "Qwen-Image-Edit" / "transformer" / "diffusion_pytorch_model.safetensors", dit)
    files = [
        made,
        STARTER / "text_encoder" / "model.safetensors",
        STARTER / "vae" / "diffusion_pytorch_model.safetensors",
    ]
    assert set(identify_files(files, FAMILIES).parts) == {"dit", "text_encoder", "vision", "vae"}
    assert set(identify_files([TRANSFORMER, *files[1:]], FAMILIES).parts) == {"dit", "text_encoder", "vae"}
    tower = {name: at for name, at in shapes(files[1]).items() if name.startswith("visual.")}
    alone = write_file(tmp_path / "tower.safetensors", {f"model.{name}": at for name, at in tower.items()})
    assert list(identify_files([alone], FAMILIES).parts) == ["vision"]
