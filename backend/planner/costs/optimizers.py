"""Optimizers by name, the package each needs, and what single parts are given: rates, schedules, arguments. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from backend.schema.json_values import parse_json
from backend.schema.messages import Trouble
from backend.schema.training.config import SCHEDULES
from backend.schema.training.method import check_optimizer_name

NAMED = {
    "adamw": "torch.optim.AdamW",
    "adam": "torch.optim.Adam",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "lion": "backend.training.optim.optimizers.Lion",
    "muon": "torch.optim.Muon",
    "adamw8bit": "bitsandbytes.optim.AdamW8bit",
    "pagedadamw8bit": "bitsandbytes.optim.PagedAdamW8bit",
    "prodigy": "prodigyopt.Prodigy",
}
_ON_PYPI = {"pytorch_optimizer": "pytorch-optimizer"}  # where a package is called otherwise than it is imported


def class_name(name: str) -> str:
    """The dotted name of the class that an optimizer's short or dotted name means."""
    return NAMED.get(name.strip().lower(), name.strip())


def check_named(section, *, here: bool = True) -> None:
    """Raises Trouble for an optimizer that is none or (`here`) whose package is not installed, and for arguments that are no JSON object."""
    check_optimizer_name(section)
    dotted = class_name(section.customized_optimizer)
    package = dotted.rpartition(".")[0]
    if not package:
        raise Trouble(
            "bad_value",
            f"There is no optimizer called {dotted!r} (--customized_optimizer).",
            hint=f"Use {', '.join(NAMED)}, or a class by its dotted name.",
        )
    top = package.partition(".")[0]
    if here and (not top or importlib.util.find_spec(top) is None):
        raise lacks_package(dotted, "which is not installed")
    arguments_of(section.optimizer_args)


def lacks_package(dotted: str, why: str) -> Trouble:
    top = dotted.partition(".")[0]
    return Trouble(
        "missing_package",
        f"The optimizer {dotted} needs the package {top}, {why}.",
        hint=f"pip install {_ON_PYPI.get(top, top)}; or choose one that needs none: {', '.join(list(NAMED)[:6])}.",
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
        raise Trouble("bad_value", f"Optimizer args (--optimizer_args) are {text!r}, not a JSON object.")
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
            )
        _check_once(part, told, "learning_rates")
        try:
            rates[part] = float(rate)
        except ValueError:
            raise Trouble("bad_value", f"The learning rate of {part} is {rate!r}, not a number.") from None
        if not 0 <= rates[part] <= 10:
            raise Trouble("bad_value", f"The learning rate of {part} is {rate}; it has to lie between 0 and 10.")
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
            )
        _check_once(part, told, "lr_schedulers")
        found[part] = kind
    return found


def _check_once(part: str, told: set[str], flag: str) -> None:
    if part in told:
        raise Trouble("bad_value", f"--{flag} names the part {part} twice.", hint="Say one of them.")
    told.add(part)
