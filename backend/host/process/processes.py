"""Starts, recognises and ends child processes, on Linux, macOS and Windows alike.

A process is known by its pid *and* its start time, so that a recycled pid is never taken for it. Output goes to log
files: a pipe that nobody reads any more blocks its writer. Children live in sessions of their own, so a signal to the
studio's terminal does not reach them; whoever starts them ends them with `end_tree`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import psutil

from backend.host.process.isolation import SAFE, isolated
from backend.schema.messages import Trouble
from backend.system.process_record import (
    NOBODY,
    SAME_START_SECONDS,
    Process,
    command_line,
    find,
    identify,
    without_secrets,
)

PYTHON = (sys.executable, *SAFE)  # how a child in Python is begun
MARK = "LOFT_MARK"  # environment variable that every descendant of a started process inherits
SUPERVISED = "LOFT_SUPERVISED"  # set by launch.py: the end of stdin asks the studio to end


OWN_MODULES = ("backend.", "studio.", "accelerate.")  # what Loft's own commands run


def child_environment(data: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for a child that works on the data folder `data`, where nothing is taken for a
    module."""
    env = {name: value for name, value in os.environ.items() if name not in (MARK, SUPERVISED)}
    env = isolated(env, data=data)
    env.update(
        LOFT_DATA=str(data),
        PYTHONUTF8="1",
        PYTHONUNBUFFERED="1",
        CUDA_DEVICE_ORDER="PCI_BUS_ID",  # the order of NVML, which `card.probe` reports
    )
    env.update(extra or {})
    return env


def start(
    argv: Sequence[str],
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    mark: str = "",
) -> Process:
    """Starts `argv` in a session of its own with nothing on stdin and both outputs appended to the file `log`.

    `mark` is put into the environment, by which `end_tree` finds descendants whose parents are gone. Raises
    Trouble("not_started").
    """
    with log.open("ab") as out:
        child = _popen(argv, cwd=cwd, env=env, mark=mark, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    _reap(child)
    return identify(child.pid, argv)


def start_piped(
    argv: Sequence[str],
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    mark: str = "",
) -> tuple[Process, subprocess.Popen]:
    """As `start`, but with binary pipes on stdin and stdout.

    The caller reads stdout to its end and waits for the child.
    """
    with log.open("ab") as out:
        child = _popen(argv, cwd=cwd, env=env, mark=mark, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out)
    return identify(child.pid, argv), child


def _popen(argv, *, cwd, env, mark, **streams) -> subprocess.Popen:
    env = dict(os.environ if env is None else env)
    if mark:
        env[MARK] = mark
    apart: dict = {"start_new_session": True}
    if sys.platform == "win32":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW}
    try:
        child = subprocess.Popen([str(word) for word in argv], cwd=cwd, env=env, close_fds=True, **apart, **streams)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or error
        raise Trouble("not_started", f"{argv[0]} could not be started: {why}.") from error
    _await_command_line(child)
    return child


def _await_command_line(child: subprocess.Popen) -> None:
    """Until the system tells what the child is: for a moment after its start it has neither command line nor
    environment."""
    end = time.monotonic() + 1.0
    while child.poll() is None and time.monotonic() < end:
        try:
            if psutil.Process(child.pid).cmdline():
                return
        except psutil.Error:
            return
        time.sleep(0.001)


def _reap(child: subprocess.Popen) -> None:
    """Waits for the child in the background, so that none stays behind as a zombie."""
    threading.Thread(target=child.wait, name=f"wait-{child.pid}", daemon=True).start()


def members(process: Process, *, mark: str = "") -> list[psutil.Process]:
    """The living tree of `process`: itself, all descendants, and orphans of it that carry `mark` or its session."""
    tree: dict[int, psutil.Process] = {}
    root = find(process)
    if root is not None:
        tree[root.pid] = root
        with contextlib.suppress(psutil.Error):  # it ends while being asked; its orphans are found below
            tree.update((child.pid, child) for child in root.children(recursive=True))
    for orphan in _orphans(process, mark):
        tree.setdefault(orphan.pid, orphan)
    tree.pop(os.getpid(), None)
    return list(tree.values())


def _orphans(process: Process, mark: str) -> Iterable[psutil.Process]:
    led = 0 < process.pid < 2**31 and (find(process) is not None or not psutil.pid_exists(process.pid))
    for found in psutil.process_iter():
        try:
            if process.created and found.create_time() < process.created - SAME_START_SECONDS:
                continue
            if (led and _in_session(found.pid, process)) or (mark and found.environ().get(MARK) == mark):
                yield found
        except (psutil.Error, OSError):
            continue  # gone, or another user's


def _in_session(pid: int, process: Process) -> bool:
    """Whether `pid` is of the session that `process` leads or led; never true of our own session."""
    if sys.platform == "win32" or process.created == 0:
        return False
    return pid != process.pid and os.getsid(pid) == process.pid != os.getsid(0)


def end_tree(process: Process, *, grace_seconds: float = 5.0, mark: str = "") -> bool:
    """Ends `process` and everything under it; returns whether all of it is gone.

    The tree is listed before the first signal, since elastic workers live in sessions of their own and lose their
    parent with the launcher. All are asked to terminate, those left after `grace_seconds` are killed. With 0 they are
    killed at once.
    """
    tree = members(process, mark=mark)
    if grace_seconds > 0:
        _each(tree, psutil.Process.terminate)
        _, tree = psutil.wait_procs(tree, timeout=grace_seconds)
        seen = {found.pid for found in tree}
        tree += [found for found in members(process, mark=mark) if found.pid not in seen]
    _each(tree, psutil.Process.kill)
    _, left = psutil.wait_procs(tree, timeout=10)
    return not [found for found in left if _running(found)]


def _running(found: psutil.Process) -> bool:
    try:
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _each(tree: list[psutil.Process], act: Callable[[psutil.Process], object]) -> None:
    for found in tree:
        try:
            act(found)
        except psutil.Error:
            continue


def marked(mark: str) -> list[Process]:
    """Every living process of this user that carries `mark` in its environment."""
    return [identify(found.pid, command_line(found)) for found in _orphans(NOBODY, mark)]


def child(process: Process, *, mark: str) -> Process:
    """`process`, if that very process lives, carries `mark`, which only those who start it can give it, and runs a
    command of Loft's; else `NOBODY`, whose end ends what carries the mark alone."""
    found = find(process)
    if found is None or mark_of(found) != mark:
        return NOBODY
    line = without_secrets(command_line(found))
    return process if line == list(process.argv) or any(word.startswith(OWN_MODULES) for word in line) else NOBODY


def mark_of(found: psutil.Process) -> str | None:
    """The mark that a living process carries, "" for none, None where the system does not tell."""
    try:
        return found.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return None


def names_folder(process: Process, folder: Path, modules: tuple[str, ...]) -> bool:
    """Whether that very process lives and its own command line runs one of `modules` on `folder`: one that a person
    started by hand."""
    found = find(process)
    if found is None or mark_of(found):
        return False
    line = command_line(found)
    if not any(word.replace("\\", "/").rpartition("/")[2] in modules for word in line):
        return False
    try:
        here = Path(found.cwd())
    except (psutil.Error, OSError):
        return False
    wanted = os.path.realpath(folder)
    return any(os.path.realpath(here / word.partition("=")[2 * ("=" in word)]) == wanted for word in line if word)


def marks(prefix: str) -> set[str]:
    """The marks that begin with `prefix` and that a living process of this user carries."""
    found = (mark_of(process) for process in psutil.process_iter())
    return {mark for mark in found if mark and mark.startswith(prefix)}
