"""`python -m rlkit.cli`."""

import sys

from rlkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
