"""Everything that needs a card, for whoever has one for twelve minutes: `python tests/gpu/run.py --out FILE`.

Checks in order of worth, each in a process of its own with its own time limit; what goes wrong in one leaves the others running. One table (markdown) and
one JSON file hold what was expected and what was measured. `--only NAME ...` runs some of them. `LOFT_CARD=cpu python tests/gpu/run.py --rehearse` runs
them all tiny on a CPU, to see that they run; what only a card can say is "not applicable" there.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from backend.engine.devices import allocator_limits

allocator_limits.expand_segments()  # before anything imports torch, here and in the checks

from tests.gpu.runner import GOOD, Check, run_all

SANITIZER = {"TORCH_CUDA_SANITIZER": "1"}
EXACT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # which deterministic algorithms ask of cuBLAS
CHECKS = (
    Check("environment", "tests.gpu.checks.env:environment", "bfloat16, segments that grow", 20),
    Check("placement", "tests.gpu.checks.suites:placement", "all tests pass: the same bits in every state", 80),
    Check("ordering", "tests.gpu.checks.ordering:late_copies", "the same bits however late copies and blocks are", 45),
    Check("sanitizer", "tests.gpu.checks.ordering:sanitized", "CUDA's sanitizer of torch reports nothing", 25, SANITIZER),
    Check("drop", "tests.gpu.checks.drop:dropped", "no byte of new tensors changes where a part is dropped unclosed", 30),
    Check("ladder", "tests.gpu.checks.ladder:ladder", "rungs are taken, the same pictures, nothing left behind", 70),
    Check("streaming", "tests.gpu.checks.suites:streaming", "a streamed step at most 1.25 of computing or moving", 50),
    Check("host time", "tests.gpu.checks.host_time:host_time", "below 60 ms for 60 streamed blocks at 512 px", 25),
    Check("training", "tests.gpu.checks.training:training", "losses of plain training, peaks below, no growth", 95, EXACT),
    Check("faster", "tests.gpu.checks.suites:faster", "all tests pass: compiled and FP8 products near, and quicker", 95),
    Check("plan", "tests.gpu.checks.plan:plan", "predicted peaks within 5 % of allocated", 100),
    Check("attention", "tests.gpu.checks.choices:attention", "guidance with a mask 1.5 to 2.5 as long as without", 25),
    Check("ways", "tests.gpu.checks.choices:others", "which of two ways is the quicker, for each", 25),
    Check("loading", "tests.gpu.checks.loading:loading", "mapped 3, read and pinned >= 10, to FP8 >= 5 GB/s", 35),
)  # fmt: skip


def chosen(names: Sequence[str] | None) -> list[Check]:
    known = {check.name: check for check in CHECKS}
    unknown = [name for name in names or () if name not in known]
    if unknown:
        sys.exit(f"There is no check {unknown[0]!r}. There are: {', '.join(known)}.")
    return [check for check in CHECKS if not names or check.name in names]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file, written anew after each check")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these checks alone")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--together", action="store_true", help="in one process, without limits; for a rehearsal")
    asked = parser.parse_args(argv)
    if asked.rehearse:
        os.environ.setdefault("LOFT_CARD", "cpu")
    began = time.monotonic()
    rows = run_all(chosen(asked.only), out=asked.out, tiny=asked.rehearse, together=asked.together)
    wrong = [row.name for row in rows if row.status not in GOOD]
    print(
        f"{time.monotonic() - began:.0f} seconds; {'not as expected: ' + ', '.join(wrong) if wrong else 'all as expected'}"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
