"""Cards by their exact names: as drivers write them, and as people do. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backend.planner.costs import gpu_table
from backend.planner.costs.device_speed import ASSUMED, source_of, speed_of, what_if
from backend.schema.memory_plan import GIB

# (a driver's or a person's spelling, GiB, dense 16-bit TFLOP/s as the maker says)
NAMES = [
    ("NVIDIA RTX A1000", 8, 26.9), ("NVIDIA A100-SXM4-80GB", 80, 312), ("NVIDIA A100 80GB PCIe", 80, 312), ("NVIDIA A100-PCIE-40GB", 40, 312),
    ("NVIDIA L4", 24, 121), ("NVIDIA L40", 48, 181), ("NVIDIA L40S", 48, 362), ("NVIDIA GeForce GTX 1060 6GB", 6, 4.4), ("NVIDIA GeForce GTX 1650", 4, 6),
    ("Tesla P40", 24, 11.8), ("Tesla P100-PCIE-16GB", 16, 18.7), ("Tesla T4", 16, 65), ("Tesla V100-SXM2-32GB", 32, 125), ("NVIDIA B200", 180, 2250),
    ("AMD Instinct MI300X", 192, 1307), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, 504), ("NVIDIA RTX 6000 Ada Generation", 48, 364),
    ("Quadro RTX 6000", 24, 130.5), ("NVIDIA RTX A6000", 48, 154.8), ("NVIDIA H100 80GB HBM3", 80, 989), ("NVIDIA H100 PCIe", 80, 756), ("NVIDIA H200", 141, 989),
    ("NVIDIA GeForce RTX 4090", 24, 165), ("NVIDIA GeForce RTX 4090 Laptop GPU", 16, 79), ("NVIDIA GeForce RTX 3060", 12, 25.5), ("NVIDIA GeForce RTX 3060 Ti", 8, 32),
    ("NVIDIA GeForce RTX 3060 Laptop GPU", 6, 21.9), ("NVIDIA GeForce RTX 4070 Ti SUPER", 16, 88), ("NVIDIA GeForce RTX 5070 Ti", 16, 88), ("NVIDIA A10", 24, 125),
    ("NVIDIA A10G", 24, 70), ("NVIDIA A2", 16, 18), ("NVIDIA RTX A2000 12GB", 12, 31.9), ("AMD Radeon RX 7900 XTX", 24, 123), ("AMD Radeon RX 7900 XT", 20, 103),
    ("AMD Radeon RX 9070 XT", 16, 195), ("AMD Radeon RX 6800 XT", 16, 41.5), ("Intel(R) Arc(TM) A770 Graphics", 16, 131), ("Intel(R) Arc(TM) B580 Graphics", 12, 116.5),
    ("Apple M1", 16, 2.6), ("Apple M2 Max (12 cores)", 96, 13.5), ("rtx4070ti", 12, 80), ("rtx5070ti", 16, 88), ("rtx5060ti", 16, 47), ("rtx2060", 6, 26),
    ("t4", 16, 65), ("a6000", 48, 155), ("gtx1080", 8, 8.9), ("b200", 180, 2250), ("rtx pro 6000", 96, 504), ("rx 7900 xtx", 24, 123), ("m1", 16, 2.6),
    ("a770", 16, 131), ("mi300x", 192, 1307), ("3090 ti", 24, 80), ("a100 40gb", 40, 312), ("RTX 3060 8GB", 8, 25.5), ("l40", 48, 181),
]  # fmt: skip


@pytest.mark.parametrize(("name", "gib", "teraflops"), NAMES)
def test_a_card_is_known_by_its_exact_name(name, gib, teraflops):
    found = gpu_table.card_named(name)
    assert found.teraflops == pytest.approx(teraflops, rel=0.02)
    card, speed = what_if(name)
    assert card.total_bytes == gib * GIB and card.device == found.device and found.name in speed.source
    assert (
        speed.flops == pytest.approx(found.share * found.teraflops * 1e12)
        and speed.memory_bytes == found.memory_gb * 1e9
    )
    assert speed_of(replace(card, name=name, measured=True)) == speed
    assert gpu_table.card_named(found.name) is found


def test_what_a_card_is_not_called_is_no_other_card():
    for name in (
        "NVIDIA RTX A1001",
        "A1000000",
        "RTX 3060 Super",
        "L400",
        "rtx6000",
        "4000",
        "Some Accelerator 100",
        "",
    ):
        assert gpu_table.card_named(name) is None, name
    unknown = replace(what_if("12GiB")[0], name="Nobody's XPU 7", measured=True)
    speed = speed_of(unknown)
    assert speed.flops == ASSUMED.flops and "no card called Nobody's XPU 7 is known" in source_of(speed, "cuda:0")
    for wrong, words in (("a1001", "A100"), ("rtx3060 7gb", "12 or 8 GiB")):
        with pytest.raises(ValueError, match=words):
            what_if(wrong)
    processor, speed = what_if("cpu", ram_gib=16)
    assert processor.device == "cpu" and "card" not in source_of(speed, "cpu")


def test_the_table_is_whole():
    known = gpu_table.known()
    rows = [row for *_, text in gpu_table._GROUPS for row in text.replace("\n", ";").split(";") if row.strip()]
    assert len(known) == len(rows) > 200, "no name stands there twice"
    for card in known.values():
        assert 0.4 < card.share <= 1 and 1 <= card.teraflops <= 2600 and 40 <= card.memory_gb <= 8000, card
        assert all(0 < gib <= 512 for gib in card.gib)
    old = {"rtx2080ti", "gtx1080", "teslat4"}
    assert all(("bfloat16" in known[key].dtypes) != (key in old) for key in (*old, "rtx3090", "a100"))
