"""Several LoRAs at once, strengths changed, one taken off, everything taken off: hot, cold and mixed, resident and placed."""

from __future__ import annotations

import gc

import psutil
import pytest
import torch
from safetensors.torch import save_file

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.loading import load
from backend.engine.lora import adapters as lora
from backend.engine.lora.adapters import Adapters
from backend.engine.offload import placement
from backend.families import qwen_image
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS
from backend.schema.request import LoraUse
from tests.lora_models import CASES, assert_acts_as, same, snapshot

pytestmark = pytest.mark.torch
MODEL = CASES / "models" / "tiny_qwen_image"
TARGETS = ("attn.to_q", "attn.add_k_proj", "img_mlp.net.2", "txt_mod.1")
SHAPES = {"attn.to_q": (48, 48), "attn.add_k_proj": (48, 48), "img_mlp.net.2": (48, 192), "txt_mod.1": (288, 48)}


@pytest.fixture(scope="module")
def spec():
    return identify_model(MODEL, families.FAMILIES).parts["dit"]


@pytest.fixture
def files(tmp_path):
    """Three LoRAs on the same layers, the third a DoRA and a LoHa with a bias."""
    random = torch.Generator().manual_seed(7)
    paths = []
    for number in range(3):
        tensors = {}
        for block in range(2):
            for target in TARGETS:
                stem, (rows, columns) = f"transformer_blocks.{block}.{target}", SHAPES[target]
                tensors[f"{stem}.lora_A.weight"] = torch.randn(number + 2, columns, generator=random) * 0.3
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, number + 2, generator=random) * 0.3
                if number == 2:
                    tensors[f"{stem}.dora_scale"] = torch.rand(rows, 1, generator=random)
        if number == 2:
            stem = "transformer_blocks.0.attn.to_v"
            for name, shape in {"w1_a": (48, 2), "w1_b": (2, 48), "w2_a": (48, 2), "w2_b": (2, 48)}.items():
                tensors[f"{stem}.hada_{name}"] = torch.randn(shape, generator=random)
            tensors[f"{stem}.diff_b"] = torch.randn(48, generator=random)
        paths.append(tmp_path / f"l{number}.safetensors")
        save_file(tensors, paths[-1])
    return paths


def adapters_for(module, spec) -> Adapters:
    return Adapters({"dit": module}, family=qwen_image, specs={"dit": spec}, families=families.FAMILIES)


def run(module) -> torch.Tensor:
    """The transformer's output on fixed inputs, in float32."""
    random = torch.Generator().manual_seed(3)
    weight = next(module.parameters())
    with torch.no_grad():
        return module(
            hidden_states=torch.randn(2, 16, 16, generator=random).to(weight.dtype),
            timestep=torch.tensor([0.7, 0.2]).to(weight.dtype),
            encoder_hidden_states=torch.randn(2, 5, 24, generator=random).to(weight.dtype),
            encoder_hidden_states_mask=None,
            img_shapes=[[(1, 4, 4)]] * 2,
            return_dict=False,
        )[0].float()


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    return float((a - b).abs().max()) <= tolerance * float(b.abs().max())


@pytest.mark.parametrize("with_spec", [True, False])
def test_hot_equals_cold(spec, files, with_spec):
    module = load.load_part(spec, dtype=torch.float32)
    before, bare = snapshot(module), run(module)
    adapters = adapters_for(module, spec) if with_spec else Adapters({"dit": module}, family=qwen_image)
    outputs = {}
    for hot in (False, True):
        for file, strength in zip(files, (0.6, -0.4, 0.8), strict=True):
            adapters.add(file, strength=strength, hot=hot)
        outputs[hot] = run(module)
        assert len(adapters.receipts) == 3
        adapters.clear()
        assert same(module, before) and torch.equal(run(module), bare)
    assert close(outputs[True], outputs[False], 2e-5) and not close(outputs[True], bare, 0.01)


@pytest.mark.parametrize("hot", [False, True])
def test_strength_changed_and_one_taken_off(spec, files, hot):
    module = load.load_part(spec, dtype=torch.float32)
    before, adapters = snapshot(module), adapters_for(module, spec)
    first = adapters.add(files[0], strength=0.5, hot=hot)
    second = adapters.add(files[1], strength=0.25, hot=hot)
    third = adapters.add(files[2], hot=hot)
    assert adapters.set_strength(first, 1.5).strength == 1.5
    adapters.remove(second)
    adapters.set_strength(third, 0.3)
    got = run(module)
    adapters.clear()
    assert same(module, before)
    adapters.add(files[0], strength=1.5, hot=hot)
    adapters.add(files[2], strength=0.3, hot=hot)
    assert torch.equal(got, run(module)) if hot else close(got, run(module), 1e-6)
    adapters.remove(str(files[0]))
    adapters.remove(adapters.receipts[0])
    assert same(module, before) and adapters.receipts == ()
    with pytest.raises(Trouble, match="No LoRA"):
        adapters.remove(first)


