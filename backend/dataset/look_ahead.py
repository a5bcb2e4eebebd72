"""What a run will be given to do, looked up before it starts and without torch: sizes of its pictures, lengths of its
captions, its steps.

The page asks at every keystroke: a dataset is read by a thread, once for as long as its files stay as they are, and a
keystroke takes what is known by then. Whoever has time waits for it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from backend.catalog.family import Family, SizeRule, TokenCount, takes_negative
from backend.dataset.bucket_sampler import Batch, epoch_batches, kept_aside, size_of, steps_of_epoch
from backend.dataset.captions import lines_of
from backend.dataset.check_inputs import read_data
from backend.dataset.dataset import Dataset, FileEntry, Item
from backend.dataset.generated_prompts import EMPTY, prior_prompts
from backend.dataset.reference_images import reference_sizes, sample_pictures, shown, whole
from backend.planner.costs import prompt_length
from backend.planner.costs.model_sizes import ModelSizes
from backend.schema.messages import Trouble
from backend.schema.untrusted import is_folder
from backend.system.text_files import listed

EXACT_SAMPLES = 2000  # of an epoch, up to which its batches are made as the run makes them
STALE_SECONDS = 2.0
_SIZES: dict[str, FileEntry] = {}  # of picture files: what `dataset` remembers
_LOOKS: dict[tuple, _Look] = {}
_LOCK = threading.Lock()
_KNOWN: dict[tuple, tuple] = {}
_changes = 0


@dataclass
class _Look:
    """One dataset as it was read last."""

    data: Dataset | None = None
    trouble: Trouble | None = None
    stamp: tuple = ()
    checked: float = 0.0
    thread: threading.Thread | None = None


@dataclass(frozen=True)
class Ahead:
    """`known`: fields of `Work`. `looking`: the dataset is still being read. `trouble`: why it cannot be."""

    known: dict = field(default_factory=dict)
    looking: bool = False
    trouble: str = ""


def dataset_changes() -> int:
    """Grows whenever more is known of a dataset."""
    return _changes


def look_ahead(config, sizes: ModelSizes, family: Family | None, *, wait: float | None = None) -> Ahead:
    """What a run of `config` with the model of `sizes` will do.

    `family`: the module of its family. `wait`: seconds to wait for a dataset that is being read; None: until it is.
    """
    if (
        family is None
        or not family.DRAWS
        or not (config.dataset.dataset_base_path or config.dataset.dataset_metadata_path)
    ):
        return Ahead()
    if config.training.task.endswith(":train"):
        return Ahead()  # a folder of encodings, which torch alone reads
    edits = "reference_pixels" in sizes.defaults
    found = _read(config, edits=edits, wait=wait)
    if found.data is None:
        return Ahead(looking=found.trouble is None, trouble=found.trouble.message if found.trouble else "")
    try:
        return Ahead(known_of(config, found.data, sizes, family))
    except Trouble as trouble:
        return Ahead(trouble=trouble.message)


def _read(config, *, edits: bool, wait: float | None) -> _Look:
    """What was read of the dataset; it is read, or looked at again, by a thread."""
    section = config.dataset
    names = (
        "dataset_base_path",
        "dataset_metadata_path",
        "dataset_weights",
        "data_file_keys",
        "extra_inputs",
        "trigger_word",
        "masked_loss",
    )
    key = (
        *(getattr(section, name) for name in names),
        section.skip_broken_pictures,
        config.prior.regularisation_path,
        edits,
    )
    with _LOCK:
        one = _LOOKS.setdefault(key, _Look())
        if one.thread is None and (wait is None or time.monotonic() - one.checked > STALE_SECONDS):
            one.thread = threading.Thread(target=_refresh, args=(one, config, edits), daemon=True)
            one.thread.start()
        thread = one.thread
        while len(_LOOKS) > 8:
            _LOOKS.pop(next(iter(_LOOKS)))
    if thread is not None and (wait is None or one.data is None):
        thread.join(wait)
    return replace(one)


def _refresh(one: _Look, config, edits: bool) -> None:
    global _changes
    try:
        stamp = _stamp(config)
        if stamp != one.stamp or (one.data is None and one.trouble is None):
            data, trouble = None, None
            try:
                data = read_data(config, index=None, edits=edits, sizes_only=_SIZES)
            except Trouble as error:
                trouble = error
            except (OSError, ValueError) as error:
                trouble = Trouble("missing_file", f"The dataset cannot be read: {error}.")
            one.data, one.trouble, one.stamp = data, trouble, stamp
            _changes += 1
    finally:
        one.checked, one.thread = time.monotonic(), None


def _stamp(config) -> tuple:
    """Changes when a file of the dataset does."""
    section, found = config.dataset, []
    for base in (*listed(section.dataset_base_path), *listed(config.prior.regularisation_path)):
        for folder, inner, names in os.walk(base):
            inner.sort()
            found += [_status(os.path.join(folder, name)) for name in sorted(names)]  # noqa: PTH118
    return (*found, *(_status(path) for path in listed(section.dataset_metadata_path)))


def _status(path: str) -> tuple:
    try:
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return (path, 0, 0)
    return (path, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class _Largest:
    """The batch that takes most: what its pictures have in common, how many, and the longest of their captions."""

    shape: tuple[tuple[int, int], ...]
    count: int
    told: TokenCount
    seen: int


def known_of(config, data: Dataset, sizes: ModelSizes, family: Family) -> dict:
    """Fields of `Work` that `data` tells of a run of `config`."""
    training, samples = config.training, config.samples
    key = (
        config.dataset,
        config.prior,
        config.model.tokenizer_path,
        training.batch_size,
        training.num_epochs,
        training.max_steps,
        training.devices,
        training.gradient_accumulation_steps,
        training.seed,
        samples.sample_prompts,
        samples.sample_edit_images,
        samples.sample_width,
        samples.sample_height,
        samples.sample_guidance,
        samples.validation_split,
    )
    kept = _KNOWN.get(key)
    if kept is None or kept[0] is not data or kept[1] is not sizes:
        while len(_KNOWN) > 32:
            _KNOWN.pop(next(iter(_KNOWN)), None)
        kept = _KNOWN[key] = (data, sizes, _facts(config, data, sizes, family))
    return dict(kept[2])


def _facts(config, data: Dataset, sizes: ModelSizes, family: Family) -> dict:
    section, rule = config.dataset, family.sizes(sizes.variant)
    multiple = rule.multiple
    edits = "reference_pixels" in sizes.defaults
    pixels = section.edit_pixels or sizes.defaults.get("reference_pixels", 0)
    shape_of = _shapes(config, multiple, family, pixels, edits=edits)
    items = list(data.items)
    shapes = [shape_of(item) for item in items]
    if config.prior.prior_pictures and not config.prior.regularisation_path:
        items, shapes = _with_drawn(config, items, shapes, editing=edits)
    aside = set(kept_aside(items, config.samples.validation_split, seed=config.training.seed))
    items = [replace(item, weight=0.0) if number in aside else item for number, item in enumerate(items)]
    tokenizer = Path(config.model.tokenizer_path) if config.model.tokenizer_path else None
    tokenizer = tokenizer if tokenizer is not None and is_folder(tokenizer) else None
    seen_pixels = _seen_pixels(sizes, section.edit_pixels)

    def told(prompts: Sequence[str], seen: Sequence[Sequence[int]] = ()) -> list[TokenCount]:
        return prompt_length.told(sizes, prompts, seen=seen, tokenizer=tokenizer)

    def seen_of(item: Item) -> list[int]:
        return prompt_length.seen_each(
            sizes, [one.size for one in shown(item, shape_of(item)[0], zoom=section.crop_zoom)], seen_pixels
        )

    captions = [caption for item in items for caption in item.captions]
    seen = [some for item in items for some in [seen_of(item) if edits else []] for _ in item.captions]
    each = told(captions, seen if edits else ())
    largest = _largest(config, items, shapes, each, seen, rule)
    dropped = told(["", " "]) if section.caption_dropout and not edits else []
    batches, samples = (
        _batches(config, items, shapes),
        _samples(config, items, shapes, told, family, sizes.variant, rule, edits, pixels, seen_pixels),
    )
    processes = max(config.training.devices, 1)
    per_epoch = steps_of_epoch(batches, processes=processes, accumulation=config.training.gradient_accumulation_steps)
    (height, width), *references = largest.shape
    everything = [*each, *dropped, *samples.pop("told")]
    return {
        "width": width,
        "height": height,
        "text_tokens": max(largest.told.given, max((one.given for one in dropped), default=0)),
        "batch": largest.count,
        "read_tokens": max(one.read for one in everything),
        "total_steps": config.training.max_steps or config.training.num_epochs * per_epoch,
        **samples,
        **({} if not edits else _edited(references, largest, shapes, rule)),
    }


def _edited(references: list, largest: _Largest, shapes: list, rule: SizeRule) -> dict:
    return {
        "reference_tokens": _tokens(references, rule),
        "reference_pixels": max((tall * wide for shape in shapes for tall, wide in shape[1:]), default=0),
        "seen_tokens": largest.seen,
    }


def _seen_pixels(sizes: ModelSizes, edit_pixels: int | None) -> int:
    said = sizes.defaults
    if "seen_pixels" not in said or not edit_pixels:
        return said.get("seen_pixels", 0)
    return min(said["seen_pixels"], edit_pixels) if said["seen_pixels"] < said["reference_pixels"] else edit_pixels


def _shapes(config, multiple: int, family: Family, pixels: int, *, edits: bool):
    """A function item -> what has to be the same in a batch; pictures of one size are looked at once."""
    section = config.dataset

    @cache
    def size(width: int, height: int) -> tuple[int, int]:
        like = Item(path=Path(), captions=(), width=width, height=height)
        return size_of(
            like,
            height=section.height,
            width=section.width,
            max_pixels=section.max_pixels,
            multiple=multiple,
            snap=config.training.batch_size > 1,
        )

    def shape(item: Item) -> tuple[tuple[int, int], ...]:
        own = size(item.width, item.height)
        if not edits:
            return (own,)
        return (own, *reference_sizes(shown(item, own, zoom=section.crop_zoom), family, pixels=pixels))

    return shape


def _with_drawn(config, items: list[Item], shapes: list, *, editing: bool) -> tuple[list[Item], list]:
    """With the pictures that the untouched model will draw, as `prior.add_drawn` adds them."""
    prompts = prior_prompts(config.prior, editing=editing)
    own = [number for number, item in enumerate(items) if not item.prior]
    usual = Counter(shape[0] for shape in shapes).most_common(1)[0][0]
    drawn, forms = [], []
    for number in range(config.prior.prior_pictures):
        like = own[number % len(own)]
        form = shapes[like] if editing else (usual,)
        height, width = form[0]
        prompt = prompts[number % len(prompts)]
        drawn.append(
            Item(path=Path(), captions=(prompt,), width=width, height=height, prior=True, edits=items[like].edits)
        )
        forms.append(form)
    return [*items, *drawn], [*shapes, *forms]


def _largest(config, items: list[Item], shapes: list, each: list[TokenCount], seen: list, rule: SizeRule) -> _Largest:
    """Of the batches that train, the one with the most tokens."""
    repeat, found, place = config.dataset.dataset_repeat, {}, 0
    for item, shape in zip(items, shapes, strict=True):
        of_item = range(place, place + len(item.captions))
        place += len(item.captions)
        if not item.weight:
            continue
        count, longest, most = found.get(shape, (0, TokenCount(0, 0), 0))
        best = prompt_length.longest([each[index] for index in of_item])
        most = max(most, *(sum(seen[index]) for index in of_item))
        found[shape] = (count + max(1, round(repeat * item.weight)), prompt_length.longest([longest, best]), most)
    largest = [
        _Largest(shape, min(config.training.batch_size, count), told, most)
        for shape, (count, told, most) in found.items()
    ]
    return max(largest, key=lambda one: one.count * (_tokens(one.shape, rule) + one.told.given))


def _tokens(shape: Iterable[tuple[int, int]], rule: SizeRule) -> int:
    """Of pictures (height, width)."""
    return sum(rule.tokens(width, height) for height, width in shape)


def _batches(config, items: list[Item], shapes: list) -> int:
    """Of an epoch: as the run makes them, or, of many samples, as many as fill each shape."""
    section = config.dataset
    whole_samples = sum(item.weight for item in items if not item.prior) * section.dataset_repeat
    if whole_samples <= EXACT_SAMPLES:
        made: list[Batch] = epoch_batches(
            items,
            shapes,
            batch_size=config.training.batch_size,
            repeat=section.dataset_repeat,
            prior_share=config.prior.prior_share,
            seed=config.training.seed,
            epoch=0,
        )
        return len(made)
    counts: Counter = Counter()
    for item, shape in zip(items, shapes, strict=True):
        counts[shape] += 0 if item.prior else item.weight * section.dataset_repeat
    if any(item.prior for item in items):
        share = config.prior.prior_share
        counts[next(shape for item, shape in zip(items, shapes, strict=True) if item.prior)] += (
            sum(counts.values()) * share / (1 - share)
        )
    return sum(-int(-count // config.training.batch_size) for count in counts.values())


def _samples(
    config,
    items,
    shapes,
    told,
    family: Family,
    variant: str,
    rule: SizeRule,
    edits: bool,
    pixels: int,
    seen_pixels: int,
) -> dict:
    """Of the samples that are drawn between steps: their sizes, and what they are told."""
    section, prompts = config.samples, lines_of(config.samples.sample_prompts)
    if not prompts:
        return {"told": []}
    sizes, seen, references = [shapes[0][0]] * len(prompts), [[] for _ in prompts], [0] * len(prompts)
    if edits:
        named = sample_pictures(section, prompts)
        own = [number for number, item in enumerate(items) if not item.prior]
        for index in range(len(prompts)):
            if named is None:
                item, shape = items[own[index % len(own)]], shapes[own[index % len(own)]]
                some, sizes[index] = shown(item, shape[0], zoom=config.dataset.crop_zoom), shape[0]
            else:
                some, last = whole(named[index]), named[index][-1]
                shape_of = _shapes(config, rule.multiple, family, pixels, edits=False)
                sizes[index] = shape_of(Item(path=last.path, captions=(), width=last.width, height=last.height))[0]
            seen[index] = [family.seen_tokens([one.size], seen_pixels) for one in some]
            references[index] = _tokens(reference_sizes(some, family, pixels=pixels), rule)
    found = told([*prompts, *([EMPTY] * len(prompts))], [*seen, *seen] if edits else ())
    asked = [(section.sample_width or width, section.sample_height or height) for height, width in sizes]
    largest = max(range(len(prompts)), key=lambda index: asked[index][0] * asked[index][1])
    guided = takes_negative(family, variant, section.sample_guidance)
    given = [max(one.given, other.given if guided else 0) for one, other in zip(found, found[len(prompts) :])]
    return {
        "told": found,
        "sample_size": asked[largest],
        "sample_tokens": max(given) if not edits else given[largest],
        "sample_references": references[largest],
    }
