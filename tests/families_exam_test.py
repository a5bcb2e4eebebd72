"""One exam for all families: what each must answer, and for those that draw, what must hold however their weights lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy
import pytest
import torch

from backend.catalog.family import Defaults, DrawSettings, LoraTargets, Part, SizeRule, settings_of
from backend.catalog.models.identify import identify_model
from backend.catalog.models.match_parts import find_parts
from backend.catalog.spec import TensorAt
from backend.engine.loading import load
from backend.engine.pipeline.pipeline import Pipeline
from backend.families import FAMILIES
from backend.planner.plan import plan
from backend.schema.memory_plan import Card, VramConfig
from backend.schema.messages import Trouble
from backend.schema.request import GenerationRequest, LoraUse
from backend.schema.settings import from_values
from tests.tiny_models import MAKERS

pytestmark = pytest.mark.torch

TRUE_SIZES = {
    "qwen_image": {"num_layers": 2},
    "flux": {"num_layers": 2, "num_single_layers": 2, "guidance_embeds": True},
    "flux2": {"num_layers": 2, "num_single_layers": 2},
    "z_image": {"n_layers": 2},
    "wan": {"num_layers": 2},
    "sd3": {"num_layers": 2, "num_attention_heads": 24, "joint_attention_dim": 4096, "caption_projection_dim": 1536},
    "sd15": {"cross_attention_dim": 768},
    "sdxl": {
        "cross_attention_dim": 2048,
        "block_out_channels": (320, 640, 1280),
        "attention_head_dim": (5, 10, 20),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "transformer_layers_per_block": (1, 2, 10),
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
        "use_linear_projection": True,
    },
}
CPU = Card("cpu", "CPU", 2**34, 2**33, ram_total_bytes=2**34, ram_free_bytes=2**33, dtypes=("float32", "float8_e4m3fn"))
DRAWING = [family for family in FAMILIES if family.DRAWS]
each = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.NAME)
each_that_draws = pytest.mark.parametrize("family", DRAWING, ids=lambda family: family.NAME)

STATES = {
    "parked": (("float32", "cpu", "float32", "cpu", "float32", "cpu", "float32", "cpu"), None, 0.0),
    "disk": ((None, "disk", None, "disk", "float32", "cpu", "float32", "cpu"), 0, 0.0),
    "disk, some stay": ((None, "disk", None, "disk", "float32", "cpu", "float32", "cpu"), 200_000, 0.0),
    "disk, onload in RAM": ((None, "disk", "float32", "cpu", "float32", "cpu", "float32", "cpu"), None, 0.0),
    "8 bits": (("float8_e4m3fn", "cpu", "float8_e4m3fn", "cpu", "float8_e4m3fn", "cpu", "float32", "cpu"), None, 8.0),
    "disk to 8 bits": ((None, "disk", None, "disk", "float8_e4m3fn", "cpu", "float32", "cpu"), None, 8.0),
}


def test_every_family_that_draws_can_be_examined():
    assert {family.NAME for family in DRAWING} == set(MAKERS)
    assert {family.NAME for family in FAMILIES} == set(TRUE_SIZES)


@each
def test_it_answers_the_questions(family):
    assert family.__name__.rpartition(".")[2] == family.NAME and family.TITLE and family.__doc__
    assert isinstance(family.LORA, LoraTargets) and family.LORA.modules and family.LORA.part in family.PARTS
    assert (
        isinstance(family.DEFAULTS, Defaults)
        and isinstance(family.SIZES, SizeRule)
        and isinstance(family.SCHEDULER, Mapping)
    )
    from_values(GenerationRequest, family.DEFAULTS.request)  # every name known, every value in range
    for name, part in family.PARTS.items():
        assert isinstance(part, Part) and part.phase in ("text", "denoise", "decode")
        assert any(signature.part == name for signature in family.SIGNATURES), f"{name} cannot be recognised"
    assert {signature.part for signature in family.SIGNATURES} <= set(family.PARTS)
    assert {dialect.part for dialect in family.NAME_MAPS} <= set(family.PARTS)
    assert {said.name for said in family.CACHED_BLOCKS} <= set(family.PARTS["dit"].blocks)


@each
def test_its_own_header_is_recognised_as_itself_and_by_no_other_family(family):
    network = load.find_class(family.PARTS["dit"].network)
    with torch.device("meta"):
        module = network(**TRUE_SIZES[family.NAME])
    tensors = {
        name: TensorAt(Path("x.safetensors"), name, "BF16", tuple(tensor.shape), 0, 2 * tensor.numel())
        for name, tensor in module.state_dict().items()
    }
    found = find_parts(tensors, {}, FAMILIES, only="dit")
    assert [one.family.NAME for one in found] == [family.NAME]
    assert set(found[0].spec.tensors) == set(tensors)
    targets = family.LORA.modules
    hit = {end for end in targets for name, _ in module.named_modules() if name.endswith("." + end) or name == end}
    assert hit == set(targets), "LoRA targets that no module has"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(family) -> the folder of a tiny model of it."""
    made = {}

    def folder(family) -> Path:
        if family.NAME not in made:
            made[family.NAME] = MAKERS[family.NAME](tmp_path_factory.mktemp("exam") / family.NAME)
        return made[family.NAME]

    return folder


REQUEST = GenerationRequest(
    prompt="a red apple", negative_prompt="dark", width=64, height=64, num_inference_steps=2, seed=1
)


def open_model(folder: Path, **options) -> Pipeline:
    return Pipeline(identify_model(folder, FAMILIES), dtype=torch.float32, device="cpu", **options)


def draw(pipeline: Pipeline) -> numpy.ndarray:
    return numpy.asarray(pipeline.generate(REQUEST)[0], dtype=float)


