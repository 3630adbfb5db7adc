"""`python -m foveal` is the `foveal` command."""

from __future__ import annotations

import sys

from foveal.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
