"""Optimizers by name, learning rate schedules (warm-up, cosine, ...), and EMA, the running mean of the weights."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable

import torch

from backend.planner.costs.optimizers import (
    arguments_of,
    check_arguments,
    check_named,
    class_name,
    lacks_package,
    part_rates,
    part_schedules,
)
from backend.schema.allowed_classes import class_of
from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingSection
from backend.schema.training.method import OPTIMIZER_PACKAGES


def make_optimizers(weights: dict[str, torch.nn.Parameter], section: TrainingSection) -> list[torch.optim.Optimizer]:
    """One optimizer, or two for muon: Muon on the matrices of blocks, AdamW for everything else.

    `weights` are `part.parameter` names. A group is called by its part and remembers its full rate as `initial_lr` and
    its `schedule`.
    """
    check_named(section)
    check_arguments(section)
    name = section.customized_optimizer.strip()
    arguments = arguments_of(section.optimizer_args)
    rates = part_rates(section.learning_rates, section.learning_rate, {name.partition(".")[0] for name in weights})
    kinds = part_schedules(section.lr_schedulers, section.lr_scheduler, rates)
    if name.lower() == "muon":
        blocks = {name: weight for name, weight in weights.items() if _is_block_matrix(name, weight)}
        rest = {name: weight for name, weight in weights.items() if name not in blocks}
        arguments.setdefault("adjust_lr_fn", "match_rms_adamw")
        made = [_make("torch.optim.Muon", blocks, rates, kinds, section.weight_decay, arguments)] if blocks else []
        return made + ([_make("torch.optim.AdamW", rest, rates, kinds, section.weight_decay, {})] if rest else [])
    custom = section.allow_custom_code
    return [_make(class_name(name), weights, rates, kinds, section.weight_decay, arguments, custom=custom)]


def check_optimizer(section: TrainingSection, parts: Iterable[str]) -> None:
    """Raises Trouble for an optimizer that is none, may not be used or does not take what it is told, before anything
    is loaded: it is made over two small weights of each of the `parts`, a block's matrix and another."""
    shapes = {"blocks.0.weight": (2, 2), "bias": (2,)}
    make_optimizers(
        {f"{part}.{name}": torch.nn.Parameter(torch.zeros(shape)) for part in parts for name, shape in shapes.items()},
        section,
    )


def _is_block_matrix(name: str, weight: torch.Tensor) -> bool:
    return weight.ndim == 2 and any(piece.isdigit() for piece in name.split(".")[:-1])


def _make(
    dotted: str,
    weights: dict,
    rates: dict[str, float],
    kinds: dict[str, str],
    decay: float,
    arguments: dict,
    *,
    custom: bool = False,
) -> torch.optim.Optimizer:
    groups: dict[str, list] = {}
    for name, weight in weights.items():
        groups.setdefault(name.partition(".")[0], []).append(weight)
    kind = find_class(dotted, custom=custom)
    options = {"lr": max(rates.values()), "weight_decay": decay, **arguments}
    try:
        optimizer = kind(
            [{"params": group, "lr": rates[part], "part": part} for part, group in groups.items()], **options
        )
    except (TypeError, ValueError) as error:
        raise Trouble(
            "bad_value",
            f"The optimizer {dotted} does not take these settings: {error}.",
            hint="See --optimizer_args.",
            setting="optimizer_args",
        ) from None
    for group in optimizer.param_groups:
        group["initial_lr"], group["schedule"] = group["lr"], kinds.get(group.get("part"))
    return optimizer


def find_class(dotted: str, *, custom: bool = False) -> type:
    """The optimizer class behind a dotted name. Raises Trouble where there is none, and for one of a package that is
    not listed before that is imported; `custom`: any package will do."""
    package, _, name = dotted.rpartition(".")
    try:
        kind = class_of(package, name, packages=(package,) if custom else OPTIMIZER_PACKAGES)
    except ImportError as error:
        lacking = importlib.util.find_spec(package.partition(".")[0]) is None
        why = "which is not installed" if lacking else f"which cannot be imported ({error})"
        raise lacks_package(dotted, why) from None
    except AttributeError:
        raise Trouble("bad_value", f"The module {package} has no optimizer {name}.") from None
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise Trouble("bad_value", f"{dotted} is not an optimizer.")
    return kind


def rate_factor(step: int, total: int, section: TrainingSection, kind: str | None = None) -> float:
    """The learning rate schedule: what the full rate is multiplied by at `step` (0 is the first) of `total`; `kind`: by
    that schedule instead of the general one."""
    warm = section.lr_warmup_steps
    rise = min(1.0, (step + 1) / warm) if warm else 1.0
    done = min(max((step - warm) / max(total - warm, 1), 0.0), 1.0)
    kind = kind or section.lr_scheduler
    if kind == "linear":
        return rise * (1 - done)
    if kind == "linear_from_half":
        return rise * min(1.0, 2 * (1 - done))
    if kind == "cosine":
        return rise * 0.5 * (1 + math.cos(math.pi * done))
    if kind == "cosine_with_restarts":
        return rise * 0.5 * (1 + math.cos(math.pi * (done * section.lr_restarts % 1.0)))
    return rise


def set_rates(optimizers: list[torch.optim.Optimizer], factor: Callable[[str | None], float] | float) -> float:
    """Sets every group's rate and returns the first. `factor`: of all, or of a group by its schedule."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (factor(group.get("schedule")) if callable(factor) else factor)
    return optimizers[0].param_groups[0]["lr"]


class EMA:
    """EMA: the exponential moving average of the weights (float32, shapes as the weights').

    The decay is warmed up, min(decay, (1 + step) / (10 + step)), so that a short run is not held back by its start.
    """

    def __init__(self, weights: dict[str, torch.nn.Parameter], decay: float):
        self.decay, self.weights = decay, weights
        self.begin()

    def begin(self) -> None:
        """The mean is the weights as they are now."""
        self.values = {name: weight.detach().float().clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """`step` counts from 1."""
        keep = min(self.decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(  # pyright: ignore[reportPrivateImportUsage]: torch has no public name for it
            list(self.values.values()), [weight.detach().float() for weight in self.weights.values()], 1 - keep
        )

    @torch.no_grad()
    def swap(self) -> None:
        """Exchanges the mean and the weights; twice is nothing."""
        for name, weight in self.weights.items():
            last = weight.detach().float().clone()
            weight.copy_(self.values[name])
            self.values[name] = last


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023: the sign of a momentum. Wants about a third of Adam's rate and three times its decay."""

    def __init__(self, params, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            first, second = group["betas"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                direction = torch.lerp(weight.grad, momentum, first).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                momentum.lerp_(weight.grad, 1 - second)
        return loss
