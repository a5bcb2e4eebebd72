"""DiffSynth-Studio's training commands with only the script's path changed: `accelerate launch /path/to/loft/train.py
--flags`.

Models, cache and results belong to the working folder (`./models`), as there, unless LOFT_DATA names another. The flags
are those of `python -m backend.training`, which is what runs.
"""

import os
import sys

if __name__ == "__main__":
    # Behind everything that is installed: what lies beside this file stands for nothing but Loft's own packages.
    project = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [
        folder for folder in sys.path if os.path.realpath(folder) not in (project, os.path.realpath(os.curdir))
    ]
    sys.path.append(project)

    from pathlib import Path

    from backend.host.process.isolation import isolated

    os.environ.setdefault("LOFT_DATA", str(Path.cwd()))
    os.environ.update(isolated(os.environ, data=Path(os.environ["LOFT_DATA"])))  # for a restart by name

    from backend.training.__main__ import main

    sys.exit(main(sys.argv[1:]))
