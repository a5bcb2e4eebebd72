"""PyTorch's own checkpoints, read where they lie: the same tensors as torch finds, and no code of the file's choosing."""

from __future__ import annotations

import collections
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from backend.catalog.formats.read import read_header
from backend.catalog.models.identify import identify_lora, identify_model
from backend.engine.loading import load
from backend.families import FAMILIES
from backend.pipelines import ModelConfig, QwenImagePipeline
from backend.schema.messages import Trouble
from tests.lora_models import CASES

pytestmark = pytest.mark.torch
MODEL = CASES / "models" / "tiny_qwen_image" / "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize("nest", [(), ("state_dict",), ("state_dict", "module")])
def test_the_same_tensors_as_torch_finds(nest, tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "a": whole,
        "rows": whole[1:3],
        "half": torch.randn(3, 1, 5).half(),
        "bf16": torch.randn(7).bfloat16(),
        "code": torch.randn(4, 4).to(torch.float8_e4m3fn).view(torch.uint8),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "long": torch.tensor([1, 2]),
        "none": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    value = collections.OrderedDict(tensors)
    for key in reversed(nest):
        value = {key: value, "epoch": 3, "config": {"lr": 0.1}}
    torch.save(value, tmp_path / "m.pt")
    header = read_header(tmp_path / "m.pt")
    assert header.container == "pickle" and set(header.tensors) == set(tensors)
    maps = load.open_maps([tmp_path / "m.pt"])
    for name, at in header.tensors.items():
        assert torch.equal(load.read_tensor(at), tensors[name]), name
        assert torch.equal(load.view(at, maps[at.file]), tensors[name]), name


def test_a_turned_tensor_is_refused_with_the_command(tmp_path):
    torch.save({"a": torch.randn(3, 4).t()}, tmp_path / "m.pt")
    with pytest.raises(Trouble, match="turned") as caught:
        read_header(tmp_path / "m.pt")
    assert "to_safetensors" in caught.value.hint


class Evil:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_no_code_runs(tmp_path):
    made = tmp_path / "made"
    torch.save({"evil": Evil(str(made)), "w": torch.ones(2)}, tmp_path / "m.pt")
    assert list(read_header(tmp_path / "m.pt").tensors) == ["w"]
    assert not made.exists()
    torch.load(tmp_path / "m.pt", weights_only=False)  # what the file would have done
    assert made.exists()


@pytest.mark.parametrize("damage", ["cut", "garbled", "compressed", "text"])
def test_damaged_archives(damage, tmp_path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(200, 20)}, path)
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "garbled":
        path.write_bytes(whole[:60] + bytes(200) + whole[260:])
    elif damage == "compressed":
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(tmp_path / "z.pt", "w", zipfile.ZIP_DEFLATED) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
        path = tmp_path / "z.pt"
    else:
        path.write_text("hello")
    with pytest.raises(Trouble) as caught:
        read_header(path)
    assert caught.value.kind == "damaged"


def test_a_model_and_a_lora(tmp_path):
    weights = load_file(MODEL)
    torch.save(
        {"state_dict": {f"model.diffusion_model.{name}": tensor for name, tensor in weights.items()}},
        tmp_path / "m.ckpt",
    )
    spec = identify_model(tmp_path / "m.ckpt", FAMILIES)
    assert spec.family == "qwen_image" and set(spec.parts["dit"].tensors) == set(weights)
    pipe = QwenImagePipeline.from_pretrained(
        torch_dtype=torch.float32,
        device="cpu",
        model_configs=[ModelConfig(path=str(tmp_path / "m.ckpt"))],
        tokenizer_config=None,
    )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in pipe.dit.state_dict().items())
    folder = tmp_path / "transformer"
    folder.mkdir()
    torch.save(weights, folder / "diffusion_pytorch_model.bin")
    (folder / "config.json").write_text((MODEL.parent / "config.json").read_text())
    assert set(identify_model(folder, FAMILIES).parts["dit"].tensors) == set(weights)
    torch.save(load_file(CASES / "qwen_kohya_musubi.safetensors"), tmp_path / "lora.pt")
    lora = identify_lora(tmp_path / "lora.pt", FAMILIES)
    assert lora.family == "qwen_image" and lora.ranks == (8,)
    assert pipe.load_lora(pipe.dit, str(tmp_path / "lora.pt")).layers_applied == 8


def test_a_local_header_that_lies_about_its_length(tmp_path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        place = archive.getinfo("m/data/0").header_offset
    whole = bytearray(path.read_bytes())
    whole[place + 26 : place + 30] = b"\xff\xff\xff\xff"
    path.write_bytes(whole)
    with pytest.raises(Trouble) as caught:
        read_header(path)
    assert caught.value.kind == "damaged"
