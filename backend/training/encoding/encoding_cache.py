"""The cache of latents and prompt embeddings: computed once, kept in RAM and on disk by a hash of their inputs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from PIL import Image
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from backend.dataset.crops import Box, cut
from backend.dataset.dataset import Item
from backend.dataset.reference_images import Shown
from backend.engine.devices import out_of_memory
from backend.engine.pipeline.image_tensors import to_pixels
from backend.images.orientation import in_rgb, upright
from backend.schema.messages import Trouble
from backend.system.atomic_files import write_bytes
from backend.training.encoding.open_images import open_reference

RAM_BYTES = 4 * 2**30
Encoding = dict[str, torch.Tensor]
Progress = Callable[[int, int], None]
T = TypeVar("T")


class View(NamedTuple):
    """One way in which a picture is shown: the number of the item, mirrored or not, and which cut of it."""

    item: int
    flip: bool = False
    cut: int = 0


class EncodingCache:
    """Small dictionaries of tensors by key. `folder` None keeps them in RAM alone, else as files; `shared`: other runs
    take them over."""

    def __init__(self, folder: Path | None, *, shared: bool = False):
        self.folder, self.shared = folder, shared
        self.near: dict[str, Encoding] = {}
        self.near_bytes = 0

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        return key in self.near or self.get(key) is not None

    def get(self, key: str) -> Encoding | None:
        """The tensors under `key`; None where there are none, or where the file is torn."""
        if key in self.near:
            return self.near[key]
        if self.folder is None:
            return None
        path = self._path(key)
        try:
            found = load_tensors(path.read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # a torn file of a lost machine: whatever the parser says, it is computed anew
            if out_of_memory.is_oom(error):
                raise
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the least recently used are deleted first
        self._keep_near(key, found)
        return found

    def put(self, key: str, encoding: Encoding, *, exact: bool = True) -> None:
        """Keeps `encoding`; one that is not `exact` for this run alone."""
        encoding = {name: tensor.detach().cpu().contiguous() for name, tensor in encoding.items()}
        near = self.folder is None or (self.shared and not exact)
        self._keep_near(key, encoding, always=near)
        if near:
            return
        try:
            write_bytes(self._path(key), save_tensors(encoding), synced=False)
        except OSError:  # a cache that cannot be written is a slower one, no more
            self._keep_near(key, encoding, always=True)

    def _keep_near(self, key: str, encoding: Encoding, *, always: bool = False) -> None:
        size = sum(tensor.nbytes for tensor in encoding.values())
        if always or self.near_bytes + size <= RAM_BYTES:
            self.near[key] = encoding
            self.near_bytes += size


def prune(folder: Path, limit_bytes: float, *, keep: Collection[str] = ()) -> None:
    """Deletes the files that were used longest ago until `folder` is within `limit_bytes`; those whose keys are in
    `keep` stay.

    What a killed process left half written goes after a day.
    """
    files = [(path.stat().st_mtime, path.stat().st_size, path) for path in folder.rglob("[!.]*.safetensors")]
    excess = sum(size for _, size, _ in files) - limit_bytes
    for _, size, path in sorted(files, key=lambda entry: entry[0]):
        if excess <= 0:
            break
        if path.stem not in keep:
            path.unlink(missing_ok=True)
            excess -= size
    for left in folder.rglob(".*.tmp"):
        if left.stat().st_mtime < time.time() - 86400:
            left.unlink(missing_ok=True)


def map_tensors(encoding: dict, change: Callable[[torch.Tensor], torch.Tensor]) -> dict:
    """`encoding` with `change` made to every tensor in it, those of its references too."""
    return {
        name: tuple(map(change, value)) if isinstance(value, tuple) else change(value)
        for name, value in encoding.items()
    }


def key_of(*words) -> str:
    """A hash of `words` in their order; what is in one of them is never taken for several."""
    text = "".join(f"{len(word)}:{word}" for word in map(str, words))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def open_pixels(item: Item, size: tuple[int, int], *, flip: bool = False, box: Box | None = None) -> torch.Tensor:
    """(3, height, width) in [-1, 1]: the picture upright, resized; what `box` cuts out, or its largest middle part.

    Raises Trouble by its name.
    """
    height, width = size
    try:
        with Image.open(item.path) as stored:
            picture = in_rgb(stored)
    except Exception as error:  # decoders raise what they like
        if out_of_memory.is_oom(error):  # the picture is whole, and not to be left out
            raise
        raise Trouble(
            "broken_picture",
            f"The picture {item.path} cannot be read ({error}).",
            hint="Replace or remove it, or set --skip_broken_pictures.",
        ) from None
    pixels = to_pixels(_cut_out(picture, size, box), width, height)[0]
    return pixels.flip(-1) if flip else pixels


def _cut_out(picture: Image.Image, size: tuple[int, int], box: Box | None) -> Image.Image:
    return picture if box is None else picture.resize((size[1], size[0]), Image.Resampling.LANCZOS, box=box)


def read_mask(
    item: Item, size: tuple[int, int], cells: tuple[int, int], *, kind: str, flip: bool, box: Box | None = None
) -> torch.Tensor:
    """(1, h, w) in [0, 1] at the latents' resolution `cells`; all ones where a picture has no mask."""
    path = item.mask if kind == "file" else item.path
    if path is None or item.prior:
        return torch.ones(1, *cells)
    with Image.open(path) as stored:
        picture = upright(stored)
        if kind == "alpha":
            picture = picture.convert("RGBA").getchannel("A")
        picture = _cut_out(_like(picture.convert("L"), item), size, box)
        mask = to_pixels(picture.convert("RGB"), size[1], size[0])[:, :1] * 0.5 + 0.5
    mask = torch.nn.functional.interpolate(mask, cells, mode="area")[0]
    return mask.flip(-1) if flip else mask


