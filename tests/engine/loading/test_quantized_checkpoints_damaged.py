"""What files say of their quantized weights, spelt otherwise, under other prefixes, twice, in part, against itself or not at all: read right or
refused, and never otherwise. Answers are worked out here in float64 from what was written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.catalog.models.identify import identify_model
from backend.engine.loading.dequantize import FORMS
from backend.engine.loading.load import load_part
from backend.families import FAMILIES
from backend.schema.messages import Trouble
from tests.lora_models import CASES

pytestmark = pytest.mark.torch
LAYERS = ("transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.net.2", "transformer_blocks.1.attn.to_out.0")
HEADER = "_quantization_metadata"
FP8, INT8 = {"format": "float8_e4m3fn"}, {"format": "int8_tensorwise"}
CONVROT = {**INT8, "convrot": True, "convrot_groupsize": 16}
BASE = load_file(CASES / "models" / "tiny_qwen_image" / "diffusion_pytorch_model.safetensors")
Tensors = dict[str, torch.Tensor]


def text(said: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


def hadamard(size: int) -> torch.Tensor:
    four = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    return matrix / size**0.5


class File:
    """A model in the making: `tensors` as stored, `metadata`, `config`; `expected` are the numbers of its quantized weights."""

    def __init__(self):
        self.tensors: Tensors = {name: tensor.bfloat16() for name, tensor in BASE.items()}
        self.metadata: dict[str, str] = {}
        self.config: dict | None = None
        self.expected: Tensors = {}

    def put(self, layer: str, expected: torch.Tensor | None, **roles: torch.Tensor) -> None:
        """Stores `layer` as `roles` ("weight_scale", "weight__absmax" for "weight.absmax")."""
        del self.tensors[f"{layer}.weight"]
        self.tensors |= {f"{layer}.{role.replace('__', '.')}": tensor for role, tensor in roles.items()}
        if expected is not None:
            self.expected[f"{layer}.weight"] = expected.float()

    def header(self, said: object) -> None:
        self.metadata[HEADER] = said if isinstance(said, str) else json.dumps(said)

    def save(self, folder: Path, prefix: str = "") -> Path:
        if self.config is not None:
            (folder / "config.json").write_text(json.dumps(self.config))
        path = folder / "model.safetensors"
        save_file({prefix + name: at.clone().contiguous() for name, at in self.tensors.items()}, path, self.metadata)
        return path

    def check(self, path: Path) -> None:
        found = load_part(identify_model(path, FAMILIES).parts["dit"], dtype=torch.float32).state_dict()
        for name, tensor in found.items():
            expected = self.expected.get(name, BASE[name].bfloat16().float())
            error = (tensor - expected).abs().max() / expected.abs().max()
            assert error <= (1e-5 if name in self.expected else 0), (name, float(error))


def codes(layer: str, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, their factor a row) of a layer."""
    weight = BASE[f"{layer}.weight"].double()
    largest = 127 if dtype is torch.int8 else 448
    scale = weight.abs().amax(1, keepdim=True) / largest
    exact = weight / scale
    return (exact.round() if dtype is torch.int8 else exact.float()).to(dtype), scale.float()


def scaled(
    marker: dict | None = None, *, role: str = "weight_scale", dtype=torch.float8_e4m3fn, whole: bool = False
) -> File:
    file = File()
    for layer in LAYERS:
        data, scale = codes(layer, dtype)
        scale = scale.amax() if whole else scale
        more = {} if marker is None else {"comfy_quant": text(marker)}
        file.put(layer, data.double() * scale.double(), weight=data, **{role: scale}, **more)
    return file


def rotated() -> File:
    file = File()
    for layer in LAYERS:
        weight, matrix = BASE[f"{layer}.weight"].double(), hadamard(16)
        turned = (weight.view(-1, 16) @ matrix).view(weight.shape)
        scale = (turned.abs().amax(1, keepdim=True) / 127).float()
        data = (turned / scale.double()).round().to(torch.int8)
        exact = ((data.double() * scale.double()).view(-1, 16) @ matrix).view(weight.shape)
        file.put(layer, exact, weight=data, weight_scale=scale)
    return file


PREFIXES = ("", "net.", "_orig_mod.", "dit.", "pipe.dit.", "module.", "model.diffusion_model.", "transformer.", "module.model.diffusion_model.",
    "pipe.dit._orig_mod.", "_orig_mod.module.", "state_dict.net.")  # fmt: skip


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("said", ["the same", "", "net.", "model.diffusion_model.", "_orig_mod."])
def test_the_header_means_a_layer_whatever_stands_before_it(prefix, said, tmp_path):
    file = rotated()
    before = prefix if said == "the same" else said
    file.header({"format_version": "1.0", "layers": {before + layer: CONVROT for layer in LAYERS}})
    file.check(file.save(tmp_path, prefix))


