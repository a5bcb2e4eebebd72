"""Optimizers: the one table of what each is called, whose class it is, what it takes, and the bytes it holds and makes;
and what single parts are given: rates, schedules, arguments. No torch.

Bytes and arguments are checked against the classes themselves (`tests/training/optim/test_optimizer_bytes.py`), as far
as they are installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from backend.planner.costs.layout import Update
from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.schema.training.config import SCHEDULES
from backend.schema.training.method import TrainingSection, check_optimizer_name

_ADAMW = Update()
_TORCH = ("maximize", "foreach", "capturable", "differentiable", "fused")
_BITSANDBYTES = ("betas", "eps", "amsgrad", "optim_bits", "args", "min_8bit_size", "percentile_clipping", "block_wise")


@dataclass(frozen=True)
class Optimizer:
    """`class_name`: dotted. `arguments`: what it takes besides `lr` and `weight_decay`. `state_bytes`: held for each
    number that trains, in float32. `update`: bytes that a step makes and drops. What no table knows is taken for
    torch's AdamW: two moments, stepping on a card on all weights at once, with a number of each beside them."""

    class_name: str
    arguments: tuple[str, ...] = ()
    state_bytes: float = 8.0
    update: Update = _ADAMW

    @property
    def package(self) -> str:
        """That is imported, and has to be installed."""
        return self.class_name.partition(".")[0]


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer("torch.optim.AdamW", ("betas", "eps", "amsgrad", *_TORCH)),
    "adam": Optimizer("torch.optim.Adam", ("betas", "eps", "amsgrad", "decoupled_weight_decay", *_TORCH)),
    "sgd": Optimizer(
        "torch.optim.SGD",
        ("momentum", "dampening", "nesterov", "maximize", "foreach", "differentiable", "fused"),
        state_bytes=0.0,
    ),
    "adafactor": Optimizer(
        "torch.optim.Adafactor",
        ("beta2_decay", "eps", "d", "foreach", "maximize"),
        state_bytes=0.02,
        update=Update(0.0, 4.0),
    ),
    "lion": Optimizer(
        "backend.training.optim.optimizers.Lion", ("betas",), state_bytes=4.0, update=Update(0.0, 4.0)
    ),
    "muon": Optimizer(
        "torch.optim.Muon",
        ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn"),
        state_bytes=4.0,
        update=Update(0.0, 10.0),
    ),
    "adamw8bit": Optimizer(
        "bitsandbytes.optim.AdamW8bit", (*_BITSANDBYTES, "is_paged"), state_bytes=2.1, update=Update(0.0)
    ),
    "pagedadamw8bit": Optimizer(
        "bitsandbytes.optim.PagedAdamW8bit", _BITSANDBYTES, state_bytes=0.2, update=Update(0.0)
    ),
    "prodigy": Optimizer(
        "prodigyopt.Prodigy",
        (
            "betas", "beta3", "eps", "decouple", "use_bias_correction", "safeguard_warmup", "d0", "d_coef",
            "growth_rate", "fsdp_in_use", "slice_p",
        ),
        state_bytes=16.0,
        update=Update(0.0, 8.0),
    ),
}  # fmt: skip
_ON_PYPI = {"pytorch_optimizer": "pytorch-optimizer"}  # where a package is called otherwise than it is imported


def optimizer_of(name: str) -> Optimizer | None:
    """The row of an optimizer's short or dotted name; None for one that the table does not have. A class of another
    package with the name of one that it has is counted as that."""
    return OPTIMIZERS.get(name.strip().lower().rpartition(".")[2])


def is_unknown(name: str) -> bool:
    """Whether `name` means an optimizer whose state and update are counted as AdamW's for want of a row."""
    return bool(name.strip()) and optimizer_of(name) is None


def class_name(name: str) -> str:
    """The dotted name of the class that an optimizer's short or dotted name means."""
    found = OPTIMIZERS.get(name.strip().lower())
    return found.class_name if found else name.strip()


def check_named(section: TrainingSection, *, here: bool = True) -> None:
    """Raises Trouble for an optimizer that is none or (`here`) whose package is not installed."""
    check_optimizer_name(section)
    dotted = class_name(section.customized_optimizer)
    package = dotted.rpartition(".")[0]
    if not package:
        raise Trouble(
            "bad_value",
            f"There is no optimizer called {dotted!r} (--customized_optimizer).",
            hint=f"Use {', '.join(OPTIMIZERS)}, or a class by its dotted name.",
            setting="customized_optimizer",
        )
    top = package.partition(".")[0]
    if here and (not top or importlib.util.find_spec(top) is None):
        raise lacks_package(dotted, "which is not installed")


