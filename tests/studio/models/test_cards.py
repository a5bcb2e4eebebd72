"""LoRA files on the page: cards, reasons, strengths of blocks, and the settings that they were trained with."""

from __future__ import annotations

import base64
import io
import json
import struct
from dataclasses import replace

import numpy
import pytest
from PIL import Image

from backend.catalog.lora.block_norms import block_of, block_strengths
from backend.catalog.spec import LoraSpec
from backend.families import FAMILIES
from backend.host.engine.client import Engine
from backend.schema.settings import to_values
from backend.schema.training.config import TrainingConfig
from studio.generate import events, lora_rows
from studio.models import cards, config_from_lora, lora_thumbnails
from studio.state import library
from studio.state.context import Studio

MADE_HERE = {"trigger": "zork", "software": "Loft 0.1", "family": "qwen_image"}


def write_safetensors(path, tensors: dict[str, tuple[str, numpy.ndarray]], metadata: dict | None = None):
    header, blobs, at = {}, [], 0
    for name, (dtype, values) in tensors.items():
        blob = values.tobytes()
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    if metadata:
        header["__metadata__"] = metadata
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    return path


def lora_tensors(blocks: int = 3, rank: int = 2, width: int = 192) -> dict:
    random = numpy.random.default_rng(0)
    tensors = {}
    for block in range(blocks):
        stem = f"transformer_blocks.{block}.attn.to_q"
        for side, shape in (("lora_A", (rank, width)), ("lora_B", (width, rank))):
            tensors[f"{stem}.{side}.weight"] = ("F32", random.standard_normal(shape).astype("<f4"))
    return tensors


@pytest.fixture
def studio(data):
    engine = Engine(data, fake=True)
    yield Studio(data, engine, FAMILIES)
    engine.stop()


def test_norms_equal_those_of_the_full_delta(tmp_path):
    tensors = lora_tensors()
    tensors["transformer_blocks.1.attn.to_q.alpha"] = ("F32", numpy.array([4.0], "<f4"))
    found = dict(block_strengths(write_safetensors(tmp_path / "a.safetensors", tensors)))
    for block in range(3):
        stem = f"transformer_blocks.{block}.attn.to_q"
        delta = tensors[f"{stem}.lora_B.weight"][1] @ tensors[f"{stem}.lora_A.weight"][1] * (2.0 if block == 1 else 1.0)
        assert found[f"transformer_blocks.{block}"] == pytest.approx(float(numpy.linalg.norm(delta)), rel=1e-4)


def test_norms_of_other_algorithms(tmp_path):
    random = numpy.random.default_rng(1)

    def some(*shape):
        return random.standard_normal(shape).astype("<f4")

    b = "transformer_blocks."
    loha = [some(6, 2), some(2, 8), some(6, 2), some(2, 8)]
    left, right_a, right_b = some(2, 4), some(3, 2), some(2, 5)
    down, mid, up = some(2, 5, 1, 1), some(3, 2, 3, 3), some(7, 3, 1, 1)
    a, c, whole = some(4, 6), some(5, 4), some(3, 4)
    tensors = {f"{b}0.q.hada_{name}": value for name, value in zip(("w1_a", "w1_b", "w2_a", "w2_b"), loha, strict=True)}
    tensors |= {
        f"{b}0.q.alpha": numpy.array(1.0, "<f4"),
        f"{b}1.q.lokr_w1": left,
        f"{b}1.q.alpha": numpy.array([1.0], "<f4"),
    }
    tensors |= {
        f"{b}1.q.lokr_w2_a": right_a,
        f"{b}1.q.lokr_w2_b": right_b,
        f"{b}2.q.lokr_w1": left,
        f"{b}2.q.lokr_w2": right_a,
    }
    tensors |= {
        f"{b}3.q.lora_down.weight": down,
        f"{b}3.q.lora_mid.weight": mid,
        f"{b}3.q.lora_up.weight": up,
        f"{b}4.q.diff": whole,
    }
    tensors |= {
        f"{b}5.q.lora_A.weight": a,
        f"{b}5.q.lora_B.weight": c,
        f"{b}5.k.diff": whole,
        f"{b}6.q.oft_blocks": some(2, 3, 3),
    }
    said = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 8, "transformer.use_rslora": True})}
    path = write_safetensors(
        tmp_path / "a.safetensors", {name: ("F32", value) for name, value in tensors.items()}, said
    )
    found = dict(block_strengths(path))
    tucker = numpy.einsum("om,mnyx,ni->oiyx", up[:, :, 0, 0], mid, down[:, :, 0, 0])
    wanted = [
        0.5 * (loha[0] @ loha[1]) * (loha[2] @ loha[3]),
        0.5 * numpy.kron(left, right_a @ right_b),
        numpy.kron(left, right_a),
        tucker * 8 / 2**0.5,
        whole,
    ]
    for block, delta in enumerate(wanted):
        assert found[f"{b}{block}"] == pytest.approx(float(numpy.linalg.norm(delta)), rel=1e-4), block
    both = float(numpy.linalg.norm(4 * c @ a)) ** 2 + float(numpy.linalg.norm(whole)) ** 2
    assert found[f"{b}5"] == pytest.approx(both**0.5, rel=1e-4) and f"{b}6" not in found


