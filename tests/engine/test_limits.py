"""How much the allocator may take, and where a driver would take more without a word."""

from __future__ import annotations

import pytest

from backend.engine import limits


def test_segments_grow_on_linux_unless_something_was_chosen():
    for platform, before, after in (
        ("linux", {}, {"PYTORCH_CUDA_ALLOC_CONF": limits.GROWING}),
        ("win32", {}, {}),
        ("darwin", {}, {}),
        ("linux", {"PYTORCH_ALLOC_CONF": "x"}, {"PYTORCH_ALLOC_CONF": "x"}),
    ):
        limits.grow_segments(before, platform)
        assert before == after


def test_a_driver_that_spills_is_known_by_its_system(tmp_path):
    version = tmp_path / "version"
    assert limits.driver_spills("win32", version) and not limits.driver_spills("linux", version)
    version.write_text("Linux version 5.15.133.1-microsoft-standard-WSL2")
    assert limits.driver_spills("linux", version) and not limits.driver_spills("darwin", version)
    version.write_text("Linux version 6.8.0-generic")
    assert not limits.driver_spills("linux", version)


@pytest.mark.torch
def test_only_a_card_is_limited():
    assert limits.cap("cpu", most_bytes=2**30) is None
    assert limits.fraction(6, 8) == 0.75 and limits.fraction(9, 8) == 1.0 and limits.fraction(-1, 8) == 0.0


@pytest.mark.torch
def test_the_page_and_the_engine_know_the_same_dtypes_of_a_cpu():
    from backend.engine import memory
    from backend.host import card

    assert card.cpu_dtypes() == memory.probe("cpu").dtypes
