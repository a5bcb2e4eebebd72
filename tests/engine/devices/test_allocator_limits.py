"""How much the allocator may take, and where a driver would take more without a word."""

from __future__ import annotations

import pytest

from backend.engine.devices import allocator_limits


def test_segments_grow_on_linux_unless_something_was_chosen():
    for platform, before, after in (
        ("linux", {}, {"PYTORCH_CUDA_ALLOC_CONF": allocator_limits.EXPANDABLE}),
        ("win32", {}, {}),
        ("darwin", {}, {}),
        ("linux", {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_ALLOC_CONF": "x"}),
    ):
        allocator_limits.expand_segments(before, platform)
        assert before == after


def test_a_driver_that_spills_is_known_by_its_system(tmp_path):
    version = tmp_path / "version"
    assert allocator_limits.driver_spills("win32", version) and not allocator_limits.driver_spills("linux", version)
    version.write_text("Linux version 5.15.133.1-microsoft-standard-WSL2")
    assert allocator_limits.driver_spills("linux", version) and not allocator_limits.driver_spills("darwin", version)
    version.write_text("Linux version 6.8.0-generic")
    assert not allocator_limits.driver_spills("linux", version)


@pytest.mark.torch
def test_only_a_card_is_limited():
    assert allocator_limits.cap("cpu", most_bytes=2**30) is None
    assert (
        allocator_limits.fraction(6, 8) == 0.75
        and allocator_limits.fraction(9, 8) == 1.0
        and allocator_limits.fraction(-1, 8) == 0.0
    )


@pytest.mark.torch
def test_the_page_and_the_engine_know_the_same_dtypes_of_a_cpu():
    from backend.engine.devices import device_memory
    from backend.system import gpu_probe

    assert gpu_probe.cpu_dtypes() == device_memory.probe("cpu").dtypes
