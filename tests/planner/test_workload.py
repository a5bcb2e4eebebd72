"""What a run asks of a model, from its settings."""

from __future__ import annotations

import pytest

from backend.planner.costs.model_sizes import sizes_of
from backend.planner.workload import work_of_training
from backend.schema.settings import from_values
from backend.schema.training.config import TrainingConfig


@pytest.mark.parametrize("name", ["Qwen-Image-Edit", "Qwen-Image-Edit-2509"])
def test_pictures_to_edit_count_with_the_area_that_a_run_gives_them(name: str):
    def work(**values):
        return work_of_training(from_values(TrainingConfig, values), sizes_of(name))[0]

    whole, small, large = work(), work(edit_pixels=64 * 64), work(edit_pixels=2048 * 2048)
    assert (whole.reference_tokens, small.reference_tokens, large.reference_tokens) == (4096, 16, 16384)
    assert small.seen_tokens < whole.seen_tokens <= large.seen_tokens
    assert (large.seen_tokens == whole.seen_tokens) is (name != "Qwen-Image-Edit")
    assert small.reference_pixels == 64 * 64