def test_cold_and_hot_together(spec, files):
    module = load.load_part(spec, dtype=torch.float32)
    before, adapters = snapshot(module), adapters_for(module, spec)
    for number, hot in enumerate((False, True, False)):
        adapters.add(files[number], strength=0.5, hot=hot)
    mixed = run(module)
    adapters.remove(str(files[0]))
    adapters.add(files[0], strength=0.5, hot=True)
    assert close(run(module), mixed, 2e-5)
    adapters.clear()
    assert same(module, before)


def test_the_dora_of_a_layer_with_something_fused_in_is_of_its_own_weight(spec, files):
    """The norm is that of the file's weight, whatever else acts; so the order does not matter."""
    module = load.load_part(spec, dtype=torch.float32)
    adapters, outputs = adapters_for(module, spec), []
    for order in ((0, 2), (2, 0)):
        for number in order:
            adapters.add(files[number], hot=False)
        outputs.append(run(module))
        adapters.clear()
    assert close(*outputs, 1e-5)


def test_exactly_the_wanted_ones(spec, files, tmp_path):
    module = load.load_part(spec, dtype=torch.float32)
    before, adapters = snapshot(module), adapters_for(module, spec)
    adapters.use([LoraUse(str(files[0]), 0.5), LoraUse(str(files[1]), 1.0)])
    receipts = adapters.use([LoraUse(str(files[1]), 0.2), LoraUse(str(files[2]), 0.7), LoraUse(str(files[0]), 0.0)])
    assert [(r.path, r.strength) for r in receipts] == [(str(files[1]), 0.2), (str(files[2]), 0.7)]
    assert all(len(r.hash) == 64 and r.layers_applied == r.layers_found for r in receipts)
    (tmp_path / "broken.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(Trouble):
        adapters.use([LoraUse(str(files[0]), 1.0), LoraUse(str(tmp_path / "broken.safetensors"), 1.0)])
    assert adapters.receipts == receipts
    with pytest.raises(Trouble, match="twice"):
        adapters.use([LoraUse(str(files[0]), 1.0), LoraUse(str(files[0]), 0.5)])
    adapters.use([])
    assert same(module, before)


def test_a_file_that_changed_since(spec, files):
    module = load.load_part(spec, dtype=torch.float32)
    adapters = adapters_for(module, spec)
    receipt = adapters.add(files[0], hot=False)
    fused = snapshot(module)
    save_file({"transformer_blocks.0.attn.to_q.diff": torch.ones(48, 48)}, files[0])
    with pytest.raises(Trouble, match="has changed"):
        adapters.set_strength(receipt, 0.1)
    assert same(module, fused) and adapters.receipts == (receipt,)
    adapters.clear()
    assert adapters.receipts == ()


CONFIGS = {
    "offloaded to RAM": VramConfig(
        offload_device="cpu",
        offload_dtype="float32",
        onload_device="cpu",
        onload_dtype="float32",
        computation_device="cpu",
        computation_dtype="float32",
    ),
    "disk": VramConfig(
        offload_device="disk",
        onload_device="disk",
        preparing_device="disk",
        computation_device="cpu",
        computation_dtype="float32",
    ),
    "FP8": VramConfig(
        offload_device="cpu",
        offload_dtype="float8_e4m3fn",
        onload_device="cpu",
        onload_dtype="float8_e4m3fn",
        preparing_device="cpu",
        preparing_dtype="float8_e4m3fn",
        computation_device="cpu",
        computation_dtype="float32",
    ),
}


@pytest.mark.parametrize("before_placing", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_on_placed_weights(spec, files, name, before_placing):
    resident = load.load_part(spec, dtype=torch.float32)
    plain = adapters_for(resident, spec)
    module = load.build_meta(spec)
    adapters = adapters_for(module, spec)
    if before_placing:
        for file in files[:2]:
            adapters.add(file, strength=0.5, hot=True)
    placed = placement.place(module, spec, CONFIGS[name], vram_limit_bytes=0, device="cpu")
    placed.onload()
    try:
        bare = run(module)
        if not before_placing:
            for file in files[:2]:
                assert adapters.add(file, strength=0.5).mode == "hot"
        receipt = None
        if not before_placing:
            receipt = adapters.add(files[2], strength=0.5)
        for file in files[: 2 if before_placing else 3]:
            plain.add(file, strength=0.5, hot=True)
        assert close(run(module), run(resident), 0.1 if name == "FP8" else 2e-5)
        if receipt is not None and not placed.weights_writable:
            with pytest.raises(Trouble, match="cannot be fused"):
                adapters.add(files[0], hot=False)
            adapters.set_strength(receipt, 0.0)
            plain.set_strength(plain.receipts[2], 0.0)
            assert close(run(module), run(resident), 0.1 if name == "FP8" else 2e-5)
        adapters.clear()
        if not before_placing:
            assert torch.equal(run(module), bare)
    finally:
        placed.close()


def test_both_halves(spec, tmp_path):
    """A file with a text encoder half: applied where that is loaded, named where it is not."""
    from transformers import CLIPTextConfig, CLIPTextModel

    torch.manual_seed(0)
    config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=1,
    )
    text = CLIPTextModel(config).eval().requires_grad_(False)
    module = load.load_part(spec, dtype=torch.float32)
    te = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
    tensors = {
        "lora_unet_transformer_blocks_0_attn_to_q.lora_down.weight": torch.ones(1, 48),
        "lora_unet_transformer_blocks_0_attn_to_q.lora_up.weight": torch.ones(48, 1),
        f"{te}.lora_down.weight": torch.ones(2, 32),
        f"{te}.lora_up.weight": torch.ones(32, 2),
    }
    save_file(tensors, tmp_path / "both.safetensors")
    alone = adapters_for(module, spec)
    receipt = alone.add(tmp_path / "both.safetensors", part="dit", hot=False)
    assert receipt.layers_applied == 1 and "text encoder" in receipt.unused[te]
    alone.clear()
    before = snapshot(text)
    together = Adapters({"dit": module, "text_encoder": text}, family=qwen_image, specs={"dit": spec})
    for hot in (False, True):
        receipt = together.add(tmp_path / "both.safetensors", part="dit", hot=hot)
        assert receipt.layers_applied == 2 and not receipt.unused
        if hot:
            assert_acts_as(text, {"encoder.layers.0.self_attn.q_proj.weight": torch.full((32, 32), 2.0)})
        else:
            assert not same(text, before)
        together.clear()
        assert same(text, before)
    save_file({key: tensor for key, tensor in tensors.items() if "_te_" in key}, tmp_path / "te.safetensors")
    with pytest.raises(Trouble, match="text encoder"):
        alone.add(tmp_path / "te.safetensors")
    assert together.add(tmp_path / "te.safetensors", part="text_encoder").layers_applied == 1


@pytest.mark.slow
def test_compiled_layers(spec, files):
    module = load.load_part(spec, dtype=torch.float32)
    for block in module.transformer_blocks:
        block.compile(backend="eager")
    adapters, bare = adapters_for(module, spec), run(module)
    plain_module = load.load_part(spec, dtype=torch.float32)
    plain = adapters_for(plain_module, spec)
    for strength in (0.5, 1.0):
        for one in (adapters, plain):
            one.use([LoraUse(str(files[0]), strength), LoraUse(str(files[2]), strength)], hot=True)
        assert close(run(module), run(plain_module), 2e-5)
    adapters.clear()
    assert close(run(module), bare, 1e-6)


def test_twenty_swaps_do_not_grow(spec, files):
    module = load.load_part(spec, dtype=torch.float32)
    adapters = adapters_for(module, spec)

    def swap(times: int) -> int:
        for number in range(times):
            adapters.use([LoraUse(str(files[number % 3]), 0.5)], hot=number % 2 == 0)
        adapters.clear()
        gc.collect()
        return psutil.Process().memory_info().rss

    before = swap(20)
    assert swap(20) - before < 4 * 2**20


def test_the_state_dict_of_a_hot_module_is_the_plain_one(spec, files):
    module = load.load_part(spec, dtype=torch.float32)
    names = list(module.state_dict())
    adapters = adapters_for(module, spec)
    adapters.add(files[0], hot=True)
    assert list(module.state_dict()) == names and isinstance(module.transformer_blocks[0].attn.to_q, torch.nn.Linear)
    with torch.enable_grad():
        layer = module.transformer_blocks[0].attn.to_q
        x = torch.randn(2, 48, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad is not None
    assert lora.of(module).receipts == ()


@pytest.mark.parametrize(
    "prefix",
    [
        "text_encoder.",
        "text_encoder.model.language_model.",
        "text_encoders.qwen25_7b.transformer.model.",
        "lora_te_",
        "lora_te1_model_",
    ],
)
def test_text_encoder_names_of_qwen_image(prefix):
    model = identify_model(ASSETS / "starter", families.FAMILIES)
    text = load.load_part(model.parts["text_encoder"])
    adapters = Adapters({"text_encoder": text}, family=qwen_image, specs=model.parts, families=families.FAMILIES)
    name = "layers.1.self_attn.q_proj"
    stem = prefix + (name.replace(".", "_") if prefix.endswith("_") else name)
    file = {f"{stem}.lora_down.weight": torch.full((1, 192), 0.5), f"{stem}.lora_up.weight": torch.ones(192, 1)}
    before = snapshot(text)
    assert adapters.add(file, hot=False).layers_applied == 1
    changed = text.get_submodule(name).weight.float() - before[f"{name}.weight"].float()
    assert float((changed - 0.5).abs().max()) < 0.01
    adapters.clear()
    assert same(text, before)
