"""Convert a LoRA to another layout (diffusers, ComfyUI, kohya), verified by reading the written file back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from backend.catalog.family import Family
from backend.catalog.lora.metadata import is_ours
from backend.catalog.models.identify import identify_model
from backend.catalog.spec import PartSpec
from backend.engine.loading.tensor_source import open_source
from backend.engine.lora.algorithms.delta import sum_of
from backend.engine.lora.tools.content import Content, family_for, read_content
from backend.engine.lora.tools.export_formats import layout_named, write_layout
from backend.engine.lora.tools.key_tables import Book, book_of
from backend.engine.lora.tools.safetensors_writer import Progress, Stop, making, never, nothing, save
from backend.schema.messages import Cancelled, Trouble

TOLERANCE = 1e-5  # of the largest number of a change, as float32 products differ by
REDUCED_TOLERANCE = 1e-4  # a written file against the reduced contents it was made from, in the dtype it is stored in
STORED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-6, "float16": 2.0**-9}
OURS = ("family", "base", "trigger", "config", "steps", "epochs", "pictures")
CARRIED = ("ss_", "modelspec.", "loft.", "training_info", "software", "name", "version", "ot_")


@dataclass(frozen=True)
class Proof:
    """What reading a written file back has shown."""

    num_modules: int
    worst: float  # largest difference of a change, relative to its largest number
    unused: dict[str, str]  # what of the source was not carried over, and why


def convert(
    path: Path,
    out: Path,
    layout: str,
    *,
    families: tuple[Family, ...],
    family: str = "",
    base: Path | None = None,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> Proof:
    """Writes the LoRA at `path` to `out` in `layout` ("diffusers", "comfyui", "kohya"). Raises Trouble, with nothing
    written, where that is not possible without a loss or the proof fails. `base`: a model of the family, for the names
    of an unusual depth."""
    source = open_source(path)
    chosen = family_for(source, families, family)
    book = book_of(chosen, base_part(base, families) if base else None, source)
    contents, unused = read_content(source, book)
    tensors = write_layout(contents, layout_named(layout), book)
    worst = write_proven(
        out,
        tensors,
        carried(source.metadata, layout),
        contents,
        book,
        overwrite=overwrite,
        on_progress=on_progress,
        should_stop=should_stop,
    )
    return Proof(len(contents), worst, unused)


def base_part(path: Path, families: tuple[Family, ...]) -> PartSpec:
    """The denoiser of the model at `path`."""
    spec = identify_model(path, families)
    if "dit" not in spec.parts:
        raise Trouble(
            "missing_part", f"{path} has no transformer.", hint="Give the model's folder, or the transformer's file."
        )
    return spec.parts["dit"]


def carried(metadata: dict[str, str], layout: str) -> dict[str, str]:
    """Metadata worth keeping in another layout; what speaks of the old one (alpha, network module) is not."""
    stale = ("ss_network_module", "ss_network_alpha", "ss_network_dim", "ss_network_args")
    names = (*CARRIED, *(OURS if is_ours(metadata) else ()))
    kept = {key: value for key, value in metadata.items() if key.startswith(names) and key not in stale}
    return {"format": "pt", **kept, "loft.layout": layout}


def write_proven(
    out: Path,
    tensors: dict[str, torch.Tensor],
    metadata: dict[str, str],
    wanted: dict[str, Content],
    book: Book,
    *,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
    tolerance: float = TOLERANCE,
) -> float:
    """Writes a file and gives it its name only if, read back, it says what `wanted` does. Answers the worst relative
    difference."""
    with making(out, overwrite=overwrite) as temporary:
        save(temporary, tensors, metadata, overwrite=True)
        written, unused = read_content(open_source(temporary, out.name), book)
        if unused:
            raise Trouble(
                "not_proven",
                f"{out.name} would hold {next(iter(unused))}, which is not read again.",
                hint="Nothing was written.",
            )
        return compare(wanted, written, out.name, tolerance, on_progress, should_stop)


def compare(
    wanted: dict[str, Content],
    written: dict[str, Content],
    name: str,
    tolerance: float,
    on_progress: Progress,
    should_stop: Stop,
) -> float:
    """The worst relative difference of two contents' changes; Trouble("not_proven") beyond `tolerance`."""
    worst = 0.0
    for number, module in enumerate(dict.fromkeys([*wanted, *written])):
        if should_stop():
            raise Cancelled
        for what, a, b in _changes(wanted.get(module, Content()), written.get(module, Content())):
            difference = float((a - b.view(a.shape)).abs().max()) if a.numel() else 0.0
            largest = max(float(a.abs().max()), 1e-30) if a.numel() else 1.0
            worst = max(worst, difference / largest if difference else 0.0)
            if difference > tolerance * largest:
                raise Trouble(
                    "not_proven",
                    f"{name}: the {what} of {module} came out {difference / largest:.2%} off.",
                    hint="Nothing was written.",
                )
        on_progress(number + 1, len(wanted))
    return worst


def _changes(wanted: Content, written: Content) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, wanted, written) float32, absent ones as zeros."""
    pairs = [
        ("change", wanted.dense(), written.dense()),
        (
            "bias",
            sum_of(wanted.bias) if wanted.bias else None,
            sum_of(written.bias) if written.bias else None,
        ),
        ("magnitude", _float(wanted.magnitude), _float(written.magnitude)),
    ]
    for what, a, b in pairs:
        if a is not None and b is not None:
            yield what, a, b
        elif a is not None:
            yield what, a, torch.zeros_like(a)
        elif b is not None:
            yield what, torch.zeros_like(b), b


def _float(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.float()


def write_contents(
    out: str,
    contents: dict[str, Content],
    layout: str,
    book,
    metadata: dict,
    dtype: str,
    overwrite: bool,
    on_progress: Progress,
    should_stop: Stop,
) -> None:
    """Writes contents in a layout and dtype, proven against themselves."""
    if dtype not in STORED:
        raise Trouble("bad_value", f"There is no dtype {dtype!r} to store in.", hint=f"There are {', '.join(STORED)}.")
    tensors = write_layout(contents, layout_named(layout), book)
    kept = {key: tensor.to(STORED[dtype]) if _is_factor(key) else tensor for key, tensor in tensors.items()}
    tolerance = REDUCED_TOLERANCE + ROUNDING[dtype]
    write_proven(
        Path(out),
        kept,
        metadata,
        contents,
        book,
        overwrite=overwrite,
        on_progress=on_progress,
        should_stop=should_stop,
        tolerance=tolerance,
    )


def _is_factor(key: str) -> bool:
    return not key.endswith((".alpha", "dora_scale", "lora_magnitude_vector"))