def test_eight_bit_factors_are_read(tmp_path):
    a, c = (
        numpy.array([[0x38, 0xC0], [0x30, 0x01]], "u1"),
        numpy.array([[0x40, 0x00], [0x38, 0x38], [0xB8, 0x48]], "u1"),
    )
    values_a, values_c = [[1.0, -2.0], [0.5, 2**-9]], [[2.0, 0.0], [1.0, 1.0], [-1.0, 4.0]]
    path = write_safetensors(
        tmp_path / "a.safetensors",
        {"layers.0.q.lora_A.weight": ("F8_E4M3", a), "layers.0.q.lora_B.weight": ("F8_E4M3", c)},
    )
    assert dict(block_strengths(path))["layers.0"] == pytest.approx(
        float(numpy.linalg.norm(numpy.array(values_c) @ values_a))
    )


def test_bf16_is_read_and_blocks_are_in_order(tmp_path):
    tensors = {
        name: ("BF16", (values.view("<u4") >> 16).astype("<u2"))
        for name, (_, values) in lora_tensors(blocks=12).items()
    }
    found = block_strengths(write_safetensors(tmp_path / "a.safetensors", tensors))
    assert [name for name, _ in found] == [f"transformer_blocks.{i}" for i in range(12)]


@pytest.mark.parametrize(
    ("stem", "block"),
    [
        ("transformer.transformer_blocks.7.attn.to_q", "transformer_blocks.7"),
        ("lora_unet_double_blocks_12_img_attn_qkv", "double_blocks.12"),
        ("diffusion_model.proj_out", "other"),
    ],
)
def test_blocks_are_known_in_any_spelling(stem, block):
    assert block_of(stem) == block


def test_cards_show_what_fits_what_does_not_and_what_is_broken(studio):
    write_safetensors(studio.places.loras / "mine.safetensors", lora_tensors(), MADE_HERE)
    (studio.places.loras / "bad<b>.safetensors").write_bytes(b"\xff" * 40)
    found = library.loras(studio)
    html = cards.lora_cards(found, model_family="qwen_image", shown="", studio=studio, now=0.0)
    assert "mine" in html and "zork" in html and 'class="card broken"' in html and "bad<b>" not in html
    assert "does not fit" not in html.split("mine")[1].split("</button>")[0]
    other = cards.lora_cards(found, model_family="flux", shown="", studio=studio, now=0.0)
    assert "does not fit" in other


def test_search_finds_by_name_and_trigger_word(studio):
    write_safetensors(studio.places.loras / "mine.safetensors", lora_tensors(), MADE_HERE)
    found = library.loras(studio)
    assert len(cards.searched(found, "ZORK", studio)) == len(cards.searched(found, "mine qwen", studio)) == 1
    assert cards.searched(found, "absent", studio) == []


def spec_with(metadata: dict, tmp_path) -> LoraSpec:
    return LoraSpec(tmp_path / "cat.safetensors", "qwen_image", "", (16,), (8.0,), (), 1, metadata=metadata)


