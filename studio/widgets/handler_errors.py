"""Keeps the page standing: a handler that fails is told in a sentence, and changes nothing."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable

import gradio as gr

from backend.schema.json_values import printable
from backend.schema.messages import Trouble

LONGEST_CAUSE = 300
AGAIN_SECONDS = 600.0  # a tick that fails does so every second; its traceback is logged once in so long
MOST_KNOWN = 200

log = logging.getLogger("loft.faults")  # to the terminal, and to user/faults.log: what nobody foresaw
_last_logged: dict[tuple, float] = {}


def guard(page: gr.Blocks) -> None:
    """Has every handler of `page` answer, whatever happens in it: with no change, and a notice that says why.

    What can be foreseen is told where it belongs; this is for the rest, of which the log has the traceback. Without it
    a browser gets an answer of 500 and shows nothing at all, at every tick anew.
    """
    for function in page.fns.values():
        if function.fn is not None and not inspect.isgeneratorfunction(function.fn):
            function.fn = _answering(function.fn, len(function.outputs))


def _answering(handler: Callable, outputs: int) -> Callable:
    @functools.wraps(handler)
    def answer(*values, **more):
        try:
            return handler(*values, **more)
        except gr.Error:
            raise
        except Exception as error:
            gr.Warning(why(error))
            return [gr.skip()] * outputs if outputs > 1 else gr.skip() if outputs else None

    return answer


def why(error: Exception) -> str:
    """A sentence for an error; the traceback of one that nobody foresaw goes to the log."""
    if isinstance(error, Trouble):
        return printable(error)
    log_fault(error)
    if isinstance(error, OSError):
        return f"That did not work: {printable(error.strerror or error)[:LONGEST_CAUSE]}."
    return f"That did not work: {type(error).__name__}: {printable(error)[:LONGEST_CAUSE]}."


def log_fault(error: Exception) -> None:
    """Logs the traceback of an error that nobody foresaw, unless it was logged a short time ago: it is a bug, whatever
    the page made of it."""
    where, now = _where(error), time.monotonic()
    if now - _last_logged.get(where, -AGAIN_SECONDS) < AGAIN_SECONDS:
        return
    if len(_last_logged) >= MOST_KNOWN:
        _last_logged.clear()
    _last_logged[where] = now
    log.error("A fault of the studio: %s", printable(repr(error))[:LONGEST_CAUSE], exc_info=error)


def _where(error: Exception) -> tuple:
    """The kind of an error and the lines that it passed: the same for the same bug at another tick."""
    lines, step = [], error.__traceback__
    while step is not None:
        lines.append((step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    return type(error), *lines[-8:]
