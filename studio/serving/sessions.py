"""What Gradio keeps of each opened page, without what nobody asks for."""

from __future__ import annotations

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
