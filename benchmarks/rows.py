"""The groups of rows of the engine's table. Each function measures one engine in a process of its own and prints its
rows."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
from pathlib import Path

from medium import MIB, bare, files_of, make_loras, medians, note, part_of, private_rss, row, rss, touch
from peers import PEERS

ENGINES = tuple(PEERS)


def imports(folder: Path, quick: bool, who: str) -> None:
    """CPU seconds and RSS of an import alone, each time in a new process; then with the classes of the three networks
    as well."""
    floor: tuple[str, ...] = ()
    if who == "Loft":
        alone, least = (statistics.median(values) for values in zip(*[_import_once("import torch") for _ in range(3)]))
        floor = (f"{alone:.1f}, torch alone", f"{least / MIB:.0f}, torch alone")
    both = f"{PEERS[who].imports}\n{PEERS[who].networks}"
    for what, code, rounds, least, size in (
        ("to a usable pipeline class", PEERS[who].imports, 3, "3.5", "340"),
        ("the class and its networks", both, 1, "-", "-"),
    ):
        found = [_import_once(code) for _ in range(rounds)]
        seconds, nbytes = (statistics.median(values) for values in zip(*found))
        row(f"import {what}, CPU seconds", least, *floor[:1], **{who: seconds})
        row(f"import {what}, RSS in MiB", size, *floor[1:], **{who: nbytes / MIB})


def _import_once(code: str) -> tuple[float, int]:
    code += "\nimport time, psutil\nprint(time.process_time(), psutil.Process().memory_info().rss)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    seconds, size = done.stdout.split()[-2:]
    return float(seconds), int(size)


def loading(folder: Path, quick: bool, who: str) -> None:
    """Loading, every page touched, against reading the files into a buffer that is used again; the peak of a first
    load; the loader alone."""
    import torch

    torch.set_num_threads(1)
    peer, paths = PEERS[who], files_of(folder)
    size = sum(path.stat().st_size for path in paths)
    buffer = bytearray(16 * MIB)

    def read() -> None:
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    before = rss()
    touch(peer.load(folder, quick))
    peak = _high_water()
    seconds = medians({"read": read, "load": lambda: touch(peer.load(folder, quick))}, rounds=5)
    row("load and touch every page / read()", "0.40", "0.33", **{who: seconds["load"] / seconds["read"]})
    if peak:
        row("peak RSS of a load / file", "1.10", "1.0", **{who: (peak - before) / size})
    if peer.everything is None:
        note(f"{who} has no loader of its own to measure: it maps the file through safetensors")
        return
    seconds = medians({"read": read, "load": peer.everything(folder, quick)}, rounds=5)
    row("loader alone / read()", "1.2", "1.0", **{who: seconds["load"] / seconds["read"]})


def _high_water() -> int:
    """The most resident bytes of this process so far; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return 0


def steps(folder: Path, quick: bool, who: str) -> None:
    """One denoising step of 512 x 512 (1024 picture and 64 text tokens): resident, its products alone, from disk,
    stored in FP8, with 8 hot LoRAs."""
    import torch

    torch.set_num_threads(1)
    peer, works = PEERS[who], {}
    resident = peer.load(folder, quick)
    works["resident"] = peer.step(resident)
    works["bare"] = bare(works["resident"])
    works["disk"] = peer.step(peer.placed(folder, quick, "disk"))
    works["FP8"] = peer.step(peer.placed(folder, quick, "fp8"))
    hot = peer.hot(folder, quick, make_loras(folder, quick, 8))
    works["hot"] = peer.step(hot)
    with torch.no_grad():
        seconds = medians(works, rounds=3)
        layers = {name: module.transformer_blocks[0].attn.to_q for name, module in (("plain", resident), ("hot", hot))}
        x = torch.randn(1, 1024, layers["plain"].in_features).to(torch.bfloat16)
        one = medians(
            {name: lambda layer=layer: [layer(x) for _ in range(10)] for name, layer in layers.items()}, rounds=9
        )
    row("resident step / its products and attentions", "1.15", "1", **{who: seconds["resident"] / seconds["bare"]})
    row("disk-offload step / resident step", "1.04", "1.00", **{who: seconds["disk"] / seconds["resident"]})
    row("FP8-stored step / bf16 step", "1.35", "1.15", **{who: seconds["FP8"] / seconds["resident"]})
    row(
        "8 hot LoRAs on all attention projections / none", "1.04", "1.02", **{who: seconds["hot"] / seconds["resident"]}
    )
    row("one projection with 8 hot LoRAs / plain", "1.12", "-", **{who: one["hot"] / one["plain"]})
    if who == "diffusers":
        copied = sum(path.stat().st_size for path in (folder / "copy").rglob("*") if path.is_file())
        note(
            f"diffusers' disk offload writes a second copy of the weights first ({copied / MIB:.0f} MiB); the others "
            "read the user's files"
        )


