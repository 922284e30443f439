"""``python -m poolgrad_numba``: the same as the command ``poolgrad-numba``."""

import sys

from poolgrad_numba.cli import main

if __name__ == "__main__":
    sys.exit(main())
