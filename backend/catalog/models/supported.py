"""Whether a family's models are drawn with and trained here, for the engine, the trainer, the page and the command line
alike. No torch."""

from __future__ import annotations

from backend.catalog.family import Family
from backend.schema.messages import Trouble


def check_draws(family: Family, *, variant: str, title: str) -> None:
    """Raises Trouble ("not_supported") where no pictures are made with a model of `family` that is called `title`."""
    if not family.DRAWS or variant in family.NOT_DRAWN:
        raise Trouble(
            "not_supported",
            f"{title} is recognised, and LoRAs for it can be worked with, but it draws no pictures here yet.",
            hint="Choose a model of a family that is drawn with.",
        )


def check_trains(family: Family, *, title: str) -> None:
    """Raises Trouble ("not_supported") where a model of `family` that is called `title` cannot be trained."""
    if not family.DRAWS:
        raise Trouble(
            "not_supported", f"{title} cannot be trained here.", hint="Choose a model of a family that is drawn with."
        )
