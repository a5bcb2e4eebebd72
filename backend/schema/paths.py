"""Where things lie in the data folder (`--data`, or the environment variable LOFT_DATA; by default the project's
folder)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
ASSETS = PROJECT / "assets"


@dataclass(frozen=True)
class Places:
    """Folders under one root. Nothing is made here: whoever writes makes the folder first."""

    root: Path

    @property
    def models(self) -> Path:
        """Base models, `<owner>/<name>/…`; DIFFSYNTH_MODEL_BASE_PATH overrides."""
        override = os.environ.get("DIFFSYNTH_MODEL_BASE_PATH")
        return Path(override) if override else self.root / "models"

    @property
    def loras(self) -> Path:
        return self.root / "loras"

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def outputs(self) -> Path:
        """Generated pictures, one folder a day."""
        return self.root / "outputs"

    @property
    def datasets(self) -> Path:
        """Uploaded training pictures."""
        return self.root / "datasets"

    @property
    def user(self) -> Path:
        """Last request, last training form, preferences: `*.json`."""
        return self.root / "user"

    @property
    def cache(self) -> Path:
        """Encodings and scans; may be deleted at any time."""
        return self.root / "cache"

    @property
    def trash(self) -> Path:
        return self.root / "trash"


def places() -> Places:
    """The places of this process."""
    return Places(Path(os.environ.get("LOFT_DATA") or PROJECT).resolve())
