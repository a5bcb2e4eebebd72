"""What networks compute in on a device without bfloat16: never in what their activations overflow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.planner.costs.model_sizes import compute_dtypes
from backend.planner.plan import computing_of, plan
from backend.schema.memory_plan import Card
from backend.schema.request import GenerationRequest

GIB = 2**30
T4 = Card(
    "cuda:0", "Tesla T4", 15 * GIB, 15 * GIB, 0, GIB // 2, 64 * GIB, 60 * GIB, ("float8_e4m3fn", "float16", "float32")
)
A10 = replace(T4, name="NVIDIA A10", dtypes=(*T4.dtypes, "bfloat16"))


@pytest.mark.parametrize("family", ["qwen_image", "z_image", "flux2"])
def test_families_that_overflow_float16_never_compute_in_it(family):
    assert computing_of(T4, family) == "float32" and computing_of(A10, family) == "bfloat16"
    assert "float16" not in compute_dtypes(family)


def test_others_compute_in_float16_where_it_is_the_best_there_is():
    assert computing_of(T4, "sd15") == "float16"


def test_weights_stay_as_narrow_as_their_files_and_are_cast_where_they_compute():
    request = GenerationRequest(width=512, height=512)
    found = plan("Qwen-Image", T4, request)
    assert found.verdict != "red"
    config = found.configs["dit"]
    assert config.computation_dtype == "float32"
    assert config.preparing_dtype in ("bfloat16", "float8_e4m3fn")
    wide = plan("Qwen-Image", replace(T4, total_bytes=160 * GIB, free_bytes=160 * GIB), request)
    dit = next(phase for phase in wide.phases if phase.name == "denoise").weights_bytes["dit"]
    assert dit < 45 * GIB  # 38 GiB of bfloat16 and a layer's cast; float32 would be 76