@pytest.mark.parametrize("prefix", PREFIXES[:7])
@pytest.mark.parametrize("place", ["{}.comfy_quant", "{}.weight.comfy_quant"])
@pytest.mark.parametrize("own", [True, False])
def test_markers_beside_the_weight_or_under_another_prefix(prefix, place, own, tmp_path):
    file = rotated()
    file.tensors = {prefix + name: at for name, at in file.tensors.items()}
    for layer in LAYERS:
        name = place.format(layer)
        file.tensors[prefix + name if own else f"model.diffusion_model.{name}"] = text(CONVROT)
    file.check(file.save(tmp_path))


def test_wrappers_inside_a_name(tmp_path):
    file = rotated()
    file.header({"layers": dict.fromkeys(LAYERS, CONVROT)})
    file.tensors = {
        name.replace("blocks.0.", "blocks.0._orig_mod.").replace(
            "blocks.1.", "blocks.1._checkpoint_wrapped_module."
        ): at
        for name, at in file.tensors.items()
    }
    file.check(file.save(tmp_path))


def _both(file: File, change: float = 1.0) -> File:
    for layer in LAYERS:
        file.tensors[f"{layer}.scale_weight"] = file.tensors[f"{layer}.weight_scale"].double().mul(change).float()
    return file


def _with(file: File, **more: torch.Tensor) -> File:
    file.tensors |= {f"{layer}.{role.replace('__', '.')}": at.clone() for layer in LAYERS for role, at in more.items()}
    return file


def _said(file: File, said: object, key: str = HEADER) -> File:
    file.metadata[key] = said if isinstance(said, str) else json.dumps(said)
    return file


def _configured(file: File, **said: object) -> File:
    file.config = {"quantization_config": said}
    return file


def _marked(file: File, said: object, layers=LAYERS) -> File:
    file.tensors |= {f"{layer}.comfy_quant": text(said) for layer in layers}
    return file


def _named(file: File, name: str, tensor: torch.Tensor) -> File:
    file.tensors[name] = tensor
    return file


def _without(file: File, role: str, layers=LAYERS[:1]) -> File:
    for layer in layers:
        del file.tensors[f"{layer}.{role}"]
    return file


def _plain(dtype: torch.dtype = torch.bfloat16) -> File:
    file = File()
    if dtype is not torch.bfloat16:
        for layer in LAYERS:
            data = BASE[f"{layer}.weight"].to(dtype)
            file.put(layer, data.double(), weight=data)
    return file


