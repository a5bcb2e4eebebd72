"""What there is on a device, what ran out, and the limits of a container."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

from backend.engine.devices import device_memory
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch


def test_the_cpu_is_probed():
    card = device_memory.probe("cpu")
    assert card.device == "cpu" and card.name
    assert 0 < card.free_bytes <= card.total_bytes <= psutil.virtual_memory().total
    assert card.total_bytes == card.ram_total_bytes and 0 < card.reserve_bytes <= device_memory.GIB
    assert device_memory.probe("cpu", reserve_bytes=5).reserve_bytes == 5
    assert str(device_memory.best_dtype("cpu")).removeprefix("torch.") in card.dtypes


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "mps", "xpu:0", "disk", "meta"])
def test_devices_that_are_not_there_are_said(name):
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is one")
    with pytest.raises(Trouble) as caught:
        device_memory.check_device(name)
    assert caught.value.kind == "bad_device" and name.partition(":")[0] in caught.value.message


def test_auto_is_a_device():
    assert device_memory.check_device("auto") == torch.device(device_memory.default_device())


def write_group(root, files: dict):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_limits_of_a_container(tmp_path):
    two, one, free, none = (tmp_path / name for name in ("two", "one", "free", "none"))
    stat = "anon 5\ninactive_file 300\n"
    write_group(two, {"memory.max": "4000\n", "memory.current": "1300\n", "memory.stat": stat})
    write_group(
        one,
        {
            "memory/memory.limit_in_bytes": "9000",
            "memory/memory.usage_in_bytes": "2000",
            "memory/memory.stat": "total_inactive_file 500",
        },
    )
    write_group(free, {"memory.max": "max\n", "memory.current": "1", "memory.stat": stat})
    assert device_memory._cgroup(two) == (4000, 1000)  # cached file pages are free
    assert device_memory._cgroup(one) == (9000, 1500)
    assert device_memory._cgroup(free) == (None, 0)
    assert device_memory._cgroup(none) == (None, 0)


def test_a_limit_below_the_machines_ram_counts(monkeypatch):
    monkeypatch.setattr(device_memory, "_cgroup", lambda: (2 * device_memory.GIB, device_memory.GIB))
    assert device_memory.ram()[0] == 2 * device_memory.GIB and device_memory.ram()[1] <= device_memory.GIB


def test_the_peak_sees_what_came_and_went():
    peak = device_memory.Peak("cpu")
    before = peak.highest_bytes
    big = torch.ones(64 * 2**20, dtype=torch.uint8)
    if sys.platform != "linux":
        peak.look()
    del big
    device_memory.empty_cache("cpu")
    assert peak.look() - before > 50 * 2**20
    assert device_memory.allocated("cpu") - before < 30 * 2**20  # it was given back


def test_threads_follow_what_was_asked(monkeypatch):
    before = torch.get_num_threads()
    try:
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        device_memory.set_threads()
        assert torch.get_num_threads() == before
        device_memory.set_threads(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
