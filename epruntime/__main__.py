"""`python -m epruntime ...`: the same as `epruntime ...`."""

import sys

from epruntime.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
