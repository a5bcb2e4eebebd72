"""`python -m backend plan`: its arguments, and what it prints.

What cannot be is one sentence on stderr, and status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import math
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from backend import families
from backend.catalog.hub import download, remote_headers
from backend.catalog.hub.part_entries import parts_meant, rounding_of
from backend.catalog.models.identify import identify_model
from backend.catalog.quantization.methods import Rule, check_method, write_storage
from backend.catalog.spec import ModelSpec
from backend.commands import plan_report as report
from backend.dataset.look_ahead import look_ahead
from backend.planner import page_estimate, suggestions, what_fits
from backend.planner.costs.device_speed import Speed, source_of, what_if
from backend.planner.costs.layout import Work
from backend.planner.costs.model_sizes import ModelSizes, sizes_of
from backend.planner.plan import fixed_of, known_of_changed, plan, surely_fits
from backend.planner.rules.check_training import check_training
from backend.planner.workload import work_of_defaults
from backend.schema import settings as knobs
from backend.schema.json_values import whole
from backend.schema.memory_plan import Card, Remedy, VramPlan
from backend.schema.messages import Trouble
from backend.schema.paths import places
from backend.schema.preferences import Preferences
from backend.schema.request import GenerationRequest
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import exists, is_folder

MOST_FRAMES = 1000
MOST_RAM_GIB = 65536


class Parser(argparse.ArgumentParser):
    """One whose complaints are a sentence, without the list of all flags before it."""

    def error(self, message: str):
        sentence = message[:1].upper() + message[1:]
        self.exit(2, f"{sentence if sentence.endswith('.') else f'{sentence}.'} --help lists what there is.\n")


def main(argv: list[str] | None = None) -> None:
    """MODEL [--card 12GiB | --card rtx3060 | --cards 8GiB,12GiB] [--ram GIB] [--size WxH[xFRAMES]] [--exact] [--free
    GIB] [--quantize HOW] [--train FLAGS]."""
    said = parser().parse_args(argv)
    try:
        show(said)
    except (Trouble, ValueError) as error:
        print(str(error), file=sys.stderr)
        raise SystemExit(2) from None


def parser() -> argparse.ArgumentParser:
    found = Parser(prog="python -m backend plan", description="What fits on a card, and how.", allow_abbrev=False)
    found.add_argument("model", help="a published model's name, an id, or a model's folder or file")
    found.add_argument("--card", help="12GiB, rtx3060, ... [default: 12GiB]")
    found.add_argument("--cards", help="several, comma-separated: one line for each")
    found.add_argument("--ram", default="64", metavar="GIB", help="RAM of that machine [default: 64]")
    found.add_argument("--size", metavar="SIZE", help="WIDTHxHEIGHT or WIDTHxHEIGHTxFRAMES")
    found.add_argument(
        "--exact", action="store_true", help="nothing that changes results: no FP8, no tiles, no 8-bit optimizer"
    )
    found.add_argument("--free", metavar="GIB", help="what if so much more memory were free, such as 1.2")
    found.add_argument(
        "--quantize",
        metavar="HOW",
        help="parts drawn with quantized, PART:METHOD[/LAYERS], such as dit:int8/img_in,proj_out",
    )
    found.add_argument("--train", nargs=argparse.REMAINDER, help="plan a training run; what follows are its flags")
    return found


def show(said: argparse.Namespace) -> None:
    """Prints the plan, or one line a card. Raises Trouble or ValueError with a sentence, before anything is printed."""
    names, ram, size, more = _cards(said), _ram(said.ram), _size(said.size), _free(said.free)
    cards = [what_if(name, ram_gib=ram) for name in names]
    traced = places().user / "memory"  # tables that were made here, as the page has them
    sizes = sizes_of(_model(said.model), folder=traced if is_folder(traced) else None)
    job = _job(said, size, sizes)
    known = _known(job, sizes)
    can = families.by_name(sizes.family).DRAWS
    if said.train is not None and not can:
        print(f"{sizes.title} cannot be trained here; this is what it would take.", file=sys.stderr)
    lossy = not said.exact
    preferences = Preferences(allow_fp8=lossy, allow_tiles=lossy, allow_8bit_optimizer=lossy)
    for name, (card, speed) in zip(names, cards, strict=True):
        found = plan(sizes, card, job, preferences, speed=speed, known=known)
        guessed = page_estimate.is_guess(found, sizes, card, job, known)
        if said.cards is not None:
            print(f"{sizes.title} on {name}: {report.line(found, guessed=guessed)}")
            continue
        taken, source = _as_flags(job, found.remedy) if can else "", source_of(speed, card.device)
        asked = _answers(sizes, card, job, preferences, found, speed=speed, known=known, more=more)
        words = page_estimate.words_of(sizes, guessed=guessed, can=can or said.train is not None)
        print(
            report.table(
                found,
                card,
                title=sizes.title,
                taken=taken,
                speed=source,
                answers=asked,
                words=words,
                guessed=guessed,
                scripts=can,
            )
        )


def _known(job, sizes: ModelSizes) -> dict:
    """What a run's dataset tells of it, where it names one that can be read."""
    if isinstance(job, Work | GenerationRequest):
        return {}
    family = next((one for one in families.FAMILIES if sizes.family == one.NAME), None)
    found = look_ahead(job, sizes, family)
    if found.trouble:
        print(f"The dataset is left out: {found.trouble}", file=sys.stderr)
    return found.known


