"""Loading: views of the mapped file, private changes, real tables, and files that do not fit their class."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from backend import families
from backend.catalog.models.identify import identify_model
from backend.engine.loading import lazy_imports, load
from backend.schema.messages import Trouble
from backend.schema.paths import PROJECT

pytestmark = pytest.mark.torch


def parts_of(folder) -> dict:
    return identify_model(folder, families.FAMILIES).parts


@pytest.mark.parametrize("name", ["dit", "text_encoder", "vae"])
def test_weights_are_those_of_the_file_without_gradients(tiny_qwen, name):
    part = parts_of(tiny_qwen)[name]
    module = load.load_part(part)
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())
    for key, at in part.tensors.items():
        assert torch.equal(module.get_parameter(key), load.read_tensor(at)), key
    for _, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.device.type == "cpu"


def test_a_change_stays_private(tiny_qwen):
    part = parts_of(tiny_qwen)["dit"]
    before = {file: file.read_bytes() for file in part.files}
    module = load.load_part(part)
    module.img_in.weight.add_(1.0)
    again = load.load_part(part)
    assert {file: file.read_bytes() for file in part.files} == before
    assert torch.equal(again.img_in.weight + 1.0, module.img_in.weight)


def test_casts_and_shards(tmp_path):
    from tests.tiny_models import make_qwen_image

    folder = make_qwen_image(tmp_path / "sharded", max_shard_size="100KB")
    part = parts_of(folder)["dit"]
    assert len(part.files) > 2
    module = load.load_part(part, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    told = []
    load.load_part(part, on_bytes=lambda done, total: told.append((done, total)))
    assert told[-1] == (part.nbytes, part.nbytes) and told == sorted(told)


def test_tables_that_are_computed_are_real_and_right(tiny_qwen):
    from diffusers import QwenImageTransformer2DModel

    part = parts_of(tiny_qwen)["dit"]
    module = load.build_meta(part)
    assert {parameter.device.type for parameter in module.parameters()} == {"meta"}
    torch.testing.assert_close(
        module.pos_embed.pos_freqs, QwenImageTransformer2DModel(**part.config).pos_embed.pos_freqs
    )
    text = load.build_meta(parts_of(tiny_qwen)["text_encoder"])
    assert text.rotary_emb.inv_freq.device.type == "cpu" and text.rotary_emb.inv_freq[0] == 1.0


LOADING = """
import json, sys
import psutil, torch
from pathlib import Path
from backend.catalog.formats.read import read_header
from backend.catalog.spec import PartSpec
from backend.engine.devices import device_memory as memory
from backend.engine.loading import load

