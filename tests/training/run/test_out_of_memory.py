"""Memory that runs out in training is told as that, never as a damaged file or a method that does not work; and what is let go is let go whole."""

from __future__ import annotations

import errno
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from PIL import Image

from backend.engine.loading import disk_reader, tensor_source
from backend.engine.offload import placement
from backend.engine.pipeline import image_tensors
from backend.engine.quantization.config import QuantizeConfig
from backend.engine.quantization.int8 import INT8
from backend.engine.quantization.methods import BACKENDS
from backend.engine.quantization.quantized_part import quantize_loaded
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble
from backend.training import setup
from backend.training.checkpoint import state
from backend.training.encoding import encoding_cache
from tests.engine.conftest import small, write_part  # noqa: F401
from tests.engine.small import inputs

pytestmark = pytest.mark.torch
RAN_OUT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 54.00 MiB."),
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
]


def raising(error):
    def fails(*_, **__):
        raise error

    return fails


@pytest.mark.parametrize("error", [RAN_OUT[0], RuntimeError("XPU out of memory. Tried to allocate 2.25 GiB.")])
def test_a_layer_that_did_not_fit_says_nothing_of_the_method(small, monkeypatch, error):  # noqa: F811
    part, _ = small()
    from tests.engine.small import Small

    def load():
        maps = {at.file: None for at in part.tensors.values()}
        quantize_loaded(Small(2), QuantizeConfig("int8"), part=part, maps=maps, device=torch.device("cpu"))

    monkeypatch.setitem(BACKENDS, "int8", replace(INT8, quantize=raising(error)))
    with pytest.raises(type(error)):
        load()
    monkeypatch.setitem(BACKENDS, "int8", replace(INT8, quantize=raising(RuntimeError("no kernel image"))))
    with pytest.raises(Trouble, match="does not work here"):
        load()


@pytest.mark.parametrize("error", RAN_OUT, ids=lambda error: type(error).__name__)
def test_a_file_for_which_there_is_no_memory_is_not_called_damaged(tmp_path, monkeypatch, error):
    picture = tmp_path / "red.png"
    Image.new("RGB", (8, 8), "red").save(picture)
    (tmp_path / "step-000001").mkdir()
    with pytest.raises(type(error)):
        state._read(tmp_path / "step-000001" / "optimizers.pt", raising(error))
    for module in (image_tensors, encoding_cache):
        monkeypatch.setattr(module, "in_rgb", raising(error))
    with pytest.raises(type(error)):
        image_tensors.open_picture(str(picture))
    with pytest.raises(type(error)):
        encoding_cache.open_pixels(type("Item", (), {"path": picture})(), (8, 8))
    monkeypatch.setattr(torch, "load", raising(error))
    with pytest.raises(type(error)):
        tensor_source.read_pickle(picture)


def test_reading_that_found_no_memory_is_not_a_damaged_disk(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(bytes(64))
    monkeypatch.setattr(disk_reader.Reader, "_scatter", raising(RAN_OUT[2]))
    with pytest.raises(OSError, match="Cannot allocate"):
        disk_reader.Reader().read([disk_reader.Span(file, 0, 0, 64)], torch.empty(64, dtype=torch.uint8))
    monkeypatch.setattr(disk_reader.Reader, "_scatter", raising(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(Trouble, match="Is the disk still there"):
        disk_reader.Reader().read([disk_reader.Span(file, 0, 0, 64)], torch.empty(64, dtype=torch.uint8))


def test_parts_that_are_no_longer_needed_are_closed(small):  # noqa: F811
    """Two blocks of their next pass are always on their way to the device."""
    part, build = small()
    modules = {name: build() for name in ("dit", "text_encoder", "vae")}
    disk = VramConfig(offload_device="disk", onload_device="disk", preparing_device="disk")
    placed = {
        name: placement.place(module, part, disk, device="cpu") for name, module in modules.items() if name != "vae"
    }
    for one in placed.values():
        one.onload()
    with torch.no_grad():
        modules["text_encoder"](**inputs())
    names = ("base", "resolved", "kept", "quantized", "split_bytes", "dtype", "device", "through_ram", "processors")
    loader = setup.PartLoader(**dict.fromkeys(names), parts=dict(modules))
    loader.drop_all_but(["dit"])
    assert set(loader.parts) == {"dit"}
    assert {name: one.level for name, one in placed.items()} == {"dit": "onload", "text_encoder": "closed"}
    assert placed["text_encoder"].transfer.prefetcher._thread is None
    placed["dit"].close()
