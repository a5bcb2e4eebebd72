"""Predicted bytes against truth: live tensors of real runs of small models, traced points of the shipped forms, and known figures."""

from __future__ import annotations

import itertools
import json

import pytest
import torch

from backend.engine.tracing import allocation_recorder, caching_allocator, fit, forward_calls, server, training_fit
from backend.planner.costs.model_sizes import published, tables

pytestmark = pytest.mark.torch

GIB = 2**30
F32, BF16 = torch.float32, torch.bfloat16
VISION = "Qwen2_5_VisionTransformerPretrainedModel"
POINT = {"h": 24, "w": 16, "t": 32, "b": 2, "f": 3}
# Wan's text is always 512 tokens long: with fewer picture tokens its norm is the peak, which is one kernel on CUDA and several here.
LARGER_POINT = {**POINT, "h": 48, "w": 32}
DENOISERS = {
    "QwenImageTransformer2DModel": {
        "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "joint_attention_dim": 48, "axes_dims_rope": [8, 12, 12],
    },
    "FluxTransformer2DModel": {
        "num_layers": 2, "num_single_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "joint_attention_dim": 48,
        "pooled_projection_dim": 24, "axes_dims_rope": [8, 12, 12], "guidance_embeds": True,
    },
    "ZImageTransformer2DModel": {
        "n_layers": 3, "n_refiner_layers": 1, "dim": 64, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 48, "axes_dims": [8, 12, 12],
    },
    "WanTransformer3DModel": {
        "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "text_dim": 48, "ffn_dim": 128, "freq_dim": 32,
    },
}  # fmt: skip
DECODERS = {
    "AutoencoderKLQwenImage": {"base_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
    "AutoencoderKLWan": {"base_dim": 16, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1},
    "AutoencoderKL": {
        "block_out_channels": [16, 32], "down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2,
        "layers_per_block": 1, "latent_channels": 16, "norm_num_groups": 8, "use_quant_conv": False, "use_post_quant_conv": False,
    },
}  # fmt: skip
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 99,
    "feed_forward_proj": "gated-gelu",
}
ENCODERS = {
    "Qwen2_5_VLTextModel": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 99, "rope_parameters": {"mrope_section": [2, 3, 3], "rope_theta": 10000.0, "rope_type": "default"},
    },
    "Qwen3Model": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 99,
    },
    "T5Stack": T5,
    "UMT5EncoderModel": T5,
    VISION: {
        "depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 64, "fullatt_block_indexes": [2],
    },
    "CLIPTextModel": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 49408},
}  # fmt: skip


def both(kind: str, config: dict, work, *, prepare=lambda module: None, grad: bool = False) -> tuple[int, int]:
    """(predicted, measured) peak of live bytes beside the weights, in float32."""
    package = "transformers" if kind in ENCODERS else "diffusers"
    if kind == "T5Stack":
        package = "transformers.models.t5.modeling_t5"
    if kind == VISION:
        package = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
    with allocation_recorder.fakes():
        module = forward_calls.build(f"{package}:{kind}", config, F32)
        prepare(module)
        predicted = forward_calls.trace(module, work(module), grad=grad)
    module = forward_calls.build(f"{package}:{kind}", config, F32)
    prepare(module)
    with torch.set_grad_enabled(grad):
        allocation_recorder.record(work(module), weights=forward_calls.resident(module), fake=False)
        measured = allocation_recorder.record(work(module), weights=forward_calls.resident(module), fake=False)
    return allocation_recorder.peak(predicted), allocation_recorder.peak(measured)


def close(pair: tuple[int, int], tolerance: float = 0.02) -> None:
    predicted, measured = pair
    assert measured > 2**16
    assert abs(predicted / measured - 1) <= tolerance, f"predicted {predicted}, measured {measured}"


