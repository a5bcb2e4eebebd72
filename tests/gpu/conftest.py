"""What the tests on a card share. `LOFT_CARD=cpu python -m pytest tests/gpu` runs them on the CPU, to see that they run at all; nothing is timed then."""

from __future__ import annotations

import os

import pytest

from backend.engine.devices import allocator_limits

allocator_limits.expand_segments()  # as workers and trainers do: torch's allocator reads it once

torch = pytest.importorskip("torch")

from backend.engine.devices import device_memory
from tests.engine.conftest import small, write_part  # noqa: F401


@pytest.fixture
def device() -> torch.device:
    return device_memory.check_device(os.environ.get("LOFT_CARD", "auto"))
