"""Tools for LoRA files on the command line: `python -m backend lora --help`. The worker calls `run_tool`."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from backend.engine.lora.tools.commands import STORED, TOOLS, run_tool
from backend.engine.lora.tools.export_formats import LAYOUTS
from backend.schema.messages import Cancelled, Trouble
from backend.schema.untrusted import exists, is_file, read_object

REQUEST = "--request"
__all__ = ["main", "run_tool"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; `--request FILE` takes the settings from a JSON file, as values. Answers the exit status: 0, 1
    with a sentence on stderr, 130 if interrupted."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == [REQUEST] and len(given) == 2:
        return _answer(lambda: read_object(Path(given[1])), ends_by_signal=arguments is None)
    return _answer(lambda: _values(vars(_parser().parse_args(given))), ends_by_signal=arguments is None)


def _values(said: dict) -> dict:
    """The tool's settings in what stood on the command line. Raises Trouble."""
    pairs = said.pop("pairs", None)
    if pairs is not None:
        said["paths"], said["strengths"] = zip(*map(_pair, pairs), strict=True)
    if "set" in said:
        said["set"] = dict(map(_setting, said["set"]))
    return said


def _answer(values_of: Callable[[], dict], *, ends_by_signal: bool) -> int:
    if ends_by_signal:  # a process of our own: being ended cleans up as being interrupted does
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        answer = run_tool(values_of(), on_progress=_Bar().show)
    except Trouble as trouble:
        print(f"\n{trouble}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, Cancelled):
        print("\nStopped; nothing was written.", file=sys.stderr)
        return 130
    if sys.stderr.isatty():
        print("\r" + " " * 8 + "\r", end="", file=sys.stderr)
    _tell(answer)
    return 0


def _tell(answer: dict) -> None:
    for block in answer.get("blocks", ()):
        print(f"{block['norm']:10.4f}  {block['modules']:4d}  {block['name']}")
    for key, value in answer.get("metadata", {}).items():
        print(f"{key}: {value if len(value) <= 200 else value[:200] + ' ...'}")
    for key, why in answer.get("unused", {}).items():
        print(f"not used: {key}: {why}")
    if "said" in answer:
        print(f"{answer['said']} {answer['path']}")


def _pair(text: str) -> tuple[str, float]:
    """FILE or FILE:STRENGTH (a drive letter's colon is no separator)."""
    path, colon, strength = text.rpartition(":")
    try:
        return (path, float(strength)) if colon and len(path) > 1 else (text, 1.0)
    except ValueError:
        if is_file(Path(path)) and not exists(Path(text)):
            raise Trouble(
                "bad_value",
                f"{strength!r} in {text} is no strength.",
                hint=f"Write {Path(path).name}:0.8, for example.",
            ) from None
        return text, 1.0


def _setting(text: str) -> tuple[str, str]:
    """KEY=VALUE."""
    key, sign, value = text.partition("=")
    if not sign:
        raise Trouble(
            "bad_value", f"--set {text} names no value.", hint=f"Write --set {text}=VALUE, or --remove {text}."
        )
    return key, value


class _Bar:
    """Per cent on stderr: in place on a terminal, else a line for each new one, twice a second at most."""

    def __init__(self):
        self.told, self.shown = 0.0, -1
        self.in_place = sys.stderr.isatty()

    def show(self, done: int, total: int) -> None:
        percent = 100 * done // max(1, total)
        if percent == self.shown or time.monotonic() - self.told < 0.5:
            return
        self.told, self.shown = time.monotonic(), percent
        print(
            f"\r{percent:3d} %" if self.in_place else f"{percent} %",
            end="" if self.in_place else "\n",
            file=sys.stderr,
            flush=True,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m backend lora", description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True)

    def tool(name: str, *, writes: bool = True) -> argparse.ArgumentParser:
        one = tools.add_parser(name, help=TOOLS[name].__doc__, description=TOOLS[name].__doc__)
        if writes:
            one.add_argument("--overwrite", action="store_true", help="Replace a file that is there.")
        return one

    def stored(one: argparse.ArgumentParser) -> None:
        one.add_argument("--layout", choices=LAYOUTS, default="comfyui")
        one.add_argument("--dtype", choices=STORED, default="float32")

    def family(one: argparse.ArgumentParser) -> None:
        one.add_argument("--family", default="", help="For which family, where the file does not tell.")

    one = tool("convert")
    one.add_argument("path")
    one.add_argument("out")
    one.add_argument("--layout", choices=LAYOUTS, required=True)
    family(one)
    one.add_argument("--base", help="A model of the family, for names of an unusual depth.")
    one = tool("merge")
    one.add_argument("pairs", nargs="+", metavar="FILE:STRENGTH")
    one.add_argument("--out", required=True)
    one.add_argument("--rank", type=int, help="Reduce to this rank; without it the merge is exact.")
    family(one)
    stored(one)
    one = tool("resize")
    one.add_argument("path")
    one.add_argument("out")
    one.add_argument("--rank", type=int)
    one.add_argument("--energy", type=float, help="Share of the squared singular values to keep, such as 0.95.")
    family(one)
    stored(one)
    one = tool("extract")
    one.add_argument("tuned")
    one.add_argument("base")
    one.add_argument("out")
    one.add_argument("--rank", type=int, default=32)
    stored(one)
    one = tool("bake")
    one.add_argument("base")
    one.add_argument("pairs", nargs="+", metavar="FILE:STRENGTH")
    one.add_argument("--out", required=True)
    one.add_argument("--dtype", choices=STORED)
    one = tool("metadata")
    one.add_argument("path")
    one.add_argument("--out")
    one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    one.add_argument("--remove", action="append", default=[], metavar="KEY")
    one.add_argument("--strip", action="store_true", help="Remove everything but the format.")
    one = tool("to_safetensors")
    one.add_argument("path")
    one.add_argument("--out")
    one = tool("strengths", writes=False)
    one.add_argument("path")
    family(one)
    return parser


if __name__ == "__main__":
    sys.exit(main())
