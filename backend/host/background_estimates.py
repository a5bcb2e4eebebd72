"""Helpers that find out what an estimate lacks. Questions and answers are files; nothing here waits.

The tracer answers for networks which no shipped table covers (`user/memory`): it runs without a card in sight, stays
warm for ten minutes after its last answer, and is started again by the next question. For a model that is only a name
another helper reads the headers of its files where they are (`cache/headers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from backend.catalog.hub import download, remote_headers
from backend.catalog.spec import ModelSpec
from backend.host.process import processes
from backend.planner.costs.model_sizes import sizes_of
from backend.schema.paths import Places
from backend.schema.untrusted import read_object_or_empty
from backend.system import process_record
from backend.system.atomic_files import write_text

FOLDER = "memory"
TRACER, READER = "process", "reader"  # notes of which processes they are


def folder(places: Places) -> Path:
    """Where questions and answers lie; what `catalog` is given as `folder`."""
    return places.user / FOLDER


def ask(spec: ModelSpec, places: Places, wants: Mapping[str, Sequence[str]] | None = None) -> tuple[str, ...]:
    """Asks for every part of `spec` whose working memory is unknown, and sees to it that somebody answers.

    Returns those parts.

    `wants`: part -> names of the forms that a job needs (`needed.missing`), which are traced before all others. A part
    that the helper could not trace before is not asked for again.
    """
    home = folder(places)
    sizes = sizes_of(spec, folder=home)
    asked = []
    names: list[str] = [*sizes.estimating, *(wants or {})]
    for name in dict.fromkeys(names):
        part, more = spec.parts[name], list((wants or {}).get(name, ()))
        word = f"{part.network.rpartition(':')[2]}-{_digest(part.config)}"
        answered = (home / f"{word}.json").exists()
        if answered and (not more or not sizes.parts[name].table):
            continue
        home.mkdir(parents=True, exist_ok=True)
        question = {
            "network": part.network,
            "config": part.config,
            "wants": more,
            "shipped": name not in sizes.estimating and not answered,
        }
        if _asked(home / f"{word}.ask") != question:
            write_text(home / f"{word}.ask", json.dumps(question))
        asked.append(name)
    if asked:
        _ensure(places)
    return tuple(asked)


def _asked(file: Path) -> dict | None:
    """The question that is still open in `file`."""
    return read_object_or_empty(file) or None


def _digest(config: dict) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _ensure(places: Places) -> process_record.Process:
    """The helper that lives, or a new one."""
    home = folder(places)
    return _alive(home / TRACER, places) or _start(
        ["-m", "backend.engine.tracing.server", str(home)], home / TRACER, places
    )


def ask_name(model_id: str, places: Places) -> bool:
    """Sees to it that somebody reads the headers of the model `model_id`, one name after the other.

    False where that may not be: offline, or no id.
    """
    if not download.is_id(model_id) or download.is_offline():
        return False
    home = folder(places)
    home.mkdir(parents=True, exist_ok=True)
    if _alive(home / READER, places) is None:
        _start(["-m", "backend", "headers", model_id], home / READER, places)
    return True


def _start(argv: list[str], note: Path, places: Places) -> process_record.Process:
    env = processes.child_environment(places.root, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    log, mark = note.with_suffix(".log"), _mark(places)
    started = processes.start([*processes.PYTHON, *argv], log=log, cwd=places.root, env=env, mark=mark)
    process_record.write_record(note, started)
    return started


def _mark(places: Places) -> str:
    return f"helper:{places.root.resolve()}"


def _alive(note: Path, places: Places) -> process_record.Process | None:
    """The helper that `note` names, if it lives."""
    known = process_record.read_record(note)
    found = processes.child(known[0], mark=_mark(places)) if known else process_record.NOBODY
    return None if found is process_record.NOBODY else found


def end(places: Places) -> None:
    """Ends the helpers that live."""
    for name in (TRACER, READER):
        found = _alive(folder(places) / name, places)
        if found is not None:
            processes.end_tree(found)


def stamp(places: Places) -> tuple[int, ...]:
    """Changes when an answer has come."""
    return tuple(
        home.stat().st_mtime_ns if home.is_dir() else 0 for home in (folder(places), remote_headers.folder(places))
    )
