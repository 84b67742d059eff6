"""Ties a rank's life to its coordinator's: no rank outlives a coordinator that was killed.

Two lines, because each has a gap. The kernel's parent-death signal covers a rank that is deep in native code, but
only for child processes on Linux. The watch on the control socket covers any launcher, but needs a thread to run.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1

#: exit code of a rank that ends because its coordinator is gone.
EXIT_ORPHANED = 75


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to SIGKILL this process when the thread that started it ends (Linux; elsewhere a no-op).

    Set by the child itself: between fork and this call the parent may have died, which the second look at the
    parent's pid finds; then the process exits at once.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != parent_pid:
        os._exit(EXIT_ORPHANED)


def exit_on_hangup(sock: socket.socket, *, grace_s: float) -> threading.Thread:
    """Starts a daemon thread that ends this process `grace_s` seconds after the peer of `sock` hung up.

    The grace lets the main thread, if it is reading the socket, see the end of stream and leave in order. A main
    thread that waits inside a collective for a peer that is gone too would otherwise keep the process alive until
    that wait ends. The watch itself ends when `sock` is closed by this process.
    """
    # An own descriptor: closing `sock` must not leave poll() on a number that some other file has by then.
    watched = os.dup(sock.fileno())

    def watch() -> None:
        poller = select.poll()
        hangup = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR
        poller.register(watched, getattr(select, "POLLRDHUP", 0))
        try:
            while sock.fileno() >= 0:
                if any(event & hangup for _, event in poller.poll(500)):
                    deadline = time.monotonic() + grace_s
                    while time.monotonic() < deadline:
                        if sock.fileno() < 0:
                            return
                        time.sleep(0.05)
                    os._exit(EXIT_ORPHANED)
        finally:
            os.close(watched)

    thread = threading.Thread(target=watch, name="epruntime-lifeline", daemon=True)
    thread.start()
    return thread
