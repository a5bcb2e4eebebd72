"""What the engine costs beside its peers: `python benchmarks/engine.py [--peers FOLDER] [--only GROUP ...] [--quick]`.

Makes a Qwen-Image transformer of the true width cut to 3 of 60 blocks from random weights (1.06 B parameters, 2.1 GB in
five shards; `--quick`: half the width, a quarter of the numbers) in a temporary folder, and prints a table: ratios of
CPU seconds of one thread, medians of interleaved runs. What is divided by what is measured in one process; every group
of rows and every engine has a process of its own, so that none sees another's imports or memory. The peers are no
dependency of the project. diffusers and peft are there in any case; DiffSynth-Studio comes into a folder of its own by

    python -m pip install --no-deps --target FOLDER diffsynth==2.1.12 einops imageio ftfy wcwidth pandas python-dateutil
six torchvision==0.28.0

"limit" is what nothing could better, "must reach" the target. What is missed and what a peer cannot do is said under
the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from medium import files_of, load_average, make_model, settle
from rows import ENGINES, GROUPS

PROJECT = Path(__file__).resolve().parents[1]
READING = ("loading", "steps", "overlap")  # groups that read the model while they measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=Path, help="folder that DiffSynth-Studio was installed into")
    parser.add_argument("--only", choices=GROUPS, action="append")
    parser.add_argument("--curve", type=Path, help="picture (PNG) of the memory traces")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help="where the model is made and kept; else a temporary folder")
    given = parser.parse_args()
    sys.path[:0] = [str(PROJECT)]
    if given.run:
        GROUPS[given.run[0]][0](given.folder, given.quick, given.run[1])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = given.folder or Path(name)
        if not files_of(folder):
            folder.mkdir(parents=True, exist_ok=True)
            make_model(folder, given.quick)
        rows, notes = [], []
        try:
            for group in given.only or GROUPS:
                run_group(group, folder, given, rows, notes)
        finally:  # what was measured is not lost to a Ctrl-C
            print_table(rows, notes)
        if given.curve and (folder / "trace.json").exists():
            from trace import draw_curves

            draw_curves(folder / "trace.json", given.curve)


def run_group(group: str, folder: Path, given: argparse.Namespace, rows: list[dict], notes: list[str]) -> None:
    """Adds the rows of a group; what an engine cannot do becomes a note."""
    began, before = time.monotonic(), load_average()
    for who in GROUPS[group][1]:
        if group in READING:
            settle(folder)
        paths = [str(PROJECT), str(PROJECT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
        paths += [str(given.peers)] if who == "diffsynth" and given.peers else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        argv = [
            sys.executable,
            "-W",
            "ignore",
            __file__,
            "--run",
            group,
            who,
            "--folder",
            str(folder),
            *["--quick"] * given.quick,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, env=environment)
        if done.returncode:
            notes.append(f"{group}, {who}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
        for line in done.stdout.splitlines():
            kind, _, text = line.partition(" ")
            if kind == "NOTE":
                notes.append(json.loads(text))
            elif kind == "ROW":
                found = json.loads(text)
                known = next((row for row in rows if row["row"] == found["row"]), None)
                rows.append(found) if known is None else known.update(
                    {key: value for key, value in found.items() if value != ""}
                )
    print(f"{group}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    notes.append(f"{group}: {time.monotonic() - began:.0f} s, load {before:.1f} before, {load_average():.1f} after")


def print_table(rows: list[dict], notes: list[str]) -> None:
    print("| what | limit | must reach | Loft | diffsynth | diffusers / peft |\n|---|---|---|---|---|---|")
    others = []
    for found in rows:
        values = {name: value for name, value in found.items() if name not in ("row", "target", "limit")}
        if not set(values) <= set(ENGINES):
            others.append((found["row"], values))
            continue
        cells = [f"{values[who]:.{0 if values[who] >= 100 else 2}f}" if who in values else "-" for who in ENGINES]
        with contextlib.suppress(ValueError, KeyError):
            over = values["Loft"] / float(found["target"]) - 1
            cells[0] = f"**{cells[0]}: missed by {over:.0%}**" if over > 0.0 else cells[0]
        print(f"| {found['row']} | {found['limit'] or '-'} | {found['target']} | {' | '.join(cells)} |")
    for name, values in others:
        print(f"\n{name}: " + ", ".join(f"{key} {value:.{0 if value >= 100 else 2}f}" for key, value in values.items()))
    print("\n" + "\n".join(f"* {text}" for text in notes), flush=True)


if __name__ == "__main__":
    main()