@each_that_draws
def test_the_folder_is_recognised_whole_and_the_plan_counts_its_bytes(family, tiny):
    spec = identify_model(tiny(family), FAMILIES)
    assert spec.family == family.NAME and not spec.missing and spec.tokenizer and spec.scheduler
    stored = {name: sum(at.nbytes for at in part.tensors.values()) for name, part in spec.parts.items()}
    planned = plan(spec, CPU, REQUEST)
    assert planned.fits and not any(config.managed for config in planned.configs.values())
    for phase in planned.phases:
        for name, nbytes in phase.weights_bytes.items():
            assert nbytes == stored[name], (phase.name, name)


@each_that_draws
@pytest.mark.parametrize("states", STATES)
def test_every_placement_and_storage_draws_the_resident_picture(family, tiny, states):
    values, limit, tolerance = STATES[states]
    resident = draw(open_model(tiny(family)))
    configs = dict.fromkeys(family.PARTS, VramConfig(*values))
    placed = open_model(tiny(family), configs=configs, vram_limit_bytes=limit)
    picture = draw(placed)
    difference = numpy.abs(picture - resident)
    assert difference.max() == 0 if tolerance == 0 else difference.mean() < tolerance
    assert picture.tolist() == draw(placed).tolist()
    placed.close()


def write_lora(pipeline: Pipeline, path: Path, prefix: str = "", size: float = 0.3) -> Path:
    from safetensors.torch import save_file

    generator, tensors = torch.Generator().manual_seed(0), {}
    ends = tuple("." + end for end in pipeline.family.LORA.modules)
    for name, module in pipeline.parts[pipeline.family.LORA.part].named_modules():
        if name.endswith(ends) and isinstance(module, torch.nn.Linear):
            tensors[f"{prefix}{name}.lora_A.weight"] = torch.randn(2, module.in_features, generator=generator) * size
            tensors[f"{prefix}{name}.lora_B.weight"] = torch.randn(module.out_features, 2, generator=generator) * size
    save_file(tensors, path)
    return path


@each_that_draws
def test_hot_and_cold_loras_agree_and_names_saved_are_names_loaded(family, tiny, tmp_path):
    pipeline = open_model(tiny(family))
    before = draw(pipeline)
    pictures = {}
    for mode in (False, True):
        for prefix in ("", "transformer.", "diffusion_model."):
            path = write_lora(pipeline, tmp_path / f"{mode}{len(prefix)}.safetensors", prefix)
            receipt = pipeline.add_lora(family.LORA.part, path, strength=0.5, hot=mode)
            assert receipt.layers_applied == receipt.layers_found > 0 and not receipt.unused
            pictures[mode, prefix] = draw(pipeline)
            pipeline.clear_loras()
            assert draw(pipeline).tolist() == before.tolist()
    reference = pictures[False, ""]
    assert numpy.abs(reference - before).mean() > 1
    for picture in pictures.values():
        assert numpy.abs(picture - reference).max() <= 2


@each_that_draws
def test_a_lora_that_matches_nothing_is_an_error_and_changes_nothing(family, tiny, tmp_path):
    from safetensors.torch import save_file

    pipeline = open_model(tiny(family))
    before = draw(pipeline)
    path = tmp_path / "stranger.safetensors"
    save_file({"blocks.0.nix.lora_A.weight": torch.zeros(2, 8), "blocks.0.nix.lora_B.weight": torch.zeros(8, 2)}, path)
    good = write_lora(pipeline, tmp_path / "good.safetensors")
    for attempt in (
        lambda: pipeline.add_lora(family.LORA.part, path),
        lambda: pipeline.use_loras([LoraUse(str(good)), LoraUse(str(path))]),
        lambda: pipeline.use_loras([LoraUse(str(tmp_path / "gone.safetensors"))]),
    ):
        with pytest.raises(Trouble):
            attempt()
        assert draw(pipeline).tolist() == before.tolist()


@each_that_draws
def test_predict_is_differentiable_and_takes_pictures_side_by_side(family, tiny):
    pipeline = open_model(tiny(family))
    dit = pipeline.parts["dit"].requires_grad_(True)
    settings = settings_of(pipeline.spec, width=64, height=48)
    shape = family.latent_shape(settings)
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), requires_grad=True)
    sigma = torch.tensor([0.3, 0.8])
    encodings = [pipeline.encode_prompt(prompt) for prompt in ("a cat", "a very small dog on a red ground")]
    velocity = family.predict(pipeline.parts, x, sigma, family.collate(encodings, settings))
    assert velocity.shape == x.shape
    velocity.square().mean().backward()
    assert x.grad.abs().sum() > 0
    without = [name for name, parameter in dit.named_parameters() if parameter.grad is None]
    assert len(without) < 0.2 * len(list(dit.parameters())), without
    for index, encoding in enumerate(encodings):
        alone = family.predict(
            pipeline.parts, x[index : index + 1], sigma[index : index + 1], family.collate([encoding], settings)
        )
        torch.testing.assert_close(alone, velocity[index : index + 1], rtol=1e-4, atol=1e-4)


@each_that_draws
@pytest.mark.parametrize("steps", [1, 2, 7, 50])
def test_schedules_go_from_noise_to_nothing(family, steps):
    for scheduler in (family.SCHEDULER, {**family.SCHEDULER, "use_dynamic_shifting": False, "shift_terminal": None}):
        sigmas = family.sigmas(DrawSettings(512, 256, scheduler=scheduler), steps)
        assert len(sigmas) == steps + 1 and sigmas[0] == 1 and sigmas[-1] == 0
        assert torch.isfinite(sigmas).all() and bool((sigmas.diff() < 0).all())
