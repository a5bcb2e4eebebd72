"""Everything that needs a card, in one go: `python tests/gpu/run.py`, in under 8 minutes, on a card of 8 GiB or more (CUDA; the first half on any).

Placement (the same answers in every state, streaming that hides, limits and pinned RAM kept), then predicted against measured peaks. Prints what was measured.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    began = time.monotonic()
    failed = int(pytest.main(["-s", "-q", "-x", str(FOLDER)]))
    sys.path.insert(0, str(FOLDER))
    import plan_check

    failed = failed or plan_check.main()
    print(f"{time.monotonic() - began:.0f} seconds, {'failed' if failed else 'all is well'}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