path, network, config = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
part = PartSpec(name="dit", network=network, config=config, tensors=read_header(path).tensors)
load.find_class(network)  # what is imported is not measured
rss = lambda: psutil.Process().memory_info().rss
before = rss()
module = load.load_part(part, dtype=torch.bfloat16)
loaded = rss() - before
sum(float(parameter.sum()) for parameter in module.parameters())
touched = rss() - before
del module
memory.empty_cache("cpu")
peak = memory.Peak("cpu")
before = peak.highest_bytes
load.load_part(part, dtype=torch.float32)
print(json.dumps([loaded, touched, peak.look() - before]))
"""


def test_a_load_costs_no_second_copy(tmp_path):
    """Resident memory after touching every weight is about the file, never twice it; measured in a process that does nothing else."""
    config = {"num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 16, "axes_dims_rope": [16, 24, 24]}
    config |= {"joint_attention_dim": 256}
    network = "diffusers.models.transformers.transformer_qwenimage:QwenImageTransformer2DModel"
    with torch.device("meta"):
        wanted = load.find_class(network)(**config).state_dict()
    path = tmp_path / "big.safetensors"
    save_file({key: torch.zeros(value.shape, dtype=torch.bfloat16) for key, value in wanted.items()}, path)
    argv = [sys.executable, "-c", LOADING, str(path), network, json.dumps(config)]
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    loaded, touched, highest = json.loads(done.stdout.splitlines()[-1])
    size = path.stat().st_size
    assert size > 50 * 2**20
    assert loaded < 0.2 * size and touched < 1.15 * size, (loaded, touched, size)
    assert highest < 2.2 * size, highest / size  # in float32: twice the file, and the file not with it


def test_scaled_eight_bit_weights_are_their_product(write_part):
    config = {"in_features": 8, "out_features": 4}
    part = write_part(torch.nn.Linear(8, 4), "torch.nn:Linear", config, scales={"weight": 0.01})
    module = load.load_part(part, dtype=torch.float32)
    codes = load.read_tensor(part.tensors["weight"])
    torch.testing.assert_close(module.weight, codes.float() * 0.01)
    assert codes.dtype == torch.float8_e4m3fn


def test_what_does_not_fit_is_said(tiny_qwen):
    part = parts_of(tiny_qwen)["dit"]
    some = dict(list(part.tensors.items())[1:])
    with pytest.raises(Trouble, match="lacks 1 of the"):
        load.load_part(replace(part, tensors=some))
    with pytest.raises(Trouble, match="configuration asks for"):
        load.load_part(replace(part, config={**part.config, "joint_attention_dim": 64}))


def test_files_that_vanish_or_are_cut_are_said(tmp_path):
    from tests.tiny_models import make_qwen_image

    folder = make_qwen_image(tmp_path / "m")
    spec = identify_model(folder, families.FAMILIES)
    dit = spec.parts["dit"].files[0]
    whole = dit.read_bytes()
    dit.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Trouble) as cut:  # cut after the header was read
        load.load_part(spec.parts["dit"])
    with pytest.raises(Trouble) as seen:  # cut before
        identify_model(folder, families.FAMILIES)
    dit.unlink()
    with pytest.raises(Trouble) as gone:
        load.load_part(spec.parts["dit"])
    assert (cut.value.kind, seen.value.kind, gone.value.kind) == ("damaged", "damaged", "missing_file")


def test_imports_are_light_and_leave_the_libraries_whole():
    import subprocess
    import sys

    code = (
        "import torch, sys, json\n"
        "from backend.engine.loading import lazy_imports as light\n"
        "light.import_module('diffusers.models.transformers.transformer_qwenimage')\n"
        "light.import_module('diffusers.models.autoencoders.autoencoder_kl_qwenimage')\n"
        "light.import_module('transformers.models.qwen2_5_vl.modeling_qwen2_5_vl')\n"
        "kept_out = [m for m in ('peft', 'diffusers.models.transformers.transformer_flux') if m in sys.modules]\n"
        "peft = light.import_module('peft')\n"
        "layer = peft.inject_adapter_in_model(peft.LoraConfig(target_modules=['0']), torch.nn.Sequential(torch.nn.Linear(2, 2)))\n"
        "torch.optim.AdamW(layer.parameters()).step()\n"
        "kept_out += [m for m in ('torch._inductor', 'torch._dynamo.eval_frame', 'torch.distributed.tensor._api', 'sympy') if m in sys.modules]\n"
        "assert torch.distributed.is_available() and not isinstance(torch.ones(1), torch.distributed.tensor.DTensor)\n"
        "from torch.distributed.tensor.placement_types import Shard\n"
        "from diffusers.models.transformers import FluxTransformer2DModel\n"
        "from diffusers import QwenImagePipeline, QwenImageTransformer2DModel\n"
        "from diffusers.utils import is_peft_available\n"
        "import torch._dynamo.variables.builder, torch._inductor.compile_fx\n"
        "compiled = torch.compile(lambda x: x * 2 + 1, backend='eager')(torch.ones(1)).item()\n"
        "print(json.dumps([kept_out, compiled, is_peft_available()]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [[], 3.0, True]


def test_a_light_import_is_the_same_module():
    import json as theirs

    assert lazy_imports.import_module("json") is theirs


def test_swapped_halves_change_places(write_part):
    part = write_part(torch.nn.Linear(3, 4), "torch.nn:Linear", {"in_features": 3, "out_features": 4})
    plain = load.load_part(part)
    at = replace(part.tensors["weight"], swapped=True)
    swapped = load.load_part(replace(part, tensors={**part.tensors, "weight": at}))
    assert torch.equal(swapped.weight[:2], plain.weight[2:]) and torch.equal(swapped.weight[2:], plain.weight[:2])
    assert torch.equal(load.read_tensor(at), swapped.weight)
