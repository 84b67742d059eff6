"""The command line.

gRPC's core writes lines of its own about connections that fail, beside the error that says so in words. It reads the
level of its log when it is imported.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