def _blocks(side: int, marker: dict | None) -> File:
    file, layer = File(), LAYERS[1]
    weight = BASE[f"{layer}.weight"].double()
    scale = weight.view(48 // side, side, -1, side).abs().amax((1, 3)).float() / 448
    spread = scale.double().repeat_interleave(side, 0).repeat_interleave(side, 1)
    data = (weight / spread).float().to(torch.float8_e4m3fn)
    more = {} if marker is None else {"comfy_quant": text(marker)}
    file.put(layer, data.double() * spread, weight=data, weight_scale=scale, **more)
    return file


def _runs(count: int) -> File:
    """Musubi-tuner's blocks."""
    file, layer = File(), LAYERS[1]
    weight = BASE[f"{layer}.weight"].double().view(48, count, -1)
    scale = (weight.abs().amax(2, keepdim=True) / 448).float()
    data = (weight / scale).float().to(torch.float8_e4m3fn)
    file.put(layer, (data.double() * scale).view(48, 192), weight=data.view(48, 192), scale_weight=scale)
    return file


def _fine_grained(config: bool) -> File:
    file = File()
    layer = LAYERS[1]
    weight, scale = BASE[f"{layer}.weight"].double(), torch.tensor([[0.5, 2.0]])
    spread = scale.double().repeat_interleave(128, 1)[:, :192]
    data = (weight / spread).float().to(torch.float8_e4m3fn)
    file.put(layer, data.double() * spread, weight=data, weight_scale_inv=scale)
    return _configured(file, quant_method="fp8", weight_block_size=[128, 128]) if config else file


ONE = torch.ones(())
READ: dict[str, Callable[[], File]] = {
    "no marker": scaled,
    "one factor": lambda: scaled(whole=True),
    "older spelling": lambda: scaled(role="scale_weight", whole=True),
    "older, with its marker": lambda: _named(scaled(role="scale_weight"), "scaled_fp8", torch.empty(0)),
    "older, marker of two": lambda: _named(scaled(role="scale_weight"), "scaled_fp8", torch.empty(2)),
    "older, marker of the dtype": lambda: _named(
        scaled(role="scale_weight"), "scaled_fp8", torch.empty(0).to(torch.float8_e4m3fn)
    ),
    "newer": lambda: scaled(FP8),
    "a format alone": lambda: scaled("float8_e4m3fn"),
    "a format alone in the header": lambda: _said(scaled(), {"layers": dict.fromkeys(LAYERS, "float8_e4m3fn")}),
    "nested settings": lambda: _marked(rotated(), {**INT8, "params": {"convrot": True, "convrot_groupsize": 16}}),
    "a header under another name": lambda: _said(
        rotated(), {"layers": dict.fromkeys(LAYERS, CONVROT)}, "quantization_metadata"
    ),
    "a factor under another prefix too": lambda: _named(
        scaled(FP8), f"net.{LAYERS[0]}.weight_scale", codes(LAYERS[0])[1]
    ),
    "marked twice alike": lambda: _said(_marked(rotated(), CONVROT), {"layers": dict.fromkeys(LAYERS, CONVROT)}),
    "settings without a meaning for numbers": lambda: scaled(
        {**FP8, "full_precision_matrix_mult": True, "orig_dtype": "torch.bfloat16"}
    ),
    "both spellings alike": lambda: _both(scaled()),
    "factors of activations": lambda: _with(
        scaled(FP8), input_scale=ONE * 0.3, scale_input=ONE * 0.3, output_scale=ONE
    ),
    "a preference of attention": lambda: _named(
        scaled(FP8), "transformer_blocks.0.attn.comfy_attention.config", text({"attention": "x"})
    ),
    "int8": lambda: scaled(INT8, dtype=torch.int8),
    "int8 by row, said": lambda: scaled({**INT8, "per_row": True}, dtype=torch.int8),
    "e5m2": lambda: scaled({"format": "float8_e5m2"}, dtype=torch.float8_e5m2),
    "squares": lambda: _blocks(16, {"format": "float8_e4m3fn_blockwise", "group_size": 16}),
    "squares, not said": lambda: _blocks(8, None),
    "runs": lambda: _runs(6),
    "one run": lambda: _runs(1),
    "fine-grained, cut off": lambda: _fine_grained(True),
    "plain fp8": lambda: _plain(torch.float8_e4m3fn),
    "plain e5m2": lambda: _plain(torch.float8_e5m2),
    "float16": lambda: _plain(torch.float16),
    "layers named that are plain": lambda: _said(_plain(), {"layers": dict.fromkeys(LAYERS, FP8)}),
    "no layers named": lambda: _said(_plain(torch.float8_e4m3fn), {"format_version": "1.0", "layers": {}}),
    "a broken header of plain numbers": lambda: _said(_plain(), '{"layers": {"a'),
    "plain numbers of a quantized model": lambda: _configured(_plain(), quant_method="bitsandbytes", load_in_4bit=True),
    "factors of 1 beside plain numbers": lambda: _with(_plain(), weight_scale=ONE, scale_weight=torch.ones(1)),
    "factors of activations beside plain numbers": lambda: _with(_plain(), input_scale=ONE * 3),
    "a scaled_fp8 of nothing": lambda: _named(_plain(), "scaled_fp8", torch.empty(0)),
    "another's metadata": lambda: _said(scaled(FP8), "[[", "modelspec.sai_model_spec"),
    "some layers only": lambda: _without_layer(scaled(FP8)),
}


def _without_layer(file: File) -> File:
    layer = LAYERS[0]
    for role in ("weight", "weight_scale", "comfy_quant"):
        del file.tensors[f"{layer}.{role}"]
    file.tensors[f"{layer}.weight"] = BASE[f"{layer}.weight"].bfloat16()
    del file.expected[f"{layer}.weight"]
    return file


def _svdquant(said: str | None = "int4", **change: torch.Tensor | None) -> File:
    """A second layer of an MLP, 128 x 128, in the lanes' order, as 4-bit floats or integers by `said`."""
    file, layer = File(), "transformer_blocks.0.img_mlp.net.2"
    roles = {
        "qweight": torch.zeros(128, 64, dtype=torch.int8),
        "wscales": torch.ones(2, 128).bfloat16(),
        "smooth_factor": torch.ones(128).bfloat16(),
        "smooth_factor_orig": torch.ones(128).bfloat16(),
        "proj_down": torch.zeros(128, 16).bfloat16(),
        "proj_up": torch.zeros(128, 16).bfloat16(),
        **change,
    }
    file.put(layer, None, **{role: at for role, at in roles.items() if at is not None})
    file.tensors[f"{layer}.bias"] = torch.zeros(128).bfloat16()
    if said is not None:
        file.metadata["quantization_config"] = json.dumps({"method": "svdquant", "weight": {"dtype": said}})
    return file


def test_svdquant_of_four_bit_floats():
    """The order of the lanes, number by number."""
    numbers = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (128, 128), generator=numbers, dtype=torch.uint8)
    scale = torch.rand(128, 8, generator=numbers).to(torch.float8_e4m3fn)
    channel, smooth = (
        torch.rand(128, generator=numbers).bfloat16(),
        (torch.rand(128, generator=numbers) + 0.5).bfloat16(),
    )
    words, factors = torch.zeros(8192, dtype=torch.uint8), torch.zeros(1024, dtype=torch.float8_e4m3fn)
    vectors = {"channel": torch.zeros_like(channel), "smooth": torch.zeros_like(smooth)}
    for row in range(128):
        lane, inner = row % 8, row // 8 % 2
        for column in range(128):
            tile, place = divmod(column, 64)
            register = 2 * inner + place // 32
            byte = tile * 4096 + ((row // 16 * 8 + lane) * 4 + place % 32 // 8) * 16 + register * 4 + place % 8 // 2
            words[byte] |= codes[row, column] << 4 * (place % 2)
        for group in range(8):
            factors[group // 4 * 512 + (row % 8 * 4 + row // 8 % 4) * 16 + row // 32 * 4 + group % 4] = scale[
                row, group
            ]
        at = row // 16 * 16 + row % 8 // 2 * 4 + row // 8 % 2 * 2 + row % 2
        vectors["channel"][at], vectors["smooth"][at] = channel[row], smooth[row]
    change = {
        "qweight": words.view(torch.int8).view(128, 64),
        "wscales": factors.view(8, 128),
        "wcscales": vectors["channel"],
    }
    file = _svdquant("fp4_e2m1_all", **change, smooth_factor=vectors["smooth"], wtscale=torch.tensor([0.25]))
    layer = "transformer_blocks.0.img_mlp.net.2"
    pieces = {name.removeprefix(f"{layer}."): at for name, at in file.tensors.items() if name.startswith(f"{layer}.")}
    found = FORMS["svdquant"](
        {
            "weight": pieces["qweight"],
            "scale": pieces["wscales"],
            "channel": pieces["wcscales"],
            "whole": pieces["wtscale"],
            "smooth": pieces["smooth_factor"],
            "down": pieces["proj_down"],
            "up": pieces["proj_up"],
        },
        {"kind": "nvfp4"},
        (128, 128),
    )
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    exact = levels[codes.long()] * scale.double().repeat_interleave(16, 1) * channel.double()[:, None] * 0.25
    assert torch.allclose(found.double(), exact / smooth.double(), rtol=1e-5)


def test_nvfp4_whose_input_is_multiplied(tmp_path):
    """e2m1 code 2 (1.0) and 4 (2.0), high nibble first, factors of 1, and a factor for each input."""
    file = _nvfp4({"format": "nvfp4"})
    file.tensors[f"{LAYERS[0]}.weight"].fill_(0x24)
    before = torch.rand(48, generator=torch.Generator().manual_seed(0)) + 0.5
    file.tensors[f"{LAYERS[0]}.pre_quant_scale"] = before
    file.expected[f"{LAYERS[0]}.weight"] = (torch.tensor([1.0, 2.0]).repeat(24) * before).expand(48, 48)
    file.check(file.save(tmp_path))


@pytest.mark.parametrize("name", READ)
def test_read_right(name, tmp_path):
    file = READ[name]()
    file.check(file.save(tmp_path))


def _bits(**change: object) -> File:
    file, layer = File(), LAYERS[0]
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [48, 48], **change}
    roles = {
        "weight": torch.zeros(1152, 1, dtype=torch.uint8),
        "weight__absmax": torch.ones(36),
        "weight__quant_map": torch.ones(16),
    }
    file.put(layer, None, **roles)
    file.tensors[f"{layer}.weight.quant_state.bitsandbytes__nf4"] = text(
        {key: at for key, at in said.items() if at is not None}
    )
    return file


def _nvfp4(marker: dict | None, rows: int = 128, columns: int = 4, whole: bool = True) -> File:
    file = File()
    scale = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    roles = {"weight": torch.zeros(48, 24, dtype=torch.uint8), "weight_scale": scale}
    roles |= {"weight_scale_2": ONE.clone()} if whole else {}
    roles |= {} if marker is None else {"comfy_quant": text(marker)}
    file.put(LAYERS[0], None, **roles)
    return file


def _torchao(kind: str | None = "Int8Tensor", scale: bool = True, **data: object) -> File:
    file, layer = File(), LAYERS[0]
    roles = {"_weight_qdata": torch.zeros(48, 48, dtype=torch.int8)} | (
        {"_weight_scale": torch.ones(48, 1)} if scale else {}
    )
    file.put(layer, None, **roles)
    if kind is not None:
        names = [role.removeprefix("_weight_") for role in roles]
        said = {"_type": kind, "_data": {"block_size": [1, 48], **data}, "_tensor_data_names": names}
        file.metadata[f"{layer}.weight"] = json.dumps(said)
    return file


def _stored(**roles: torch.Tensor) -> File:
    file = File()
    file.put(LAYERS[0], None, **roles)
    return file


EIGHT = torch.ones(48, 48, dtype=torch.int8)
PACKED = torch.zeros(48, 24, dtype=torch.uint8)
REFUSED: dict[str, tuple[Callable[[], File], str]] = {
    "header cut off": (lambda: _said(rotated(), '{"layers": {"transformer_blocks.0.attn.to_q": {"form'), "cut off"),
    "header cut off, fp8": (lambda: _said(scaled(), '{"layers": {'), "cut off"),
    "header a list": (lambda: _said(rotated(), [CONVROT]), "no table of layers"),
    "layers a list": (lambda: _said(rotated(), {"layers": [[layer, CONVROT] for layer in LAYERS]}), "no table of layers"),
    "layers nothing": (lambda: _said(rotated(), {"layers": None}), "no table of layers"),
    "header of another version": (lambda: _said(rotated(), {"format_version": "7", "layers": {}}), "version"),
    "a header that speaks of all layers": (lambda: _said(rotated(), {"layers": {}, "default": CONVROT}), "default"),
    "a header without layers": (lambda: _said(rotated(), {layer: CONVROT for layer in LAYERS}), "no table of layers"),
    "a header that names no layers, int8": (lambda: _said(rotated(), {"layers": {}}), "without a marker"),
    "a layer named twice": (lambda: _said(rotated(), f'{{"layers": {{"{LAYERS[0]}": {json.dumps(INT8)}, "{LAYERS[0]}": {json.dumps(CONVROT)}}}}}'), "marker"),
    "a header under another name, cut off": (lambda: _said(rotated(), '{"layers": {', "quantization_metadata"), "quantization_metadata"),
    "one layer of several not named": (lambda: _said(rotated(), {"layers": dict.fromkeys(LAYERS[1:], CONVROT)}), "without a marker"),
    "one layer of several not marked": (lambda: _marked(rotated(), CONVROT, LAYERS[:2]), "without a marker"),
    "groups, and not whether rotated": (lambda: _marked(rotated(), {**INT8, "convrot_groupsize": 16}), "whether it is rotated"),
    "a factor under another prefix that disagrees": (lambda: _named(scaled(FP8), f"net.{LAYERS[0]}.weight_scale", ONE * 3), "twice and differently"),
    "a marker under another prefix that disagrees": (lambda: _named(_marked(rotated(), INT8), f"net.{LAYERS[0]}.comfy_quant", text(CONVROT)), "twice and differently"),
    "lengths beside bf16": (lambda: _with(_plain(), weight_g=torch.ones(48, 1)), "weight_g"),
    "a rotation beside bf16": (lambda: _with(_plain(), weight_rotation=torch.ones(48, 48)), "weight_rotation"),
    "an entry is a list": (lambda: _said(rotated(), {"layers": {key: [CONVROT] for key in LAYERS}}), "list"),
    "an entry is a number": (lambda: _said(rotated(), {"layers": dict.fromkeys(LAYERS, 4)}), "int"),
    "an entry without a format": (lambda: _said(rotated(), {"layers": {key: {"convrot": True} for key in LAYERS}}), "no format"),
    "an entry of an unknown format": (lambda: _said(rotated(), {"layers": {key: {"format": "int5_secret"} for key in LAYERS}}), "int5_secret"),
    "entries of layers that are not there": (lambda: _said(rotated(), {"layers": {"blocks.9.attn.q": CONVROT}}), "belongs to no weight"),
    "a marker that is a list": (lambda: _marked(scaled(dtype=torch.int8), [CONVROT]), "list"),
    "a marker that is a number": (lambda: _marked(scaled(), 8), "int"),
    "a marker cut off": (lambda: _with(scaled(), comfy_quant=text(FP8)[:9]), "no JSON"),
    "a marker without a format": (lambda: _marked(scaled(dtype=torch.int8), {"convrot": True, "per_row": True}), "no format"),
    "a marker of an unknown format": (lambda: scaled({"format": "float8_secret"}), "float8_secret"),
    "markers that disagree": (lambda: _said(scaled(FP8), {"layers": dict.fromkeys(LAYERS, CONVROT)}), "disagree"),
    "two markers that disagree": (lambda: _with(_marked(rotated(), CONVROT), weight__comfy_quant=text(INT8)), "disagree"),
    "a marker that belongs to no weight": (lambda: _named(rotated(), "blocks.9.q.comfy_quant", text(CONVROT)), "belongs to no weight"),
    "a marker of fp8 on int8": (lambda: scaled(FP8, dtype=torch.int8), "disagree"),
    "a marker of int8 on fp8": (lambda: scaled(INT8), "disagree"),
    "a marker of e5m2 on e4m3": (lambda: scaled({"format": "float8_e5m2"}), "disagree"),
    "a marker of nvfp4 on fp8": (lambda: scaled({"format": "nvfp4"}), "NVFP4|nvfp4"),
    "a setting that is not understood": (lambda: scaled({**FP8, "secret_rotation": 3}), "secret_rotation"),
    "rotated fp8": (lambda: scaled({**FP8, "convrot": True}), "convrot"),
    "rotated in groups that cannot be": (lambda: _marked(rotated(), {**CONVROT, "convrot_groupsize": 8}), "groups of 8"),
    "rotated in groups that do not fit": (lambda: _marked(rotated(), {**CONVROT, "convrot_groupsize": 64}), "groups of 64"),
    "rotated in no number of groups": (lambda: _marked(rotated(), {**CONVROT, "convrot_groupsize": "16"}), "groupsize"),
    "rotated without a factor": (lambda: _without(_marked(rotated(), CONVROT), "weight_scale"), "missing"),
    "marked fp8 without a factor": (lambda: _without(scaled(FP8), "weight_scale"), "no factor"),
    "named fp8 without a factor": (lambda: _said(_plain(torch.float8_e4m3fn), {"layers": {LAYERS[0]: FP8}}), "no factor"),
    "scaled_fp8 without a factor": (lambda: _named(_plain(torch.float8_e4m3fn), "scaled_fp8", torch.empty(0)), "no factor"),
    "scaled_fp8 under another prefix": (lambda: _named(_plain(torch.float8_e4m3fn), "net.scaled_fp8", torch.empty(0)), "no factor"),
    "scaled_fp8 of e5m2": (lambda: _named(scaled(), "scaled_fp8", torch.empty(0).to(torch.float8_e5m2)), "disagree"),
    "one layer of several without a factor": (lambda: _without(scaled(), "weight_scale"), "no factor"),
    "a factor that belongs to no weight": (lambda: _named(_plain(torch.float8_e4m3fn), "blocks.9.q.scale_weight", ONE * 3), "no factor|belongs to no weight"),
    "factors that disagree": (lambda: _both(scaled(), 2.0), "disagree"),
    "factors that disagree a little": (lambda: _both(scaled(), 1.001), "disagree"),
    "factors of other shapes": (lambda: _with(scaled(whole=True), scale_weight=torch.ones(48, 1)), "disagree"),
    "a factor beside bf16": (lambda: _with(_plain(), weight_scale=ONE * 0.02), "weight_scale beside it"),
    "an older factor beside bf16": (lambda: _with(_plain(), scale_weight=ONE * 0.02), "scale_weight beside it"),
    "a factor beside float16": (lambda: _with(_plain(torch.float16), scale_weight=ONE * 0.02), "scale_weight beside it"),
    "a factor of 8 bits beside bf16": (lambda: _with(_plain(), SCB=torch.ones(48)), "SCB"),
    "a factor of 4 bits beside bf16": (lambda: _with(_plain(), weight__absmax=torch.ones(36)), "absmax"),
    "a second factor beside bf16": (lambda: _with(_plain(), weight_scale_2=ONE), "weight_scale_2"),
    "smoothing beside bf16": (lambda: _with(_plain(), smooth_factor=torch.ones(48)), "smooth_factor"),
    "a zero point beside bf16": (lambda: _with(_plain(), weight_zero_point=ONE), "zero_point"),
    "a marker beside bf16": (lambda: _marked(_plain(), CONVROT), "disagree"),
    "bf16 that the header calls rotated": (lambda: _said(_plain(), {"layers": dict.fromkeys(LAYERS, CONVROT)}), "rotated"),
    "int8 without a factor": (lambda: _without(scaled(dtype=torch.int8), "weight_scale"), "without a factor"),
    "bytes": (lambda: _stored(weight=PACKED), "without a factor"),
    "int32": (lambda: _stored(weight=EIGHT.int()), "without a factor"),
    "a factor for each input": (lambda: _with(_without(scaled(), "weight_scale", LAYERS), weight_scale=torch.ones(1, 48)), "factor of shape"),
    "a factor that fits nothing": (lambda: _with(_without(scaled(), "weight_scale", LAYERS), weight_scale=torch.ones(5)), "factor of shape"),
    "a factor of integers": (lambda: _with(_without(scaled(), "weight_scale", LAYERS), weight_scale=torch.ones((), dtype=torch.int32)), "I32"),
    "an offset": (lambda: _with(scaled(INT8, dtype=torch.int8), weight_offset=torch.ones(48, 1)), "weight_offset"),
    "a zero point": (lambda: _with(scaled(dtype=torch.int8), weight_zero_point=torch.ones(48, 1, dtype=torch.int8)), "zero_point"),
    "an order of inputs": (lambda: _with(scaled(dtype=torch.int8), g_idx=torch.arange(48)), "GPTQ"),
    "smoothing": (lambda: _with(scaled(INT8, dtype=torch.int8), smooth=torch.ones(48)), "smooth|SVDQuant"),
    "a low-rank part": (lambda: _with(scaled(INT8, dtype=torch.int8), proj_down=torch.ones(48, 4)), "proj_down|SVDQuant"),
    "a codebook": (lambda: _with(scaled(INT8, dtype=torch.int8), weight_codebook=torch.ones(16)), "codebook"),
    "by row, with one factor": (lambda: scaled({**INT8, "per_row": True}, dtype=torch.int8, whole=True), "factor of shape"),
    "of another shape": (lambda: scaled({**INT8, "orig_shape": [96, 24]}, dtype=torch.int8), "of the shape"),
    "blocks of another size": (lambda: _blocks(16, {"format": "float8_e4m3fn_blockwise", "group_size": 32}), "blocks of 32"),
    "fine-grained, nothing said": (lambda: _fine_grained(False), "weight_scale_inv"),
    "fp8 of a quantized model": (lambda: _configured(_plain(torch.float8_e4m3fn), quant_method="fp8"), "fp8"),
    "fp8 of an unknown scheme": (lambda: _configured(_plain(torch.float8_e4m3fn), bits=8), "unknown"),
    "scaled fp8 of another scheme": (lambda: _configured(scaled(), quant_method="bitsandbytes"), "bitsandbytes"),
    "a configuration in the header cut off": (lambda: _said(scaled(), "{", "quantization_config"), "no JSON"),
    "nvfp4 of nobody": (lambda: _nvfp4(None), "nothing says"),
    "nvfp4 without its second factor": (lambda: _nvfp4({"format": "nvfp4"}, whole=False), "missing"),
    "nvfp4 in rows, marked as tiled": (lambda: _nvfp4({"format": "nvfp4"}, 48, 3), "does not fit"),
    "nvfp4 with a rotation": (lambda: _nvfp4({"format": "nvfp4", "convrot": True}), "convrot"),
    "nvfp4 smoothed by another size": (
        lambda: _named(_nvfp4({"format": "nvfp4"}), f"{LAYERS[0]}.pre_quant_scale", torch.ones(24)), "does not fit"),
    "nf4 without a state": (lambda: _without(_bits(), "weight.quant_state.bitsandbytes__nf4"), "quant states"),
    "nf4 without levels": (lambda: _without(_bits(), "weight.quant_map"), "missing"),
    "nf4 without factors": (lambda: _without(_bits(), "weight.absmax"), "missing"),
    "nf4 that says fp4": (lambda: _bits(quant_type="fp4"), "cannot be understood"),
    "nf4 of another size": (lambda: _bits(shape=[48, 96]), "shape"),
    "nf4 in other blocks": (lambda: _bits(blocksize=128), "absmax"),
    "nf4 that says more": (lambda: _bits(secret=1), "cannot be understood"),
    "nf4 marked as nvfp4": (lambda: _named(_bits(), f"{LAYERS[0]}.comfy_quant", text({"format": "nvfp4"})), "nvfp4"),
    "llm.int8 without its factor": (lambda: _stored(weight=EIGHT, weight_format=torch.zeros((), dtype=torch.uint8)), "missing"),
    "llm.int8 in another order": (lambda: _stored(weight=EIGHT, SCB=torch.ones(48), weight_format=ONE.to(torch.uint8)), "order"),
    "llm.int8 with another factor": (lambda: _stored(weight=EIGHT, SCB=torch.ones(48), weight_scale=ONE), "weight_scale"),
    "torchao without a header": (lambda: _torchao(None), "torchao"),
    "torchao without a factor": (lambda: _torchao(scale=False), "missing"),
    "torchao that says float8": (lambda: _torchao("Float8Tensor"), "torchao float8"),
    "torchao in other blocks": (lambda: _torchao(block_size=[1, 16]), "does not fit"),
    "torchao of an unknown class": (lambda: _torchao("SecretTensor"), "torchao"),
    "torchao int4": (lambda: _torchao("Int4Tensor"), "torchao int4"),
    "torchao of a plain weight": (lambda: _said(_plain(), {"_type": "Int8Tensor", "_data": {}}, f"{LAYERS[0]}.weight"), "torchao|Int8Tensor"),
    "torchao with one tensor more": (lambda: _named(_torchao(), f"{LAYERS[0]}._weight_shift", torch.ones(48, 1)), "torchao int8"),
    "quanto without a factor": (lambda: _stored(weight___data=EIGHT), "missing"),
    "quanto int4 without a shift": (lambda: _stored(weight___data___data=PACKED, weight___scale=torch.ones(48, 1)), "missing"),
    "sdnq without a configuration": (lambda: _stored(weight=PACKED.flatten(), scale=torch.ones(48, 1), zero_point=torch.ones(48, 1)), "SDNQ"),
    "gptq": (lambda: _stored(qweight=PACKED.int(), qzeros=EIGHT.int(), scales=torch.ones(1, 48)), "GPTQ or AWQ"),
    "svdquant": (lambda: _stored(qweight=EIGHT[:, :24].clone(), wscales=torch.ones(1, 48), smooth=torch.ones(48)), "SVDQuant INT4"),
    "svdquant without its header": (lambda: _svdquant(None), "SVDQuant INT4"),
    "svdquant in an older spelling": (lambda: _svdquant(lora_down=torch.ones(128, 16)), "SVDQuant INT4"),
    "svdquant without its low-rank part": (lambda: _svdquant(proj_up=None), "proj_up is missing"),
    "svdquant that says floats": (lambda: _svdquant("fp4_e2m1_all"), "quantization_config says"),
    "svdquant in other groups": (lambda: _svdquant(wscales=torch.ones(4, 128).bfloat16()), "does not fit"),
    "svdquant with a zero point": (lambda: _svdquant(wzeros=torch.ones(2, 128).bfloat16()), "wzeros"),
    "hqq": (lambda: _stored(W_q=PACKED, scale=ONE, zero=ONE), "HQQ"),
    "compressed-tensors": (lambda: _stored(weight_packed=EIGHT.int(), weight_scale=torch.ones(48, 1)), "compressed-tensors"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    make, words = REFUSED[name]
    with pytest.raises(Trouble, match=words) as caught:
        identify_model(make().save(tmp_path), FAMILIES)
    assert caught.value.kind in ("not_supported", "repeated") and "damaged" not in caught.value.message
    assert caught.value.message.startswith("model.safetensors") and len(caught.value.message) < 400


@pytest.mark.parametrize(
    "make",
    [
        lambda: _blocks(16, None),
        lambda: _nvfp4({"format": "nvfp4"}),
        lambda: _marked(rotated(), CONVROT),
        lambda: scaled(),
    ],
    ids=["blocks", "nvfp4", "rotated", "rows"],
)
def test_factors_that_are_no_numbers(make, tmp_path):
    file = make()
    for name, tensor in file.tensors.items():
        if name.endswith("weight_scale"):
            tensor.view(torch.uint8).view(-1).fill_(0x7F) if tensor.dtype is torch.float8_e4m3fn else tensor.fill_(
                float("nan")
            )
    part = identify_model(file.save(tmp_path), FAMILIES).parts["dit"]
    with pytest.raises(Trouble) as caught:
        load_part(part, dtype=torch.float32)
    assert caught.value.kind == "not_finite"
