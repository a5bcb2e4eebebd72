"""Which requests wait, which one is at work and how others ended: one frozen snapshot under one lock, and the files
that keep it."""

from __future__ import annotations

import dataclasses
import threading
import time

from backend.host.engine import failed_requests, pending_requests
from backend.host.engine.pending_requests import Waiting
from backend.host.engine.snapshot import Answer, EngineSnapshot, Job, job_after
from backend.schema.messages import Event, Trouble, trouble_from_values
from backend.schema.paths import Places
from backend.schema.request import GenerationRequest, Result, result_from_values

KEPT_ANSWERS = 50


class Ledger:
    """Whoever waits for a change waits on `changed`; whoever changes something holds it (a lock that one thread may
    take twice)."""

    def __init__(self, places: Places):
        """Brings back what waited, held, and what failed and was not read yet."""
        self.changed = threading.Condition(threading.RLock())
        self._queue, self._failed = places.user / "queue", places.user / "failed"
        self.snapshot = EngineSnapshot(
            queue=tuple(pending_requests.load(self._queue)), failed=failed_requests.load(self._failed)
        )

    def set(self, **values) -> None:
        """Replaces the snapshot by one with other `values` and the next revision."""
        with self.changed:
            self.snapshot = dataclasses.replace(self.snapshot, revision=self.snapshot.revision + 1, **values)

    def heard(self) -> None:
        """Notes that the worker has said something; that alone is nothing to redraw, so the revision stays."""
        with self.changed:
            self.snapshot = dataclasses.replace(self.snapshot, heard_at=time.monotonic())

    def submit(self, request: GenerationRequest) -> str:
        """Puts `request` at the end of the queue, on the disk too, and returns its id."""
        waiting = pending_requests.new(request)
        pending_requests.save(waiting, self._queue)
        with self.changed:
            self.set(queue=(*self.snapshot.queue, waiting), trouble=None)
        return waiting.id

    def withdraw(self, id: str) -> None:
        """Takes a waiting request off the queue."""
        pending_requests.remove(id, self._queue)
        with self.changed:
            self.set(queue=pending_requests.without(self.snapshot.queue, id))

    def begin(self, item: Waiting, *, state: str) -> Job:
        """Makes a waiting request the job."""
        job = Job(item.id, item.request, steps=item.request.num_inference_steps, began_at=time.time())
        with self.changed:
            self.set(queue=pending_requests.without(self.snapshot.queue, item.id), job=job, state=state)
        return job

    def put_back(self, job: Job, *, held: bool) -> None:
        """Has a job wait again, before all others."""
        back = Waiting(job.id, job.request, held=held, submitted_at=job.began_at)
        with self.changed:
            self.set(queue=(back, *self.snapshot.queue), job=None)

    def hear(self, job: Job, event: Event, *, state: str) -> None:
        """Takes an event of the job: how far it is, or its answer, after which the engine is in `state`."""
        if event.event == "result":
            self.answer(job, result=result_from_values(event.values), state=state)
        elif event.event == "cancelled":
            self.answer(job, state=state)
        elif event.event == "trouble":
            self.answer(job, trouble=trouble_from_values(event.values), state=state)
        else:
            job = job_after(job, event)
            self.set(job=job, state=job.phase)

    def answer(self, job: Job, *, state: str, result: Result | None = None, trouble: Trouble | None = None) -> None:
        """Ends a job: with a result, with a trouble, or cancelled.

        A trouble stays among `failed` until it is dismissed.
        """
        pending_requests.remove(job.id, self._queue)
        answer = Answer(job.id, job.request, result, trouble, ended_at=time.time())
        if trouble is not None:
            failed_requests.save(answer, self._failed)
        with self.changed:
            failed = self.snapshot.failed if trouble is None else (*self.snapshot.failed, answer)
            for old in failed[: -failed_requests.KEPT]:
                failed_requests.remove(old.id, self._failed)
            answers = (*self.snapshot.answers, answer)[-KEPT_ANSWERS:]
            self.set(job=None, answers=answers, failed=failed[-failed_requests.KEPT :], trouble=trouble, state=state)
            self.changed.notify_all()

    def failed(self, id: str) -> Answer | None:
        return next((answer for answer in self.snapshot.failed if answer.id == id), None)

    def dismiss(self, id: str | None = None) -> None:
        """Takes a failed request off, once it has been read; without an id all of them, and what went wrong with the
        worker."""
        with self.changed:
            gone = [answer for answer in self.snapshot.failed if id in (None, answer.id)]
            for answer in gone:
                failed_requests.remove(answer.id, self._failed)
            left = tuple(answer for answer in self.snapshot.failed if answer not in gone)
            told = id is None or any(answer.trouble is self.snapshot.trouble for answer in gone)
            self.set(failed=left, trouble=None if told else self.snapshot.trouble)
