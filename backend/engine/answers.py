"""The helper that traces networks which no shipped table covers: `python -m backend.engine.answers FOLDER`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from backend.engine import trace


def serve(folder: Path, *, idle_seconds: float = 600.0) -> None:
    """Answers each `NAME.ask` ({"network", "config"}) in `folder` by a `NAME.json` beside it, for as long as questions come.

    A network that cannot be traced is answered by a file without tables that says why.
    """
    facts = trace.published()["networks"]
    last = time.monotonic()
    while time.monotonic() - last < idle_seconds:
        for question in sorted(folder.glob("*.ask")):
            try:
                asked = json.loads(question.read_text(encoding="utf-8"))
                # what a picture needs comes first; training forms take several times as long
                trace.write(question.with_suffix(".json"), [trace.table(**asked, facts=facts, like={"forms": {}})])
                if "lora" in facts[asked["network"].rpartition(":")[2]]:
                    trace.write(question.with_suffix(".json"), [trace.table(**asked, facts=facts)])
            except Exception as error:  # the helper outlives a model that it cannot trace
                text = json.dumps({"tables": [], "trouble": f"{type(error).__name__}: {error}"})
                question.with_suffix(".json").write_text(text, encoding="utf-8")
            question.unlink(missing_ok=True)
            last = time.monotonic()
        time.sleep(0.2)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
