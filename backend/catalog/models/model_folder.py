"""What lies beside a model's parts in its folder: noise schedule, tokenizer, and the settings it wants to be asked
with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from backend.catalog.family import Family
from backend.catalog.spec import ModelSpec
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_file, is_folder, read_object_or_empty

TOKENIZERS = ("tokenizer", "processor")  # folders of a model, in which its tokenizer can lie


def completed(spec: ModelSpec, family: Family) -> ModelSpec:
    """`spec` with tokenizer and schedule from the folder its parts lie in, for parts that were given one by one."""
    root = root_of(spec, family)
    if root is None:
        return spec
    schedule = read_object(root / "scheduler" / "scheduler_config.json")
    return replace(
        spec,
        path=root,
        scheduler=schedule or spec.scheduler,
        tokenizers=tokenizers_in(root, family) | spec.tokenizers,
        processor=spec.processor or processor_in(root),
    )


def tokenizers_in(root: Path | None, family: Family) -> dict[str, Path]:
    """The family's tokenizers in a model's folder, by their names among the parts."""
    found = {name: tokenizer_in(root, described.folder) for name, described in family.TOKENIZERS.items()}
    return {name: folder for name, folder in found.items() if folder is not None}


def tokenizer_in(root: Path | None, name: str = "tokenizer") -> Path | None:
    """The tokenizer in the folder `name` of a model's folder; of the first also the one that a processor is made of."""
    if root is None:
        return None
    if is_folder(root / name):
        return root / name
    words = ("tokenizer.json", "vocab.json")
    own = name == "tokenizer" and any(is_file(root / "processor" / word) for word in words)
    return root / "processor" if own else None


def processor_in(root: Path | None) -> Path | None:
    """The processor of pictures in a model's folder."""
    found = root / "processor" if root is not None else None
    return found if found is not None and processor_settings(found) is not None else None


def processor_settings(folder: Path) -> Path | None:
    """The file in a processor's folder that says how pictures are cut; None where there is none.

    Newer transformers write another.
    """
    names = ("preprocessor_config.json", "processor_config.json")
    return next((folder / name for name in names if is_file(folder / name)), None)


def root_of(spec: ModelSpec, family: Family) -> Path | None:
    """The folder in the diffusers layout that holds the parts, the transformer's first; None where they lie
    otherwise."""
    if spec.path is not None and is_folder(spec.path):
        return spec.path
    for name in sorted(spec.parts, key=lambda name: name != "dit"):
        folder = spec.parts[name].folder
        if folder is not None and folder.name == family.PARTS[name].folder:
            return folder.parent
    return None


def request_defaults(
    spec: ModelSpec, family: Family, *, usual: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Fields of `GenerationRequest` that this model wants by default: the family's, over them `usual`, and over both
    `_defaults` of its model_index.json."""
    said = _said(spec, family, "_defaults")
    known = (
        {name: value for name, value in said.items() if isinstance(value, int | float)}
        if isinstance(said, dict)
        else {}
    )
    return {**family.DEFAULTS.request, **(usual or {}), **known}


def check_multiple(spec: ModelSpec, family: Family, *, width: int, height: int) -> None:
    """Raises Trouble for a side that the model's latents do not come to."""
    multiple = family.sizes(spec.variant).multiple
    for name, value in (("Width", width), ("Height", height)):
        if value % multiple or value < multiple:
            raise Trouble("bad_value", f"{name} is {value}; this model needs a multiple of {multiple}.")


def check_size(spec: ModelSpec, family: Family, *, width: int, height: int) -> None:
    """Raises Trouble where the model draws no pictures of that size: for a side of another multiple, or where `_sizes`
    in its model_index.json, a list of [width, height], do not hold this one."""
    check_multiple(spec, family, width=width, height=height)
    said = _said(spec, family, "_sizes")
    sizes = [size for size in said if isinstance(size, list) and len(size) == 2] if isinstance(said, list) else []
    if sizes and [width, height] not in sizes:
        known = " or ".join(f"{size[0]} x {size[1]}" for size in sizes)
        raise Trouble(
            "bad_value",
            (
                f"This model draws {known} pixels, the size it was trained at; at {width} x {height} things come out "
                "cut or repeated."
            ),
            hint=f"Ask for {known}, or choose another model.",
        )


def _said(spec: ModelSpec, family: Family, key: str) -> object:
    """What the model's model_index.json has under `key`; None where it says nothing."""
    root = root_of(spec, family)
    return read_object(root / "model_index.json").get(key) if root else None


def read_object(path: Path) -> dict:
    """The JSON object in a file; empty where there is none."""
    return read_object_or_empty(path)
