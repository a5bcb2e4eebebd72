"""Where a child process may take modules from: never from the data folder or a working folder. Standard library only.

Python puts the working folder first on the module path of `python -m`, and whatever lies there (`torch.py`, `json.py`)
would be run in place of what it is called after. Children get `PYTHONSAFEPATH`, and Loft's own folder, which is the
data folder where nobody names another, is on no path either: a `sitecustomize` in `STARTUP`, which alone is on
`PYTHONPATH`, finds Loft's packages there by their names. Grandchildren inherit all of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from backend.schema.paths import PROJECT

STARTUP = Path(__file__).resolve().parents[1] / "startup"
SAFE = ("-P",)  # what stands behind the interpreter in a child's command line; says the same as PYTHONSAFEPATH


def isolated(environment: Mapping[str, str], *, data: Path) -> dict[str, str]:
    """`environment` for a child that works on the data folder `data`.

    Of PYTHONPATH there stay folders that the owner named in full, outside the data folder, the project and this working
    folder.
    """
    own = [Path(folder).resolve() for folder in (data, PROJECT, Path.cwd())]
    kept = []
    for item in environment.get("PYTHONPATH", "").split(os.pathsep):
        if not item or not Path(item).is_absolute():  # relative to whatever folder the child is in
            continue
        here = Path(item).resolve()
        if here not in own and here != STARTUP and not here.is_relative_to(own[0]):
            kept.append(item)
    return {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([str(STARTUP), *kept])}
