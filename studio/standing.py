"""Keeps the page standing: a handler that fails is told in a sentence, and changes nothing."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable

import gradio as gr

from backend.schema.messages import Trouble
from backend.schema.values import printable

LONGEST_CAUSE = 300


def guard(page: gr.Blocks) -> None:
    """Has every handler of `page` answer, whatever happens in it: with no change, and a notice that says why.

    What can be foreseen is told where it belongs; this is for the rest, of which the log has the traceback. Without it a browser
    gets an answer of 500 and shows nothing at all, at every tick anew.
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
    traceback.print_exception(error)
    if isinstance(error, OSError):
        return f"That did not work: {printable(error.strerror or error)[:LONGEST_CAUSE]}."
    return f"That did not work: {type(error).__name__}: {printable(error)[:LONGEST_CAUSE]}."
