"""Which models are given pictures to edit, and how many: told before anything is loaded."""

from __future__ import annotations

from types import ModuleType

from backend.catalog.spec import ModelSpec
from backend.schema.messages import Trouble


def edits(spec: ModelSpec, family: ModuleType) -> bool:
    """Whether the model is one that is given pictures to edit."""
    return spec.variant in getattr(family, "EDITING", ())


def check(spec: ModelSpec, family: ModuleType, num_pictures: int, *, must: bool = True) -> None:
    """Raises Trouble where the model cannot take so many pictures to edit, or (`must`) wants one and has none."""
    if not num_pictures:
        if must and edits(spec, family):
            raise Trouble(
                "bad_value",
                f"{spec.title} changes a picture, and none was given.",
                hint="Add one under “Pictures to edit”, or choose Qwen-Image to draw from words alone.",
            )
        return
    if not edits(spec, family):
        raise Trouble(
            "bad_value",
            f"{spec.title} draws from words alone; it edits no pictures.",
            hint="Choose a Qwen-Image-Edit model. A single file is known for one by that name, as in Qwen-Image-Edit-2509.safetensors.",
        )
    if num_pictures > 1 and spec.variant == "edit":
        raise Trouble(
            "bad_value",
            f"{spec.title} works from one picture, and {num_pictures} were given.",
            hint="Give one, or choose Qwen-Image-Edit-2509 or a later one.",
        )
