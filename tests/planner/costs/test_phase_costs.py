"""Bytes of weights and of working memory, against figures that were measured or traced elsewhere. No torch."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from backend.catalog.models.identify import identify_model
from backend.families import FAMILIES
from backend.planner import history
from backend.planner.costs import phase_costs, weight_bytes
from backend.planner.costs.device_speed import Speed, remember, speed_of, what_if
from backend.planner.costs.layout import Fixed, Layout, PartLayout, Work
from backend.planner.costs.model_sizes import fingerprint, known_models, published, sizes_of, spread
from backend.planner.costs.phase_costs import point_of
from backend.planner.workload import work_of_request, work_of_training
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS, PROJECT
from backend.schema.request import GenerationRequest
from backend.schema.training.config import LoraSection, TrainingConfig, TrainingSection

GIB = 2**30
FIXED = Fixed()


@pytest.mark.parametrize(
    ("model", "part", "gib"),
    [
        ("Qwen-Image", "dit", 38.06),
        ("Qwen-Image", "vae", 0.236),
        ("FLUX.1-dev", "dit", 22.17),
        ("FLUX.1-dev", "text_encoder", 0.23),
        ("FLUX.1-dev", "text_encoder_2", 8.87),
        ("FLUX.1-dev", "vae", 0.156),
        ("Z-Image", "dit", 11.46),
        ("Z-Image", "text_encoder", 7.30),
        ("Wan2.2-T2V-A14B", "dit", 26.67),
        ("Wan2.2-T2V-A14B", "dit2", 26.67),
        ("Wan2.2-T2V-A14B", "text_encoder", 10.58),
    ],
)
def test_weights_of_published_models(model, part, gib):
    sizes = sizes_of(model).parts[part]
    assert sizes.bytes("bfloat16", "bfloat16") / GIB == pytest.approx(gib, rel=0.005)


def test_the_language_half_of_qwen_image_s_encoder_is_what_is_loaded():
    # 15.45 GiB with the vision tower (1.26) and the output layer (1.02), which a picture from text does not need
    assert sizes_of("Qwen-Image").parts["text_encoder"].bytes("bfloat16", "bfloat16") / GIB == pytest.approx(
        13.17, rel=0.005
    )
    edits = sizes_of("Qwen-Image-Edit").parts
    assert sum(edits[name].bytes("bfloat16", "bfloat16") for name in ("text_encoder", "vision")) / GIB == pytest.approx(
        14.43, rel=0.005
    )


@pytest.mark.parametrize(
    ("model", "side", "gib"),
    [
        ("Qwen-Image", 1024, 0.37),
        ("FLUX.1-dev", 1024, 0.46),
        ("Z-Image-Turbo", 1024, 0.48),
    ],
)
def test_a_denoising_step(model, side, gib):
    sizes = sizes_of(model)
    text = sizes.defaults["text_tokens"] if sizes.defaults.get("text_fixed") else 256
    work = Work(width=side, height=side, text_tokens=text)
    found = phase_costs.denoise(sizes.parts["dit"], point_of(sizes, work), work, FIXED)
    assert found.live / GIB == pytest.approx(gib, rel=0.03)
    assert found.live <= found.least <= found.likely


def test_a_video_step():
    sizes = sizes_of("Wan2.2-T2V-A14B")
    work = Work(width=1280, height=720, frames=81, text_tokens=512)
    assert phase_costs.denoise(sizes.parts["dit"], point_of(sizes, work), work, FIXED).live / GIB == pytest.approx(
        8.0, rel=0.01
    )


@pytest.mark.parametrize(
    ("model", "size", "frames", "dtype", "gib"),
    [
        ("FLUX.1-dev", (1024, 1024), 1, "bfloat16", 2.38),
        ("FLUX.1-dev", (2048, 2048), 1, "bfloat16", 9.5),
        ("Wan2.1-T2V-14B", (1280, 720), 81, "float32", 17.57),
        ("Wan2.1-T2V-14B", (1280, 720), 81, "bfloat16", 10.1),
    ],
)
def test_decoding(model, size, frames, dtype, gib):
    sizes = sizes_of(model)
    point = point_of(sizes, Work(width=size[0], height=size[1], frames=frames))
    assert phase_costs.decode(sizes.parts["vae"], point, dtype, FIXED).live / GIB == pytest.approx(gib, rel=0.015)


def test_a_tiled_video_decode_as_measured_on_a_card():
    sizes = sizes_of("Wan2.1-T2V-14B")  # 2.15 GiB on an RTX 4090 in 16 bits
    point = point_of(sizes, Work(width=1280, height=704, frames=81))
    assert phase_costs.decode(sizes.parts["vae"], point, "float16", FIXED, tiled=True).live / GIB == pytest.approx(
        2.15, rel=0.03
    )


def test_a_single_picture_of_qwen_image_is_decoded_without_the_video_cache():
    sizes = sizes_of("Qwen-Image")
    for side, most in ((1024, 2.1), (2048, 8.4)):  # diffusers' class by itself: 4.13 and 16.5
        point = point_of(sizes, Work(width=side, height=side))
        whole = phase_costs.decode(sizes.parts["vae"], point, "bfloat16", FIXED)
        assert whole.live / GIB < most
        assert phase_costs.decode(sizes.parts["vae"], point, "bfloat16", FIXED, tiled=True).live < 0.4 * whole.live


# GiB with weights, adapters, gradients and two moments, as another tracer found them for lean adapters on diffusers' classes
@pytest.mark.parametrize(
    ("model", "side", "batch", "kept", "gib"),
    [
        ("Qwen-Image", 512, 1, False, 39.2),
        ("Qwen-Image", 1024, 1, False, 40.7),
        ("Qwen-Image", 1024, 4, False, 47.2),
        ("Qwen-Image", 1328, 2, False, 45.7),
        ("Qwen-Image", 1024, 1, True, 64.4),
        ("Qwen-Image", 1024, 2, True, 93.1),
        ("FLUX.1-dev", 1024, 1, False, 24.6),
        ("FLUX.1-dev", 1024, 4, False, 31.0),
        ("FLUX.1-dev", 1024, 2, True, 61.4),
        ("Z-Image", 1024, 1, False, 13.9),
        ("Z-Image", 1024, 4, False, 20.5),
        ("Z-Image", 1024, 1, True, 42.8),
    ],
)
def test_a_training_step(model, side, batch, kept, gib):
    sizes = sizes_of(model)
    dit = sizes.parts["dit"]
    text = 512 if model.startswith("FLUX") else 256
    work = Work(width=side, height=side, targets="attention", rank=16, batch=batch, text_tokens=text)
    found, ends, _ = phase_costs.step(dit, point_of(sizes, work), work, Layout(checkpointed=not kept), FIXED)
    trained = 16 * lora_size(sizes, "attention", 16)[1]
    assert (found.live + trained + dit.bytes("bfloat16", "bfloat16")) / GIB == pytest.approx(gib, rel=0.01)
    assert ends <= found.live


def lora_size(sizes, wanted: str, rank: int) -> tuple[str, int]:
    """(the traced set of modules that it is counted by, how many numbers train) of a LoRA on what `wanted` names."""
    work, _ = work_of_training(TrainingConfig(lora=LoraSection(lora_target_modules=wanted, lora_rank=rank)), sizes)
    return work.targets, work.trained_numel


def test_lora_sizes_are_counted_from_the_layers():
    dit = sizes_of("Qwen-Image")
    kind, numel = lora_size(dit, "attention", 16)
    assert (kind, numel) == ("attention", 60 * 8 * 16 * (3072 + 3072))
    kind, wider = lora_size(dit, "to_q,img_mlp.net.2", 16)
    assert (kind, wider) == ("usual", 60 * 16 * (2 * 3072 + 3072 + 4 * 3072))
    assert lora_size(dit, r".*transformer_blocks\.\d+\.attn\.to_q", 16)[1] == 60 * 16 * 2 * 3072
    assert lora_size(dit, "", 32)[0] == "usual" and lora_size(dit, "", 32)[1] > 2 * numel
    assert lora_size(dit, "all-linear", 16)[0] == "all"


def test_the_sets_of_modules_are_the_families():
    networks = published()["networks"]
    for family in FAMILIES:
        facts = networks.get(family.PARTS["dit"].network.rpartition(":")[2]) if "dit" in family.PARTS else None
        if not facts or not facts.get("lora"):
            continue
        named = {name: facts["means"].get(name, name) for name in ("", *family.LORA.presets)}
        meant = {name: set(facts["lora"].get(one) or one.split(",")) for name, one in named.items()}
        assert meant == {
            "": set(family.LORA.modules),
            **{name: set(ends) for name, ends in family.LORA.presets.items()},
        }, family.NAME


def test_a_spec_s_bytes_are_its_header_s():
    spec = identify_model(ASSETS / "starter", FAMILIES)
    sizes = sizes_of(spec)
    for name, part in spec.parts.items():
        numel = sum(at.nbytes // {"BF16": 2, "F16": 2, "F32": 4}[at.dtype] for at in part.tensors.values())
        assert sizes.parts[name].bytes("bfloat16", "bfloat16") == 2 * numel
        assert sizes.parts[name].file_bytes == part.nbytes
    assert sizes.parts["dit"].depths["transformer_blocks"] == len(sizes.parts["dit"].blocks) > 1


def test_the_starter_has_tables():
    sizes = sizes_of(identify_model(ASSETS / "starter", FAMILIES))
    assert sizes.estimating == (), "trace it again: python -m backend trace starter"


def test_fingerprints_forget_depth_and_nothing_else():
    shapes = {"blocks.0.a": (4, 4), "blocks.1.a": (4, 4), "head": (4, 2)}
    same = {"blocks.0.a": (4, 4), "head": (4, 2)}
    assert fingerprint("Net", shapes, ("blocks",)) == fingerprint("Net", same, ("blocks",))
    assert fingerprint("Net", {**same, "head": (4, 3)}, ("blocks",)) != fingerprint("Net", same, ("blocks",))
    assert fingerprint("Net", same, ("blocks",), ("flag",)) != fingerprint("Net", same, ("blocks",))
    assert fingerprint("Other", same, ("blocks",)) != fingerprint("Net", same, ("blocks",))


def test_an_unknown_network_is_guessed_and_said_to_be_estimated():
    spec = identify_model(ASSETS / "starter", FAMILIES)
    dit = spec.parts["dit"]
    tensors = {
        name: replace(at, shape=(*at.shape[:-1], at.shape[-1] + 1)) if name == "proj_out.weight" else at
        for name, at in dit.tensors.items()
    }
    odd = replace(spec, parts={**spec.parts, "dit": replace(dit, tensors=tensors)})
    sizes = sizes_of(odd)
    assert sizes.estimating == ("dit",)
    work = work_of_request(GenerationRequest(), sizes)
    assert phase_costs.denoise(sizes.parts["dit"], point_of(sizes, work), work, FIXED).live > 0


def test_a_model_without_a_name_here_is_refused_with_the_names():
    with pytest.raises(Trouble, match="No sizes are known"):
        sizes_of("Somebody/Something")
    assert {"Qwen-Image", "FLUX.1-dev", "Z-Image-Turbo", "Wan2.2-TI2V-5B"} <= set(known_models())
    for title in known_models():
        assert sizes_of(title).parts["dit"].blocks


def test_weights_by_state():
    part = sizes_of("Qwen-Image").parts["dit"]
    whole = part.bytes("bfloat16", "bfloat16")
    eight = weight_bytes.on_card(part, PartLayout("parked", "float8_e4m3fn"), True, "bfloat16")
    assert eight[0] / whole == pytest.approx(0.5, abs=0.005)
    assert eight[1] == 2 * part.largest_matrix
    none = weight_bytes.on_card(part, PartLayout("streamed", on_card=0), True, "bfloat16")
    assert none[1] == 2 * part.largest_block("bfloat16", "bfloat16")
    assert weight_bytes.on_card(part, PartLayout("parked"), False, "bfloat16") == (0, 0)
    assert weight_bytes.off_card(part, PartLayout("parked"), "bfloat16") == whole
    assert weight_bytes.off_card(part, PartLayout("parked", home="disk"), "bfloat16") == 0


def test_blocks_that_stay_are_spread_evenly():
    assert spread(8, 4) == (1, 3, 5, 7)
    assert spread(60, 0) == () and len(spread(60, 60)) == 60
    gaps = [b - a for a, b in zip(spread(60, 13), spread(60, 13)[1:])]
    assert max(gaps) - min(gaps) <= 1


def test_requests_and_configs_as_work():
    sizes = sizes_of("Qwen-Image")
    work = work_of_request(
        GenerationRequest(prompt="x" * 300, width=768, height=512, guidance=4.0, input_image="a.png"), sizes
    )
    assert (work.width, work.height, work.guidance, work.from_picture, work.text_tokens) == (768, 512, True, True, 100)
    config = TrainingConfig(
        lora=LoraSection(lora_rank=8), training=TrainingSection(batch_size=3, customized_optimizer="adamw8bit")
    )
    work, own = work_of_training(config, sizes)
    assert (work.targets, work.rank, work.batch, work.width) == ("usual", 8, 3, 1024)
    assert own.state_bytes < 3 and not own.checkpointed
    full, _ = work_of_training(TrainingConfig(training=TrainingSection(trainable_models="dit")), sizes)
    assert full.targets == "full" and full.trained_numel == sizes.parts["dit"].numel


def test_a_measured_machine_corrects_the_next_prediction(tmp_path):
    card, file = what_if("12GiB")[0], tmp_path / "measured.json"
    assert history.corrected(FIXED, card, "flux", file) is FIXED
    for _ in range(3):
        held = history.corrected(FIXED, card, "flux", file).learnt_bytes
        history.remember(
            file, card, "flux", kind="generate", predicted_bytes=8 * GIB + held, measured_bytes=8 * GIB + 2**28
        )
    assert history.corrected(FIXED, card, "flux", file).learnt_bytes == 2**28
    assert history.corrected(FIXED, card, "other", file) is FIXED
    for more in (2**28, -(2**28)):
        known = replace(FIXED, learnt_bytes=more)
        assert known.corrected(8 * GIB) == 8 * GIB + more and known.corrected(2**20) == 2**20 + (
            2**19 if more > 0 else -(2**19)
        )
        assert all(
            known.correction(known.corrected(live)) == known.corrected(live) - live for live in (2**20, 2**28, 8 * GIB)
        )
    assert history.last(file, card, "flux")[1] == 8 * GIB + 2**28
    file.write_text("{half")
    assert history.corrected(FIXED, card, "flux", file) is FIXED


def test_a_calibration_is_kept_by_device(tmp_path):
    card, _ = what_if("rtx3060")
    measured = Speed(1e12, 2e9, 3e9, 4e9, measured=True)
    remember(card, measured, tmp_path / "calibration.json")
    assert speed_of(card, tmp_path / "calibration.json") == measured
    assert not speed_of(what_if("rtx4090")[0], tmp_path / "calibration.json").measured
    (tmp_path / "calibration.json").write_text("{")
    assert speed_of(card, tmp_path / "calibration.json") == what_if("rtx3060")[1]


def test_cards_that_are_not_here():
    card, speed = what_if("NVIDIA GeForce RTX 4090")
    assert card.total_bytes == 24 * GIB and speed.flops > 1e14 and not card.measured
    assert what_if("8")[0].total_bytes == 8 * GIB
    for wrong in ("potato", "0", "-3GiB", ""):
        with pytest.raises(ValueError, match="card"):
            what_if(wrong)


def test_evaluating_takes_microseconds_and_no_torch():
    sizes = sizes_of("FLUX.1-dev")
    work = Work(text_tokens=512)
    point = point_of(sizes, work)
    start = time.process_time()
    for _ in range(200):
        phase_costs.denoise(sizes.parts["dit"], point, work, FIXED)
    assert (time.process_time() - start) / 200 < 2e-4


def test_the_planner_needs_no_torch():
    code = "import sys, backend.planner.page_estimate; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'diffusers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, timeout=60).returncode == 0


def test_published_facts_name_known_networks():
    known = published()
    for family in known["families"].values():
        for variant in family["variants"].values():
            assert {"dit", "vae", "text_encoder"} <= variant["parts"].keys()
            for part in variant["parts"].values():
                assert part["network"].partition(":")[2] in known["networks"]
