"""What the Python API is given: checked, and turned into what the engine takes."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from PIL import Image

from backend.engine.devices import device_memory, out_of_memory
from backend.engine.pipeline import image_tensors
from backend.engine.pipeline.latent_preview import Step
from backend.schema.memory_plan import GIB
from backend.schema.messages import Trouble


def limit_bytes(gib: float | None) -> int | None:
    """`vram_limit` in bytes. Raises Trouble for what is no amount."""
    if gib is None:
        return None
    if isinstance(gib, bool) or not isinstance(gib, int | float) or not 0 <= gib < math.inf:
        hint = "Give GiB as a number such as 8; None is no limit, 0 keeps nothing ready on the card."
        raise Trouble("bad_value", f"vram_limit is {gib!r}, which is no amount of memory.", hint=hint)
    return int(gib * GIB)


def check_dtype(dtype: object) -> None:
    """Raises Trouble for what a network cannot compute in. None, as in older scripts, is what the engine takes by
    itself."""
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        hint = "Use torch.bfloat16, torch.float16 or torch.float32; storing in FP8 is ModelConfig's (preparing_dtype)."
        raise Trouble("bad_value", f"torch_dtype is {dtype!r}, which a model does not compute in.", hint=hint)


def pictures_of(given: Image.Image | str | Path | Sequence[Image.Image | str | Path] | None) -> tuple[Image.Image, ...]:
    """One picture, several, or none (PIL pictures or files), in RGB. Raises Trouble for what is no picture."""
    some = given if isinstance(given, list | tuple) else [] if given is None else [given]
    return tuple(picture_of(one) for one in some)


def picture_of(given: object) -> Image.Image:
    """A PIL picture, or that in a file, in RGB. Raises Trouble for what is no picture."""
    if isinstance(given, Image.Image):
        if not given.width * given.height:
            raise Trouble("bad_picture", f"A picture that was given has {given.width} x {given.height} pixels.")
        try:
            return image_tensors.on_white(given)
        except (OSError, ValueError) as error:  # its file was closed, or is cut off
            raise Trouble(
                "bad_picture", f"A picture that was given cannot be read: {str(error).rstrip('.')}."
            ) from None
    if isinstance(given, str | Path):
        return image_tensors.open_picture(given)
    raise Trouble("bad_value", f"{given!r:.80} is no picture.", hint="Give a PIL picture or a file's path.")


def check_switches(**given: object) -> None:
    """Raises Trouble for what is neither True nor False."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise Trouble("bad_value", f"{name} is {value!r:.80}, which is neither True nor False.")


def check_call(
    *, input_image: object, tiled: object, tile_size: object, tile_stride: object, on_step: object, bar: object
) -> None:
    """Raises Trouble for what a picture cannot be asked for with."""
    if input_image is not None and not isinstance(input_image, str | Path | Image.Image):
        raise Trouble(
            "bad_value",
            f"input_image is {input_image!r:.80}, which is no picture.",
            hint="Give a PIL picture or a file's path.",
        )
    if tiled is not None:
        check_switches(tiled=tiled)
    for name, value in (("tile_size", tile_size), ("tile_stride", tile_stride)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise Trouble(
                "bad_value", f"{name} is {value!r:.80}; it is a whole number of latent cells (8 pixels), at least 1."
            )
    for name, value in (("on_step", on_step), ("progress_bar_cmd", bar)):
        if value is not None and not callable(value):
            raise Trouble(
                "bad_value",
                f"{name} is {value!r:.80}, which cannot be called.",
                hint="Give a function, or leave it out.",
            )


def round_up(values: dict[str, object], *, multiple: int) -> list[str]:
    """Makes width and height in `values` multiples of `multiple` (and of the 16 that every request has), upwards; a
    sentence for each that was none. What is no positive whole number stays, to be refused by name."""
    step, said = math.lcm(multiple, 16), []
    for name in ("width", "height"):
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % step:
            values[name] = -(-value // step) * step
            said.append(f"{name} {value} is no multiple of {step} and was rounded up to {values[name]}.")
    return said


@contextlib.contextmanager
def shortage_in_words(doing: str, device: object) -> Iterator[None]:
    """Raises Trouble in place of what says that memory ran out, and lets go of what that held."""
    with out_of_memory.suppress_oom() as ran_out:
        yield
    for error in ran_out:
        raise out_of_memory.trouble(device_memory.check_device(str(device)), error, doing=doing)


def words_of(function: Callable) -> list[str]:
    """The settings that a function takes, by name."""
    named = inspect.signature(function).parameters.values()
    return [one.name for one in named if one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in ("self", "cls")]


class Progress:
    """Calls `bar` (as tqdm is called) and `on_step` after every step."""

    def __init__(self, bar, steps: int, on_step: Callable[[Step], None] | None):
        self.on_step, self.bar = on_step, None if bar is None else iter(bar(range(steps)))

    def __enter__(self):
        if self.bar is not None:
            next(self.bar, None)
        return self.step if self.bar is not None or self.on_step else None

    def step(self, step: Step) -> None:
        if self.bar is not None:
            next(self.bar, None)
        if self.on_step:
            self.on_step(step)

    def __exit__(self, *_):
        return False
