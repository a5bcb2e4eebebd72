"""What the engine costs beside its peers: `python benchmarks/engine.py [--quick] [--peers FOLDER] [--only ROW]`.

Makes a Qwen-Image transformer of the true width cut to 3 of 60 blocks from random weights (1.06 B parameters; `--quick`: half the width, a quarter of
the numbers) in a temporary folder, and prints ratios of CPU seconds of one thread, medians of interleaved runs in one process. Every group of rows has a
process of its own. The peers are no dependency of the project:

    python -m pip install --no-deps --target FOLDER diffsynth==2.1.12 imageio ftfy

diffusers is there in any case. A row that a peer cannot do is "-". "limit" is what the row's target in docs/benchmarks.md asks for.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from medium import (
    DISK,
    FP8,
    diffusers_modules,
    inputs,
    loader,
    loft_modules,
    make_model,
    medians,
    part_of,
    private_rss,
    row,
    rss,
    touch,
)

PROJECT = Path(__file__).resolve().parents[1]
MIB = 2**20
IMPORTS = {
    "Loft": "from backend.pipelines import QwenImagePipeline",
    "diffusers": "from diffusers import QwenImagePipeline",
    "diffsynth": "from diffsynth.pipelines.qwen_image import QwenImagePipeline",
}


def imports(folder: Path, quick: bool, who: str = "") -> None:
    """One process for each: CPU seconds and RSS of the import alone."""
    seconds, sizes = {}, {}
    for name, statement in IMPORTS.items():
        code = (
            f"import time\n{statement}\nimport psutil\nprint(time.process_time(), psutil.Process().memory_info().rss)"
        )
        found = [_import_once(code) for _ in range(3)]
        if all(found):
            seconds[name], sizes[name] = (
                statistics.median(f[0] for f in found),
                statistics.median(f[1] for f in found) / MIB,
            )
    row("import, CPU seconds", "3.5", **seconds)
    row("import, RSS in MiB", "340", **sizes)


def _import_once(code: str) -> tuple[float, int] | None:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=os.environ)
    if done.returncode:
        return None
    seconds, size = done.stdout.split()[-2:]
    return float(seconds), int(size)


def loading(folder: Path, quick: bool, who: str) -> None:
    """Loading, every page touched, against reading the file into a buffer that is used again; the peak of a first load."""
    import psutil
    import torch

    torch.set_num_threads(1)
    path, load = folder / "diffusion_pytorch_model.safetensors", loader(who, folder, quick)
    size = path.stat().st_size
    before = rss()
    if hasattr(psutil.Process().memory_info(), "peak_wset"):
        return
    touch(load())
    peak = int(
        next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    )
    buffer = bytearray(16 * MIB)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    seconds = medians({"read": read, "load": lambda: touch(load())}, rounds=5)
    row("load and touch / read()", "0.40", **{who: seconds["load"] / seconds["read"]})
    row("peak RSS of a load / file", "1.10", **{who: (peak * 1024 - before) / size})


def steps(folder: Path, quick: bool, who: str) -> None:
    """A step with resident weights, streamed from disk, and stored in FP8, interleaved in one process."""
    import torch

    torch.set_num_threads(1)
    given = inputs()
    makers = {"Loft": loft_modules, "diffusers": diffusers_modules}
    modules = makers[who](folder, quick)
    with torch.no_grad():
        seconds = medians({name: lambda module=module: module(**given) for name, module in modules.items()}, rounds=3)
    row("disk-offload step / resident step", "1.04", **{who: seconds["disk"] / seconds["resident"]})
    row("FP8-stored step / bf16 step", "1.35", **{who: seconds["fp8"] / seconds["resident"]})


def reading(folder: Path, quick: bool, who: str = "") -> None:
    """Blocks alone, through the reader, against `read()`; and torch's own cast from FP8 against ours."""
    import torch

    from backend.engine import load, quantize
    from backend.engine.stream import Reader, allocate
    from backend.engine.units import find_units

    torch.set_num_threads(1)
    part = part_of(folder, quick)
    blocks = [unit for unit in find_units(load.build_meta(part), part, torch.bfloat16) if unit.block]
    reader, path = Reader(), part.files[0]
    buffer = allocate(max(unit.raw.nbytes for unit in blocks), torch.device("cpu"))
    total = sum(unit.raw.nbytes for unit in blocks)
    plain = memoryview(buffer.numpy())

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            left = total
            while left:
                left -= file.readinto(plain[: min(left, len(plain))])

    seconds = medians({"read": read, "blocks": lambda: [reader.read(unit.spans, buffer) for unit in blocks]}, rounds=7)
    row("loader alone / read()", "1.2", Loft=seconds["blocks"] / seconds["read"])
    codes = torch.randint(0, 120, (1 << 24,), dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    casts = medians(
        {"torch": lambda: out.copy_(codes), "Loft": lambda: quantize.cast(codes, out, special=False)}, rounds=7
    )
    row(
        "FP8 -> bf16, million numbers a second",
        "-",
        **{name: codes.numel() / 1e6 / value for name, value in casts.items()},
    )


def fp8_memory(folder: Path, quick: bool, who: str) -> None:
    """Private RSS that an FP8-stored module adds, after a step of 16 tokens, against one byte a parameter."""
    import torch

    torch.set_num_threads(1)
    given = inputs()
    given["hidden_states"], given["img_shapes"] = given["hidden_states"][:, :16], [[(1, 4, 4)]]
    count = sum(at.nbytes // 2 for at in part_of(folder, quick).tensors.values())
    if who == "Loft":
        from backend.engine import load, placement
        from backend.schema.vram import VramConfig

        part = part_of(folder, quick)
        module = load.build_meta(part)
        before = private_rss()
        placement.place(module, part, VramConfig(**FP8), device="cpu").onload()
    else:
        from diffusers import QwenImageTransformer2DModel

        before = private_rss()
        module = QwenImageTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
        module.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        module(**given)
    row("FP8 private RSS / one byte a parameter", "1.15", **{who: (private_rss() - before) / count})


def trace(folder: Path, quick: bool, who: str) -> None:
    """RSS in MiB: before, loaded, the highest of three steps, unloaded; `who` names the configuration."""
    import threading

    import torch

    from backend.engine import load, memory, placement
    from backend.schema.vram import VramConfig

    torch.set_num_threads(1)
    part, given = part_of(folder, quick), inputs()
    module = load.build_meta(part)
    memory.give_back("cpu")
    seen, over = [rss()], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            seen.append(rss())

    config = {"resident": {}, "FP8": FP8, "disk": DISK, "disk, half stays": {**DISK, "preparing_device": None}}[who]
    watcher = threading.Thread(target=watch)
    watcher.start()
    limit = part.nbytes // 2 if who == "disk, half stays" else None
    placed = placement.place(module, part, VramConfig(**config), vram_limit_bytes=limit, device="cpu")
    placed.onload()
    begin, loaded = seen[0], rss()
    with torch.no_grad():
        for _ in range(3):
            module(**given)
    drawn, highest = rss(), max(seen)
    placed.close()
    del module, placed
    memory.give_back("cpu")
    over.set()
    watcher.join()
    values = {"before": begin, "loaded": loaded, "after 3 steps": drawn, "highest": highest, "unloaded": rss()}
    row(f"RSS in MiB, {who}", "-", **{name: value / MIB for name, value in values.items()})


GROUPS = {
    "imports": (imports, ("",)),
    "loading": (loading, ("Loft", "diffusers", "diffsynth")),
    "steps": (steps, ("Loft", "diffusers")),
    "reading": (reading, ("",)),
    "fp8_memory": (fp8_memory, ("Loft", "diffusers")),
    "trace": (trace, ("resident", "FP8", "disk", "disk, half stays")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", type=Path, help="folder that the peers were installed into")
    parser.add_argument("--only", choices=GROUPS, action="append")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path[:0] = [str(PROJECT)]
    if given.run:
        GROUPS[given.run[0]][0](given.folder, given.quick, given.run[1])
        return
    paths = [str(PROJECT), *([str(given.peers)] if given.peers else []), os.environ.get("PYTHONPATH", "")]
    os.environ.update(PYTHONPATH=os.pathsep.join(filter(None, paths)), OMP_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, given.quick)
        print_table([found for group in given.only or GROUPS for found in run_group(group, folder, given.quick)])


def run_group(group: str, folder: Path, quick: bool) -> list[dict]:
    """The rows of a group; what a peer cannot do is said on stderr and left out."""
    rows: list[dict] = []
    for who in GROUPS[group][1]:
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
            *["--quick"] * quick,
        ]
        done = subprocess.run(argv, capture_output=True, text=True)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:] or ["?"]
            print(f"{group}, {who or 'all'}: {last[0]}", file=sys.stderr)
        for line in done.stdout.splitlines():
            if line.startswith("ROW "):
                found = json.loads(line[4:])
                known = next((row for row in rows if row["row"] == found["row"]), None)
                rows.append(found) if known is None else known.update(found)
    return rows


def print_table(rows: list[dict]) -> None:
    for found in rows:
        values = {name: value for name, value in found.items() if name not in ("row", "target")}
        cells = ", ".join(f"{name} {value:.{0 if value >= 100 else 2}f}" for name, value in values.items())
        missed = ""
        with contextlib.suppress(ValueError, KeyError):
            missed = "" if values["Loft"] <= float(found["target"]) else "  MISSED"
        print(f"{found['row']:<45} target {found['target']:<5} {cells}{missed}", flush=True)


if __name__ == "__main__":
    main()
