"""The helper that traces networks which no shipped table covers, or not for this job: `python -m
backend.engine.tracing.server FOLDER`.

A question is a file `NAME.ask` ({"network", "config", "wants"}); the answer is a table beside it, `NAME.json`. What is
asked for is traced first. While nobody asks, what may be asked next of the same networks is traced: the usual LoRA,
training on a card, float32, the rest.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from backend.engine.tracing import cpu_training_fit, trace, training_fit
from backend.schema.json_values import dicts
from backend.schema.untrusted import read_object, read_object_or_empty
from backend.system.atomic_files import write_text

CPU_NUMEL = 10**9  # parameters of a network that somebody may train on a CPU
USUAL = 3  # forms of the usual LoRA: everything kept, checkpointed, and its samples
MANY_BLOCKS = 60  # where a configuration leaves its depth to the class


def serve(folder: Path, *, idle_seconds: float = 600.0) -> None:
    """Answers the questions in `folder` for as long as some come.

    A network that cannot be traced is answered by a file without tables that says why; of one that can, the forms that
    cannot are listed as "failed".
    """
    facts = trace.published()["networks"]
    later: dict[str, Iterator[dict]] = {}
    last = time.monotonic()
    while time.monotonic() - last < idle_seconds:
        questions = sorted(folder.glob("*.ask"), key=_age)
        for question in questions[:1]:  # a newer one may have come before the second
            try:
                asked = read_object(question)
                table = answer(question.with_suffix(".json"), asked, facts)
                later.setdefault(question.stem, _rest(table, asked["network"], asked["config"], facts))
            except Exception as error:  # the helper outlives a model that it cannot trace
                text = json.dumps({"tables": [], "trouble": f"{type(error).__name__}: {error}"})
                write_text(question.with_suffix(".json"), text)
            question.unlink(missing_ok=True)
            last = time.monotonic()
        if questions:
            continue
        if later:
            name = next(iter(later))
            try:
                more = next(later[name], None)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                more = None
            if more is None:
                del later[name]
            else:
                _keep(folder / f"{name}.json", more)
            last = time.monotonic()
            continue
        time.sleep(0.2)


def _age(question: Path) -> float:
    """The newest first: what somebody looks at now."""
    try:
        return -question.stat().st_mtime
    except OSError:
        return 0.0


def answer(file: Path, asked: dict, facts: dict) -> dict:
    """Traces what `asked` wants and `file` has not, writing it form by form. Returns the table."""
    network, config, wants = asked["network"], asked["config"], asked.get("wants", [])
    known = facts.get(network.rpartition(":")[2])
    found = _read(file)
    if found is None:
        first = "float32" if wants and all("/float32" in one for one in wants) and not _trains(known) else "bfloat16"
        shallow = asked.get("shipped", False)  # the shipped table has all but what is wanted
        found = (
            trace.bare(network, config, facts=facts)
            if shallow
            else trace.table(network, config, facts=facts, like={"forms": {}}, dtypes=(first,))
        )
        _keep(file, found)
    for key in wants:
        if key in found["forms"] or key in found.get("cpu", {}) or key in found.get("failed", ()):
            continue
        try:
            found = _with(found, network, config, known, key)
        except Exception as error:  # this form alone cannot be traced
            print(f"{file.stem} {key}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            found = {**found, "failed": [*found.get("failed", ()), key]}
        _keep(file, found)
    return found


def _trains(known: dict | None) -> bool:
    return known is not None and "lora" in known


def _with(found: dict, network: str, config: dict, known: dict, key: str) -> dict:
    """`found` with the form `key`, and whatever comes with it."""
    first, *words = key.split("/")
    if first in cpu_training_fit.KERNELS:
        cpu = {"plain_tokens": known["plain_tokens"], **found.get("cpu", {})}
        return {**found, "cpu": {**cpu, key: cpu_training_fit.form_of(network, config, known, key)}}
    if first == "step":
        targets, kept, name = words[:3]
        texts = trace.texts_of(known)
        dtype = trace.DTYPES[name]
        forms = training_fit.forms_of(network, config, known, dtype, name, targets, kept == "checkpointed", texts)
        return {**found, "forms": {**found["forms"], **forms}}
    return {**found, "forms": {**found["forms"], **trace.forms_of(network, config, known, words[0])}}


def _read(file: Path) -> dict | None:
    tables = dicts(read_object_or_empty(file).get("tables"))
    return tables[0] if tables else None


def _keep(file: Path, table: dict) -> None:
    trace.write(file, [table])


def _rest(found: dict, network: str, config: dict, facts: dict) -> Iterator[dict]:
    """One table after the other, each with more in it. Of a network with a shipped table nothing."""
    known = facts[network.rpartition(":")[2]]
    if not found["forms"]:
        return
    if not _trains(known):
        for name in trace.DTYPES:
            if not any(f"/{name}" in key for key in found["forms"]):
                found = {**found, "forms": {**found["forms"], **trace.forms_of(network, config, known, name)}}
                yield found
        return
    small = "plain_tokens" in known and _numel(found, config) <= CPU_NUMEL
    cpu = dict(found.get("cpu", {}))
    wide, narrow = (
        cpu_training_fit.names_of_forms(known, trace.DTYPES[name], name) if small else ()
        for name in ("float32", "bfloat16")
    )

    def more(names) -> Iterator[dict]:
        for key in names:
            if key not in cpu:
                cpu.update(
                    {"plain_tokens": known["plain_tokens"], key: cpu_training_fit.form_of(network, config, known, key)}
                )
                yield {**found, "cpu": cpu}

    yield from more(itertools.islice(narrow, USUAL))
    if not any(key.startswith("step/") for key in found["forms"]):
        whole = trace.table(network, config, facts=facts)
        found = {**found, "forms": {**whole["forms"], **found["forms"]}}
        yield {**found, "cpu": cpu} if cpu else found
    yield from more((*itertools.islice(wide, USUAL), *narrow, *wide))


def _numel(table: dict, config: dict) -> int:
    """Parameters of the whole network."""
    each = {home: numel["matrix"] + numel["rest"] + numel["precise"] for home, numel in table["numel"].items()}
    return each[""] + sum(each[home] * config.get(key, MANY_BLOCKS) for home, key in table["blocks"].items())


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
