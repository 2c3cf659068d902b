"""``python -m launcher``: the same as the ``areal-like`` command."""

from __future__ import annotations

import sys

from launcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
