"""What Gradio keeps of each opened page, without what nobody asks for."""

from __future__ import annotations

import contextlib
import ctypes
import sys

from gradio.state_holder import SessionState, StateHolder

MOST_SESSIONS = 32  # the newest; one that was forgotten is drawn anew when it is looked at


class Session(SessionState):
    """Gradio's, without the description of every component, about a MiB a page, which serves links to a page's state.

    Those links are not served here.
    """

    def __init__(self, blocks):
        super().__init__(blocks)
        self.config_values = {}

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.config_values.clear()

    def _update_config(self, key):
        pass

    def _update_value_in_config(self, key, value):
        pass


class Sessions(StateHolder):
    """Gradio's holder of the state of the newest pages."""

    def __getitem__(self, session_id):
        if session_id not in self.session_data:
            self.session_data[session_id] = Session(self.blocks)
        return super().__getitem__(session_id)


def limit_arenas(most: int = 2) -> None:
    """Lets all threads share the C library's heaps, where that is glibc.

    By default each of the forty threads that answer has one of its own, and what was freed in one is not used again by the others: the
    studio grew by twice as much with the same pages. `M_ARENA_MAX` is -8 in malloc.h. Children are not affected, as they would be by MALLOC_ARENA_MAX.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(-8, most)
