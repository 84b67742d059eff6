"""TorchrunJob: `torchrun ... PROGRAM ...` as child processes, one per host, of which the output is read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
_READY = re.compile(r"^epruntime is ready: gRPC on (\S+?)(?:, HTTP on (\S+))?$")


class TorchrunJob:
    """One torchrun, that is, one host's part of a job. Use as a context manager; it is killed at the end.

    Args:
        options: of torchrun; program: what it starts, with arguments.
        environment: added to this process's own.
        popen: starts it; that of a stand-in host puts it there.

    Attributes:
        lines: what it has printed so far.
    """

    def __init__(
        self,
        options: Sequence[str],
        program: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        popen: Callable[..., subprocess.Popen[Any]] | None = None,
    ) -> None:
        self._command = [TORCHRUN, *options, *program]
        self._environment = {"PYTHONPATH": str(Path(__file__).parents[2]), **(environment or {})}
        self._popen = popen
        self.lines: list[str] = []
        self._changed = threading.Condition()

    def __enter__(self) -> TorchrunJob:
        options: dict[str, Any] = {
            "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True,
            "errors": "replace",
        }  # fmt: skip
        if self._popen is None:
            environment = {**os.environ, **self._environment}
            self.process = subprocess.Popen(self._command, env=environment, start_new_session=True, **options)
        else:
            self.process = self._popen(self._command, environment=self._environment, **options)
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.wait(10)

    def wait_for(self, pattern: str, timeout_s: float, *, times: int = 1) -> re.Match[str]:
        """The `times`-th line in which the pattern is found.

        Raises:
            AssertionError: it did not come in time, or torchrun ended before; with all that was printed.
        """
        deadline, regex = time.monotonic() + timeout_s, re.compile(pattern)
        while True:
            with self._changed:
                found = [match for line in self.lines if (match := regex.search(line))]
                ended = self.process.poll() is not None
                if len(found) >= times:
                    return found[times - 1]
                left_s = deadline - time.monotonic()
                if ended or left_s <= 0:
                    what = f"torchrun ended with {self.process.returncode}" if ended else f"not within {timeout_s:g} s"
                    raise AssertionError("\n".join([f"{pattern!r}: {what}", *self.lines]))
                self._changed.wait(min(left_s, 0.2))

    def ready(self, timeout_s: float, *, times: int = 1) -> str:
        """HOST:PORT of gRPC, once the server takes requests (for the `times`-th time)."""
        return self.wait_for(_READY.pattern, timeout_s, times=times)[1]

    def signal(self, number: signal.Signals) -> None:
        """To torchrun's agent."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """torchrun's exit code.

        Raises:
            AssertionError: it still runs after `timeout_s` seconds.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError("\n".join([f"torchrun still runs after {timeout_s:g} s", *self.lines])) from None

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
