"""Peak memory of a run: bytes of live tensors in each of its phases.

A card's allocator counts always. On a CPU operations are looked at while they run, which costs time, and so for two
steps on the largest batch, one sample and one save alone; the other steps run as if nobody looked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from backend.dataset.bucket_sampler import Batch
from backend.engine.tracing import live_tensors
from backend.planner.costs.layout import Fixed
from backend.training.encoding.encoding_cache import View
from backend.training.encoding.sample_source import Source, prompt_name
from backend.training.model.base_model import BaseModel
from backend.training.model.training_module import TrainingModule
from backend.training.optim.cpu_offload import OptimizerCpuOffload
from backend.training.optim.optimizers import EMA

FORWARD, BACKWARD, OPTIMIZER, SAMPLE, SAVE = "forward", "backward", "optimizer", "sample", "save"
STEP = (FORWARD, BACKWARD, OPTIMIZER)
TOKEN_SIDE = 16  # pixels of what becomes one token
MEASURED_STEPS = 2  # steps on equally large batches


class LargestBatch(NamedTuple):
    """A batch, in the order of what it takes."""

    pixels: int = 0  # of all its pictures, those to edit too
    text_tokens: int = 0  # of its longest caption
    height: int = 0
    width: int = 0
    count: int = 0
    reference_tokens: int = 0  # of what one of its samples is edited from


class MeasuredRun(Protocol):
    """What the meter reads of a `backend.training.run.state.Run`."""

    learner: TrainingModule
    vae: torch.nn.Module | None
    device: torch.device
    base: BaseModel
    source: Source
    optimizers: list[torch.optim.Optimizer]
    optimizer_offload: OptimizerCpuOffload | None
    ema: EMA | None


class PeakMeter:
    """The peaks of one run. Enter `step`, `sample` and `save` around each; inside a step name what comes by
    `moment`."""

    def __init__(self, run: MeasuredRun):
        self.run, self.measure = (
            run,
            live_tensors.Measure({**run.learner.parts, "vae": run.vae}, run.device, beside=self._extra_tensors),
        )
        self.counts = self.measure.is_free
        self.steps, self.same, self.largest, self._open = 0, 0, LargestBatch(), False
        self._tokens: dict[str, int] = {}
        self.kept = False  # the peaks are remembered for the next estimate
        self.fixed: Fixed | None = None  # the device's fixed costs, as known when this run began

    @property
    def by_phase(self) -> dict[str, int]:
        """Phase -> bytes, as far as they are known."""
        return dict(self.measure.by_phase)

    @contextlib.contextmanager
    def step(self, groups: list[list[Batch]]) -> Iterator[None]:
        """A step over `groups`; it is looked at where there was none as large before, or but one. The first is passed
        over: only after it is there everything that stays from step to step."""
        size = max(self._size(batch) for group in groups for batch in group)
        seen = self.steps > 0 and (
            self.counts or size > self.largest or (size == self.largest and self.same < MEASURED_STEPS)
        )
        self.steps += 1
        if seen:
            self.same = self.same + 1 if size == self.largest else 1
            self.largest = max(size, self.largest)
        with self._looking(FORWARD, seen):
            yield

    def moment(self, name: str) -> None:
        """Within a step: what comes now."""
        if self._open:
            self.measure.phase(name)

    @contextlib.contextmanager
    def sample(self) -> Iterator[None]:
        """A sample; those before the first step have no optimizer's state beside them and are passed over."""
        with self._looking(SAMPLE, self.steps > 0 and (self.counts or SAMPLE not in self.by_phase)):
            yield

    @contextlib.contextmanager
    def save(self) -> Iterator[None]:
        """A save: all that is made for it is made in the process's own thread, before another writes it."""
        with self._looking(SAVE, self.steps > 0 and (self.counts or SAVE not in self.by_phase)):
            yield

    def enough(self) -> None:
        """What comes is like what was seen: looking may end."""
        if self._open and not self.counts:
            self.measure.end()

    @contextlib.contextmanager
    def _looking(self, name: str, seen: bool) -> Iterator[None]:
        self._open = seen
        if seen:
            self.measure.phase(name)
        try:
            yield
        finally:
            if seen:
                self.measure.end()
            self._open = False

    def _extra_tensors(self) -> Iterator[torch.Tensor]:
        """Optimizers' states, copies of weights in RAM, the running mean."""
        for optimizer in self.run.optimizers:
            for state in optimizer.state.values():
                yield from (one for one in state.values() if isinstance(one, torch.Tensor))
        yield from self.run.optimizer_offload.copies.values() if self.run.optimizer_offload else ()
        yield from self.run.ema.values.values() if self.run.ema else ()

    def _size(self, batch: Batch) -> LargestBatch:
        source = self.run.source
        first, count = batch.items[0], len(batch.items)
        (height, width), *edited = source.shape(first)
        tokens = [
            self.text_tokens(caption, source.references.get(View(item), ()))
            for item in batch.items
            for caption in source.items[item].captions
        ]
        references = sum((tall // TOKEN_SIDE) * (wide // TOKEN_SIDE) for tall, wide in edited)
        return LargestBatch(source.pixels(first) * count, max(tokens, default=0), height, width, count, references)

    def text_tokens(self, prompt: str, references: tuple[str, ...] = ()) -> int:
        """Of a prompt with the pictures that go with it; 0 for one that is encoded in each step."""
        name = prompt_name(prompt, references)
        if name not in self._tokens:
            run, source = self.run, self.run.source
            known = source.texts is not None and name in source.texts
            self._tokens[name] = run.base.family.num_tokens(source.text(prompt, references)) if known else 0
        return self._tokens[name]