def _answers(
    sizes: ModelSizes, card: Card, job, preferences: Preferences, found: VramPlan, *, speed: Speed, known: dict, more
) -> list[str]:
    """What one asks next, answered."""
    fixed = fixed_of(card)
    told = what_fits.answers(
        sizes,
        suggestions.State(job, preferences, card),
        found,
        lambda state: surely_fits(sizes, state, fixed=fixed, known=known_of_changed(known, job, state.job)),
        plan_of=lambda state: plan(sizes, state.card, job, preferences, speed=speed, known=known),
        more_gib=more,
        disk_free=what_fits.free_of(places().models),
        num_steps=known.get("total_steps"),
    )
    return [one.words for one in told]


def _free(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        gib = float(text.lower().removesuffix("gib").removesuffix("gb"))
    except ValueError:
        gib = math.nan
    if not 0 < gib <= MOST_RAM_GIB:
        raise ValueError(f"--free is {text!r}; it is an amount in GiB above 0, such as 1.2.")
    return gib


def _as_flags(job: Work | TrainingConfig, helps: Remedy | None) -> str:
    """What is advised, as it is said on this command line: flags that take the place of those that were given."""
    if helps is None:
        return ""
    flags = [f"--card {helps.card_gib}GiB"] if helps.card_gib else []
    flags += [f"--ram {helps.ram_gib}"] if helps.ram_gib else []
    settings = dict(helps.settings)
    if isinstance(job, Work) and settings:
        width, height, frames = (
            whole(settings.pop(name, getattr(job, name))) or 1 for name in ("width", "height", "frames")
        )
        flags.append(f"--size {width}x{height}x{frames}" if frames > 1 else f"--size {width}x{height}")
    flags += [f"--{name} {shlex.quote(str(value))}" for name, value in settings.items()]
    if helps.preferences:
        flags.append("no --exact")
    return f"So: {' '.join(flags)}" if flags else ""


def _cards(said: argparse.Namespace) -> list[str]:
    if said.cards is None:
        return ["12GiB" if said.card is None else said.card]
    if said.card is not None:
        raise ValueError("--card names one card and --cards several; say one of them.")
    names = [name.strip() for name in said.cards.split(",")]
    if not all(names):
        raise ValueError(f"--cards is {said.cards!r}, where a card has no name; say something like 8GiB,rtx3060.")
    return names


def _ram(text: str) -> float:
    try:
        gib = float(text.lower().removesuffix("gib").removesuffix("gb"))
    except ValueError:
        gib = math.nan
    if not 1 <= gib <= MOST_RAM_GIB:
        raise ValueError(f"--ram is {text!r}; it is an amount in GiB from 1 to {MOST_RAM_GIB}, such as 32.")
    return gib


def _size(text: str | None) -> tuple[int, ...]:
    """(width, height) or (width, height, frames); () where nothing is said."""
    if text is None:
        return ()
    if not re.fullmatch(r"\d+x\d+(x\d+)?", text.strip().lower()):
        raise ValueError(
            f"--size is {text!r}; it is WIDTHxHEIGHT in pixels, or WIDTHxHEIGHTxFRAMES, such as 1024x1024."
        )
    width, height, *frames = map(int, text.strip().lower().split("x"))
    knobs.from_values(GenerationRequest, {"width": width, "height": height})  # says what no picture's size can be
    if frames and not 1 <= frames[0] <= MOST_FRAMES:
        raise ValueError(f"--size asks for {frames[0]} frames; a clip has 1 to {MOST_FRAMES}.")
    return (width, height, *frames)


def _job(said: argparse.Namespace, size: tuple[int, ...], sizes: ModelSizes):
    if said.train is None:
        if size[2:] and size[2] > 1 and not sizes.geometry["video"]:
            raise ValueError(f"{sizes.title} makes single pictures, so it has no {size[2]} frames (--size).")
        work = work_of_defaults(sizes, **dict(zip(("width", "height", "frames"), size)))
        return replace(work, quantized=_quantized(said.quantize, sizes))
    if said.quantize is not None:
        raise ValueError("--quantize is of pictures that are drawn; a run says --quant_options, after --train.")
    if size:
        raise ValueError(
            "--size is a picture's that is drawn; a run's is --max_pixels, or --width and --height, after --train."
        )
    config = knobs.from_flags(TrainingConfig, said.train)
    if config.memory.vram:
        raise ValueError("--vram makes a run take this plan; here the card is named by --card, before --train.")
    check_training(config, sizes, families.by_name(sizes.family), here=False)
    return config


def _quantized(text: str | None, sizes: ModelSizes) -> tuple[tuple[str, str], ...]:
    """Part -> storage. Raises Trouble for a part or a method that there is not."""
    files, found = {name: part.files for name, part in sizes.parts.items()}, {}
    for entry, method, excluded in rounding_of(text, "--quantize"):
        check_method(method, "--quantize")
        for name in parts_meant(entry, "quantize", files):
            if name == "vae":
                raise ValueError("The part vae has no linear layers to quantize (--quantize).")
            found[name] = write_storage([Rule(method, excluded)])
    return tuple(found.items())


def _model(name: str) -> ModelSpec | str:
    """A folder or file is identified, which takes the families; of an id the headers are read where its files are; else
    a published name."""
    if not name.strip():
        raise ValueError("The model's name is empty; say a published model's, or a folder.")
    if exists(Path(name)):
        return identify_model(Path(name), families.FAMILIES)
    if not download.is_id(name) and re.search(r"[/\\]|\.(safetensors|gguf|sft|ckpt|pt|bin)$", name):
        raise ValueError(f"There is no file or folder {name}.")
    if not download.is_id(name):
        return name
    here = None
    with contextlib.suppress(Trouble):  # it is not on this machine
        here = download.find_model(name)
    if here is not None:
        return identify_model(here, families.FAMILIES)
    return name if download.is_offline() else _far_away(name)


def _far_away(name: str) -> ModelSpec | str:
    logging.disable(logging.WARNING)  # a hub's library would write a line for each time that it tries again
    try:
        return remote_headers.look(name, families.FAMILIES)
    except Trouble as trouble:
        print(f"{trouble.message.partition(':')[0].rstrip('.')}. What is published is taken.", file=sys.stderr)
        return name
    finally:
        logging.disable(logging.NOTSET)
