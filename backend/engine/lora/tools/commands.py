"""LoRA tools, one function each with plain values in and out: convert, merge, resize, extract, bake, metadata."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from backend.catalog.formats.safetensors import read_layout
from backend.catalog.models.identify import identify_model
from backend.engine.loading.tensor_source import open_source
from backend.engine.lora.tools import merge, safetensors_writer
from backend.engine.lora.tools.arguments import check_metadata, check_out, check_rank, check_share, check_strengths
from backend.engine.lora.tools.content import family_for, read_content
from backend.engine.lora.tools.convert import STORED, base_part, carried, convert, write_contents
from backend.engine.lora.tools.key_tables import book_of
from backend.engine.lora.tools.safetensors_writer import Progress, Stop, never, nothing
from backend.engine.lora.tools.self_contained import check_neighbours
from backend.schema.messages import Trouble

MADE_ANEW = ("convert", "merge", "resize", "extract")
CANCELLED = 1e-6  # of the changes' lengths: what is left of them when they cancel each other


def run_tool(values: dict, *, on_progress: Progress = nothing, should_stop: Stop = never) -> dict:
    """Does what `values["tool"]` names, with the other values as its settings; the answer is JSON. Raises Trouble or
    Cancelled."""
    tool = TOOLS.get(values.get("tool", ""))
    if tool is None:
        raise Trouble("bad_value", f"There is no tool {values.get('tool')!r}.", hint=f"There are {', '.join(TOOLS)}.")
    known = tool.__code__.co_varnames[: tool.__code__.co_argcount + tool.__code__.co_kwonlyargcount]
    settings = {key: value for key, value in values.items() if key not in ("tool", "command", "id")}
    strange = [key for key in settings if key not in known or key in ("on_progress", "should_stop")]
    if strange:
        raise Trouble("bad_value", f"The tool {values['tool']} has no setting {strange[0]!r}.")
    check_out(settings.get("out"))
    if settings.get("out"):
        check_neighbours(Path(settings["out"]), own_meaning=values["tool"] in MADE_ANEW)
    try:
        return tool(**settings, on_progress=on_progress, should_stop=should_stop)
    except TypeError as error:
        if "missing" not in str(error):
            raise
        raise Trouble("bad_value", f"The tool {values['tool']} lacks a setting: {error}.") from None


def run_convert(
    path: str,
    out: str,
    layout: str,
    *,
    family: str = "",
    base: str | None = None,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> dict:
    """A LoRA in the layout of diffusers, ComfyUI or kohya, proven by reading it back."""
    proof = convert(
        Path(path),
        Path(out),
        layout,
        families=_families(),
        family=family,
        base=Path(base) if base else None,
        overwrite=overwrite,
        on_progress=on_progress,
        should_stop=should_stop,
    )
    return {
        "path": out,
        "modules": proof.num_modules,
        "worst": proof.worst,
        "unused": proof.unused,
        "said": f"{proof.num_modules} modules written and read back; "
        f"the largest difference is {proof.worst:.1e} of a change.",
    }


def run_merge(
    paths: Sequence[str],
    strengths: Sequence[float],
    out: str,
    *,
    layout: str = "comfyui",
    rank: int | None = None,
    dtype: str = "float32",
    family: str = "",
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> dict:
    """Several LoRAs as one: exactly, side by side, or at `rank` with the error stated."""
    numbers = check_strengths(paths, strengths)
    check_rank(rank)
    used = [(path, number) for path, number in zip(paths, numbers, strict=True) if number]
    sources = [open_source(path) for path, _ in used]
    chosen = family_for(sources[0], _families(), family)
    book = book_of(chosen, source=sources[0])
    parts = [(read_content(source, book)[0], number) for source, (_, number) in zip(sources, used, strict=True)]
    whole = merge.merged(parts)
    _check_acts(whole, parts)
    said = "exactly"
    error = 0.0
    if rank:
        small = merge.reduced(whole, rank=rank, on_progress=on_progress, should_stop=should_stop)
        whole, error = small.contents, small.error
        said = f"at rank {rank}, which loses {error:.2%}"
    names = ", ".join(f"{source.name} x {strength:g}" for source, (_, strength) in zip(sources, parts, strict=True))
    metadata = {"format": "pt", "loft.layout": layout, "loft.family": chosen.NAME, "modelspec.merged_from": names}
    write_contents(out, whole, layout, book, metadata, dtype, overwrite, on_progress, should_stop)
    rounded = "" if dtype == "float32" else f", and rounded to {dtype}"
    idle = "" if len(used) == len(paths) else f"; {len(paths) - len(used)} at strength 0 left out"
    return {
        "path": out,
        "modules": len(whole),
        "error": error,
        "said": f"{len(used)} {'file' if len(used) == 1 else 'files'} merged {said}{rounded}{idle}.",
    }


def run_resize(
    path: str,
    out: str,
    *,
    rank: int | None = None,
    energy: float | None = None,
    layout: str = "comfyui",
    dtype: str = "float32",
    family: str = "",
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> dict:
    """A LoRA of a smaller rank: `rank` everywhere, or for each module the least that keeps the share `energy`."""
    check_rank(rank)
    check_share(energy)
    source = open_source(path)
    chosen = family_for(source, _families(), family)
    book = book_of(chosen, source=source)
    small = merge.reduced(
        read_content(source, book)[0], rank=rank, energy=energy, on_progress=on_progress, should_stop=should_stop
    )
    write_contents(
        out, small.contents, layout, book, carried(source.metadata, layout), dtype, overwrite, on_progress, should_stop
    )
    ranks = sorted(set(small.ranks.values()))
    shown = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0] if ranks else 0)
    return {
        "path": out,
        "modules": len(small.contents),
        "error": small.error,
        "ranks": small.ranks,
        "said": f"Rank {shown}; {small.error:.2%} of the change is lost.",
    }


def run_extract(
    tuned: str,
    base: str,
    out: str,
    *,
    rank: int = 32,
    layout: str = "comfyui",
    dtype: str = "float32",
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> dict:
    """The LoRA that makes a tuned model of its base."""
    check_rank(rank, needed=True)
    spec = identify_model(base, _families())
    family = next(one for one in _families() if spec.family == one.NAME)
    part = base_part(Path(base), _families())
    found = merge.extracted(
        base_part(Path(tuned), _families()), part, rank=rank, on_progress=on_progress, should_stop=should_stop
    )
    metadata = {"format": "pt", "loft.layout": layout, "loft.family": family.NAME, "loft.base": Path(base).name}
    write_contents(
        out, found.contents, layout, book_of(family, part), metadata, dtype, overwrite, on_progress, should_stop
    )
    return {
        "path": out,
        "modules": len(found.contents),
        "error": found.error,
        "said": f"{len(found.contents)} modules at rank {rank}; {found.error:.2%} of the difference is lost.",
    }


def run_bake(
    base: str,
    paths: Sequence[str],
    strengths: Sequence[float],
    out: str,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> dict:
    """A checkpoint with LoRAs in its weights."""
    numbers = check_strengths(paths, strengths)
    spec = identify_model(base, _families())
    family = next(one for one in _families() if spec.family == one.NAME)
    loras = [(Path(path), number) for path, number in zip(paths, numbers, strict=True) if number]
    report = merge.bake(
        base_part(Path(base), _families()),
        loras,
        Path(out),
        family=family,
        families=_families(),
        dtype=STORED[dtype] if dtype else None,
        overwrite=overwrite,
        on_progress=on_progress,
        should_stop=should_stop,
    )
    lines = [f"{name}: {applied} modules" for name, applied, _ in report]
    return {"path": out, "unused": {name: unused for name, _, unused in report}, "said": "; ".join(lines) + "."}


def run_metadata(
    path: str,
    *,
    out: str | None = None,
    set: dict[str, str] | None = None,
    remove: Sequence[str] = (),
    strip: bool = False,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> dict:
    """Metadata read, or with `set`, `remove` or `strip` changed, in another file or (with `overwrite`) in place."""
    check_metadata(read_layout(path).metadata, set=set, remove=remove, strip=strip, out=out)
    if not (set or remove or strip):
        return {"path": path, "metadata": read_layout(path).metadata}
    if out is None and not overwrite:
        raise Trouble(
            "exists", f"{path} would be changed in place.", hint="Name another file, or ask for it to be replaced."
        )
    written = safetensors_writer.edit_metadata(
        Path(path),
        Path(out) if out else None,
        set=set,
        remove=remove,
        strip=strip,
        overwrite=overwrite,
        on_progress=on_progress,
        should_stop=should_stop,
    )
    return {"path": str(written), "metadata": read_layout(written).metadata, "said": f"{written.name} is written."}


def run_to_safetensors(
    path: str,
    *,
    out: str | None = None,
    overwrite: bool = False,
    on_progress: Progress = nothing,
    should_stop: Stop = never,
) -> dict:
    """A pickle as safetensors, opened so that it can run no code."""
    written = safetensors_writer.to_safetensors(
        Path(path), Path(out) if out else None, overwrite=overwrite, on_progress=on_progress, should_stop=should_stop
    )
    return {"path": str(written), "said": f"{written.name} is written."}


def run_strengths(path: str, *, family: str = "", on_progress: Progress = nothing, should_stop: Stop = never) -> dict:
    """How strongly a LoRA acts on each block: the Frobenius norm of its change."""
    source = open_source(path)
    contents, unused = read_content(source, book_of(family_for(source, _families(), family), source=source))
    blocks = [{"name": name, "norm": norm, "modules": count} for name, norm, count in merge.strengths(contents)]
    return {"path": path, "blocks": blocks, "unused": unused}


TOOLS: dict[str, Callable[..., dict]] = {
    "convert": run_convert,
    "merge": run_merge,
    "resize": run_resize,
    "extract": run_extract,
    "bake": run_bake,
    "metadata": run_metadata,
    "to_safetensors": run_to_safetensors,
    "strengths": run_strengths,
}


def _families() -> tuple:
    from backend.families import FAMILIES

    return FAMILIES


def _check_acts(whole: dict, parts: list) -> None:
    """Raises Trouble where the parts of a merge cancel each other."""
    length = sum(norm for _, norm, _ in merge.strengths(whole))
    if length <= CANCELLED * sum(abs(number) * norm for some, number in parts for _, norm, _ in merge.strengths(some)):
        raise Trouble(
            "bad_value",
            "The files cancel each other: the merged LoRA would do nothing.",
            hint="Give them other strengths.",
        )