CASES = {
    "loft": (
        {"software": "Loft 0.1.0", "config": json.dumps({"learning_rate": 0.0015, "max_steps": 240, "lora_rank": 8})},
        {"learning_rate": 0.0015, "max_steps": 240, "lora_rank": 8},
    ),
    "sd-scripts": (
        {
            "ss_network_dim": "32", "ss_network_alpha": "16.0", "ss_unet_lr": "0.0003", "ss_num_epochs": "6",
            "ss_optimizer": "bitsandbytes.optim.adamw.AdamW8bit", "ss_lr_scheduler": "cosine_with_restarts",
            "ss_resolution": "(1024, 768)", "ss_flip_aug": "True", "ss_seed": "42",
        },
        {
            "lora_rank": 32, "lora_alpha": 16.0, "learning_rate": 0.0003, "num_epochs": 6, "customized_optimizer": "adamw8bit",
            "lr_scheduler": "cosine_with_restarts", "max_pixels": 1024 * 768, "flip": True, "seed": 42,
        },
    ),
    "ai-toolkit": (
        {
            "software": json.dumps({"name": "ai-toolkit"}), "training_info": json.dumps({"step": 2000, "epoch": 5}),
            "config": json.dumps({"process": [{"train": {"lr": 1e-4}, "network": {"linear": 64, "linear_alpha": 64}}]}),
        },
        {"max_steps": 2000, "num_epochs": 5, "learning_rate": 1e-4, "lora_rank": 64, "lora_alpha": 64.0},
    ),
    "onetrainer": (
        {"ot_config": json.dumps({"learning_rate": 2e-4, "epochs": 30, "optimizer": {"optimizer": "PRODIGY"}, "lora_rank": 24})},
        {"learning_rate": 2e-4, "num_epochs": 30, "customized_optimizer": "prodigy", "lora_rank": 24},
    ),
    "diffusers": (
        {"lora_adapter_metadata": json.dumps({"transformer.r": 12, "transformer.target_modules": ["to_q", "to_k"]})},
        {"lora_rank": 12, "lora_target_modules": "to_q,to_k"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainer", CASES)
def test_settings_are_read_from_what_trainers_write(trainer, tmp_path):
    metadata, expected = CASES[trainer]
    values = to_values(config_from_lora.config_of(spec_with(metadata, tmp_path), TrainingConfig()))
    assert {name: values[name] for name in expected} == expected


def test_strange_metadata_costs_nothing(tmp_path):
    metadata = {"ss_network_dim": "None", "ss_unet_lr": "nan", "ss_resolution": "x", "ot_config": "{", "config": "[1]"}
    metadata |= {"software": "Loft", "lora_adapter_metadata": '{"r": {}}', "ss_num_epochs": "-3"}
    values = to_values(config_from_lora.config_of(spec_with(metadata, tmp_path), TrainingConfig()))
    assert values["lora_rank"] == 16 and values["lora_alpha"] == 8.0 and values["num_epochs"] == 1


def test_nothing_of_another_machine_is_taken_over(tmp_path):
    foreign = {"output_path": "/etc", "dataset_base_path": "/theirs", "model": "who/what", "max_steps": 5}
    spec = spec_with({"software": "Loft 1", "config": json.dumps(foreign)}, tmp_path)
    values = to_values(config_from_lora.config_of(spec, TrainingConfig()))
    assert values["max_steps"] == 5 and values["model"] == "loft/starter"
    assert values["dataset_base_path"] == "" and values["output_path"] == TrainingConfig().output.output_path


def test_a_used_lora_brings_its_trigger_word_and_a_row():
    assert events.with_trigger("a cat", ("zork", "zark")) == "zork, a cat"
    assert events.with_trigger("Zark on a hill", ("zork", "zark")) == "Zark on a hill"
    assert events.with_trigger("", ("zork",)) == "zork" and events.with_trigger("a", ()) == "a"
    rows = lora_rows.with_lora([("a", 0.5), ("", 1.0)], "b")
    assert rows == [("a", 0.5), ("b", 1.0)] and lora_rows.with_lora(rows, "a") == rows
    full = [(str(i), 1.0) for i in range(lora_rows.MOST_ROWS)]
    assert len(lora_rows.with_lora(full, "new")) == lora_rows.MOST_ROWS


def test_pictures_inside_files_are_shown_small_and_strange_ones_are_not(studio):
    def url(kind: str, data: bytes) -> str:
        return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"

    buffer = io.BytesIO()
    Image.new("RGB", (900, 600), "teal").save(buffer, "PNG")
    inside = {
        "good": {"modelspec.thumbnail": url("png", buffer.getvalue())},
        "broken": {"thumbnail": url("jpeg", b"no picture")},
        "script": {"thumbnail": "data:image/svg+xml;base64,PHN2Zz4="},
        "none": {},
    }
    for name, metadata in inside.items():
        write_safetensors(studio.places.loras / f"{name}.safetensors", lora_tensors(), MADE_HERE | metadata)
    found = {spec.path.stem: spec for spec in library.loras(studio)}
    assert all(len(value) < 40 for value in found["good"].metadata.values())  # a listing holds no pictures
    html = cards.lora_cards(list(found.values()), model_family="", shown="", studio=studio, now=0.0)
    assert html.count("<img") == 1 and 'loading="lazy"' in html and "base64" not in html
    kept = list((studio.places.cache / "thumbnails").glob("*.webp"))
    assert len(kept) == 1 and Image.open(kept[0]).size == (256, 171)
    details = cards.lora_details(found["good"], model_family="", strengths="", studio=studio)
    assert "detail-face" in details and kept[0].name in details


def test_a_file_of_a_run_shows_no_sample_that_is_younger_than_itself(studio):
    run = studio.places.runs / "one"
    for step, colour in ((0, "gray"), (100, "teal")):
        picture = run / "samples" / f"step-{step:06d}" / "0.png"
        picture.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), colour).save(picture)
    for step in (1, 100, 120):
        write_safetensors(run / f"step-{step}.safetensors", lora_tensors(), MADE_HERE | {"steps": str(step)})
    face = {spec.path.stem: lora_thumbnails.picture_of(spec, studio) for spec in library.loras(studio)}
    assert face["step-100"] == face["step-120"] != face["step-1"] != ""


def test_details_tell_how_it_was_trained(studio):
    said = MADE_HERE | {"config": json.dumps({"learning_rate": 0.0015, "max_steps": 240}), "ss_tag_frequency": "{"}
    write_safetensors(studio.places.loras / "mine.safetensors", lora_tensors(), said)
    html = cards.lora_details(library.loras(studio)[0], model_family="", strengths="", studio=studio)
    assert "<dt>Learning rate</dt><dd>0.0015</dd>" in html and "<dt>Steps</dt><dd>240</dd>" in html


def test_a_form_takes_what_suits_a_model_here_or_only_known_by_name_and_sizes_are_checked_before_the_queue(studio):
    from backend.schema.messages import Trouble
    from backend.schema.request import GenerationRequest

    found = library.models(studio)
    assert library.request_defaults(found, "loft/starter", studio)["width"] == 128
    assert library.request_defaults(found, "black-forest-labs/FLUX.1-dev", studio)["width"] == 1024
    assert library.request_defaults(found, "nobody/nothing", studio) == {}
    library.check_size(found, GenerationRequest(), studio)
    library.check_size(found, GenerationRequest(model="black-forest-labs/FLUX.1-dev", width=1024), studio)
    with pytest.raises(Trouble, match="draws 128 x 128 pixels"):
        library.check_size(found, GenerationRequest(width=160), studio)


def test_a_lora_of_another_model_that_is_here_is_said_to_be_so(studio, tmp_path):
    spec = replace(spec_with({}, tmp_path), base="loft/starter")
    said = library.other_base(spec, "my-model", studio)
    assert said == "cat was trained on loft/starter; the model chosen here is my-model."
    assert not library.other_base(spec, "loft/starter", studio)
    assert not library.other_base(replace(spec, base="Qwen/Qwen-Image"), "my-model", studio), (
        "it may be a copy of that, by another name"
    )
    assert not library.other_base(None, "my-model", studio)


def test_what_does_not_fit_the_chosen_model_is_told_in_the_library_behind_the_button_and_before_drawing(studio):
    from backend.schema.messages import Trouble
    from backend.schema.request import GenerationRequest, LoraUse

    folder = studio.places.loras
    files = {
        "good": lora_tensors(blocks=2),
        "wide": lora_tensors(blocks=2, width=3072),
        "part": {**lora_tensors(blocks=2), **{k.replace(".1.", ".59."): v for k, v in lora_tensors(blocks=2).items()}},
    }
    paths = {name: write_safetensors(folder / f"{name}.safetensors", tensors) for name, tensors in files.items()}
    found, models = library.loras(studio), library.models(studio)
    model = library.model_of(models, library.STARTER, studio)
    specs = {spec.path.stem: spec for spec in found}
    why = {name: library.fits(spec, model.family, studio, model) for name, spec in specs.items()}
    assert why["good"] == "" and "192" in why["wide"] and "transformer_blocks.59" in why["part"]
    html = cards.lora_cards(found, model_family=model.family, shown="", studio=studio, now=0.0, model=model)
    pills = {name: html.split(f"<b>{name}</b>")[1].split("</button>")[0] for name in files}
    assert "does not fit" in pills["wide"] and "fits in part" in pills["part"] and "pill" not in pills["good"]
    details = cards.lora_details(specs["wide"], model_family=model.family, strengths="", studio=studio, model=model)
    assert "another size" in details
    labels = [label for label, _ in library.lora_choices(found, studio, library.STARTER)]
    assert labels[-1] == "wide (does not fit this model)" and "part (fits in part)" in labels and "good" in labels

    def check(*names: str) -> None:
        uses = tuple(LoraUse(str(paths[name]), 1.0) for name in names)
        library.check_loras(models, GenerationRequest(prompt="a", model=library.STARTER, loras=uses), studio)

    check("good", "part")
    with pytest.raises(Trouble, match=r"wide.safetensors does not fit the chosen model.*3072") as caught:
        check("good", "wide")
    assert caught.value.kind == "shape_mismatch"
    strange = {key.replace("transformer_blocks", "double_blocks"): value for key, value in lora_tensors().items()}
    paths["flux"] = write_safetensors(
        folder / "flux.safetensors", strange, {"modelspec.architecture": "flux-1-dev/lora"}
    )
    with pytest.raises(Trouble, match=r"flux is a LoRA for FLUX\.1; the chosen model is Qwen-Image") as caught:
        check("flux")
    assert caught.value.kind == "wrong_family"