def check_arguments(section: TrainingSection) -> None:
    """Raises Trouble for `--optimizer_args` that are no JSON object, and for such as an optimizer of the table does not
    take. Of other classes only their own constructors tell."""
    given = arguments_of(section.optimizer_args)
    row = OPTIMIZERS.get(section.customized_optimizer.strip().lower()) or next(
        (row for row in OPTIMIZERS.values() if row.class_name == section.customized_optimizer.strip()), None
    )
    if row is None:
        return
    for name, value in given.items():
        if name not in (*row.arguments, "lr", "weight_decay"):
            raise Trouble(
                "bad_value",
                f"The optimizer {row.class_name} does not take {name!r} (--optimizer_args).",
                hint=f"It takes {', '.join(row.arguments)}.",
                setting="optimizer_args",
            )
        words, fine = _VALUES.get(name, ("", None))
        if fine and not (name == "eps" and isinstance(value, tuple)) and not fine(value):
            raise Trouble(
                "bad_value",
                f"{name} in --optimizer_args is {_as_json(value)}; it has to be {words}.",
                setting="optimizer_args",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_VALUES: dict[str, tuple[str, Callable[[Any], bool]]] = {  # argument -> (what it is, whether a value is that)
    "betas": (
        "a list of two numbers from 0 to below 1",
        lambda value: isinstance(value, tuple) and len(value) == 2 and all(_is_number(b) and 0 <= b < 1 for b in value),
    ),
    "eps": ("a number, 0 or more", lambda value: _is_number(value) and value >= 0),
    "momentum": ("a number, 0 or more", lambda value: _is_number(value) and value >= 0),
    "lr": ("a number, 0 or more", lambda value: _is_number(value) and value >= 0),
    "weight_decay": ("a number, 0 or more", lambda value: _is_number(value) and value >= 0),
}


def _as_json(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)[:100]


def lacks_package(dotted: str, why: str) -> Trouble:
    top = dotted.partition(".")[0]
    return Trouble(
        "missing_package",
        f"The optimizer {dotted} needs the package {top}, {why}.",
        hint=f"pip install {_ON_PYPI.get(top, top)}; or choose one that needs none: {', '.join(list(OPTIMIZERS)[:6])}.",
        setting="customized_optimizer",
    )


def arguments_of(text: str | None) -> dict:
    """Arguments in `--optimizer_args`. Raises Trouble for what is no JSON object."""
    if not text:
        return {}
    try:
        arguments = parse_json(text)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        words = f"Optimizer args (--optimizer_args) are {text!r}, not a JSON object."
        raise Trouble("bad_value", words, setting="optimizer_args")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in arguments.items()}


def part_rates(text: str | None, general: float, parts: Iterable[str]) -> dict[str, float]:
    """Learning rate of each part from `part=rate,part=rate` over the general one. Raises Trouble."""
    rates, told = dict.fromkeys(parts, general), set()
    for entry in (text or "").split(","):
        part, equals, rate = (piece.strip() for piece in entry.partition("="))
        if not part and not equals:
            continue
        if part not in rates:
            raise Trouble(
                "bad_value",
                f"Learning rates (--learning_rates) names {part!r}, which does not train.",
                hint=f"What trains: {', '.join(rates)}.",
                setting="learning_rates",
            )
        _check_once(part, told, "learning_rates")
        try:
            rates[part] = float(rate)
        except ValueError:
            words = f"The learning rate of {part} is {rate!r}, not a number."
            raise Trouble("bad_value", words, setting="learning_rates") from None
        if not 0 <= rates[part] <= 10:
            words = f"The learning rate of {part} is {rate}; it has to lie between 0 and 10."
            raise Trouble("bad_value", words, setting="learning_rates")
    return rates


def part_schedules(text: str | None, general: str, parts: Iterable[str]) -> dict[str, str]:
    """Schedule of each part from `part=schedule,part=schedule` over the general one. Raises Trouble."""
    found, told = dict.fromkeys(parts, general), set()
    for entry in (text or "").split(","):
        part, equals, kind = (piece.strip() for piece in entry.partition("="))
        if not part and not equals:
            continue
        if part not in found or kind not in SCHEDULES:
            raise Trouble(
                "bad_value",
                f"{entry.strip()!r} in --lr_schedulers is not a part that trains and its schedule.",
                hint=f"Parts: {', '.join(found)}; schedules: {', '.join(SCHEDULES)}.",
                setting="lr_schedulers",
            )
        _check_once(part, told, "lr_schedulers")
        found[part] = kind
    return found


def _check_once(part: str, told: set[str], flag: str) -> None:
    if part in told:
        raise Trouble("bad_value", f"--{flag} names the part {part} twice.", hint="Say one of them.", setting=flag)
    told.add(part)
