"""What computes here, read without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from backend.schema.memory_plan import Card
from backend.schema.paths import PROJECT
from backend.system import gpu_probe

GIB = 2**30
MEMORY = dict(ram_total_bytes=32 * GIB, ram_free_bytes=20 * GIB, reserve_bytes=0)


def group(folder: Path, *, limit: str, used: int, cache: int, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    word = "inactive_file" if version == 2 else "total_inactive_file"
    (folder / "memory.stat").write_text(f"anon 5\n{word} {cache}\n")


def limits(tmp_path: Path, membership: str) -> list[tuple[int, int]]:
    (tmp_path / "cgroup").write_text(membership)
    return list(gpu_probe._cgroup_limits(tmp_path / "cgroup", tmp_path / "fs"))


def test_version_two_counts_every_level_and_not_the_files_cache(tmp_path):
    group(tmp_path / "fs/docker/abc", limit=str(8 * GIB), used=3 * GIB, cache=GIB, version=2)
    group(tmp_path / "fs/docker", limit=str(4 * GIB), used=3 * GIB, cache=0, version=2)
    (tmp_path / "fs/memory.max").write_text("max")
    assert limits(tmp_path, "0::/docker/abc\n") == [(8 * GIB, 2 * GIB), (4 * GIB, 3 * GIB)]


def test_version_one(tmp_path):
    group(tmp_path / "fs/memory/pod", limit=str(2 * GIB), used=GIB, cache=0, version=1)
    group(tmp_path / "fs/memory", limit="9223372036854771712", used=9 * GIB, cache=0, version=1)
    assert limits(tmp_path, "9:name=systemd:/\n4:memory:/pod\n1:cpu:/\n") == [(2 * GIB, GIB)]


def test_in_a_container_the_own_group_lies_at_the_root(tmp_path):
    group(tmp_path / "fs", limit=str(6 * GIB), used=GIB, cache=0, version=2)
    assert limits(tmp_path, "0::/not/visible/inside\n") == [(6 * GIB, GIB)]


@pytest.mark.parametrize("membership", ["0::/\n", ""])
def test_without_a_limit(tmp_path, membership):
    group(tmp_path / "fs", limit="max", used=GIB, cache=0, version=2)
    assert limits(tmp_path, membership) == []
    assert list(gpu_probe._cgroup_limits(tmp_path / "absent", tmp_path / "fs")) == []


def test_ram_of_this_machine():
    total, free = gpu_probe.ram()
    assert 0 < free <= total <= psutil.virtual_memory().total


UUIDS = ["GPU-aaaa-1", "GPU-bbbb-2", "GPU-bbcc-3"]


@pytest.mark.parametrize(
    ("setting", "order"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("1", [1]),
        ("0,7,1", [0]),
        ("0,0", [0]),
        ("GPU-bbcc", [2]),
        ("GPU-bb", []),
        (" 1 , GPU-aaaa-1 ", [1, 0]),
        ("NoDevFiles", []),
    ],
)
def test_visible_cards_are_those_that_cuda_would_use(setting, order):
    assert gpu_probe.visible(UUIDS, setting) == order


def test_amd_cards(tmp_path):
    for number, (total, used) in enumerate([(16 * GIB, GIB), (8 * GIB, 0)]):
        device = tmp_path / f"drm/card{number}/device"
        device.mkdir(parents=True)
        (device / "mem_info_vram_total").write_text(f"{total}\n")
        (device / "mem_info_vram_used").write_text(f"{used}\n")
    (tmp_path / "drm/card1/device/product_name").write_text("Radeon\n")
    (tmp_path / "kfd").write_text("")
    cards = gpu_probe._amd(MEMORY, tmp_path / "drm", tmp_path / "kfd")
    assert [(c.device, c.name, c.total_bytes, c.free_bytes) for c in cards] == [
        ("cuda:0", "AMD GPU", 16 * GIB, 15 * GIB),
        ("cuda:1", "Radeon", 8 * GIB, 8 * GIB),
    ]
    assert gpu_probe._amd(MEMORY, tmp_path / "drm", tmp_path / "no-rocm") == ()


def test_the_preference_chooses():
    cards = tuple(Card(f"cuda:{n}", f"card {n}", 8 * GIB, 7 * GIB, **MEMORY) for n in range(2))
    assert gpu_probe.choose(cards, "auto") is cards[0]
    assert gpu_probe.choose(cards, "cuda:1") is cards[1]
    assert gpu_probe.choose(cards, "cuda") is cards[0]
    cpu = gpu_probe.choose(cards, "cpu")
    assert (cpu.device, cpu.total_bytes, cpu.free_bytes) == ("cpu", 32 * GIB, 20 * GIB)


def test_this_machine_has_something_that_computes():
    first = gpu_probe.probe(reserve_bytes=5)[0]
    assert first.name and 0 < first.free_bytes <= first.total_bytes and first.reserve_bytes == 5
    if first.device == "cpu":
        assert "core" in first.name and first.total_bytes == first.ram_total_bytes


def test_it_needs_no_torch_and_opens_no_context():
    script = "import sys\nfrom backend.system import gpu_probe as card\ncard.probe()\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.gpu
def test_a_card_is_seen_without_a_context_on_it():
    """NVML alone: this process must not be among those that hold memory on the card."""
    pynvml = pytest.importorskip("pynvml")
    found = gpu_probe.probe()[0]
    assert found.device == "cuda:0" and found.total_bytes > GIB and found.used_by_others_bytes < found.total_bytes
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    assert psutil.Process().pid not in [entry.pid for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]


@pytest.mark.parametrize(
    ("device", "environment", "expected"),
    [
        ("auto", {}, {}),
        ("cuda", {}, {}),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "3,GPU-5,0"}, {"CUDA_VISIBLE_DEVICES": "GPU-5,3,0"}),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "2,1"}, {"CUDA_VISIBLE_DEVICES": "2,1"}),
        ("cuda:1", {"HIP_VISIBLE_DEVICES": "4,5"}, {"HIP_VISIBLE_DEVICES": "5,4"}),
        ("cuda:1", {}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
        ("xpu:1", {}, {"ZE_AFFINITY_MASK": "1,0"}),
        ("cuda:7", {"CUDA_VISIBLE_DEVICES": "0"}, {}),
        ("mps", {}, {}),
        ("cpu", {}, {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
    ],
)
def test_a_child_sees_the_preferred_device_first(device, environment, expected):
    assert gpu_probe.training_environment(device, environment) == expected
