"""Small parts written to safetensors files, for tests of where weights lie."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def older_objects() -> Iterator[None]:
    """What lives before a file's tests is not looked through at each of their collections: that took most of their time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def deep_qwen(tmp_path_factory) -> Path:
    """A folder with a tiny Qwen-Image of four blocks."""
    from tests.tiny_models import make_qwen_image

    return make_qwen_image(tmp_path_factory.mktemp("models") / "deep_qwen", num_layers=4)


@pytest.fixture
def write_part(tmp_path):
    """write_part(module, network, config, dtype=None, name="dit", scales={}) -> PartSpec, as `small.write_part` in a folder of the test's own."""
    from tests.engine.small import write_part

    return partial(write_part, tmp_path)


@pytest.fixture
def small(tmp_path):
    """small(dtype, num_blocks=4, scales=()) -> (part, build), as `small.small_part` in a folder of the test's own."""
    from tests.engine.small import small_part

    return partial(small_part, tmp_path)
