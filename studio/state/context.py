"""What the tabs share: places, engine, families, and how a file's address reads in the browser."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import gradio as gr

from backend.catalog.family import Family
from backend.host.engine.client import Engine
from backend.schema.paths import Places
from backend.schema.preferences import Preferences
from studio.state.saved_forms import read_preferences


@dataclass(frozen=True)
class Studio:
    """Made once by `studio.app` and handed to every tab: there are no globals."""

    places: Places
    engine: Engine
    families: tuple[Family, ...]
    root_path: str = ""
    recent: dict = field(default_factory=dict, compare=False)  # what was read of the disk within the last moment

    def preferences(self) -> Preferences:
        return read_preferences(self.places)

    def address(self, path: Path | str) -> str:
        """The URL of a file in one of the served folders."""
        base = self.root_path.rstrip("/")
        return f"{base}/gradio_api/file={quote(str(path))}"

    @property
    def uploads(self) -> Path:
        """Where what the browser sends is kept for a day."""
        return self.places.cache / "uploads"

    @property
    def served(self) -> tuple[Path, ...]:
        """The folders whose files the browser may read."""
        places = self.places
        return (places.outputs, places.runs, places.cache / "thumbnails", places.user / "inputs")


# A click on anything with `data-do` becomes the event "act" with what was meant; keys work as clicks do on buttons. A
# fold with `data-keep` stays as it was clicked: drawing the region anew takes its `open` away, or brings another fold
# of that name.
ACT = """
element.addEventListener("click", (event) => {
  const meant = event.target.closest("[data-do]");
  if (!meant || !element.contains(meant)) return;
  event.preventDefault();
  let what = meant.dataset.what || "";
  if (meant.hasAttribute("data-collect")) what = JSON.stringify(element.loftTyped());
  trigger("act", {do: meant.dataset.do, what: what});
});
const folds = {};
element.addEventListener("click", (event) => {
  const fold = event.target.closest("summary")?.parentElement;
  if (fold?.dataset.keep) folds[fold.dataset.keep] = !fold.open;
});
new MutationObserver(() => {
  for (const fold of element.querySelectorAll("details[data-keep]")) {
    const wish = folds[fold.dataset.keep];
    if (wish !== undefined && fold.open !== wish) fold.open = wish;
  }
}).observe(element, {childList: true, subtree: true, attributes: true, attributeFilter: ["open"]});
"""


def live(html: str = "", *, name: str, script: str = "", **look) -> gr.HTML:
    """A region that the timer redraws and whose `data-do` elements act: `.act(handler)` gets a `gr.EventData`.

    With `data-collect`, the event brings what `element.loftTyped()` of `script` says.
    """
    return gr.HTML(html, elem_id=name, js_on_load=ACT + script, apply_default_css=False, **look)