def fusing(folder: Path, quick: bool, who: str) -> None:
    """One LoRA of 24 matrices from its file into the weights, against the in-place products alone (bf16, factors in
    memory)."""
    import torch

    torch.set_num_threads(1)
    for dtype in ("bfloat16", "float16", "float32"):
        file = make_loras(folder, quick, 1, dtype)[0]
        module, fuse, undo = PEERS[who].fuse(folder, quick, file)
        pairs = _factors(module, file)

        def products(pairs=pairs) -> None:
            for weight, up, down in pairs:
                weight.addmm_(up, down)

        with torch.no_grad():
            seconds = medians({"fuse": fuse, "addmm_": products}, rounds=5, after={"fuse": undo})
        target = "1.3" if dtype == "bfloat16" else "-"
        row(
            f"fuse one LoRA ({dtype}, 24 matrices) / addmm_",
            target,
            "1.0",
            **{who: seconds["fuse"] / seconds["addmm_"]},
        )


def _factors(module, file: Path) -> list[tuple]:
    import torch
    from safetensors.torch import load_file

    tensors, found = load_file(file), []
    for key, up in tensors.items():
        if key.endswith(".lora_B.weight"):
            name = key.removesuffix(".lora_B.weight")
            down = tensors[f"{name}.lora_A.weight"]
            weight = module.get_submodule(name).weight.detach()
            found.append((weight, up.to(torch.bfloat16), down.to(torch.bfloat16)))
    return found


def casting(folder: Path, quick: bool, who: str) -> None:
    """FP8 to bfloat16 on the CPU: torch's own cast and ours, of 16 M numbers."""
    import torch

    from backend.engine.loading import fp8_storage

    torch.set_num_threads(1)
    codes = torch.randint(0, 120, (1 << 24,), dtype=torch.uint8).view(torch.float8_e4m3fn)
    out = torch.empty(codes.shape, dtype=torch.bfloat16)
    works = {"torch": lambda: out.copy_(codes), "Loft": lambda: fp8_storage.cast(codes, out, special=False)}
    found = {name: codes.numel() / 1e6 / value for name, value in medians(works, rounds=7).items()}
    row("FP8 -> bf16, million numbers a second", "-", f"{found['torch']:.0f}, torch's own", Loft=found["Loft"])


def fp8_memory(folder: Path, quick: bool, who: str) -> None:
    """Private RSS that an FP8-stored module adds, after a step of 16 picture tokens, against one byte a parameter."""
    import torch

    torch.set_num_threads(1)
    count = sum(at.nbytes // 2 for at in part_of(folder, quick).tensors.values())
    if who == "diffsynth":
        import peers

        peers._without_torchvisions_kernels()
        import diffsynth.models.qwen_image_dit  # noqa: F401
    elif who == "diffusers":
        from diffusers import QwenImageTransformer2DModel  # noqa: F401
    else:
        from backend.engine.loading import load

        load.build_meta(part_of(folder, quick))
    before, mapped = private_rss(), rss()
    module = PEERS[who].placed(folder, quick, "fp8")
    peak, size = _high_water(), sum(path.stat().st_size for path in files_of(folder))
    if peak:
        row("peak RSS of loading into FP8 / file", "1.10", "0.5", **{who: (peak - mapped) / size})
    with torch.no_grad():
        PEERS[who].step(module, 4)()
    private, everything = private_rss() - before, rss() - mapped
    row("FP8 private RSS / one byte a parameter", "1.15", "1.0", **{who: private / count})
    row("FP8 RSS with the file's mapped pages / the same", "-", "1.0", **{who: everything / count})


def overlap(folder: Path, quick: bool, who: str) -> None:
    from overlap import sweep

    sweep(folder, quick, who)


def trace(folder: Path, quick: bool, who: str) -> None:
    from trace import draw_three

    draw_three(folder, quick, who)


GROUPS = {
    "imports": (imports, ENGINES),
    "loading": (loading, ENGINES),
    "steps": (steps, ENGINES),
    "fusing": (fusing, ENGINES),
    "casting": (casting, ("Loft",)),
    "fp8_memory": (fp8_memory, ENGINES),
    "overlap": (overlap, ENGINES),
    "trace": (trace, ("resident", "FP8", "streamed", "disk", "disk to FP8")),
}
