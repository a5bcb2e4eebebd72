"""One studio for a data folder: two would end each other's worker and answer each other's queue."""

from __future__ import annotations

import contextlib

from backend.host import processes
from backend.host.files import write_text
from backend.schema.messages import Trouble
from backend.schema.places import Places


def claim(places: Places, *, port: int) -> None:
    """Takes the data folder for this process. Raises Trouble("in_use") while another studio that lives has it."""
    path = places.user / "studio.json"
    known = processes.from_file(path)
    if known and processes.alive(known[0]) and known[0].pid != processes.this_process().pid:
        raise Trouble(
            "in_use",
            f"Loft is open already on {places.root} (process {known[0].pid}, port {known[1].get('port', '?')}).",
            hint="Use that page, or end it first, or give another folder with --data.",
        )
    write_text(path, processes.to_text(processes.this_process(), port=port))


def release(places: Places) -> None:
    """Gives the data folder back."""
    known = processes.from_file(places.user / "studio.json")
    if known and known[0].pid == processes.this_process().pid:
        with contextlib.suppress(OSError):
            (places.user / "studio.json").unlink(missing_ok=True)
