"""The helper that traces networks which no shipped table covers: questions and answers are files in `user/memory`.

It runs without a card in sight, stays warm for ten minutes after its last answer, and is started again by the next question.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from backend.catalog.sizes import sizes_of
from backend.catalog.spec import ModelSpec
from backend.host import processes
from backend.host.files import write_text
from backend.schema.places import PROJECT, Places

FOLDER = "memory"


def folder(places: Places) -> Path:
    """Where questions and answers lie; what `catalog` is given as `folder`."""
    return places.user / FOLDER


def ask(spec: ModelSpec, places: Places) -> tuple[str, ...]:
    """Asks for every part of `spec` whose working memory is unknown, and sees to it that somebody answers. Returns those parts.

    A part that the helper could not trace before is not asked for again.
    """
    home = folder(places)
    unknown = sizes_of(spec, folder=home).estimating
    asked = []
    for name in unknown:
        part = spec.parts[name]
        word = f"{part.network.rpartition(':')[2]}-{_digest(part.config)}"
        if (home / f"{word}.json").exists():
            continue
        home.mkdir(parents=True, exist_ok=True)
        write_text(home / f"{word}.ask", json.dumps({"network": part.network, "config": part.config}))
        asked.append(name)
    if asked:
        _ensure(places)
    return tuple(asked)


def _digest(config: dict) -> str:
    import hashlib

    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _ensure(places: Places) -> processes.Process:
    """The helper that lives, or a new one."""
    home = folder(places)
    note = home / "process"
    try:
        pid, created = json.loads(note.read_text(encoding="utf-8"))
        known = processes.Process(pid, created)
        if processes.alive(known):
            return known
    except (OSError, ValueError):
        pass
    argv = [sys.executable, "-m", "backend.engine.answers", str(home)]
    env = processes.child_environment(places.root, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
    started = processes.start(argv, log=home / "log.txt", cwd=PROJECT, env=env)
    write_text(note, json.dumps([started.pid, started.created]))
    return started


def end(places: Places) -> None:
    """Ends the helper, if it lives."""
    try:
        pid, created = json.loads((folder(places) / "process").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    processes.end_tree(processes.Process(pid, created))
