"""Runs in this process, as tests of the trainer have them; and tiny models of every family that draws, made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.conftest import events, loaded, pairs, pictures, run_training, tiny_edit  # noqa: F401


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny(maker in tests/tiny_models.py, **its options) -> the folder of such a model."""
    from tests import tiny_models

    made: dict[tuple, Path] = {}

    def folder(maker: str, **options: str) -> Path:
        key = (maker, *sorted(options.items()))
        if key not in made:
            made[key] = getattr(tiny_models, maker)(tmp_path_factory.mktemp("family") / maker, **options)
        return made[key]

    return folder
