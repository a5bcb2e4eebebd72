"""Settings of the four states: completed, or refused with the sentence that says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from backend.catalog.spec import PartSpec, TensorAt
from backend.engine.offload import vram_states
from backend.engine.offload.vram_states import State, States
from backend.schema.memory_plan import VramConfig
from backend.schema.messages import Trouble

pytestmark = pytest.mark.torch

CPU, CARD = torch.device("cpu"), torch.device("cuda:0")


def read(**settings) -> States:
    return vram_states.read_states(VramConfig(**settings), device="cpu", dtype=torch.bfloat16)


def test_what_is_left_out_is_as_in_the_next_state():
    plain = State(torch.bfloat16, CPU)
    assert read() == States(plain, plain, plain, plain) and read().resident
    found = read(onload_dtype="float8_e5m2", computation_dtype="float16")
    assert [str(state) for state in (found.offload, found.onload, found.preparing, found.computation)] == [
        "float8_e5m2 on cpu",
        "float8_e5m2 on cpu",
        "float16 on cpu",
        "float16 on cpu",
    ]
    assert str(read(offload_device="disk", offload_dtype="bfloat16").offload) == "disk"
    assert read(offload_dtype="disk", offload_device="disk", onload_dtype=torch.float32).onload.dtype is torch.float32
    assert read(onload_device="disk").offload.on_disk
    assert read(offload_device="disk", offload_dtype="int3").offload.on_disk  # on disk the dtype is the file's


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"computation_device": "disk"}, "nothing computes on a disk"),
        ({"computation_dtype": "float8_e4m3fn"}, "layers do not compute in 8-bit floats"),
        ({"onload_device": "disk", "offload_device": "cpu"}, "offload .* is nearer to computing than onload"),
        ({"preparing_device": "disk", "onload_device": "cpu"}, "onload .* is nearer to computing than preparing"),
        ({"offload_dtype": "float99"}, "offload_dtype is 'float99'"),
        ({"onload_dtype": "disk"}, "onload_dtype is 'disk' while onload_device is 'cpu'"),
        ({"onload_device": "toaster"}, "onload_device is 'toaster'"),
        ({"onload_device": "cuda:x"}, "onload_device is 'cuda:x'"),
    ],
)
def test_nonsense_is_refused(settings, says):
    with pytest.raises(Trouble, match=says) as caught:
        read(**settings)
    assert caught.value.kind == "vram_config" and caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a card")
def test_a_card_that_is_not_there_is_refused():
    with pytest.raises(Trouble, match="no cuda device"):
        read(computation_device="cuda")


def test_a_card_only_holds_weights_for_its_own_kind():
    plain = State(torch.bfloat16, CPU)
    card = State(torch.bfloat16, CARD)
    with pytest.raises(Trouble, match="is nearer to computing than computation"):
        vram_states.check_states(States(plain, plain, card, plain))
    vram_states.check_states(States(plain, plain, card, replace(card, device=torch.device("cuda:1"))))
    with pytest.raises(Trouble, match="mps computes"):
        vram_states.check_states(States(plain, plain, card, State(torch.bfloat16, torch.device("mps"))))


def test_eight_bits_do_not_reach_an_apple_gpu():
    plain, codes = (State(dtype, CPU) for dtype in (torch.bfloat16, torch.float8_e5m2))
    gpu = State(torch.bfloat16, torch.device("mps"))
    vram_states.check_states(States(plain, plain, gpu, gpu))
    with pytest.raises(Trouble, match=r"onload_dtype is float8_e5m2, which Apple's GPUs"):
        vram_states.check_states(States(plain, codes, gpu, gpu))


def test_a_limit_below_zero_is_refused():
    vram_states.check_limit(None)
    vram_states.check_limit(0)
    with pytest.raises(Trouble, match="vram_limit is -1 bytes"):
        vram_states.check_limit(-1)


def test_leaving_a_pickle_on_disk_offers_the_conversion():
    path = Path("models/old model.ckpt")
    part = PartSpec("dit", "x:Y", {}, {"w": TensorAt(path, "w", "BF16", (1,), 0, 2)})
    vram_states.check_files(part, read())
    with pytest.raises(Trouble, match=r"old model\.ckpt is a pickle") as caught:
        vram_states.check_files(part, read(offload_device="disk"))
    assert caught.value.hint.endswith(f'to_safetensors "{path}"')
