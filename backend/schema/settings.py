"""Settings written once: a frozen dataclass of knobs from which form, flags, checks, files and reference page are
computed.

    @dataclass(frozen=True)
    class Size:
        height: int | None = knob(None, help="Fixed height.", low=16, unit="px")

    @dataclass(frozen=True)
    class Config:
        size: Size = section(Size, "Size")

Knob names are unique over all sections of a config, so a flat `{name: value}` and `--name value` are unambiguous.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from backend.schema.json_values import parse_json, printable
from backend.schema.messages import Trouble
from backend.schema.settings_field import Knob, knob, knobs_of, section, switch, switches_of

T = TypeVar("T")
MOST_SHOWN = 200  # characters of a wrong value that a sentence repeats

__all__ = [
    "Knob",
    "check",
    "from_file_text",
    "from_flags",
    "from_values",
    "knob",
    "knobs_of",
    "reference",
    "section",
    "switch",
    "to_file_text",
    "to_flags",
    "to_values",
]


def to_values(config) -> dict[str, Any]:
    """`{knob name: value}` over all sections."""
    values = {}
    for item in knobs_of(type(config)):
        here = config
        for name in item.path:
            here = getattr(here, name)
        values[item.name] = here
    return values


def from_values(cls: type[T], values: Mapping[str, object], *, base: T | None = None) -> T:
    """A config of `cls` with `values` by knob name over `base` (or the defaults).

    Text is converted to the knob's kind. Raises Trouble for a name that is none, a value of the wrong kind or out of
    range.
    """
    known = {item.name: item for item in knobs_of(cls)}
    for name in values:
        if name not in known:
            _check_refused(cls, name)
            raise Trouble("unknown_setting", f"There is no setting called {name!r}.", hint=_nearest(name, known))
    config = base if base is not None else cls()
    for name, value in values.items():
        config = _replaced(config, known[name].path, _converted(known[name], value))
    check(config)
    return config


def _check_refused(cls: type, name: str) -> None:
    """Raises Trouble for a setting that another class has and `cls.REFUSED` says why it has not."""
    reason = getattr(cls, "REFUSED", {}).get(name)
    if reason:
        raise Trouble("not_supported", reason, hint=f"Leave {name} out.")


def _nearest(name: str, known: Iterable[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else "See docs/settings.md for the list."


def _replaced(config: Any, path: tuple[str, ...], value: object) -> Any:
    if len(path) == 1:
        return dataclasses.replace(config, **{path[0]: value})
    return dataclasses.replace(config, **{path[0]: _replaced(getattr(config, path[0]), path[1:], value)})


def _converted(item: Knob, value: object) -> object:
    if value is None or (item.optional and isinstance(value, str) and value.strip() in ("", "None")):
        if item.optional:
            return None
        raise Trouble("bad_value", f"{item.label} (--{item.name}) needs a value.")
    try:
        return _CONVERT[item.kind](value)
    except (TypeError, ValueError, OverflowError):
        shown = repr(value)
        shown = shown if len(shown) <= MOST_SHOWN else shown[:MOST_SHOWN] + " …"
        words = f"{item.label} (--{item.name}) is {shown}, which is not {_KIND_WORDS[item.kind]}."
        raise Trouble("bad_value", words) from None


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "yes": True, "1": True, "on": True, "false": False, "no": False, "0": False, "off": False}
    return words[value.strip().lower()] if isinstance(value, str) and value.strip().lower() in words else _refuse()


def _refuse() -> NoReturn:
    raise ValueError


def _to_int(value) -> int:
    if isinstance(value, bool):
        _refuse()
    if isinstance(value, float):
        return int(value) if value.is_integer() else _refuse()
    return int(value)


def _to_float(value) -> float:
    number = _refuse() if isinstance(value, bool) else float(value)
    return number if math.isfinite(number) else _refuse()


def _to_tuple(value) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [part for line in value.splitlines() for part in line.split(",")]
    if not isinstance(value, list | tuple):
        _refuse()
    return tuple(text for text in (_to_str(os.fspath(part)).strip() for part in value) if text)


def _to_str(value) -> str:
    """No NUL, which no path and no argument of a process can hold."""
    return value if isinstance(value, str) and "\0" not in value else _refuse()


_CONVERT = {str: _to_str, int: _to_int, float: _to_float, bool: _to_bool, tuple: _to_tuple}
_KIND_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "yes or no", tuple: "a list"}


def check(config) -> None:
    """Raises Trouble for the first value that is outside its knob's range or choices, or that one of the class's own
    `CHECKS` refuses."""
    values = to_values(config)
    for item in knobs_of(type(config)):
        value = values[item.name]
        if value is None:
            continue
        if item.choices and value not in item.choices:
            raise Trouble(
                "bad_value", f"{item.label} (--{item.name}) is {value!r}; it can be {', '.join(item.choices)}."
            )
        if item.low is not None and value < item.low:
            raise Trouble("bad_value", f"{item.label} (--{item.name}) is {value}; the least is {_plain(item.low)}.")
        if item.high is not None and value > item.high:
            raise Trouble("bad_value", f"{item.label} (--{item.name}) is {value}; the most is {_plain(item.high)}.")
    for look in getattr(type(config), "CHECKS", ()):
        look(config)


class _Flags(argparse.ArgumentParser):
    def error(self, message: str):
        raise Trouble("bad_flags", f"The command line is not right: {message}.", hint="--help lists every flag.")


def from_flags(cls: type[T], argv: Sequence[str], *, program: str = "", base: T | None = None) -> T:
    """A config of `cls` from `--name value` flags over `base` (or the defaults); yes/no knobs are `--name` and
    `--no-name`, switches `--name` alone. Unknown flags raise Trouble."""
    for flag in argv:
        if flag.startswith("--"):
            _check_refused(cls, flag[2:].partition("=")[0])
    parser = _Flags(prog=program or None, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for item in knobs_of(cls):
        text = f"{item.help} [default: {_shown(item.default)}]".replace("%", "%%")
        if item.kind is bool:
            parser.add_argument(f"--{item.name}", action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(f"--{item.name}", metavar=item.unit or item.kind.__name__.upper(), help=text)
    switches = switches_of(cls)
    for name, (_, help) in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=help.replace("%", "%%"))
    said, unknown = parser.parse_known_args(list(argv))
    if unknown:
        flag = unknown[0].partition("=")[0]
        near = _nearest(flag.lstrip("-"), [item.name for item in knobs_of(cls)]) if flag.startswith("--") else ""
        words = f"The command line is not right: unrecognized arguments: {' '.join(unknown)}."
        raise Trouble("bad_flags", words, hint=f"{near} --help lists every flag.".strip())
    # Of a value that is nothing but two dashes (`--name=--`) argparse leaves an empty list.
    values = {name: "--" if value == [] else value for name, value in vars(said).items()}
    on = {name: True for name in switches if values.pop(name, False)}
    return from_values(cls, values, base=_switched(base if base is not None else cls(), on))


def _switched(config: T, on: dict[str, bool]) -> T:
    """`config` with these of its switches turned on."""
    for name in on:
        config = _replaced(config, switches_of(type(config))[name][0], True)
    return config


def to_flags(config, *, all: bool = False) -> list[str]:
    """The flags that `from_flags` reads back to an equal config: those that differ from the defaults, or all."""
    flags = []
    values = to_values(config)
    for item in knobs_of(type(config)):
        value = values[item.name]
        if value == item.default and not all:
            continue
        if item.kind is bool:
            flags.append(f"--{item.name}" if value else f"--no-{item.name}")
        elif value is not None:
            text = ",".join(value) if item.kind is tuple else str(value)
            # Behind a space, argparse takes what begins with a dash (a text, -1e-05) for another flag.
            flags += [f"--{item.name}={text}"] if text.startswith("-") else [f"--{item.name}", text]
    return flags


def to_file_text(config) -> str:
    """A config as JSON text with only what differs from the defaults; `from_file_text` reads it."""
    defaults = to_values(type(config)())
    changed = {name: value for name, value in to_values(config).items() if value != defaults[name]}
    return json.dumps(changed, ensure_ascii=False, indent=2) + "\n"


def from_file_text(cls: type[T], text: str | bytes, *, base: T | None = None) -> T:
    """The config in JSON `text` over `base` (or the defaults).

    Raises Trouble where it is not JSON, not an object, or holds an unknown name.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise Trouble("bad_file", f"The settings file is not JSON: {printable(error)[:200]}.") from None
    if not isinstance(values, dict):
        raise Trouble("bad_file", "The settings file must hold one JSON object of names and values.")
    return from_values(cls, values, base=base)


