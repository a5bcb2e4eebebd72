"""Events are read as they come, torn lines included, and logs by their end alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from backend.host.process.event_log import KEPT_STEPS, LOG_TAIL_BYTES, Journal, log_tail
from backend.schema.messages import to_line


def write(folder: Path, *events: tuple[str, dict]) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        for name, values in events:
            file.write(to_line(name, **values))


def step(number: int, loss: float = 1.0, **more) -> tuple[str, dict]:
    return "step", {
        "step": number,
        "total_steps": 100,
        "epoch": 1,
        "loss": loss,
        "learning_rate": 1e-4,
        "seconds": 0.5,
        **more,
    }


def test_only_what_was_added_is_read(tmp_path):
    journal = Journal(tmp_path)
    journal.update()
    assert (journal.count, journal.loss, journal.seconds_per_step) == (0, None, 0.0)
    write(tmp_path, ("started", {"total_steps": 100, "model": "loft/starter"}), step(1))
    journal.update()
    assert (journal.count, journal.step, journal.total_steps, journal.started["model"]) == (2, 1, 100, "loft/starter")
    size = journal.offset
    write(tmp_path, step(2, 3.0))
    journal.update()
    assert (journal.count, journal.step, journal.loss, journal.seconds_per_step) == (3, 2, 2.0, 0.5)
    assert journal.offset > size


@pytest.mark.parametrize("cut", range(1, 40, 7))
def test_a_torn_line_waits_for_its_rest(tmp_path, cut):
    line = to_line("sample", step=5, prompt="ein roter Käse", path="samples/0.png").encode()
    path = tmp_path / "events.jsonl"
    journal = Journal(tmp_path)
    path.write_bytes(line[:-cut])
    journal.update()
    assert journal.count == 0
    path.write_bytes(line)
    journal.update()
    assert [(sample.step, sample.prompt, sample.path) for sample in journal.samples] == [
        (5, "ein roter Käse", tmp_path / "samples/0.png")
    ]


def test_stray_lines_are_passed_over(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b"\xff\xfe\n[1, 2]\nwarning: stray\n{}\n\n")
    write(tmp_path, step(3))
    journal = Journal(tmp_path)
    journal.update()
    assert (journal.count, journal.step) == (1, 3)


def test_a_file_that_shrank_is_read_anew(tmp_path):
    write(tmp_path, *[step(number) for number in range(1, 9)])
    journal = Journal(tmp_path)
    journal.update()
    (tmp_path / "events.jsonl").unlink()
    write(tmp_path, step(1))
    journal.update()
    assert (journal.step, len(journal.steps)) == (1, 1)


def test_after_a_resume_the_steps_that_are_made_again_count_once(tmp_path):
    write(tmp_path, *[step(number, 1.0) for number in range(1, 58)], ("sample", {"step": 55, "path": "a.png"}))
    write(tmp_path, ("resumed", {"step": 50, "restored": ["optimizer"], "not_restored": []}))
    write(tmp_path, *[step(number, 9.0) for number in range(51, 61)])
    journal = Journal(tmp_path)
    journal.update()
    assert list(journal.steps) == list(range(1, 61))
    assert journal.losses[49] == 1.0 and journal.losses[50] == 9.0
    assert journal.samples == [] and journal.resumed["restored"] == ["optimizer"]


def test_a_loss_that_is_no_number_is_left_out_of_the_curve(tmp_path):
    write(tmp_path, step(1, 2.0), step(2, math.nan), step(3, math.inf), step(4, 4.0))
    journal = Journal(tmp_path)
    journal.update()
    assert (journal.step, list(journal.losses), journal.loss) == (4, [2.0, 4.0], 3.0)


@pytest.mark.parametrize("total", [0, 1, 399, 400, 401, 1234, 5000])
def test_the_curve_is_thinned_and_keeps_its_mean(tmp_path, total):
    write(tmp_path, *[step(number, number % 7) for number in range(1, total + 1)])
    journal = Journal(tmp_path)
    journal.update()
    series = journal.loss_series(400)
    assert len(series.steps) == len(series.losses) <= 400
    if total:
        assert series.steps[-1] == total
        whole = total - total % -(-total // 400)
        width = -(-total // 400)
        full = series.losses[: whole // width]
        assert sum(full) / len(full) == pytest.approx(sum(number % 7 for number in range(1, whole + 1)) / whole)
    if 0 < total <= 400:
        assert list(series.losses) == [number % 7 for number in range(1, total + 1)]


def test_a_very_long_run_is_kept_small(tmp_path):
    line = to_line("step", step=0, total_steps=100_000, epoch=1, loss=0.0, learning_rate=1e-4, seconds=0.5)
    with (tmp_path / "events.jsonl").open("w") as file:
        for number in range(1, 100_001):
            file.write(line.replace('"step": 0', f'"step": {number}').replace('"loss": 0.0', f'"loss": {number % 8}'))
    journal = Journal(tmp_path)
    journal.update()
    assert journal.step == 100_000 and journal.seconds_per_step == 0.5
    assert 20_000 <= len(journal.steps) == len(journal.losses) == len(journal.seconds) <= KEPT_STEPS
    series = journal.loss_series(400)
    assert series.steps[-1] == 100_000 and max(abs(loss - 3.5) for loss in series.losses) < 0.2


def test_a_log_is_shown_as_a_terminal_would(tmp_path):
    log = tmp_path / "log.txt"
    log.write_bytes(b"start\r\n 10%|#\r 50%|##\r100%|###\r\n\x1b[32mgreen\x1b[0m \xff\nlast")
    assert log_tail(log) == "start\n100%|###\ngreen \ufffd\nlast"
    assert log_tail(log, lines=2) == "green \ufffd\nlast"
    assert log_tail(tmp_path / "absent.txt") == ""


def test_of_a_long_log_only_the_end_is_read(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("".join(f"line {number}\n" for number in range(200_000)))
    shown = log_tail(log, lines=50).splitlines()
    assert shown[-1] == "line 199999" and len(shown) == 50
    log.write_text("x" * (3 * LOG_TAIL_BYTES) + "\n" + "end\n")
    assert log_tail(log) == "end"
    log.write_text("y" * 5000)
    assert len(log_tail(log)) == 2000
