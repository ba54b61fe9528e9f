"""`python -m harness` and the `fp8-harness` console script."""

import sys

from harness.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
