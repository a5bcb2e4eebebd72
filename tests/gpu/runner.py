"""Runs checks one after the other, each in a process of its own with its own time limit: a crash, a hang or a fault of the card in one leaves the others
running. A row for each goes into one table and one JSON file, which is complete after every check.

As a program it is one check: `runner.py MODULE:FUNCTION REPORT [--tiny]`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from backend.engine.devices import allocator_limits

allocator_limits.expand_segments()  # as workers and trainers do: torch's allocator reads it once

HELD, MISSED, NOT_APPLICABLE = "held", "missed", "not applicable"
FAILED, CRASHED, TIMEOUT = "failed", "crashed", "timeout"
GOOD = (HELD, NOT_APPLICABLE)
ENDING_SECONDS = 5  # for a check that is told to end
HEADER = "| check | expected | status | seconds | measured |\n|---|---|---|---|---|"


@dataclass(frozen=True)
class Outcome:
    """What a check found. `held`: whether its expectation did; None where this device cannot say. `measured`: of JSON values."""

    held: bool | None
    measured: dict = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Check:
    """`function`: "module:name" of a function of a torch.device and of whether sizes are tiny, which answers an `Outcome`."""

    name: str
    function: str
    expected: str
    limit_seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    name: str
    expected: str
    status: str
    seconds: float
    measured: dict
    note: str = ""

    def line(self) -> str:
        said = "; ".join(f"{key}: {shown(value)}" for key, value in self.measured.items())
        said = "; ".join(filter(None, (self.note, said)))
        return "| " + " | ".join(_cell(one) for one in (*self._first(), said)) + " |"

    def _first(self) -> tuple[str, ...]:
        return self.name, self.expected, self.status, f"{self.seconds:.0f}"


def shown(value) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(one)}" for key, one in value.items())
    return ", ".join(map(shown, value)) if isinstance(value, list | tuple) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


# --- one check


def perform(function: str, *, tiny: bool) -> Outcome:
    """Calls a check in this process, with a data folder of its own."""
    from backend.engine.devices import device_memory

    module, _, name = function.partition(":")
    found: Callable = getattr(importlib.import_module(module), name)
    with tempfile.TemporaryDirectory(prefix="loft-card-") as data, _environment({"LOFT_DATA": data}):
        return found(device_memory.check_device(os.environ.get("LOFT_CARD", "auto")), tiny)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def status_of(outcome: Outcome) -> str:
    return NOT_APPLICABLE if outcome.held is None else HELD if outcome.held else MISSED


def attempt(function: str, *, tiny: bool) -> dict:
    """`perform` as a row's values; what it raises is the row's note."""
    try:
        outcome = perform(function, tiny=tiny)
    except Exception as error:
        traceback.print_exc()
        return {"status": FAILED, "measured": {}, "note": f"{type(error).__name__}: {error}"[:500]}
    return {"status": status_of(outcome), "measured": plain(outcome.measured), "note": outcome.note}


def plain(value):
    """`value` as JSON has it; numbers that are none become words."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


# --- all of them


def run_one(check: Check, *, tiny: bool = False, together: bool = False) -> Row:
    """`together`: in this process, without a limit; for checks that are known to end."""
    began = time.monotonic()
    if together:
        with _environment(check.environment):
            found = attempt(check.function, tiny=tiny)
    else:
        found = _in_a_process(check, tiny)
    return Row(check.name, check.expected, seconds=round(time.monotonic() - began, 1), **found)


def _in_a_process(check: Check, tiny: bool) -> dict:
    with tempfile.TemporaryDirectory(prefix="loft-check-") as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log.txt"
        command = [sys.executable, str(Path(__file__).resolve()), check.function, str(report)]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command + ["--tiny"] * tiny,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **check.environment},
                start_new_session=True,
            )
            try:
                status = child.wait(check.limit_seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(child)
        said = log.read_text(encoding="utf-8", errors="replace")
        sys.stderr.write("".join(f"  {line}\n" for line in said.splitlines()[-40:]))
        try:
            return json.loads(report.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            pass
    last = (said.strip().splitlines() or [""])[-1][:300]
    if status is None:
        return {"status": TIMEOUT, "measured": {}, "note": f"not done after {check.limit_seconds:g} s. {last}"}
    return {"status": CRASHED, "measured": {}, "note": f"{_ended(status)}. {last}"}


def _ended(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with {status}"


def _end(child: subprocess.Popen) -> None:
    """The check and whatever it started are gone."""
    for word in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, word)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDING_SECONDS)


def run_all(
    checks: Sequence[Check], *, out: Path | None = None, tiny: bool = False, together: bool = False
) -> list[Row]:
    """A row for each of `checks`, in their order; printed as they come, and all once more at the end. `out`: the JSON file."""
    rows: list[Row] = []
    print(HEADER, flush=True)
    for check in checks:
        rows.append(run_one(check, tiny=tiny, together=together))
        print(rows[-1].line(), flush=True)
        if out is not None:
            write(out, rows)
    print("\n" + table(rows), flush=True)
    return rows


def table(rows: Sequence[Row]) -> str:
    return "\n".join([HEADER, *(row.line() for row in rows)])


def write(out: Path, rows: Sequence[Row]) -> None:
    made = out.with_name(out.name + ".part")
    made.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    made.replace(out)


def main(argv: Sequence[str] | None = None) -> int:
    """One check, whose row's values go to the report's file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("function")
    parser.add_argument("report", type=Path)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(argv)
    asked.report.write_text(json.dumps(attempt(asked.function, tiny=asked.tiny)), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a thread or a driver that hangs at the end is no part of the check


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from tests.gpu.runner import main as as_module  # its classes are those that checks import

    as_module()
