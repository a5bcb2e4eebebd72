"""The helper that traces networks which no shipped table covers: `python -m backend.engine.answers FOLDER`."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from backend.engine import trace

CPU_NUMEL = 10**9  # parameters of a network that somebody may train on a CPU
USUAL = 3  # forms of the usual LoRA: everything kept, checkpointed, and its samples
MANY_BLOCKS = 60  # where a configuration leaves its depth to the class


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
                for table in _tables(asked["network"], asked["config"], facts):
                    trace.write(question.with_suffix(".json"), [table])
            except Exception as error:  # the helper outlives a model that it cannot trace
                text = json.dumps({"tables": [], "trouble": f"{type(error).__name__}: {error}"})
                question.with_suffix(".json").write_text(text, encoding="utf-8")
            question.unlink(missing_ok=True)
            last = time.monotonic()
        time.sleep(0.2)


def _tables(network: str, config: dict, facts: dict) -> Iterator[dict]:
    """One table after the other, each with more in it: what a picture needs; of networks that anybody would train on a CPU, the usual LoRA
    there in bfloat16; training on a card, which takes several times as long; the usual LoRA in float32, which is no multiple of the former (under
    autocast much is float32 anyway); and the rest."""
    found, known = trace.table(network, config, facts=facts, like={"forms": {}}), facts[network.rpartition(":")[2]]
    yield found
    if "lora" not in known:
        return
    small = "plain_tokens" in known and _numel(found, config) <= CPU_NUMEL
    wide, narrow = (
        trace.cpu_tables(network, config, known, dtypes=(name,)) if small else iter(())
        for name in ("float32", "bfloat16")
    )
    cpu: dict = {}
    for forms in itertools.islice(narrow, USUAL):
        cpu |= forms
        yield {**found, "cpu": cpu}
    found = trace.table(network, config, facts=facts)
    yield {**found, "cpu": cpu} if cpu else found
    for forms in itertools.chain(itertools.islice(wide, USUAL), narrow, wide):
        cpu |= forms
        yield {**found, "cpu": cpu}


def _numel(table: dict, config: dict) -> int:
    """Parameters of the whole network."""
    each = {home: numel["matrix"] + numel["rest"] + numel["precise"] for home, numel in table["numel"].items()}
    return each[""] + sum(each[home] * config.get(key, MANY_BLOCKS) for home, key in table["blocks"].items())


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
