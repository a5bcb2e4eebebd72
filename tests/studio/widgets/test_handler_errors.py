"""A handler that fails changes nothing and says why; the traceback of what nobody foresaw is logged, once."""

from __future__ import annotations

import logging

import gradio as gr
import pytest

from backend.schema.messages import Trouble
from studio.serving import server
from studio.widgets import handler_errors


@pytest.fixture
def log(tmp_path):
    """The log of faults as the studio keeps it, in `user/faults.log`."""
    from types import SimpleNamespace

    from backend.schema.paths import Places

    places, before = Places(tmp_path), (handler_errors.log.handlers[:], handler_errors.log.propagate)
    server.keep_log(SimpleNamespace(places=places), "faults")
    handler_errors._last_logged.clear()
    yield lambda: path.read_text() if (path := places.user / "faults.log").exists() else ""
    for handler in handler_errors.log.handlers:
        handler.close()
    handler_errors.log.handlers[:], handler_errors.log.propagate = before


def failing(kind: type[Exception], *said: str):
    def handler(*_):
        raise kind(*said)

    return handler_errors._answering(handler, 2)


def test_a_fault_is_logged_with_its_traceback_and_once_in_a_while(log, monkeypatch):
    said = []
    monkeypatch.setattr(gr, "Warning", said.append)
    answer = failing(ZeroDivisionError, "by \ud800")
    for _ in range(3):
        assert len(answer(1)) == 2
    assert len(said) == 3 and "ZeroDivisionError" in said[0]
    assert log().count("Traceback (most recent call last)") == 1 and "raise kind" in log()
    failing(ValueError, "another")()
    assert log().count("Traceback (most recent call last)") == 2


def test_what_was_foreseen_is_no_fault(log, monkeypatch):
    said = []
    monkeypatch.setattr(gr, "Warning", said.append)
    failing(Trouble, "bad_value", "No such model.")()
    with pytest.raises(gr.Error):
        failing(gr.Error, "a value that a field refuses")()
    assert said == ["No such model."] and log() == ""


def test_a_fault_without_a_studio_goes_to_the_terminal(caplog):
    handler_errors._last_logged.clear()
    with caplog.at_level(logging.ERROR, logger="loft.faults"):
        handler_errors.why(KeyError("x"))
    assert caplog.records and caplog.records[0].exc_info
