"""Test files that need a card, run by pytest: what failed, and the figures that tests print."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.gpu.runner import Outcome

FOLDER = Path(__file__).resolve().parents[1]
KEPT_LINES = 40


def placement(device: torch.device, tiny: bool) -> Outcome:
    return run_file("test_placement_on_card.py", device, "(streamed and gradients) or pinned or peak" if tiny else "")


def streaming(device: torch.device, tiny: bool) -> Outcome:
    return run_file("test_streaming_on_card.py", device, "256 or cast" if tiny else "")


def faster(device: torch.device, tiny: bool) -> Outcome:
    return run_file("test_faster_on_card.py", device, "product_of or cached" if tiny else "")


def run_file(name: str, device: torch.device, chosen: str = "") -> Outcome:
    """All tests of the file, or those that the expression names. Figures are those that were printed."""
    with tempfile.TemporaryDirectory() as folder, _card(device):
        report = Path(folder) / "report.xml"
        flags = [f"--junitxml={report}", "-o", "junit_logging=system-out", "-q", "-p", "no:cacheprovider"]
        pytest.main([str(FOLDER / name), *flags, *(["-k", chosen] if chosen else [])], plugins=[])
        return read(report)


@contextlib.contextmanager
def _card(device: torch.device):
    before = os.environ.get("LOFT_CARD")
    os.environ["LOFT_CARD"] = str(device)
    try:
        yield
    finally:
        os.environ.pop("LOFT_CARD") if before is None else os.environ.update(LOFT_CARD=before)


def read(report: Path) -> Outcome:
    """A report as JUnit's XML. Nothing that ran, or none that was read, is no success."""
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    failed = {case.get("name", ""): _why(case) for case in cases if _why(case)}
    skipped = {case.get("name", ""): one.get("message", "") for case in cases for one in case.findall("skipped")}
    printed = [line for case in cases for said in case.findall("system-out") for line in _lines(said.text or "")]
    passed = len(cases) - len(failed) - len(skipped)
    measured = {"passed": passed, "failed": failed, "skipped": skipped, "printed": printed[:KEPT_LINES]}
    return Outcome(passed > 0 and not failed, measured)


def _why(case: ElementTree.Element) -> str:
    return next((one.get("message", "")[:300] for one in case if one.tag in ("failure", "error")), "")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("---")]