@pytest.mark.parametrize("kind", DENOISERS)
def test_a_denoising_step_takes_what_was_predicted(kind):
    close(both(kind, DENOISERS[kind], lambda module: lambda _: forward_calls.predict(module, LARGER_POINT, F32)))


@pytest.mark.parametrize("checkpointed", [True, False])
@pytest.mark.parametrize("kind", DENOISERS)
def test_a_training_step_takes_what_was_predicted(kind, checkpointed):
    def prepare(module):
        forward_calls.add_lora(module, published()["networks"][kind]["lora"]["all"], 8, F32)
        module.train()
        if checkpointed:
            module.enable_gradient_checkpointing()

    close(
        both(
            kind,
            DENOISERS[kind],
            lambda module: forward_calls.train_step(module, POINT, F32),
            prepare=prepare,
            grad=True,
        )
    )


@pytest.mark.parametrize("stage", ["decode", "encode_image"])
@pytest.mark.parametrize("kind", DECODERS)
def test_an_autoencoder_takes_what_was_predicted(kind, stage):
    close(both(kind, DECODERS[kind], lambda module: lambda _: getattr(forward_calls, stage)(module, POINT, F32)))


@pytest.mark.parametrize("kind", ENCODERS)
def test_a_text_encoder_takes_what_was_predicted(kind):
    close(
        both(kind, ENCODERS[kind], lambda module: lambda _: forward_calls.encode_text(module, {"t": 192, "b": 2}, F32))
    )


def shipped(kind: str) -> list[dict]:
    return [one for one in tables().values() if one["network"] == kind and one["forms"]]


