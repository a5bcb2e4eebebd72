"""ggml's quantized types: numbers by hand and by plain loops over one block, and a model in a GGUF file drawn from however it lies."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from backend.catalog.formats.gguf import BLOCKS
from backend.catalog.models.identify import identify_model
from backend.engine.loading.gguf_dequantize import TYPES, GgufBlocks
from backend.families import FAMILIES
from backend.pipelines import ModelConfig, QwenImagePipeline
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch
FORMS = Path(__file__).parents[2] / "cases" / "forms"
WITH_CODEBOOKS = tuple(f"GGUF_IQ{kind}" for kind in ("1_S", "1_M", "2_XXS", "2_XS", "2_S", "3_XXS", "3_S"))
SCALES = {
    "GGUF_Q2_K": (80, 82),
    "GGUF_Q3_K": (108,),
    "GGUF_Q6_K": (208,),
    "GGUF_Q4_1": (0, 2),
    "GGUF_Q5_1": (0, 2),
    "GGUF_Q4_K": (0, 2),
    "GGUF_Q5_K": (0, 2),
    "GGUF_TQ1_0": (52,),
    "GGUF_TQ2_0": (64,),
    **dict.fromkeys(("GGUF_MXFP4", "GGUF_NVFP4", "GGUF_Q8_K"), ()),
}


def half(block: bytes, at: int) -> float:
    return struct.unpack_from("<e", block, at)[0]


def bit(data: bytes, number: int) -> int:
    return data[number // 8] >> number % 8 & 1


def nibble(data: bytes, number: int) -> int:
    """Of 32 numbers in 16 bytes: the low halves are the first sixteen."""
    return data[number] & 15 if number < 16 else data[number - 16] >> 4


def pair_of_six(scales: bytes, j: int) -> tuple[int, int]:
    if j < 4:
        return scales[j] & 63, scales[j + 4] & 63
    return scales[j + 4] & 15 | scales[j - 4] >> 6 << 4, scales[j + 4] >> 4 | scales[j] >> 6 << 4


def six_of_three(scales: bytes, j: int) -> int:
    low = scales[j] & 15 if j < 8 else scales[j - 8] >> 4
    return (low | (scales[8 + j % 4] >> 2 * (j // 4) & 3) << 4) - 32


def number(kind: str, b: bytes, i: int) -> float:
    """Number `i` of block `b`, one at a time."""
    d = half(b, {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(kind, 0))
    part, place = divmod(i, 128)
    j, k = divmod(i, 32)
    if kind == "Q4_0":
        return d * (nibble(b[2:], i) - 8)
    if kind == "Q4_1":
        return d * nibble(b[4:], i) + half(b, 2)
    if kind == "Q5_0":
        return d * ((nibble(b[6:], i) | bit(b[2:6], i) << 4) - 16)
    if kind == "Q5_1":
        return d * (nibble(b[8:], i) | bit(b[4:8], i) << 4) + half(b, 2)
    if kind == "Q8_0":
        return d * struct.unpack_from("b", b, 2 + i)[0]
    if kind == "Q2_K":
        scale = b[i // 16]
        return d * (scale & 15) * (b[16 + 32 * part + k] >> 2 * (place // 32) & 3) - half(b, 82) * (scale >> 4)
    if kind == "Q3_K":
        q = (b[32 + 32 * part + k] >> 2 * (place // 32) & 3) - (0 if b[k] >> j & 1 else 4)
        return d * six_of_three(b[96:108], i // 16) * q
    if kind in ("Q4_K", "Q5_K"):
        scale, offset = pair_of_six(b[4:16], j)
        start = 16 if kind == "Q4_K" else 48
        byte = b[start + 32 * (j // 2) + k]
        q = (byte >> 4 if j % 2 else byte & 15) | (0 if kind == "Q4_K" else (b[16 + k] >> j & 1) << 4)
        return d * scale * q - half(b, 2) * offset
    if kind == "Q6_K":
        group = place // 32
        low = b[64 * part + 32 * (group % 2) + k]
        q = (low >> 4 if group > 1 else low & 15) | (b[128 + 32 * part + k] >> 2 * group & 3) << 4
        return d * struct.unpack_from("b", b, 192 + i // 16)[0] * (q - 32)
    e2m1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)
    if kind == "MXFP4":
        return 2.0 ** (b[0] - 127) * e2m1[nibble(b[1:], i)]
    if kind == "NVFP4":
        group, k = divmod(i, 16)
        code = b[group] & 127
        mantissa = (8 + code % 8 if code >= 8 else code % 8) * 2.0 ** (max(code // 8, 1) - 10)
        byte = b[4 + 8 * group + k % 8]
        return 0.0 if code == 127 else mantissa * e2m1[byte >> 4 if k > 7 else byte & 15]
    if kind == "TQ1_0":
        start, width, k = (0, 32, i) if i < 160 else (32, 16, i - 160) if i < 240 else (48, 4, i - 240)
        digit, place = divmod(k, width)
        return half(b, 52) * ((b[start + place] * 3**digit % 256 * 3 // 256) - 1)
    if kind == "TQ2_0":
        return half(b, 64) * ((b[32 * part + k] >> 2 * (place // 32) & 3) - 1)
    if kind == "Q1_0":
        return d * (2 * bit(b[2:], i) - 1)
    if kind == "Q8_1":
        return d * struct.unpack_from("b", b, 4 + i)[0]
    if kind == "Q8_K":
        return struct.unpack_from("<f", b, 0)[0] * struct.unpack_from("b", b, 4 + i)[0]
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    if kind == "IQ4_NL":
        return d * levels[nibble(b[2:], i)]
    assert kind == "IQ4_XS"
    scale = b[4 + j // 2] >> 4 * (j % 2) & 15 | (struct.unpack_from("<H", b, 2)[0] >> 2 * j & 3) << 4
    return d * (scale - 32) * levels[nibble(b[8 + 16 * j :], k)]


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in WITH_CODEBOOKS])
def test_every_type_is_read_as_by_plain_loops(kind):
    size, nbytes, _ = TYPES[kind]
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (3, nbytes), generator=generator, dtype=torch.uint8)
    raw[:, 0] = 100 + raw[:, 0] % 60 if kind == "GGUF_MXFP4" else raw[:, 0]
    if kind == "GGUF_Q8_K":
        raw[:, :4] = torch.randn(3, 1, generator=generator).view(torch.uint8)
    for at in SCALES.get(kind, (0,)):
        raw[:, at : at + 2] = torch.randn(3, 1, generator=generator).half().view(torch.uint8)
    expected = [number(kind.removeprefix("GGUF_"), bytes(block.tolist()), i) for block in raw for i in range(size)]
    found = GgufBlocks(kind, (size, 3)).dequantize(raw.flatten())
    assert found.shape == (size, 3) and torch.allclose(found.flatten(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_every_type_of_the_header_is_read():
    named = {name: (size, nbytes) for name, size, nbytes in BLOCKS.values() if name.startswith("GGUF_")}
    assert named == {name: TYPES[name][:2] for name in TYPES}


@pytest.mark.parametrize("kind", WITH_CODEBOOKS)
def test_types_with_codebooks_are_read_as_by_the_gguf_package(kind):
    """Blocks at random and what its `dequantize` made of them."""
    known = load_file(FORMS / "ggml_codebooks.safetensors")
    blocks, numbers = known[f"{kind}|blocks"], known[f"{kind}|numbers"]
    assert torch.equal(GgufBlocks(kind, tuple(numbers.shape)).dequantize(blocks.flatten()), numbers)


def test_blocks_written_by_hand():
    two = struct.pack("<e", 2.0)
    block = torch.frombuffer(bytearray(two + bytes([0x98, 0x0F] + [0x88] * 14)), dtype=torch.uint8)
    found = GgufBlocks("GGUF_Q4_0", (32,)).dequantize(block).tolist()
    assert found[:3] == [0.0, 14.0, 0.0] and found[16:19] == [2.0, -16.0, 0.0]
    eight = torch.frombuffer(bytearray(two + struct.pack("32b", *range(-16, 16))), dtype=torch.uint8)
    assert GgufBlocks("GGUF_Q8_0", (32,)).dequantize(eight).tolist() == [2.0 * value for value in range(-16, 16)]
    with pytest.raises(AssertionError, match="not those of the shape"):
        GgufBlocks("GGUF_Q8_0", (64,)).dequantize(eight)


def test_rows_that_end_inside_a_block_are_refused(tmp_path):
    from backend.catalog.spec import TensorAt
    from backend.engine.loading.load import read_tensor

    path = tmp_path / "a.gguf"
    path.write_bytes(bytes(34))
    assert read_tensor(TensorAt(path, "w", "GGUF_Q8_0", (2, 16), 0, 34)).shape == (2, 16)
    with pytest.raises(Trouble, match="do not end with its rows"):
        read_tensor(TensorAt(path, "w", "GGUF_Q8_0", (1, 16), 0, 17))


def in_eight(weight: torch.Tensor) -> torch.Tensor:
    """Bytes of Q8_0."""
    blocks = weight.float().reshape(-1, 32)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=1).flatten()


def write_gguf(path: Path, tensors: dict[str, tuple[int, tuple[int, ...], bytes]]) -> None:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = (
        b"GGUF"
        + struct.pack("<IQQ", 3, len(tensors), 1)
        + text("general.architecture")
        + struct.pack("<I", 8)
        + text("qwen_image")
    )
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, len(body))
        body += data + bytes(-len(data) % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + body)


@pytest.fixture(scope="module")
def both(tiny_qwen, tmp_path_factory):
    """The tiny transformer in Q8_0, and the same numbers in safetensors."""
    folder, stored, same = tmp_path_factory.mktemp("gguf"), {}, {}
    for name, weight in load_file(tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors").items():
        quantized = weight.ndim == 2 and weight.numel() % 32 == 0
        raw = in_eight(weight) if quantized else weight.float().contiguous().view(-1).view(torch.uint8)
        stored[name] = (8 if quantized else 0, tuple(weight.shape), raw.numpy().tobytes())
        same[name] = GgufBlocks("GGUF_Q8_0", tuple(weight.shape)).dequantize(raw) if quantized else weight.float()
    write_gguf(folder / "dit.gguf", stored)
    save_file(same, folder / "same.safetensors")
    return folder / "dit.gguf", folder / "same.safetensors"


@pytest.mark.parametrize(
    "states",
    [
        {},
        {"offload_device": "disk", "onload_device": "disk", "preparing_device": "disk"},
        dict.fromkeys(("offload_dtype", "onload_dtype", "preparing_dtype"), "float8_e4m3fn"),
    ],
    ids=["plain", "streamed from the file", "FP8"],
)
def test_a_gguf_model_draws_what_its_numbers_draw(both, tiny_qwen, states):
    pictures = []
    for file in both:
        configs = [
            ModelConfig(path=file, **states),
            ModelConfig(path=tiny_qwen / "text_encoder"),
            ModelConfig(path=tiny_qwen / "vae"),
        ]
        pipe = QwenImagePipeline.from_pretrained(
            model_configs=configs,
            device="cpu",
            torch_dtype=torch.float32,
            tokenizer_config=ModelConfig(path=tiny_qwen / "tokenizer"),
        )
        pictures.append(numpy.asarray(pipe("a red apple", seed=1, width=64, height=64, num_inference_steps=1)))
    assert numpy.array_equal(*pictures)


@pytest.mark.parametrize("role", ["weight_scale", "scale_weight", "weight.absmax"])
def test_what_lies_beside_blocks_and_is_not_theirs_is_refused(role, both, tiny_qwen, tmp_path):
    stored = {}
    for name, weight in load_file(tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors").items():
        raw = (
            in_eight(weight)
            if name.endswith("attn.to_q.weight")
            else weight.float().contiguous().view(-1).view(torch.uint8)
        )
        stored[name] = (8 if name.endswith("attn.to_q.weight") else 0, tuple(weight.shape), raw.numpy().tobytes())
    stored[f"transformer_blocks.0.attn.to_q.{role}"] = (0, (1,), struct.pack("<f", 0.5))
    write_gguf(tmp_path / "dit.gguf", stored)
    with pytest.raises(Trouble, match=f"GGUF Q8_0 with '?{role}'? beside it"):
        identify_model(tmp_path / "dit.gguf", FAMILIES)


def test_a_type_that_is_not_known_is_refused(tiny_qwen, tmp_path):
    weight = load_file(tiny_qwen / "transformer" / "diffusion_pytorch_model.safetensors")["img_in.weight"]
    write_gguf(tmp_path / "dit.gguf", {"img_in.weight": (99, tuple(weight.shape), bytes(weight.numel()))})
    with pytest.raises(Trouble, match="GGUF type 99") as caught:
        identify_model(tmp_path / "dit.gguf", FAMILIES)
    assert caught.value.kind == "not_supported"
