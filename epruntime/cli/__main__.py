"""`python -m epruntime.cli`, for where the `epruntime` script is not on the PATH."""

import sys

from epruntime.cli.main import main

sys.exit(main())