@pytest.mark.parametrize("kind", DENOISERS)
def test_shipped_forms_agree_with_a_new_trace(kind):
    first = next(
        part["config"]
        for family in published()["families"].values()
        for variant in family["variants"].values()
        for part in variant["parts"].values()
        if part["network"].endswith(f":{kind}")
    )
    found = next(one for one in shipped(kind) if first in one["configs"])
    depths = {key: 2 for key in found["blocks"].values()}
    point = {"h": 64, "w": 80, "n": 64 * 80 // 4, "t": 160, "b": 1, "r": 20}
    with allocation_recorder.fakes():
        module = forward_calls.build(f"diffusers:{kind}", {**found["configs"][0], **depths}, BF16)
        traced = allocation_recorder.peak(
            forward_calls.trace(module, lambda _: forward_calls.predict(module, point, BF16))
        )
    assert fit.evaluate(found["forms"]["denoise/bfloat16/b1"], point) == pytest.approx(traced, rel=0.01)
    word = "d" + "-".join("2" for _ in depths)
    targets = published()["networks"][kind]["lora"]["attention"]
    step = allocation_recorder.peak(
        training_fit.step_tape(f"diffusers:{kind}", {**found["configs"][0], **depths}, BF16, targets, point, True)
    )
    assert fit.evaluate(found["forms"][f"step/attention/checkpointed/bfloat16/b1/{word}"], point) == pytest.approx(
        step, rel=0.01
    )


def test_bytes_are_affine_in_depth():
    known = published()["networks"]["QwenImageTransformer2DModel"]
    found = [
        allocation_recorder.peak(
            training_fit.step_tape(
                "diffusers:QwenImageTransformer2DModel",
                {**DENOISERS["QwenImageTransformer2DModel"], "num_layers": depth},
                BF16,
                known["lora"]["attention"],
                {"h": 32, "w": 32, "t": 32, "b": 1, "r": 4},
                False,
            )
        )
        for depth in (2, 3, 6)
    ]
    assert found[2] == pytest.approx(found[0] + 4 * (found[1] - found[0]), rel=0.005)


@pytest.fixture(scope="module")
def decoded() -> dict[str, allocation_recorder.Tape]:
    """Decoding one 1024 x 1024 picture: as this project does it, and as diffusers' class does by itself."""
    from diffusers import AutoencoderKLQwenImage

    point = {"h": 128, "w": 128}
    with allocation_recorder.fakes():
        ours = forward_calls.build("diffusers:AutoencoderKLQwenImage", {}, BF16)
        with forward_calls._default(BF16):
            theirs = AutoencoderKLQwenImage().eval().requires_grad_(False)
        return {
            "ours": forward_calls.trace(ours, lambda _: forward_calls.decode(ours, point, BF16)),
            "theirs": forward_calls.trace(
                theirs, lambda _: theirs.decode(torch.empty(1, 16, 1, 128, 128, dtype=BF16), return_dict=False)
            ),
        }


def test_the_tracer_gives_the_known_figure_of_the_unchanged_decoder(decoded):
    assert allocation_recorder.peak(decoded["theirs"]) / GIB == pytest.approx(4.13, rel=0.01)


def test_a_single_picture_is_decoded_in_less_than_half(decoded):
    assert allocation_recorder.peak(decoded["ours"]) < 0.5 * allocation_recorder.peak(decoded["theirs"])


def test_pools_lie_in_order(decoded):
    for one in decoded.values():
        live = allocation_recorder.peak(one)
        least, reserved, growing = (
            caching_allocator.least(one, live),
            caching_allocator.replay(one),
            caching_allocator.replay(one, expandable=True),
        )
        assert live <= least <= reserved <= 2 * live
        assert live <= growing <= 1.5 * live
        assert caching_allocator.replay(one, limit=least) <= least
        with pytest.raises(caching_allocator.OutOfPool):
            caching_allocator.replay(one, limit=live - 2**21)


def test_a_pool_reuses_what_was_given_back():
    one = allocation_recorder.Tape(sizes=[32 * 2**20] * 10)
    for index in range(10):
        one.events += [index, ~index]
    assert caching_allocator.replay(one) == 32 * 2**20


def test_fit_refuses_tapes_of_different_events():
    first, second = allocation_recorder.Tape([512], [0, ~0]), allocation_recorder.Tape([512, 512], [0, 1, ~0, ~1])
    with pytest.raises(ValueError, match="order of events"):
        fit.fit(["1"], [{}, {}], [first, second], {})


def test_fit_finds_the_pieces_of_a_peak():
    def one(n: int) -> allocation_recorder.Tape:
        return allocation_recorder.Tape([512 * n, 512 * 1000], [0, ~0, 1, ~1])

    points = [{"n": n} for n in (10, 500, 4000)]
    form = fit.fit(["1", "n"], points, [one(point["n"]) for point in points], {"n": (1, 10**4)})
    for n in (1, 999, 1001, 10**4):
        assert fit.evaluate(form, {"n": n}) == pytest.approx(512 * max(n, 1000), rel=0.003)


def test_every_published_network_has_a_table():
    for family in published()["families"].values():
        for variant in family["variants"].values():
            for part in variant["parts"].values():
                kind = part["network"].partition(":")[2]
                assert any(part["config"] in one["configs"] for one in shipped(kind)), (variant["title"], kind)


def test_the_helper_answers_questions_in_a_folder(tmp_path):
    config = DENOISERS["WanTransformer3DModel"] | {"in_channels": 16, "out_channels": 16}
    (tmp_path / "one.ask").write_text(
        json.dumps({"network": "transformers.models.t5.modeling_t5:T5Stack", "config": T5})
    )
    (tmp_path / "two.ask").write_text(json.dumps({"network": "diffusers:NoSuchNetwork", "config": config}))
    server.serve(tmp_path, idle_seconds=0.0)
    for _ in itertools.takewhile(lambda _: list(tmp_path.glob("*.ask")), range(3)):
        server.serve(tmp_path, idle_seconds=0.1)
    answer = json.loads((tmp_path / "one.json").read_text())
    assert answer["tables"][0]["forms"]["text/bfloat16/b1"]["pieces"]
    assert "NoSuchNetwork" in json.loads((tmp_path / "two.json").read_text())["trouble"]
