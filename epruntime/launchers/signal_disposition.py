"""Keeps a library from taking over a signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

#: more than any system's struct sigaction takes; its content is of no interest here
_SIGACTION_BYTES = 512


@contextlib.contextmanager
def kept_disposition(number: int) -> Iterator[None]:
    """Gives the signal its former handler back at the end, whichever thread this is.

    (`signal.signal` works in the main thread only, and does not see handlers that C code installs.)
    """
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.create_string_buffer(_SIGACTION_BYTES)
    if libc.sigaction(number, None, before) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    try:
        yield
    finally:
        if libc.sigaction(number, before, None) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
