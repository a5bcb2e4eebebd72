"""Headers: honest ones as they are, hostile ones refused in one sentence, whatever bytes they hold."""

from __future__ import annotations

import json
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backend.catalog.formats.header import LARGEST_HEADER_BYTES, read_bytes
from backend.catalog.formats.read import read_header
from backend.catalog.formats.safetensors import read_layout
from backend.schema.messages import Trouble
from backend.schema.paths import ASSETS
from tests.catalog.files import header_of, write_file, write_raw

TWO = {"a.weight": ("F32", (2, 3)), "b": ("F8_E4M3", (4,))}


def test_an_honest_header(tmp_path):
    path = write_file(
        tmp_path / "a.safetensors", {**TWO, "c": ("BF16", ()), "empty": ("F32", (0, 7))}, {"format": "pt", "n": "1"}
    )
    header = read_header(path)
    start = path.stat().st_size - 24 - 4 - 2
    assert list(header.tensors) == ["a.weight", "b", "c", "empty"]
    first = header.tensors["a.weight"]
    assert (first.dtype, first.shape, first.start, first.end, first.file) == ("F32", (2, 3), start, start + 24, path)
    assert header.tensors["c"].shape == () and header.metadata == {"format": "pt", "n": "1"}
    assert read_bytes(first) == bytes(24)


def test_the_starter_is_read_whole():
    path = ASSETS / "starter" / "transformer" / "diffusion_pytorch_model.safetensors"
    header = read_header(path)
    assert max(at.end for at in header.tensors.values()) == path.stat().st_size


def _entries(**changes) -> bytes:
    """A header of two tensors, with one entry changed."""
    entries = header_of(TWO)
    entries["a.weight"] |= changes
    return json.dumps(entries).encode()


HOSTILE = {
    "empty file": (b"", 0, None, "no safetensors"),
    "header longer than the file": (b"{}", 0, 10**6, "cut off"),
    "length that overflows": (b"{}", 0, 2**64 - 1, "cut off"),
    "not JSON": (b"{not json}" + b" " * 20, 0, None, "not valid JSON"),
    "broken text": (b'{"\xff\xfe": 1}', 0, None, "not valid JSON"),
    "a list": (b"[1, 2, 3]", 0, None, "not a JSON object"),
    "nested deeply": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 0, None, "too deeply"),
    "a list nested deeply": (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 0, None, "too deeply"),
    "a number of ten thousand digits": (b'{"a":' + b"9" * 10_000 + b"}", 0, None, "not valid JSON"),
    "an entry that is a number": (b'{"a": 5}', 0, None, "broken entry"),
    "an entry without offsets": (b'{"a": {"dtype": "F32", "shape": [1]}}', 4, None, "broken entry"),
    "metadata that is a list": (b'{"__metadata__": []}', 0, None, "metadata"),
    "unknown dtype": (_entries(dtype="F31"), 28, None, "broken entry"),
    "negative offsets": (_entries(data_offsets=[-24, 0]), 28, None, "impossible numbers"),
    "offsets the wrong way round": (_entries(data_offsets=[24, 0]), 28, None, "impossible numbers"),
    "offsets that are fractions": (_entries(data_offsets=[0, 24.0]), 28, None, "impossible numbers"),
    "offsets that are texts": (_entries(data_offsets=["0", "24"]), 28, None, "impossible numbers"),
    "three offsets": (_entries(data_offsets=[0, 24, 24]), 28, None, "broken entry"),
    "offsets beyond 64 bits": (_entries(data_offsets=[0, 2**70]), 28, None, "impossible numbers"),
    "a shape that overflows": (_entries(shape=[2**62, 2**62]), 28, None, "takes another size"),
    "a negative shape": (_entries(shape=[-2, -3]), 28, None, "impossible numbers"),
    "a truth as a size": (_entries(shape=[True, 6]), 28, None, "impossible numbers"),
    "a thousand dimensions": (_entries(shape=[1] * 1000), 28, None, "impossible numbers"),
    "a shape of another size": (_entries(shape=[2, 4]), 28, None, "takes another size"),
    "overlapping spans": (
        b'{"a": {"dtype":"U8","shape":[4],"data_offsets":[0,4]}, "b": {"dtype":"U8","shape":[4],"data_offsets":[2,6]}}',
        6,
        None,
        "overlapping",
    ),
    "a hole": (json.dumps({"a": {"dtype": "U8", "shape": [1], "data_offsets": [3, 4]}}).encode(), 4, None, "hole"),
    "data cut off": (_entries(), 20, None, "promises 28 bytes"),
    "data left over": (_entries(), 40, None, "belong to no tensor"),
    "a name twice": (
        b'{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}, "a": {"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        2,
        None,
        "hole",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused_in_words(name, tmp_path):
    text, data, length, words = HOSTILE[name]
    path = tmp_path / "h.safetensors"
    path.write_bytes(b"") if name == "empty file" else write_raw(path, text, data, length=length)
    with pytest.raises(Trouble) as caught:
        read_header(path)
    assert caught.value.kind == "damaged" and words in caught.value.message and "h.safetensors" in caught.value.message
    assert len(caught.value.message) < 400


def test_a_header_of_a_hundred_megabytes_is_refused_unread(tmp_path):
    path = write_raw(tmp_path / "h.safetensors", b"{" + b" " * 100, 120_000_000, length=100_000_000)
    tracemalloc.start()
    with pytest.raises(Trouble, match="is not read"):
        read_layout(path)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert LARGEST_HEADER_BYTES < 100_000_000


def test_other_kinds_of_file_are_named(tmp_path):
    with pytest.raises(Trouble, match="There is no file"):
        read_header(tmp_path / "absent.safetensors")
    (tmp_path / "old.ckpt").write_bytes(b"\x80\x02}q\x00" + b"x" * 40)
    with pytest.raises(Trouble, match="is a pickle") as caught:
        read_header(tmp_path / "old.ckpt")
    assert "to_safetensors" in caught.value.hint
    (tmp_path / "broken.ckpt").write_bytes(b"PK\x03\x04" + b"x" * 40)
    with pytest.raises(Trouble, match="cannot be read as a checkpoint"):
        read_header(tmp_path / "broken.ckpt")
    with pytest.raises(Trouble):
        read_header(tmp_path)


def test_a_header_length_that_looks_like_a_pickle_is_none(tmp_path):
    """0x80 and a small second byte begin a pickle, and also a header of some hundred bytes."""
    tensors = {f"tensor_{number}": ("U8", (1,)) for number in range(10)}
    text = json.dumps(header_of(tensors)).encode()
    text += b" " * (0x280 + 0x100 * 2 - len(text)) if len(text) < 0x480 else b""
    assert len(text) & 0xFF == 0x80
    assert len(read_header(write_raw(tmp_path / "a.safetensors", text, 10)).tensors) == 10


def gguf(tensors: list[tuple[str, tuple[int, ...], int, int]], values: dict[str, str], data: int) -> bytes:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    for key, value in values.items():
        out += text(key) + struct.pack("<I", 8) + text(value)
    for name, shape, kind, offset in tensors:
        out += (
            text(name) + struct.pack("<I", len(shape)) + b"".join(struct.pack("<Q", size) for size in reversed(shape))
        )
        out += struct.pack("<IQ", kind, offset)
    return out + bytes(-len(out) % 32) + bytes(data)


def test_gguf(tmp_path):
    tensors = [("img_in.weight", (4, 64), 0, 0), ("txt_in.weight", (2, 256), 12, 1024)]
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(tensors, {"general.architecture": "qwen_image"}, 1024 + 288))
    header = read_header(path)
    assert header.container == "gguf" and header.metadata["general.architecture"] == "qwen_image"
    assert header.tensors["img_in.weight"].shape == (4, 64) and header.tensors["txt_in.weight"].dtype == "GGUF_Q4_K"
    assert header.tensors["txt_in.weight"].end == path.stat().st_size
    for broken in (path.read_bytes()[:-1], path.read_bytes()[:40], b"GGUF" + b"\xff" * 60):
        (tmp_path / "b.gguf").write_bytes(broken)
        with pytest.raises(Trouble) as caught:
            read_header(tmp_path / "b.gguf")
        assert caught.value.kind == "damaged"


