"""A dataset of cached latents and prompt embeddings: what `sft:data_process` leaves and `sft:train` begins from,
without the encoders or the pictures.

A folder with `latents/`, `texts/` and `encodings.json`, which says what belongs together.
"""

from __future__ import annotations

import json
from pathlib import Path

from backend.dataset.dataset import Item
from backend.schema.json_values import finite, parse_json, printable, whole
from backend.schema.messages import Trouble
from backend.schema.training.config import TrainingConfig
from backend.schema.untrusted import exists, read_bytes
from backend.system.atomic_files import write_text
from backend.training.encoding.conditioning import is_editing
from backend.training.encoding.encoding_cache import EncodingCache, View
from backend.training.encoding.sample_source import Source
from backend.training.model.base_model import BaseModel
from backend.training.model.flow_matching_loss import NoiseLevels

TABLE = "encodings.json"
MOST_TABLE_BYTES = 2**29


def write(folder: Path, source: Source, base: BaseModel) -> None:
    items = []
    for number, item in enumerate(source.items):
        keys = {_name(view): key for view, key in source.latents.items() if view.item == number}
        edits = {_name(view): some for view, some in source.references.items() if view.item == number}
        more = {"references": edits, "reference_sizes": source.reference_sizes[number]} if edits else {}
        items.append(
            {
                "latents": keys,
                **more,
                "captions": item.captions,
                "size": source.sizes[number],
                "digest": item.digest,
                "weight": item.weight,
                "prior": item.prior,
                "seed": item.seed,
                "steps": item.steps,
            }
        )
    table = {
        "format": 1,
        "family": base.spec.family,
        "variant": base.spec.variant,
        "items": items,
        "texts": source.texts,
    }
    write_text(folder / TABLE, json.dumps(table, ensure_ascii=False), durable=True)


def _name(view: View) -> str:
    return str(view.flip) if view.cut == 0 else f"{view.flip}/{view.cut}"


def _view(number: int, name: str) -> View:
    flip, _, place = name.partition("/")
    return View(number, flip == "True", int(place or 0))


def _contents(folder: Path, table: dict) -> tuple[list, list, dict, dict, list]:
    """(items, sizes, latents, references, sizes of references) in a table that others may have written. Raises
    ValueError and its kin."""
    _text(table["family"]), _text(table["variant"])
    if table["texts"] is not None:
        for caption, key in table["texts"].items():
            _text(caption), _key(key)
    items, sizes, latents, references, reference_sizes = [], [], {}, {}, []
    for number, row in enumerate(table["items"]):
        height, width = (_checked(whole(side, low=1)) for side in row["size"])
        sizes.append((height, width))
        items.append(
            Item(
                path=folder,
                captions=tuple(_text(caption) for caption in row["captions"]),
                width=width,
                height=height,
                digest=_text(row["digest"]),
                weight=_checked(finite(row["weight"], low=0.0)),
                prior=bool(row["prior"]),
                seed=_whole_or_none(row["seed"]),
                steps=_whole_or_none(row.get("steps")),
            )
        )
        latents |= {_view(number, name): _key(key) for name, key in row["latents"].items()}
        references |= {_view(number, name): tuple(map(_key, keys)) for name, keys in row.get("references", {}).items()}
        reference_sizes.append(
            tuple(
                (_checked(whole(high, low=1)), _checked(whole(wide, low=1)))
                for high, wide in row.get("reference_sizes", ())
            )
        )
    return items, sizes, latents, references, reference_sizes


def _checked(number):
    if number is None:
        raise ValueError("a number in it is missing or out of range")
    return number


def _whole_or_none(value: object) -> int | None:
    return None if value is None else _checked(whole(value, high=2**63 - 1))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("what should be a text is none")
    return value


def _key(value: object) -> str:
    """The key of an encoding, of which its file's name is made: never a path."""
    key = _text(value)
    if not key.isalnum():
        raise ValueError(f"{key[:60]!r} is not the key of an encoding")
    return key


def read(folder: Path, base: BaseModel, config: TrainingConfig) -> Source:
    """The source in `folder`. Raises Trouble where there is none, or one of another family."""
    if not exists(folder / TABLE):
        raise Trouble(
            "missing_file",
            f"The folder {folder} holds no encodings ({TABLE}).",
            hint="Make them first: the same command with --task sft:data_process and this folder as --output_path.",
        )
    data = read_bytes(folder / TABLE, most=MOST_TABLE_BYTES)
    try:
        table = parse_json(data)
        if not isinstance(table, dict):
            raise ValueError("it is no JSON object")
    except ValueError as error:
        raise Trouble("damaged", f"{folder / TABLE} cannot be read: {error}.") from None
    try:
        found = _contents(folder, table)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise Trouble(
            "damaged", f"{folder / TABLE} is not as it was written: {type(error).__name__}: {printable(error)[:200]}."
        ) from None
    if table["family"] != base.spec.family:
        raise Trouble(
            "bad_value", f"The encodings in {folder} are of {table['family']}, the model is {base.spec.family}."
        )
    if is_editing(base) != any(row.get("references") for row in table["items"]):
        how = (
            "without pictures to edit, which it needs"
            if is_editing(base)
            else "with pictures to edit, which it does not take"
        )
        raise Trouble("bad_value", f"The encodings in {folder} were made {how}: {base.spec.title}.")
    theirs, ours = (base.family.EDITS.get(variant) for variant in (table["variant"], base.spec.variant))
    if ours is not None and is_editing(base) and (theirs is None or theirs.shown != ours.shown):
        raise Trouble(
            "bad_value",
            (
                f"The encodings in {folder} are of the variant {table['variant']}, which sees pictures otherwise than "
                f"{base.spec.title}."
            ),
            hint="Make them again with the model that is to train.",
        )
    items, sizes, latents, references, reference_sizes = found
    if references and table["texts"] is None:
        raise Trouble(
            "bad_value",
            "What is told of pictures to edit (a text encoder that trains, --caption_shuffle) is read from those "
            "pictures, which a "
            "second stage does not have.",
            hint="Use --task sft, which keeps encodings too.",
        )
    if config.dataset.flip and not any(view.flip for view in latents):
        raise Trouble("bad_value", "Flip is on, but the encodings were made without it.", hint="Make them with --flip.")
    return Source(
        items=items,
        sizes=sizes,
        latents=latents,
        texts=table["texts"],
        latent_store=EncodingCache(folder / "latents"),
        text_store=EncodingCache(folder / "texts"),
        config=config,
        levels=NoiseLevels(base.family, base.spec),
        references=references,
        reference_sizes=reference_sizes,
    )