def _shown(value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def reference(cls: type, title: str) -> str:
    """The reference page of `cls` in Markdown: one table per section."""
    lines = [f"## {title}", ""]
    here = None
    for item in knobs_of(cls):
        if item.section != here:
            here = item.section
            lines += ([""] if lines[-1] else []) + ([f"### {here}", ""] if here else [])
            lines += ["| setting | default | range | what it does |", "|---|---|---|---|"]
        span = ", ".join(item.choices) or _range(item)
        default = _shown(item.default)
        lines.append(f"| `--{item.name}` | {f'`{default}`' if default else ''} | {span} | {item.help} |")
    switches = switches_of(cls)
    if switches:
        lines += [
            "",
            "### On a command line alone",
            "",
            "| setting | default | range | what it does |",
            "|---|---|---|---|",
        ]
        lines += [f"| `--{name}` | `off` |  | {help} |" for name, (_, help) in switches.items()]
    return "\n".join(lines) + "\n"


def _range(item: Knob) -> str:
    unit = f" {item.unit}" if item.unit else ""
    if item.low is not None and item.high is not None:
        return f"{_plain(item.low)} to {_plain(item.high)}{unit}"
    if item.low is not None:
        return f"{_plain(item.low)} or more{unit}"
    return item.unit


def _plain(number: float) -> str:
    """Whole numbers in full: 67108864, not 6.71089e+07."""
    return str(int(number)) if float(number).is_integer() else f"{number:g}"
