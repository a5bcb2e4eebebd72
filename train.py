"""DiffSynth-Studio's training commands with only the script's path changed: `accelerate launch /path/to/loft/train.py --flags`.

Models, cache and results belong to the working folder (`./models`), as there, unless LOFT_DATA names another. The flags are those of
`python -m backend.training`, which is what runs.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    project = str(Path(__file__).resolve().parent)
    os.environ.setdefault("LOFT_DATA", str(Path.cwd()))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [project, os.environ.get("PYTHONPATH")])
    )  # for a restart by name
    sys.path.insert(0, project)

    from backend.training.__main__ import main

    sys.exit(main(sys.argv[1:]))
