"""Loft's commands: `python -m backend plan MODEL`, and the others of COMMANDS. Each has `--help`."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {  # name -> module with `main(argv)`, and what it is for
    "plan": ("backend.commands.plan", "whether a picture or a training run fits a card, and how long it takes"),
    "lora": ("backend.engine.lora.tools.command_line", "convert, merge, resize, extract and bake LoRA files"),
    "download": ("backend.catalog.hub.download", "download a model by its id"),
    "headers": ("backend.catalog.hub.remote_headers", "read a model's headers at a hub, without its weights"),
    "trace": ("backend.engine.tracing.trace", "trace a model's memory and fit the planner's formulas"),
    "calibrate": ("backend.engine.devices.benchmark", "measure this machine's speed for the planner"),
    "train": ("backend.training.__main__", "train; the same as `accelerate launch train.py` in one process"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: python -m backend COMMAND [--help]", *lines])


def main(argv: list[str] | None = None) -> int:
    """Runs the command that `argv` begins with. Returns its exit code; 2 for an unknown command."""
    name, *rest = sys.argv[1:] if argv is None else argv or ("",)
    if name in ("-h", "--help", ""):
        print(usage())
        return 0 if name else 2
    if name not in COMMANDS:
        print(f"There is no command {name!r}.\n{usage()}", file=sys.stderr)
        return 2
    sys.argv = [f"{sys.argv[0]} {name}", *rest]  # argparse takes the program's name from there
    return importlib.import_module(COMMANDS[name][0]).main(rest) or 0


if __name__ == "__main__":
    sys.exit(main())
