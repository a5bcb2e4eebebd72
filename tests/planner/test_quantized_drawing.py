"""The plan of a model that is drawn with quantized parts: their bytes are those of real layers, and they stay while the others take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.catalog.quantization.methods import METHODS, Rule, is_quantized, read_storage, write_storage
from backend.commands.plan import main
from backend.planner.costs.device_speed import what_if
from backend.planner.costs.model_sizes import sizes_of
from backend.planner.plan import plan
from backend.planner.workload import work_of_defaults
from backend.schema.memory_plan import GIB


def planned(card: str, **storages: str):
    sizes = sizes_of("Qwen-Image")
    work = replace(work_of_defaults(sizes), quantized=tuple(storages.items()))
    return sizes, plan(sizes, what_if(card, ram_gib=64)[0], work)


def test_storage_is_written_as_it_is_read():
    for rules in ((Rule("int8"),), (Rule("int8", ("img_in", "proj_out")), Rule("bitsandbytes_nf4", (), ("to_q",)))):
        assert read_storage(write_storage(rules)) == rules and is_quantized(write_storage(rules))
    assert read_storage("bfloat16") == () and not is_quantized("float8_e4m3fn")


def test_a_quantized_transformer_stays_and_takes_what_its_layers_take():
    sizes, found = planned("24GiB", dit="bitsandbytes_nf4")
    dit = sizes.parts["dit"]
    layers = [*dit.linears.values(), *((*size, 1) for size in dit.outside.values())]
    saved = sum(n * (2 * r * c - METHODS["bitsandbytes_nf4"].layer_bytes(r, c, 2)) for r, c, n in layers)
    assert dit.bytes("bitsandbytes_nf4", "bfloat16") == dit.bytes("bfloat16", "bfloat16") - saved
    assert all(phase.weights_bytes["dit"] >= 9 * GIB for phase in found.phases) and found.verdict == "green"
    assert "dit" not in found.configs and set(found.configs) == {"text_encoder", "vae"}
    assert any(step.sentence == "The transformer is quantized (NF4) and stays on the card." for step in found.steps)


def test_mixed_and_single_layers_are_counted_as_they_are_meant():
    dit = sizes_of("Qwen-Image").parts["dit"]
    whole, plain = dit.bytes("int8", "bfloat16"), dit.bytes("bfloat16", "bfloat16")
    some, rest = dit.bytes("int8=to_q,to_k", "bfloat16"), dit.bytes("int8/to_q,to_k", "bfloat16")
    assert (plain - some) + (plain - rest) == plain - whole
    assert dit.bytes("int8/to_q,to_k+int8=to_q,to_k", "bfloat16") == whole
    one = dit.bytes("int8=transformer_blocks.0.attn.to_q", "bfloat16")
    assert 60 * (plain - one) == plain - dit.bytes("int8=attn.to_q", "bfloat16")


def test_other_parts_make_room_for_what_stays():
    _, found = planned("24GiB", dit="int8")
    assert found.verdict == "green" and found.streamed_blocks["text_encoder"]
    assert max(phase.peak_high_bytes for phase in found.phases) <= 24 * GIB


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--quantize", "dit:int9"], "no quantization method 'int9'"),
        (["--quantize", "vae:int8"], "no linear layers"),
        (["--quantize", "unit:int8"], "no part of this model"),
        (["--quantize", "dit"], "in --quantize is not"),
        (["--quantize", "dit:int8", "--train"], "--quant_options"),
    ],
)
def test_the_command_says_what_cannot_be(capsys, flags, words):
    with pytest.raises(SystemExit):
        main(["Qwen-Image", *flags])
    assert words in capsys.readouterr().err


def test_the_command_counts_it(capsys):
    main(["Qwen-Image", "--card", "24GiB", "--quantize", "dit:bitsandbytes_nf4/img_in"])
    said = capsys.readouterr().out
    assert "The transformer is quantized (NF4) and stays on the card." in said and "The other parts take turns" in said