def _like(mask: Image.Image, item: Item) -> Image.Image:
    """A mask of another size than its picture is one of the whole picture all the same."""
    return mask if mask.size == (item.width, item.height) else mask.resize((item.width, item.height))


def cache_latents(
    store: EncodingCache,
    wanted: dict[str, View],
    items: Sequence[Item],
    sizes: Sequence[tuple[int, int]],
    *,
    encode: Callable[[torch.Tensor], Iterable[torch.Tensor]],
    workers: int,
    skip_broken: bool,
    progress: Progress,
    zoom: float = 1.0,
    exact: Callable[[], bool] = lambda: True,
) -> dict[int, str]:
    """Encodes what `store` lacks of `wanted` {key: view}. Returns the items that could not be read, and why. `exact`:
    of what was encoded.

    `encode` is given one picture (1, 3, height, width) at a time: what it goes through the network with would change
    its last bits, and an encoding is to be the same whatever the cache held before.
    """

    def read(key: str) -> torch.Tensor | Trouble:
        view = wanted[key]
        item, size = items[view.item], sizes[view.item]
        try:
            return open_pixels(item, size, flip=view.flip, box=cut(item, size, view.cut, zoom=zoom))
        except Trouble as why:
            return why

    broken: dict[int, str] = {}
    for done, (key, pixels) in enumerate(_read_ahead(list(wanted), read, workers), start=1):
        if isinstance(pixels, torch.Tensor):
            (latents,) = encode(pixels[None])
            store.put(key, {"latents": latents.float()}, exact=exact())
        elif skip_broken:
            broken[wanted[key].item] = pixels.message
        else:
            raise pixels
        progress(done, len(wanted))
    return broken


def _read_ahead(keys: list[str], read: Callable[[str], T], workers: int) -> Iterator[tuple[str, T]]:
    """`keys` with what `read` makes of each; threads read ahead (decoding releases Python's lock)."""
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        ahead = max(2, 2 * workers)
        waiting = deque(pool.submit(read, key) for key in keys[:ahead])
        for place, key in enumerate(keys):
            found = waiting.popleft().result()
            waiting.extend(pool.submit(read, later) for later in keys[place + ahead : place + ahead + 1])
            yield key, found


def cache_reference_latents(
    store: EncodingCache,
    wanted: dict[str, Shown],
    *,
    encode: Callable[[Image.Image], torch.Tensor],
    workers: int,
    skip_broken: bool,
    progress: Progress,
    exact: Callable[[], bool] = lambda: True,
) -> dict[str, str]:
    """Encodes the pictures in `wanted` {key: picture}. Returns the keys of those that could not be read, and why."""
    broken: dict[str, str] = {}

    def read(key: str) -> Image.Image | Trouble:
        try:
            return open_reference(wanted[key])
        except Trouble as why:
            return why

    for done, (key, picture) in enumerate(_read_ahead(list(wanted), read, workers), start=1):
        if isinstance(picture, Trouble):
            if not skip_broken:
                raise picture
            broken[key] = picture.message
        else:
            latents = encode(picture).float()
            store.put(key, {"latents": latents}, exact=exact())
        progress(done, len(wanted))
    return broken


def cache_prompt_embeddings(
    store: EncodingCache,
    wanted: dict[str, tuple[str, tuple[str, ...]]],
    *,
    encode: Callable[[list[tuple[str, tuple[str, ...]]]], Iterable[Encoding]],
    progress: Progress,
) -> None:
    """Encodes what is told in `wanted` {key: (prompt, pictures)}, short prompts first, each alone: as for pictures."""
    keys = sorted(wanted, key=lambda key: (len(wanted[key][1]), len(wanted[key][0])))
    for done, key in enumerate(keys, start=1):
        (encoding,) = encode([wanted[key]])
        store.put(key, encoding)
        progress(done, len(keys))
