"""The script for whoever has a card: rehearsed on a CPU, with a row for each check; what goes wrong in one check ends no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import run, runner
from tests.gpu.runner import Check

ROOT = Path(__file__).resolve().parents[2]
SPOILT = """
import os, sys, time
from tests.gpu.runner import Outcome

def held(device, tiny): return Outcome(tiny and device.type == "cpu", {"speed": 2.5, "odd": float("nan")})
def missed(device, tiny): return Outcome(False, {"speed": 0.5}, "slow | slower")
def cannot(device, tiny): return Outcome(None, note="no card")
def raises(device, tiny): raise RuntimeError("CUDA error: an illegal memory access was encountered")
def crashes(device, tiny): print("before it", flush=True); os.kill(os.getpid(), 11)
def hangs(device, tiny): time.sleep(600)
def told(device, tiny): return Outcome(os.environ["SAID"] == "so")
"""


@pytest.fixture
def spoilt(tmp_path, monkeypatch):
    """Checks of each kind: spoilt(name, ...)."""
    (tmp_path / "spoilt_checks.py").write_text(SPOILT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("LOFT_CARD", "cpu")
    limits = {"hangs": 0.5}
    return lambda *names: [
        Check(name, f"spoilt_checks:{name}", "it ends", limits.get(name, 100), {"SAID": "so"}) for name in names
    ]


@pytest.mark.torch
def test_a_check_that_crashes_or_hangs_ends_no_other(spoilt, tmp_path, capsys):
    out = tmp_path / "out.json"
    rows = runner.run_all(spoilt("crashes", "hangs", "held"), out=out, tiny=True)
    assert [row.status for row in rows] == ["crashed", "timeout", "held"]
    assert rows[1].seconds < 60
    assert "SIGSEGV" in rows[0].note and "before it" in rows[0].note and "0.5 s" in rows[1].note
    written = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [(one["name"], one["status"]) for one in written] == [(row.name, row.status) for row in rows]
    assert written[-1]["measured"] == {"speed": 2.5, "odd": "nan"}
    assert capsys.readouterr().out.count("\n| hangs |") == 2


@pytest.mark.torch
def test_what_a_check_finds_is_a_row(spoilt, capsys):
    rows = runner.run_all(spoilt("raises", "missed", "cannot", "told"), tiny=True, together=True)
    assert [row.status for row in rows] == ["failed", "missed", "not applicable", "held"]
    assert "illegal memory access" in rows[0].note
    printed = capsys.readouterr().out
    assert printed.count("slow \\| slower; speed: 0.5") == 2 and printed.count("\n") == 2 * (2 + 4) + 1


@pytest.mark.torch
@pytest.mark.slow
def test_every_check_is_rehearsed_on_a_cpu(tmp_path):
    pytest.importorskip("torch")
    out = tmp_path / "out.json"
    command = [sys.executable, str(ROOT / "tests/gpu/run.py"), "--rehearse", "--together", "--out", str(out)]
    done = subprocess.run(
        command,
        env={**os.environ, "LOFT_CARD": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=540,
    )
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == [check.name for check in run.CHECKS], done.stderr[-2000:]
    odd = [row for row in rows if row["status"] not in runner.GOOD]
    assert not odd and done.returncode == 0, (odd, done.stderr[-2000:])
    held = {row["name"] for row in rows if row["status"] == "held"}
    assert held >= {"placement", "ordering", "drop", "ladder", "streaming", "training", "faster"}  # needs no card
    for name, key in {"attention": "attention", "ways": "vae", "host time": "hooks", "loading": "rounding"}.items():
        assert next(row for row in rows if row["name"] == name)["measured"][key].startswith("faster by ")


@pytest.mark.torch
@pytest.mark.parametrize("grace, stay", [(0, 1), (1 << 12, 2)])
def test_a_limit_of_some_blocks_and_a_little_more_lets_them_stay(monkeypatch, tmp_path, grace, stay):
    """A card counts the number that stands for weights that are away, 512 bytes, against the limit."""
    import torch

    from backend.engine.devices import device_memory
    from tests.engine.fake_cuda import CARD, fake_card
    from tests.engine.small import write_part
    from tests.gpu.test_placement_on_card import DISK, Wide, placed_on

    part = write_part(tmp_path, Wide(64), dtype=torch.bfloat16)
    with fake_card(monkeypatch, 0, early=0.3), torch.device("meta"):
        module = Wide(64)
        monkeypatch.setattr(device_memory, "allocated", lambda device: 512)
        placed = placed_on(CARD, module, part, DISK, part.nbytes // 2 + grace - 512)
        placed.onload()
        assert len(placed.planned_resident_blocks()) == stay
        placed.close()


def test_all_limits_together_are_twelve_minutes():
    assert sum(check.limit_seconds for check in run.CHECKS) <= 12 * 60
    assert len({check.name for check in run.CHECKS}) == len(run.CHECKS)


FIRST = """
import importlib.abc, os, runpy, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("torch is asked for:", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
            sys.exit()

sys.meta_path.insert(0, Watch())
runpy.run_path(sys.argv[1])
print("without torch:", os.environ.get("PYTORCH_CUDA_ALLOC_CONF"), "torch" in sys.modules)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="segments grow there")
@pytest.mark.parametrize("file", ["run.py", "runner.py", "conftest.py", "plan_check.py"])
def test_segments_are_told_to_grow_before_torch_is_there(file):
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", FIRST, str(ROOT / "tests/gpu" / file)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    without = f"without torch: {'expandable_segments:True'} False\n"
    asked = "torch is asked for: expandable_segments:True\n"
    assert done.stdout == (without if file in ("run.py", "runner.py") else asked), done.stderr[-800:]
