"""The client of the engine worker: starts it on demand, sends it one request after the other, and keeps one snapshot of what it does.

Three threads touch an `Engine`: the caller's, which only changes the queue and returns; the pump, which alone begins requests;
and one reader for each worker. Whatever they know is in one frozen `EngineSnapshot`, replaced under one lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from backend.host import processes, queue, run
from backend.host.endings import death_of_worker
from backend.host.files import write_text
from backend.host.queue import Waiting
from backend.schema.messages import Event, Trouble, from_line, trouble_from_values
from backend.schema.places import Places
from backend.schema.request import GenerationRequest, Result, request_to_values, result_from_values

KEPT_ANSWERS = 50
LOG_BYTES = 8 * 1024 * 1024
BUSY_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """The request that the worker has now."""

    id: str
    request: GenerationRequest
    phase: str = "starting"  # "starting" (the worker), "loading", "generating", "cancelling"
    part: str = ""  # what is being loaded
    done_bytes: int = 0
    total_bytes: int = 0
    step: int = 0
    steps: int = 0
    picture: int = 0  # counts from 0
    seconds_left: float | None = None
    preview: str = ""  # path of the newest preview picture
    began_at: float = 0.0


@dataclass(frozen=True)
class Answer:
    """How a request ended: with a result, with a trouble, or cancelled (neither)."""

    id: str
    request: GenerationRequest
    result: Result | None = None
    trouble: Trouble | None = None
    ended_at: float = 0.0

    @property
    def cancelled(self) -> bool:
        return self.result is None and self.trouble is None


@dataclass(frozen=True)
class EngineSnapshot:
    """What the engine does at one moment. `revision` grows with every change."""

    state: str = "off"  # "off", "starting", "idle", "loading", "generating", "cancelling"
    device: str = ""
    device_name: str = ""
    pid: int = 0
    job: Job | None = None
    queue: tuple[Waiting, ...] = ()
    answers: tuple[Answer, ...] = ()  # the newest last
    trouble: Trouble | None = None  # of the newest request or of the worker; a new request clears it
    waits_for: str = ""  # why a waiting request is not begun: a sentence
    memory: dict = dataclasses.field(default_factory=dict)
    revision: int = 0

    @property
    def last(self) -> Answer | None:
        return self.answers[-1] if self.answers else None


@dataclass(eq=False)
class _Worker:
    process: processes.Process
    child: subprocess.Popen
    decided: threading.Event  # set when it is ready or gone
    ready: bool = False
    wanted_end: str = ""  # "cancel" or "stop" when it was us who ended it


class Engine:
    """One engine worker at most. Every method may be called from any thread and returns soon."""

    def __init__(
        self,
        places: Places,
        *,
        fake: bool = False,
        argv: list[str] | None = None,
        busy: Callable[[], str] | None = None,
    ):
        """Brings back waiting requests, held, and ends a worker that an earlier studio left behind.

        `argv` replaces the worker's command; `busy` says in a sentence who has the card, or "" (by default: a live run).
        """
        self._places = places
        self._argv = argv or [sys.executable, "-m", "backend.engine", *(["--fake"] if fake else [])]
        self._busy = busy or (lambda: _run_at_work(places))
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue_folder = places.user / "queue"
        self._worker: _Worker | None = None
        self._pauses = 0
        self._closed = False
        self._pump: threading.Thread | None = None
        self._asked: dict[str, list[Event]] = {}
        self._snapshot = EngineSnapshot(queue=tuple(queue.load(self._queue_folder)))
        self._end_left_behind()

    # What the page asks

    def snapshot(self) -> EngineSnapshot:
        return self._snapshot

    def submit(self, request: GenerationRequest) -> str:
        """Puts `request` at the end of the queue and returns its id; the worker is started if there is none."""
        waiting = queue.new(request)
        queue.save(waiting, self._queue_folder)
        with self._changed:
            self._set(queue=(*self._snapshot.queue, waiting), trouble=None)
            self._wake()
        return waiting.id

    def release(self, id: str | None = None) -> None:
        """Lets the held request `id`, or all of them, be begun."""
        with self._changed:
            items = self._snapshot.queue
            self._set(
                queue=tuple(dataclasses.replace(item, held=item.held and id not in (None, item.id)) for item in items)
            )
            self._wake()

    def cancel(self, id: str | None = None) -> None:
        """Takes a waiting request off the queue, or ends the one at work: softly at first, by the worker's end at a second call.

        Without an id it is the one at work.
        """
        with self._changed:
            job = self._snapshot.job
            if job is None or id not in (None, job.id):
                self._drop(id)
                return
            worker = self._worker
            if job.phase != "cancelling" and worker is not None and worker.ready:
                self._set(job=dataclasses.replace(job, phase="cancelling"), state="cancelling")
                self._send(worker, {"command": "cancel", "id": job.id})
                return
            if worker is not None:
                worker.wanted_end = "cancel"
            else:
                self._answer(job)
        if worker is not None:
            processes.end_tree(worker.process, grace_seconds=0)

    def dismiss(self) -> None:
        """Takes the trouble off the snapshot, once it has been read."""
        with self._changed:
            self._set(trouble=None)

    def ensure(self) -> None:
        """Starts the worker if there is none. Raises Trouble("card_busy") while a run has the card, Trouble("not_started")."""
        taken = self._busy()
        if taken:
            raise Trouble("card_busy", taken, hint="Wait for it, or stop it on the Train tab.")
        with self._changed:
            if self._worker is None and not self._pauses and not self._closed:
                self._start_worker()

    def unload(self) -> None:
        """Asks an idle worker to let go of its models; the process stays."""
        with self._changed:
            if self._worker is not None and self._worker.ready and self._snapshot.job is None:
                self._send(self._worker, {"command": "unload", "id": ""})

    def ask(self, command: str, *, timeout_seconds: float = 60.0, **values) -> list[Event]:
        """Sends another command ("load", "tool", "estimate") to the worker and returns its events, the last one an answer.

        Starts the worker if there is none. Raises the Trouble that it answers with, or Trouble("timeout" | "worker_died").
        """
        self.ensure()
        worker = self._worker
        if worker is None:
            raise Trouble("worker_died", "The engine is being ended.", hint="Try again.")
        end = time.monotonic() + timeout_seconds
        worker.decided.wait(timeout_seconds)
        id = f"ask-{queue.new(GenerationRequest()).id}"
        with self._changed:
            events = self._asked.setdefault(id, [])
            self._send(worker, {"command": command, "id": id, **values})
            self._changed.wait_for(
                lambda: (events and events[-1].event in _ANSWERS) or worker is not self._worker,
                timeout=max(0.0, end - time.monotonic()),
            )
            self._asked.pop(id, None)
        if events and events[-1].event == "trouble":
            raise trouble_from_values(events[-1].values)
        if worker is not self._worker:
            raise Trouble("worker_died", f"The engine ended while it was asked to {command}.", hint="Try again.")
        if not events or events[-1].event not in _ANSWERS:
            raise Trouble("timeout", f"The engine did not answer to {command} within {timeout_seconds:.0f} s.")
        return events

    def stop(self) -> None:
        """Ends the worker for good; a request at work and those that wait come back, held, with the next `Engine`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end_worker()

    @contextlib.contextmanager
    def card_given(self) -> Iterator[None]:
        """Ends the worker and starts none inside the `with`: for whoever takes the card. A request at work waits again."""
        with self._changed:
            self._pauses += 1
        try:
            self._end_worker()
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._wake()

    # The pump

    def _wake(self) -> None:
        if self._pump is None and not self._closed:
            self._pump = threading.Thread(target=self._run_pump, name="engine-pump", daemon=True)
            self._pump.start()
        self._changed.notify_all()

    def _next(self) -> Waiting | None:
        if self._pauses or self._snapshot.job is not None:
            return None
        return next((item for item in self._snapshot.queue if not item.held), None)

    def _run_pump(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
            taken = self._busy()
            with self._changed:
                if taken != self._snapshot.waits_for:
                    self._set(waits_for=taken)
                item = self._next()
                if taken or item is None:
                    self._changed.wait(BUSY_POLL_SECONDS)
                    continue
                worker = self._begin(item)
            if worker is not None:
                worker.decided.wait()
                self._hand_over(worker, item)

    def _begin(self, item: Waiting) -> _Worker | None:
        """Makes `item` the job and starts the worker; where that fails the request is held."""
        others = tuple(other for other in self._snapshot.queue if other.id != item.id)
        try:
            worker = self._worker or self._start_worker()
        except (Trouble, OSError) as error:
            trouble = error if isinstance(error, Trouble) else Trouble("not_started", f"No engine: {error}.")
            self._set(queue=(dataclasses.replace(item, held=True), *others), trouble=trouble, state="off")
            return None
        job = Job(item.id, item.request, steps=item.request.num_inference_steps, began_at=time.time())
        self._set(queue=others, job=job, state="loading" if worker.ready else "starting")
        return worker

    def _hand_over(self, worker: _Worker, item: Waiting) -> None:
        folder = self._places.outputs / time.strftime("%Y-%m-%d")
        with self._changed:
            job = self._snapshot.job
            if worker is not self._worker or not worker.ready or job is None or job.id != item.id:
                return
            folder.mkdir(parents=True, exist_ok=True)
            self._set(job=dataclasses.replace(job, phase="loading"), state="loading")
            request = request_to_values(item.request)
            self._send(worker, {"command": "generate", "id": item.id, "request": request, "folder": str(folder)})

    # The worker

    def _start_worker(self) -> _Worker:
        log = self._log()
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LOG_BYTES:
            log.replace(log.with_suffix(".old.log"))
        process, child = processes.start_piped(
            self._argv,
            log=log,
            cwd=self._places.root,
            env=processes.child_environment(self._places.root),
            mark=self._mark(),
        )
        write_text(self._places.user / "worker.json", processes.to_text(process))
        worker = _Worker(process, child, threading.Event())
        self._worker = worker
        self._set(state="starting", pid=process.pid, memory={})
        threading.Thread(target=self._read, args=(worker,), name=f"engine-{process.pid}", daemon=True).start()
        return worker

    def _log(self) -> Path:
        return self._places.user / "engine.log"

    def _mark(self) -> str:
        return f"engine:{self._places.root.resolve()}"

    def _send(self, worker: _Worker, values: dict) -> None:
        try:
            worker.child.stdin.write((json.dumps(values, ensure_ascii=False) + "\n").encode("utf-8"))
            worker.child.stdin.flush()
        except (OSError, ValueError):
            return  # it is gone or going: its reader says so

    def _end_worker(self) -> None:
        """End of stdin asks the worker to end; after a grace its tree is ended."""
        with self._changed:
            worker = self._worker
            if worker is None:
                return
            worker.wanted_end = worker.wanted_end or "stop"
        with contextlib.suppress(OSError, ValueError):
            worker.child.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.child.wait(timeout=1.0 if self._snapshot.job is None else 0.3)
        processes.end_tree(worker.process, grace_seconds=2.0, mark=self._mark())
        with self._changed:
            self._changed.wait_for(lambda: self._worker is not worker, timeout=10)

    def _end_left_behind(self) -> None:
        known = processes.from_file(self._places.user / "worker.json")
        if known and processes.alive(known[0]):
            processes.end_tree(known[0], grace_seconds=1.0)

    def _read(self, worker: _Worker) -> None:
        for line in worker.child.stdout:
            event = from_line(line.decode("utf-8", errors="replace"))
            if event is not None:
                with self._changed:
                    if worker is self._worker:
                        self._take(worker, event)
                        self._changed.notify_all()
        code = worker.child.wait()
        worker.child.stdout.close()
        with contextlib.suppress(OSError, ValueError):
            worker.child.stdin.close()
        with self._changed:
            if worker is self._worker:
                self._gone(worker, code)
            worker.decided.set()
            self._changed.notify_all()

    def _gone(self, worker: _Worker, code: int) -> None:
        """Says what the worker's end means for the request it had."""
        self._worker = None
        (self._places.user / "worker.json").unlink(missing_ok=True)
        job = self._snapshot.job
        self._set(state="off", pid=0, memory={}, job=None)
        if worker.wanted_end == "cancel" and job is not None:
            self._answer(job)
        elif worker.wanted_end == "stop" and job is not None:
            back = Waiting(job.id, job.request, held=self._closed, submitted_at=job.began_at)
            self._set(queue=(back, *self._snapshot.queue))
        elif not worker.wanted_end:
            trouble = death_of_worker(code, ready=worker.ready, working=job is not None, log=self._log())
            if not worker.ready:  # it would die again: let nothing that waits start it over and over
                self._set(queue=tuple(dataclasses.replace(item, held=True) for item in self._snapshot.queue))
            if job is not None:
                self._answer(job, trouble=trouble)
            self._set(trouble=trouble)

    def _take(self, worker: _Worker, event: Event) -> None:
        if event.event == "ready":
            worker.ready = True
            device = {
                name: str(event.values.get(key, "")) for name, key in (("device", "device"), ("device_name", "name"))
            }
            self._set(state="idle" if self._snapshot.job is None else "loading", **device)
            worker.decided.set()
        elif event.event == "memory":
            self._set(memory=event.values)
        elif event.id in self._asked:
            self._asked[event.id].append(event)
        elif self._snapshot.job is not None and event.id == self._snapshot.job.id:
            self._take_of_job(self._snapshot.job, event)
        elif event.event == "trouble":
            self._set(trouble=trouble_from_values(event.values))

    def _take_of_job(self, job: Job, event: Event) -> None:
        values = event.values
        if event.event == "result":
            self._answer(job, result=result_from_values(values))
        elif event.event == "cancelled":
            self._answer(job)
        elif event.event == "trouble":
            self._answer(job, trouble=trouble_from_values(values))
        elif event.event in _PROGRESS:
            phase = job.phase if job.phase == "cancelling" else _PROGRESS[event.event]
            known = {name: values[name] for name in _JOB_VALUES & values.keys()}
            if event.event == "preview":
                known = {"preview": str(values.get("path", ""))}
            self._set(job=dataclasses.replace(job, phase=phase, **known), state=phase)

    def _answer(self, job: Job, *, result: Result | None = None, trouble: Trouble | None = None) -> None:
        queue.remove(job.id, self._queue_folder)
        answer = Answer(job.id, job.request, result, trouble, ended_at=time.time())
        answers = (*self._snapshot.answers, answer)[-KEPT_ANSWERS:]
        self._set(job=None, answers=answers, trouble=trouble, state="idle" if self._worker else "off")
        self._changed.notify_all()

    def _drop(self, id: str | None) -> None:
        if id is not None and any(item.id == id for item in self._snapshot.queue):
            queue.remove(id, self._queue_folder)
            self._set(queue=tuple(item for item in self._snapshot.queue if item.id != id))

    def _set(self, **values) -> None:
        self._snapshot = dataclasses.replace(self._snapshot, revision=self._snapshot.revision + 1, **values)


_PROGRESS = {"loading": "loading", "step": "generating", "preview": "generating"}
_JOB_VALUES = {"part", "done_bytes", "total_bytes", "step", "steps", "picture", "seconds_left"}
_ANSWERS = ("result", "trouble", "cancelled", "loaded", "unloaded", "estimate")


def _run_at_work(places: Places) -> str:
    live = run.live_runs(places)
    return f"The run {live[0].name} is using the card." if live else ""
