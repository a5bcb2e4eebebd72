"""The engine worker: `python -m backend.engine [--fake]`. A line in, events out; docs/architecture.md has the words.

The models stay loaded between requests. `--fake` is the same loop with a painted gradient instead of a model and
without torch.
"""

from __future__ import annotations

import os
import queue
import sys
import traceback
from collections.abc import Callable

from backend.engine.devices import allocator_limits
from backend.engine.worker.protocol import Wire
from backend.schema.messages import Cancelled, Trouble

IDLE_SECONDS = 0.2  # of quiet after the start, then the libraries that every request needs are imported
QUIET_SECONDS = 20.0  # without a command, then the device is measured


def main(argv: list[str]) -> int:
    wire = Wire()
    unknown = [word for word in argv if word != "--fake"]
    if unknown:
        wire.say_trouble(Trouble("bad_flags", f"The engine does not know {unknown[0]!r}.", hint="It takes --fake."))
        return 2
    worker = _start(wire, fake="--fake" in argv)
    if worker is None:
        return 1
    wire.say("ready", **worker.about())
    wire.beat()
    try:
        values = wire.commands.get(timeout=IDLE_SECONDS)
    except queue.Empty:
        worker.warm_up()
        values = _next(wire, worker)
    while values is not None and values["command"] != "quit":
        _answer(wire, worker, values)
        values = _next(wire, worker)
    worker.unload()
    return 0


def _next(wire: Wire, worker) -> dict | None:
    """The next command. While none comes the device is measured, if it was not yet; a command ends that."""
    while not worker.measured:
        try:
            return wire.commands.get(timeout=QUIET_SECONDS)
        except queue.Empty:
            worker.measure_speed(lambda: wire.ended.is_set() or not wire.commands.empty())
    return wire.commands.get()


def _start(wire: Wire, *, fake: bool):
    try:
        if fake:
            from backend.engine.worker.fake import FakeWork

            return FakeWork(wire)
        _prepare_process()
        from backend.engine.worker.commands import Work

        return Work(wire)
    except Trouble as trouble:
        wire.say_trouble(trouble)
    except Exception as error:
        wire.say_trouble(_unexpected(error, "start"))
    return None


def _prepare_process() -> None:
    """What torch and OpenMP read when they are loaded: fragments are kept small (not on Windows), idle threads
    sleep."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    allocator_limits.expand_segments()


def _answer(wire: Wire, worker, values: dict) -> None:
    """Does one command; whatever happens, exactly one last event answers it."""
    id = values["id"]
    try:
        _command(worker, values["command"])(id, values)
    except Trouble as trouble:
        wire.say_trouble(trouble, id=id)
    except Cancelled:
        wire.say("cancelled", id=id)
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # libraries in Rust panic with one that is no Exception
        wire.say_trouble(worker.explain(error, values["command"]) or _unexpected(error, values["command"]), id=id)
    finally:
        wire.done(id)


def _command(worker, name: str) -> Callable[[str, dict], None]:
    known = {
        "load": worker.load,
        "generate": worker.generate,
        "unload": worker.unload,
        "tool": worker.tool,
        "estimate": worker.estimate,
    }
    if name not in known:
        raise Trouble(
            "bad_command", f"The engine has no command {name!r}.", hint=f"It knows {', '.join(known)}, cancel, quit."
        )
    return known[name]


def _unexpected(error: BaseException, doing: str) -> Trouble:
    traceback.print_exception(error)
    return Trouble(
        "unexpected",
        f"The engine failed to {doing}: {type(error).__name__}: {error}".rstrip(".") + ".",
        hint="The details are in user/engine.log.",
        detail="".join(traceback.format_exception(error)),
    )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # the reader thread is still in stdin, which the interpreter's own end would wait for
