"""One process of several that do one run after the other: `accelerate launch … -m tests.training.several RUNS.json`.

Starting processes takes longer than a tiny run. The file holds a list of {"flags": […], "environment": {…}}; the last run may fail.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main(path: Path) -> int:
    import torch
    from accelerate.state import AcceleratorState, GradientState

    from backend.training.__main__ import main as train

    torch.set_num_threads(1)
    os.environ["FORK_LAUNCHED"] = "1"  # accelerate then leaves the processes joined when a run ends
    status = 0
    for run in json.loads(path.read_text(encoding="utf-8")):
        os.environ.update(run.get("environment", {}))
        status = train(run["flags"])
        AcceleratorState._reset_state()
        GradientState._reset_state()
        for name in run.get("environment", {}):
            os.environ.pop(name, None)
        if status:
            break
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
