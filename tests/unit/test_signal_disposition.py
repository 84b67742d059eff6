"""A library that takes a signal over, from any thread, does not keep it."""

from __future__ import annotations

import ctypes
import os
import signal
import threading

from epruntime.launchers.signal_disposition import kept_disposition

_SIG_IGN = 1


def test_handler_comes_back_from_c_code_in_another_thread() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    take_over = ctypes.CDLL(None).signal
    take_over.argtypes, take_over.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1]

        def library() -> None:
            with kept_disposition(signal.SIGUSR1):
                take_over(signal.SIGUSR1, _SIG_IGN)
                os.kill(os.getpid(), signal.SIGUSR1)

        thread = threading.Thread(target=library)
        thread.start()
        thread.join(10)
        assert seen == [signal.SIGUSR1], "ignored while the library had it"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)
