"""What the engine does at one moment, as frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from backend.host.engine.pending_requests import Waiting
from backend.schema.messages import Event, Trouble
from backend.schema.request import GenerationRequest, Result


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
    failed: tuple[Answer, ...] = ()  # those that ended in a trouble which nobody has dismissed yet, the newest last
    trouble: Trouble | None = None  # of the newest request or of the worker; a new request clears it
    waits_for: str = ""  # why a waiting request is not begun: a sentence
    memory: dict = field(default_factory=dict)
    heard_at: float = 0.0  # time.monotonic() of the worker's latest event; 0.0 before its first
    revision: int = 0

    @property
    def last(self) -> Answer | None:
        return self.answers[-1] if self.answers else None


STALLED_SECONDS = 20.0  # without a word from a worker that says every few seconds that it is alive


def silent_seconds(snapshot: EngineSnapshot, now: float) -> float:
    """For how long the worker that has a request has said nothing, by the monotonic time `now`; 0.0 while it is not
    stalled."""
    if snapshot.job is None or not snapshot.pid or not snapshot.heard_at:
        return 0.0
    silent = now - snapshot.heard_at
    return silent if silent >= STALLED_SECONDS else 0.0


_PHASES = {"loading": "loading", "step": "generating", "preview": "generating"}
_VALUES = {"part", "done_bytes", "total_bytes", "step", "steps", "picture", "seconds_left"}


def job_after(job: Job, event: Event) -> Job:
    """`job` with what a progress event ("loading", "step", "preview") tells of it; another event changes nothing."""
    if event.event not in _PHASES:
        return job
    known = {name: event.values[name] for name in _VALUES & event.values.keys()}
    if event.event == "preview":
        known = {"preview": str(event.values.get("path", ""))}
    return replace(job, phase=job.phase if job.phase == "cancelling" else _PHASES[event.event], **known)
