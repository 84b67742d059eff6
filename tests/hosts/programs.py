"""Programs on stand-in hosts: their output as it comes, and a gRPC client that runs where the server is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from epruntime.testing.hosts import Host, HostProcess
from epruntime.testing.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
_CLIENT = Path(__file__).with_name("client_program.py")


class Output:
    """Reads what a process prints (its stdout is a text pipe), in a thread."""

    def __init__(self, process: HostProcess) -> None:
        self.process = process
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    @property
    def text(self) -> str:
        with self._changed:
            return "".join(self._lines)

    def wait_for(self, pattern: str, timeout_s: float) -> re.Match[str]:
        """The first match of the pattern in all that was printed."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (found := re.search(pattern, "".join(self._lines))) is None:
                left = deadline - time.monotonic()
                assert left > 0, f"no {pattern!r} within {timeout_s} s in:\n{''.join(self._lines)}"
                assert not self._ended, f"it ended without {pattern!r}:\n{''.join(self._lines)}"
                self._changed.wait(left)
        return found

    def wait_end(self, timeout_s: float) -> int:
        """Its exit status, when all that it printed is there."""
        status = self.process.wait(timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: self._ended, PATIENCE_S / 2)
        return status

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def start(host: Host, argv: list[str], environment: dict[str, str]) -> Output:
    """Starts a program; standard error goes where its output goes."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    return Output(host.popen(argv, environment=environment, cwd=ROOT, text=True, **pipes))


def client(host: Host, address: str, command: str, **arguments: Any) -> Any:
    """Runs one command of client_program.py on the host, to its end."""
    return json.loads(_client(host, address, command, arguments).wait_for_end())


def start_client(host: Host, address: str, command: str, **arguments: Any) -> ClientRun:
    """The same, without waiting."""
    return _client(host, address, command, arguments)


class ClientRun:
    """A client at work. Its first output, if any, is the line "begun"."""

    def __init__(self, output: Output) -> None:
        self.output = output

    def wait_begun(self, timeout_s: float = PATIENCE_S) -> None:
        self.output.wait_for("begun\n", timeout_s)

    def wait_for_end(self, timeout_s: float = 2 * PATIENCE_S) -> str:
        """Its last line."""
        status = self.output.wait_end(timeout_s)
        assert status == 0, self.output.text
        return self.output.text.strip().splitlines()[-1]

    def result(self, timeout_s: float = 2 * PATIENCE_S) -> Any:
        return json.loads(self.wait_for_end(timeout_s))


def _client(host: Host, address: str, command: str, arguments: dict[str, Any]) -> ClientRun:
    argv = [sys.executable, str(_CLIENT), address, command, json.dumps(arguments)]
    return ClientRun(start(host, argv, {"PYTHONPATH": str(ROOT)}))