@pytest.mark.parametrize(
    "kind, form, shape", [(6, "f", (4.0, 64.0)), (5, "i", (-4, -64)), (12, "d", (float("nan"),)), (11, "q", (256,))]
)
def test_a_gguf_shape_in_the_metadata_counts_where_it_can_be_one(tmp_path, kind, form, shape):
    name = b"comfy.gguf.orig_shape.w"
    value = (
        struct.pack("<Q", len(name))
        + name
        + struct.pack("<IIQ", 9, kind, len(shape))
        + struct.pack(f"<{len(shape)}{form}", *shape)
    )
    entry = struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 64, 4, 0, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + value + entry + bytes(2048))
    assert read_header(tmp_path / "m.gguf").tensors["w"].shape == ((256,) if shape == (256,) else (4, 64))
    empty = struct.pack("<Q", 1) + b"w" + struct.pack("<IQQIQ", 2, 0, 2**63, 0, 0)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + empty + bytes(64))
    with pytest.raises(Trouble, match="the shape"):
        read_header(tmp_path / "m.gguf")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["F32", "BF16", "U8"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4)
    ),
    max_leaves=12,
)
SIZES = st.integers(-2, 40) | st.sampled_from([2**31, 2**32 + 1, 2**63, 2**64, 2**80])
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "I64", "C64", "?"]),
        "shape": st.lists(SIZES, max_size=4),
        "data_offsets": st.lists(SIZES, min_size=1, max_size=3),
    }
)
HEADERS = st.dictionaries(st.text(max_size=6) | st.just("__metadata__"), ENTRY | JSON, max_size=5)
FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check_any_bytes(path, data: bytes) -> None:
    """Either a header whose every span lies in the file, or one Trouble; nothing else, whatever the bytes."""
    path.write_bytes(data)
    try:
        header = read_header(path)
    except Trouble as trouble:
        assert trouble.kind in ("damaged", "not_recognised", "not_supported") and trouble.message
        return
    for at in header.tensors.values():
        assert 0 <= at.start <= at.end <= len(data)
        assert all(isinstance(size, int) and size >= 0 for size in at.shape)
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in header.metadata.items())


@FUZZ
@given(entries=HEADERS, data=st.integers(0, 64), wrong=st.integers(-3, 3))
def test_any_header(tmp_path, entries, data, wrong):
    text = json.dumps(entries).encode()
    check_any_bytes(tmp_path / "f.safetensors", struct.pack("<Q", max(0, len(text) + wrong)) + text + bytes(data))


@FUZZ
@given(data=st.binary(max_size=200))
def test_any_bytes(tmp_path, data):
    check_any_bytes(tmp_path / "f.safetensors", data)
    check_any_bytes(tmp_path / "f.gguf", b"GGUF" + struct.pack("<IQQ", 3, len(data) % 3, len(data) % 2) + data)


@FUZZ
@given(place=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_one_byte_changed_or_the_end_cut_off(tmp_path, place, value, cut):
    whole = bytearray(write_file(tmp_path / "g.safetensors", TWO, {"format": "pt"}).read_bytes())
    whole[place % len(whole)] = value
    check_any_bytes(tmp_path / "g.safetensors", bytes(whole[: max(0, len(whole) - cut)] if cut % 2 else whole))
