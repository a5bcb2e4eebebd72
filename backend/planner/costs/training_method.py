"""What trains, as far as memory depends on it: the kind of adapter, its dropout, and a student that draws in several
steps. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from backend.schema.training.config import TrainingConfig

LEAN = ("lora", "rslora")  # kept lean where they have no dropout
OF_ONE_RANK = ("lokr", "oft")  # whose weights are no multiples of the rank: forms hold for one alone
_WORD = re.compile(r"([a-z]+?)(?:-(\d+))?(-dropout)?(?:\+(\d+))?")


@dataclass(frozen=True)
class Method:
    """`drawing`: denoising steps of a student that is trained through all of them, 0 for the usual single one; `rank`
    is 0 where forms hold for every rank."""

    algorithm: str = "lora"
    rank: int = 0
    dropout: bool = False
    drawing: int = 0

    @property
    def lean(self) -> bool:
        """Whether the adapters compute without copies of what they read, and so without autocast."""
        return self.algorithm in LEAN and not self.dropout

    @property
    def word(self) -> str:
        """As forms are named by it; "" for the usual LoRA."""
        if self == Method():
            return ""
        parts = (self.algorithm, f"-{self.rank}" if self.rank else "", "-dropout" if self.dropout else "")
        return "".join(parts) + (f"+{self.drawing}" if self.drawing else "")


def method_of(word: str) -> Method:
    """The method that is called `word`."""
    if not word:
        return Method()
    found = _WORD.fullmatch(word)
    if found is None:
        raise ValueError(f"{word!r} names no method of training.")
    algorithm, rank, dropout, drawing = found.groups()
    return Method(algorithm, int(rank or 0), bool(dropout), int(drawing or 0))


def method_of_config(config: TrainingConfig) -> Method:
    """What a run trains with."""
    lora, full = config.lora, config.adapter_part is None
    algorithm = "lora" if full or lora.lora_algorithm == "rslora" else lora.lora_algorithm
    return Method(
        algorithm,
        lora.lora_rank if algorithm in OF_ONE_RANK else 0,
        not full and lora.lora_dropout > 0,
        config.loss.distill_steps if config.training.task.startswith("direct_distill") else 0,
    )


def numbers_of(algorithm: str, rank: int, rows: int, columns: int) -> int:
    """Numbers that train of an adapter on a layer of `rows` outputs and `columns` inputs, as peft makes them."""
    return sum(height * width for height, width in shapes_of(algorithm, rank, rows, columns))


def shapes_of(algorithm: str, rank: int, rows: int, columns: int) -> tuple[tuple[int, int], ...]:
    """The weights of that adapter."""
    pair = ((rank, columns), (rows, rank))
    if algorithm == "dora":
        return (*pair, (1, rows))
    if algorithm == "loha":
        return (*pair, *pair)
    if algorithm == "oft":
        return ((columns // max(rank, 1), rank * (rank - 1) // 2),)
    if algorithm == "lokr":
        (a, b), (c, d) = _near_root(rows), _near_root(columns)
        return ((a, c), (b, d)) if rank >= max(b, d) / 2 else ((a, c), (b, rank), (rank, d))
    return pair


def _near_root(number: int) -> tuple[int, int]:
    """`number` as a product of two, as near to its root as can be; the smaller first."""
    small = next(one for one in range(int(number**0.5), 0, -1) if number % one == 0)
    return small, number // small
