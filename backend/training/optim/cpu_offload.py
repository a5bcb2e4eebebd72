"""Optimizer CPU offload: optimizer state, master weights and the optimizer step are on the CPU, as in ZeRO-Offload.

The gradients leave the card in chunks on a stream of their own; while the CPU steps on one chunk the next arrives and
the last one's new weights go back. On a CPU all of that is one chunk and no copy but the weights'.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

CHUNK_BYTES = 64 * 2**20


class OptimizerCpuOffload:
    """Optimizer state CPU offload: the optimizers step on copies of `weights` in RAM; `step` copies the new weights
    back.

    `weights` are `part.parameter` names with parameters of any shape and dtype; copies and gradients have the same.
    """

    def __init__(self, weights: dict[str, torch.nn.Parameter], *, chunk_bytes: int = CHUNK_BYTES):
        self.weights = weights
        self.copies = {
            name: torch.nn.Parameter(_in_ram(weight).copy_(weight.detach())) for name, weight in weights.items()
        }
        self.card = next((weight.device for weight in weights.values() if weight.device.type == "cuda"), None)
        self.stream = torch.cuda.Stream(self.card) if self.card else None
        self.chunks = _chunks(weights, chunk_bytes)
        self._arriving: dict[str, torch.Tensor] = {}  # pinned, made once: where gradients of a card arrive

    def step(self, optimizers: Iterable, *, good: bool) -> None:
        """One step with the gradients that the weights hold, and that they lose; no step where those are not `good`."""
        apart = all(_steps_by_weight(optimizer) for optimizer in optimizers)
        chunks = self.chunks if apart else [list(self.weights)]
        arrivals = [self._fetch(chunk) if good else None for chunk in chunks]
        for chunk, arrived in zip(chunks, arrivals, strict=True):
            if arrived is not None:
                arrived.synchronize()
            self._take(chunk)
            if good:
                for optimizer in optimizers:
                    optimizer.step()
            self._return(chunk)
        if self.stream:
            torch.cuda.current_stream(self.card).wait_stream(self.stream)

    def _fetch(self, chunk: list[str]):
        """Begins to move the gradients of a chunk to RAM; an event that tells when they are there."""
        if self.stream is None:
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.card))
        with torch.cuda.stream(self.stream):
            for name in chunk:
                gradient = self.weights[name].grad
                if gradient is not None:
                    if name not in self._arriving:
                        self._arriving[name] = _in_ram(gradient)
                    self._arriving[name].copy_(gradient.detach(), non_blocking=True)
                    gradient.record_stream(self.stream)
            return self.stream.record_event()

    def _take(self, chunk: list[str]) -> None:
        for name in chunk:
            gradient, self.weights[name].grad = self.weights[name].grad, None
            self.copies[name].grad = None if gradient is None else self._arrived(name, gradient)

    def _arrived(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        return self._arriving[name] if name in self._arriving else gradient.detach().cpu()

    @torch.no_grad()
    def _return(self, chunk: list[str]) -> None:
        with torch.cuda.stream(self.stream):  # nothing where there is no card
            for name in chunk:
                self.copies[name].grad = None
                self.weights[name].copy_(self.copies[name].detach(), non_blocking=True)

    @torch.no_grad()
    def refresh(self) -> None:
        """Takes the weights as they are now, after they were changed from outside."""
        for name, weight in self.weights.items():
            self.copies[name].copy_(weight)


def _in_ram(tensor: torch.Tensor) -> torch.Tensor:
    """Room for `tensor` in RAM, in pages from which a card can fetch by itself where it comes from one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")


def _chunks(weights: dict[str, torch.nn.Parameter], most_bytes: int) -> list[list[str]]:
    chunks, size = [[]], 0
    for name, weight in weights.items():
        if chunks[-1] and size + weight.nbytes > most_bytes:
            chunks.append([])
            size = 0
        chunks[-1].append(name)
        size += weight.nbytes
    return chunks


def _steps_by_weight(optimizer) -> bool:
    """Whether a step of some weights, and then of others, is one step of all: not where one number is kept for all, as
    in Prodigy."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    return kind.__module__.startswith(("torch.optim", "backend.training"))
