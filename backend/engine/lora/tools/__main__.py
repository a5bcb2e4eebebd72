"""`python -m backend lora`: see `command_line`."""

import sys

from backend.engine.lora.tools.command_line import main

if __name__ == "__main__":
    sys.exit(main())
