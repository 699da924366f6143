"""`python -m chaosrun`."""

import sys

from chaosrun.cli import main

if __name__ == "__main__":
    sys.exit(main())
