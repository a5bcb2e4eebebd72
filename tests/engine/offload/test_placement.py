"""The exam of residence: every configuration of the four states computes what a resident module computes."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch")

from backend.engine.loading import load
from backend.engine.offload import placement
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from tests.engine.small import inputs

pytestmark = pytest.mark.torch

FP8 = "float8_e4m3fn"
STORED_FP8 = {"offload_dtype": FP8, "onload_dtype": FP8, "preparing_dtype": FP8}
ON_DISK = {"offload_device": "disk", "onload_device": "disk"}
DISK = {**ON_DISK, "preparing_device": "disk"}
LOSSLESS = {
    "nothing asked for": {},
    "part offload": {"offload_device": "cpu", "onload_device": "cpu", "computation_device": "cpu"},
    "disk until used": {"offload_device": "disk"},
    "disk, blocks may stay": ON_DISK,
    "disk, always": {**ON_DISK, "preparing_device": "disk"},
    "float32 in RAM": {"offload_dtype": "float32", "onload_dtype": "float32", "preparing_dtype": "float32"},
    "disk, float32 on the way": {**ON_DISK, "preparing_dtype": "float32", "computation_dtype": "bfloat16"},
}
LOSSY = {
    "FP8": STORED_FP8,
    "FP8, e5m2": {key: "float8_e5m2" for key in STORED_FP8},
    "FP8, e4m3fnuz": {key: "float8_e4m3fnuz" for key in STORED_FP8},
    "disk, then FP8": {**ON_DISK, "preparing_dtype": FP8},
    "disk, FP8 in RAM": {"offload_device": "disk", "onload_dtype": FP8, "preparing_dtype": FP8},
    "disk, FP8 in RAM, bfloat16 stays": {"offload_device": "disk", "onload_dtype": FP8},
    "a dtype for each state": {"offload_dtype": "float32", "onload_dtype": "float8_e5m2", "preparing_dtype": FP8},
    "as DiffSynth writes it": {
        "offload_dtype": "disk",
        "offload_device": "disk",
        "onload_dtype": torch.float8_e4m3fn,
        "onload_device": "cpu",
        "preparing_dtype": torch.float8_e4m3fn,
        "preparing_device": "cpu",
        "computation_dtype": torch.bfloat16,
        "computation_device": "cpu",
    },
}
TOLERANCE = {"FP8, e5m2": 0.10, "a dtype for each state": 0.10}  # relative L2 of the network's answer; the others: 0.05
LIMITS = [None, 0, 170_000]


def call(module, batch: int = 1) -> torch.Tensor:
    with torch.no_grad():
        return module(**inputs(batch))


def put(part, build, config: dict, limit=None, **options) -> tuple[torch.nn.Module, placement.Placement]:
    module = build()
    return module, placement.place(module, part, VramConfig(**config), vram_limit_bytes=limit, device="cpu", **options)


def resident(part, build) -> torch.nn.Module:
    module = build()
    for name, at in part.tensors.items():
        load.assign(module, name, load.read_tensor(at, part.scales.get(name)).to(torch.bfloat16))
    return module


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_every_configuration_answers_as_the_resident_module(small, name, stored):
    config = {"computation_dtype": "bfloat16", **(LOSSLESS | LOSSY)[name]}
    part, build = small(stored)
    want = call(resident(part, build))
    for limit in LIMITS:
        module, placed = put(part, build, config, limit)
        found = [call(module)]  # a part may be called while offloaded, too
        for _ in range(2):
            placed.onload()
            found += [call(module), call(module)]
            placed.offload()
        found.append(call(module))
        for got in found:
            if name in LOSSLESS:
                assert torch.equal(got, want)
            else:
                assert (got - want).float().norm() <= TOLERANCE.get(name, 0.05) * want.float().norm()
        placed.close()


@pytest.mark.parametrize("config", [{}, DISK, STORED_FP8], ids=["resident", "disk", "FP8"])
def test_files_in_scaled_8_bit_are_read_exactly(small, config):
    """Codes that are FP8 already are not rounded again, in whichever state they wait."""
    names = [f"blocks.{i}.{leaf}.weight" for i in range(4) for leaf in ("to_q", "down")]
    part, build = small(scales=names)
    module, placed = put(part, build, config)
    placed.onload()
    got = call(module)
    for name in names:
        assert torch.equal(
            placed.read(name), load.read_tensor(part.tensors[name], part.scales[name]).to(torch.bfloat16)
        )
    if config != STORED_FP8:
        assert torch.equal(got, call(resident(part, build)))
    placed.close()


def test_a_diffusers_transformer(write_part):
    from diffusers import QwenImageTransformer2DModel

    config = {
        "in_channels": 16,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 3,
        "joint_attention_dim": 32,
        "axes_dims_rope": [4, 6, 6],
    }
    torch.manual_seed(0)
    network = "diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel"
    part = write_part(QwenImageTransformer2DModel(**config), network, config, dtype=torch.bfloat16)
    given = {
        "hidden_states": torch.randn(1, 16, 16).to(torch.bfloat16),
        "encoder_hidden_states": torch.randn(1, 5, 32).to(torch.bfloat16),
        "timestep": torch.tensor([0.5], dtype=torch.bfloat16),
        "img_shapes": [[(1, 4, 4)]],
    }
    with torch.no_grad():
        want = load.load_part(part)(**given).sample
        for settings in (DISK, {**ON_DISK, "preparing_dtype": FP8}, STORED_FP8):
            module, placed = put(part, lambda: load.build_meta(part), settings)
            placed.onload()
            got = module(**given).sample
            assert torch.equal(got, want) if settings is DISK else (got - want).norm() < 0.05 * want.norm()
            placed.close()


def test_text_encoder_streams(write_part):
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

    config = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 64,
        "rope_scaling": {"type": "default", "mrope_section": [1, 1, 2], "rope_type": "default"},
    }
    torch.manual_seed(0)
    module = Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**config))
    network = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLTextModel"
    part = write_part(module, network, config, dtype=torch.bfloat16, name="text_encoder")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        want = load.load_part(part)(input_ids=ids).last_hidden_state
        for settings in (DISK, STORED_FP8):
            streamed, placed = put(part, lambda: load.build_meta(part), settings)
            placed.onload()
            assert [unit.name for unit in placed.blocks] == ["layers.0", "layers.1", "layers.2"]
            got = streamed(input_ids=ids).last_hidden_state
            assert torch.equal(got, want) if settings is not STORED_FP8 else (got - want).norm() < 0.1 * want.norm()
            placed.close()


def test_vae_streams_though_it_is_called_by_other_names_than_forward(write_part):
    from diffusers import AutoencoderKLQwenImage

    config = {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 2],
        "num_res_blocks": 1,
        "attn_scales": [],
        "temperal_downsample": [False],
        "latents_mean": [0.0] * 4,
        "latents_std": [1.0] * 4,
    }
    torch.manual_seed(0)
    network = "diffusers.models.autoencoders.autoencoder_kl_qwenimage:AutoencoderKLQwenImage"
    part = write_part(AutoencoderKLQwenImage(**config), network, config, name="vae")
    latents, pixels = torch.randn(1, 4, 1, 8, 8), torch.randn(1, 3, 1, 16, 16)
    resident = load.load_part(part)
    module, placed = put(part, lambda: load.build_meta(part), DISK)
    placed.onload()
    with torch.no_grad():
        assert torch.equal(module.decode(latents).sample, resident.decode(latents).sample)
        assert torch.equal(module.encode(pixels).latent_dist.mean, resident.encode(pixels).latent_dist.mean)
    placed.close()


def test_weights_look_right_and_read_as_nan_while_they_are_away(small):
    part, build = small()
    module, placed = put(part, build, DISK)
    weight = module.blocks[2].up.weight
    assert weight.shape == (192, 48) and weight.dtype is torch.bfloat16 and weight.device.type == "cpu"
    assert weight.isnan().all() and weight.untyped_storage().nbytes() == 2
    placed.onload()
    call(module)
    assert weight.isnan().all() and not placed.is_ready("blocks.2.up.weight") and placed.is_ready("embed.weight")
    assert placement.of(module) is placed
    for name, at in part.tensors.items():
        assert torch.equal(placed.read(name), load.read_tensor(at)), name
    placed.close()
    assert placement.of(module) is None
    assert all(parameter.device.type == "meta" for parameter in module.parameters())


@pytest.mark.parametrize("config", [DISK, STORED_FP8], ids=["disk", "FP8"])
def test_one_layer_may_be_called_alone(small, config):
    part, build = small()
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    module, placed = put(part, build, config)
    weight, bias = placed.read("blocks.1.to_q.weight"), placed.read("blocks.1.to_q.bias")
    assert torch.equal(module.blocks[1].to_q(x), torch.nn.functional.linear(x, weight, bias))
    assert not placed.calls
    placed.close()


def test_both_halves_of_guidance_move_each_byte_once(small):
    part, build = small()
    module, placed = put(part, build, DISK)
    placed.onload()
    call(module, batch=2)
    before = placed.moved_bytes
    for _ in range(3):
        call(module, batch=2)
    assert placed.moved_bytes - before == 3 * sum(unit.raw.nbytes for unit in placed.blocks)
    placed.close()


def test_a_guided_picture_moves_each_byte_once_a_step(tmp_path):
    from backend import families
    from backend.catalog.models.identify import identify_model
    from backend.engine.pipeline.pipeline import Pipeline
    from backend.schema.request import GenerationRequest
    from tests.tiny_models import make_qwen_image

    spec = identify_model(make_qwen_image(tmp_path / "model", num_layers=5), families.FAMILIES)
    pipeline = Pipeline(spec, dtype=torch.float32, device="cpu", configs={"dit": VramConfig(**DISK)})
    asked = {"width": 32, "height": 32, "guidance": 3.0, "num_inference_steps": 4}
    pipeline.generate(GenerationRequest(prompt="a red apple", negative_prompt="dark", **asked))
    placed = pipeline.placements["dit"]
    blocks = [unit.raw.nbytes for unit in placed.blocks]
    once = asked["num_inference_steps"] * sum(blocks)
    assert (
        once <= placed.moved_bytes <= once + placement.STAGING * max(blocks)
    )  # what was fetched for a step that did not come
    pipeline.close()


def test_a_limit_lets_as_many_blocks_stay_as_fit_evenly_spread(small):
    part, build = small(num_blocks=10)
    want = call(resident(part, build))
    _, placed = put(part, build, ON_DISK)
    one = placed.blocks[0].computing.nbytes
    rest = sum(unit.computing.nbytes for unit in placed.units if not unit.block)
    placed.close()
    for stay in (0, 1, 3, 5, 8):
        module, placed = put(part, build, ON_DISK, limit=rest + (2 + stay) * one)  # two of them are staging
        placed.onload()
        assert torch.equal(call(module), want) and torch.equal(call(module), want)
        found = placed.resident_blocks()
        assert len(found) == stay or stay == 8
        assert len(placed.transfer.fetched.slots) == min(2, 10 - len(found))
        gaps = [b - a for a, b in pairwise(found)]
        assert not gaps or max(gaps) - min(gaps) <= 1
        held = placed.held_bytes()
        assert held["stored"] + held["staging"] <= placed.limit_bytes
        before = placed.moved_bytes
        call(module)
        assert placed.moved_bytes - before == (10 - len(found)) * one
        placed.close()


def test_blocks_of_the_callers_choice_may_stay(small):
    part, build = small(num_blocks=6)
    module, placed = put(part, build, ON_DISK, limit=0, resident=(1, 4))
    placed.onload()
    assert torch.equal(call(module), call(resident(part, build)))
    assert placed.resident_blocks() == (1, 4)
    placed.close()


def test_large_blocks_may_move_in_pieces(small):
    part, build = small(num_blocks=4)
    answers, staging = [], []
    for split_bytes in (None, 10_000, 0):
        module, placed = put(part, build, DISK, split_bytes=split_bytes)
        placed.onload()
        answers += [call(module), call(module)]
        staging.append(placed.held_bytes()["staging"])
        assert sorted(name for unit in placed.units for name in unit.names) == sorted(part.tensors)
        placed.close()
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    assert staging[0] > 1.5 * staging[1] > 0 and staging[1] >= staging[2]


def test_fp8_takes_one_byte_a_number_and_offload_gives_back(small):
    part, build = small()
    matrices = sum(at.nbytes // 2 for name, at in part.tensors.items() if "blocks" in name and len(at.shape) == 2)
    module, placed = put(part, build, {**ON_DISK, "preparing_dtype": FP8})
    placed.onload()
    call(module)
    held = placed.held_bytes()
    assert held["stored"] == matrices  # all else is a view of the file, whose dtype is right already
    assert held["staging"] == 192 * 48 * 2  # the largest matrix alone, not a block
    kept = [weakref.ref(unit.stored) for unit in placed.blocks]
    placed.offload()
    assert not any(one() for one in kept)  # nobody else has them
    assert placed.held_bytes() == {"stored": 0, "staging": 0}
    placed.close()


def test_a_file_that_vanishes_is_one_sentence(small):
    part, build = small()
    module, placed = put(part, build, DISK)
    part.files[0].unlink()
    with pytest.raises(Trouble, match=r"dit\.safetensors (cannot be read|is no longer there)"):
        call(module)
    assert not placed.calls
    placed.close()


def test_progress_is_told_in_bytes(small):
    part, build = small()
    told = []
    _, placed = put(part, build, STORED_FP8, on_bytes=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1] == (part.nbytes, part.nbytes)
    placed.close()


@pytest.mark.parametrize("config", [{}, STORED_FP8, DISK], ids=["resident", "FP8", "disk"])
def test_twenty_loads_do_not_grow(write_part, config):
    import psutil

    from backend.engine.devices import device_memory

    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    part = write_part(Stack(), dtype=torch.bfloat16)
    x = torch.randn(1, 1024, dtype=torch.bfloat16)

    def once() -> None:
        with torch.device("meta"):
            module = Stack()
        placed = placement.place(module, part, VramConfig(**config), device="cpu")
        placed.onload()
        with torch.no_grad():
            module(x)
        placed.close()

    def settled() -> int:
        device_memory.empty_cache("cpu")
        return psutil.Process().memory_info().rss

    for _ in range(2):
        once()
    before = settled()
    for _ in range(20):
        once()
    assert settled() - before < part.nbytes / 2


def test_without_close_everything_goes_with_the_module(small):
    part, build = small()
    module, placed = put(part, build, DISK)
    placed.onload()
    call(module)
    gone = weakref.ref(placed)
    del module, placed
    gc.collect()
    assert gone() is None
