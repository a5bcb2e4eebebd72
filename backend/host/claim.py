"""One studio for a data folder: two would end each other's worker and answer each other's queue."""

from __future__ import annotations

import contextlib
import os

from backend.host import processes
from backend.host.files import write_text
from backend.schema.messages import Trouble
from backend.schema.places import Places


def holder(places: Places) -> tuple[processes.Process, int] | None:
    """The studio that has the data folder, if it lives and is not this process, and its port."""
    known = processes.from_file(places.user / "studio.json")
    if known is None or known[0].pid == os.getpid() or not processes.alive(known[0]):
        return None
    return known[0], int(known[1].get("port", 0))


def claim(places: Places, *, port: int) -> None:
    """Takes the data folder for this process. Raises Trouble("in_use") while another studio that lives has it."""
    other = holder(places)
    if other:
        raise Trouble(
            "in_use",
            f"Loft is open already on {places.root} (process {other[0].pid}, port {other[1]}).",
            hint="Use that page, or end it first, or give another folder with --data.",
        )
    path = places.user / "studio.json"
    write_text(path, processes.to_text(processes.this_process(), port=port), private=True)


def release(places: Places) -> None:
    """Gives the data folder back."""
    known = processes.from_file(places.user / "studio.json")
    if known and known[0].pid == os.getpid():
        with contextlib.suppress(OSError):
            (places.user / "studio.json").unlink(missing_ok=True)
