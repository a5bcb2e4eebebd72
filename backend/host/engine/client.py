"""The client of the engine worker: starts it on demand, sends it one request after the other, and keeps one snapshot of
what it does.

Three threads touch an `Engine`: the caller's, which only changes the queue and returns; the pump, which alone begins
requests; and one reader for each worker. Whatever they know is in the ledger, one frozen `EngineSnapshot` replaced
under one lock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

from backend.host.engine import pending_requests
from backend.host.engine import worker_process as workers
from backend.host.engine.job_state import Ledger
from backend.host.engine.pending_requests import Waiting
from backend.host.engine.snapshot import EngineSnapshot, Job
from backend.host.engine.worker_process import Worker
from backend.host.process import processes
from backend.host.runs import status
from backend.schema.messages import Event, Trouble, trouble_from_values
from backend.schema.paths import Places
from backend.schema.request import GenerationRequest, request_to_values

BUSY_POLL_SECONDS = 1.0


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

        `argv` replaces the worker's command; `busy` says in a sentence who has the card, or "" (by default: a live
        run).
        """
        self._places = places
        self._argv = argv or [*processes.PYTHON, "-m", "backend.engine", *(["--fake"] if fake else [])]
        self._busy = busy or (lambda: status.at_work(places))
        self._ledger = Ledger(places)
        self._changed = self._ledger.changed
        self._set = self._ledger.set
        self._worker: Worker | None = None
        self._pauses = 0
        self._closed = False
        self._pump: threading.Thread | None = None
        self._asked: dict[str, list[Event]] = {}
        workers.end_left_behind(places)

    # What the page asks

    def snapshot(self) -> EngineSnapshot:
        return self._ledger.snapshot

    def submit(self, request: GenerationRequest) -> str:
        """Puts `request` at the end of the queue and returns its id; the worker is started if there is none."""
        id = self._ledger.submit(request)
        with self._changed:
            self._wake()
        return id

    def release(self, id: str | None = None) -> None:
        """Lets the held request `id`, or all of them, be begun."""
        with self._changed:
            self._set(queue=pending_requests.released(self._ledger.snapshot.queue, id))
            self._wake()

    def cancel(self, id: str | None = None) -> None:
        """Takes a waiting request off the queue, or ends the one at work: softly at first, by the worker's end at a
        second call.

        Without an id it is the one at work.
        """
        with self._changed:
            job = self._ledger.snapshot.job
            if job is None or id not in (None, job.id):
                if id is not None:
                    self._ledger.withdraw(id)
                return
            worker = self._worker
            if job.phase != "cancelling" and worker is not None and worker.ready:
                self._set(job=dataclasses.replace(job, phase="cancelling"), state="cancelling")
                workers.send(worker, {"command": "cancel", "id": job.id})
                return
            if worker is not None:
                worker.wanted_end = "cancel"
            else:
                self._answer(job)
        if worker is not None:
            processes.end_tree(worker.process, grace_seconds=0)

    def dismiss(self, id: str | None = None) -> None:
        """Takes a failed request off the snapshot, once it has been read; without an id all of them, and the worker's
        trouble."""
        self._ledger.dismiss(id)

    def try_again(self, id: str) -> str:
        """Puts a failed request into the queue anew and returns its new id; "" where it is no longer there."""
        failed = self._ledger.failed(id)
        if failed is None:
            return ""
        again = self.submit(failed.request)
        self._ledger.dismiss(id)
        return again

    def ensure(self) -> None:
        """Starts the worker if there is none.

        Raises Trouble("card_busy") while a run has the card, Trouble("not_started").
        """
        taken = self._busy()
        if taken:
            raise Trouble("card_busy", taken, hint="Wait for it, or stop it on the Train tab.")
        with self._changed:
            if self._worker is None and not self._pauses and not self._closed:
                self._start_worker()

    def unload(self) -> None:
        """Asks an idle worker to let go of its models; the process stays."""
        with self._changed:
            if self._worker is not None and self._worker.ready and self._ledger.snapshot.job is None:
                workers.send(self._worker, {"command": "unload", "id": ""})

    def ask(self, command: str, *, timeout_seconds: float = 60.0, **values) -> list[Event]:
        """Sends another command ("load", "tool", "estimate") to the worker and returns its events, the last one an
        answer.

        Starts the worker if there is none. Raises the Trouble that it answers with, or Trouble("timeout" |
        "worker_died").
        """
        self.ensure()
        worker = self._worker
        if worker is None:
            raise Trouble("worker_died", "The engine is being ended.", hint="Try again.")
        end = time.monotonic() + timeout_seconds
        worker.decided.wait(timeout_seconds)
        id = f"ask-{pending_requests.new(GenerationRequest()).id}"
        with self._changed:
            events = self._asked.setdefault(id, [])
            workers.send(worker, {"command": command, "id": id, **values})
            left = max(0.0, end - time.monotonic())
            self._changed.wait_for(lambda: workers.answered(events) or worker is not self._worker, timeout=left)
            self._asked.pop(id, None)
            gone = worker is not self._worker
        return workers.checked(events, command, gone=gone, timeout_seconds=timeout_seconds)

    def stop(self) -> bool:
        """Ends the worker for good; a request at work and those that wait come back, held, with the next `Engine`.

        Returns whether the worker is gone.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self._end_worker()

    @contextlib.contextmanager
    def card_given(self) -> Iterator[None]:
        """Ends the worker and starts none inside the `with`: for whoever takes the card.

        A request at work waits again.
        """
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
        if self._pauses or self._ledger.snapshot.job is not None:
            return None
        return next((item for item in self._ledger.snapshot.queue if not item.held), None)

    def _run_pump(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
            taken = self._busy()
            with self._changed:
                item = self._next()
                why = taken if item is not None else ""
                if why != self._ledger.snapshot.waits_for:
                    self._set(waits_for=why)
                if taken:
                    self._changed.wait(BUSY_POLL_SECONDS)
                worker = self._begin(item) if item is not None and not taken and not self._closed else None
            if worker is not None and item is not None:
                worker.decided.wait()
                self._hand_over(worker, item)

    def _begin(self, item: Waiting) -> Worker | None:
        """Makes `item` the job and starts the worker; where that fails the request is held."""
        try:
            worker = self._worker or self._start_worker()
        except (Trouble, OSError) as error:
            trouble = error if isinstance(error, Trouble) else Trouble("not_started", f"No engine: {error}.")
            others = pending_requests.without(self._ledger.snapshot.queue, item.id)
            self._set(queue=(dataclasses.replace(item, held=True), *others), trouble=trouble, state="off")
            return None
        self._ledger.begin(item, state="loading" if worker.ready else "starting")
        return worker

    def _hand_over(self, worker: Worker, item: Waiting) -> None:
        folder = self._places.outputs / time.strftime("%Y-%m-%d")
        with self._changed:
            job = self._ledger.snapshot.job
            if worker is not self._worker or not worker.ready or job is None or job.id != item.id:
                return
            if job.phase == "cancelling":
                return self._answer(job)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return self._answer(job, trouble=Trouble("no_folder", f"{folder} cannot be made: {error.strerror}."))
            self._set(job=dataclasses.replace(job, phase="loading"), state="loading")
            request = request_to_values(item.request)
            workers.send(worker, {"command": "generate", "id": item.id, "request": request, "folder": str(folder)})

    # The worker

    def _start_worker(self) -> Worker:
        worker = workers.start(self._argv, self._places)
        self._worker = worker
        self._set(state="starting", pid=worker.process.pid, memory={}, heard_at=0.0)
        workers.follow(worker, lambda event: self._heard(worker, event), lambda code: self._ended(worker, code))
        return worker

    def _end_worker(self) -> bool:
        with self._changed:
            worker = self._worker
            if worker is None:
                return True
            worker.wanted_end = worker.wanted_end or "stop"
            patience = 1.0 if self._ledger.snapshot.job is None else 0.3
        gone = workers.end(worker, self._places, patience_seconds=patience)
        with self._changed:
            self._changed.wait_for(lambda: self._worker is not worker, timeout=10)
        return gone

    def _heard(self, worker: Worker, event: Event) -> None:
        with self._changed:
            if worker is self._worker:
                self._take(worker, event)
                self._changed.notify_all()

    def _ended(self, worker: Worker, code: int) -> None:
        with self._changed:
            if worker is self._worker:
                self._gone(worker, code)
            worker.decided.set()
            self._changed.notify_all()

    def _gone(self, worker: Worker, code: int) -> None:
        """Says what the worker's end means for the request it had."""
        self._worker = None
        with contextlib.suppress(OSError):  # the folder may be gone, or another's
            (self._places.user / "worker.json").unlink(missing_ok=True)
        job = self._ledger.snapshot.job
        self._set(state="off", pid=0, memory={}, job=None)
        if worker.wanted_end == "cancel" and job is not None:
            self._answer(job)
        elif worker.wanted_end == "stop" and job is not None:
            self._ledger.put_back(job, held=self._closed)
        elif not worker.wanted_end:
            trouble = workers.death(worker, code, self._places, working=job is not None)
            if not worker.ready:  # it would die again: let nothing that waits start it over and over
                self._set(queue=pending_requests.held(self._ledger.snapshot.queue))
            if job is not None:
                self._answer(job, trouble=trouble)
            self._set(trouble=trouble)

    def _take(self, worker: Worker, event: Event) -> None:
        self._ledger.heard()
        if event.event == "ready":
            worker.ready = True
            device, name = (str(event.values.get(key, "")) for key in ("device", "name"))
            self._set(state="idle" if self._ledger.snapshot.job is None else "loading", device=device, device_name=name)
            worker.decided.set()
        elif event.event == "alive":
            pass
        elif event.event == "memory":
            self._set(memory=event.values)
        elif event.id in self._asked:
            self._asked[event.id].append(event)
        elif self._ledger.snapshot.job is not None and event.id == self._ledger.snapshot.job.id:
            if not (worker.wanted_end == "stop" and event.event in ("cancelled", "trouble")):  # it will be asked again
                self._ledger.hear(self._ledger.snapshot.job, event, state=self._state)
        elif event.event == "trouble":
            worker.trouble = trouble_from_values(event.values)
            self._set(trouble=worker.trouble)

    def _answer(self, job: Job, *, trouble: Trouble | None = None) -> None:
        self._ledger.answer(job, trouble=trouble, state=self._state)

    @property
    def _state(self) -> str:
        """What the engine is without a job."""
        return "idle" if self._worker else "off"
