"""The page's own calls without a browser: what each control asks the studio, with any values in place of those that a browser would send."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping

from tests.browser.conftest import Site
from tests.security.requests_by_hand import Reply, ask


class PageCalls:
    """One opened page of a studio: its functions, and what its controls hold at first.

    A control is told by its `elem_id`; a component without one by its number.
    """

    def __init__(self, site: Site):
        self.site, self.session = site, uuid.uuid4().hex
        self.headers = {"Authorization": f"Bearer {site.token}"}
        config = json.loads(ask(site.port, "/config", **self.headers).body)
        self.functions: list[dict] = [one for one in config["dependencies"] if one["backend_fn"]]
        self.by_id: dict[int, dict] = {one["id"]: one for one in config["dependencies"]}
        self._names = {part["id"]: part["props"].get("elem_id") or part["id"] for part in config["components"]}
        self.values = {part["id"]: part["props"].get("value") for part in config["components"]}

    def function(self, control: str, event: str) -> dict:
        """What is asked when this happens to that control."""
        return next(
            one
            for one in self.functions
            if any(event == name and self._names.get(part) == control for part, name in one["targets"])
        )

    def tick(self) -> dict:
        return next(one for one in self.functions if any(name == "tick" for _, name in one["targets"]))

    def filling(self) -> dict:
        """What fills the forms of an opened page: the browser asks it by itself after the page's load."""
        loaded = next(one["id"] for one in self.by_id.values() if any(name == "load" for _, name in one["targets"]))
        return self.by_id[loaded + 1]

    def names(self, function: dict) -> list[str | int]:
        """The controls whose values go into it, in order."""
        return [self._names[part] for part in function["inputs"]]

    def sent(self, function: dict, **values: object) -> list[object]:
        """What a browser would send to it, but for `values`, which are told by names with underscores for hyphens."""
        told = {name.replace("-", "_"): name for name in map(str, self.names(function))}
        unknown = set(values) - set(told)
        assert not unknown, unknown
        changed = {told[name]: value for name, value in values.items()}
        return [changed.get(str(self._names[part]), self.values[part]) for part in function["inputs"]]

    def post(self, function: dict, data: list[object], *, event: Mapping | None = None, **headers: str) -> Reply:
        """The answer to these values."""
        call = {"fn_index": function["id"], "data": data, "session_hash": self.session, "event_data": event}
        kind = {"Content_Type": "application/json"}
        body = json.dumps(call).encode()
        mine = {**self.headers, **kind, **headers}
        return ask(self.site.port, "/gradio_api/run/predict", method="POST", body=body, **mine)

    def open(self) -> None:
        """Opens a page as a browser does: the page itself, what fills its forms, and its first tick, under a session of its own."""
        self.session = uuid.uuid4().hex
        assert ask(self.site.port, "/", **self.headers).status == 200
        filling, tick = self.filling(), self.tick()
        filled = self.post(filling, self.sent(filling))
        assert filled.status == 200, filled.body
        fields = self.by_id[filling["id"] + 1]["inputs"][1:]  # behind the answer
        for part, change in zip(fields, json.loads(filled.body)["data"][0]["changes"], strict=True):
            if not isinstance(change, dict) or change.get("__type__") != "update":
                self.values[part] = change
            elif "value" in change:
                self.values[part] = change["value"]
        drawn = self.post(tick, self.sent(tick))
        assert drawn.status == 200, drawn.body
