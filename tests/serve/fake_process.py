"""fake_server.py as a process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
DEADLINE_S = 60


class Process:
    """fake_server.py, running; killed at the end of the test if it still is."""

    def __init__(
        self, mode: str = "serve", port: int = 0, http_port: int = 0, delay_s: float = 0.02, drain_s: float = 30.0
    ) -> None:
        root = HERE.parent.parent
        self.popen = subprocess.Popen(
            [sys.executable, str(HERE / "fake_server.py"), mode, str(port), str(http_port), str(delay_s), str(drain_s)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": f"{root}:{HERE}"},
        )  # fmt: skip

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.popen.kill()
        self.popen.communicate(timeout=DEADLINE_S)

    def urls(self) -> tuple[str, str]:
        """Address of gRPC and URL of HTTP ("": none), once it is ready."""
        line = self.popen.stdout.readline()
        match = re.fullmatch(
            r"epruntime is ready: gRPC on (127\.0\.0\.1:\d+)(?:, HTTP on (http://127\.0\.0\.1:\d+))?\n", line
        )
        assert match, (line, self.popen.stderr.read() if not line else "")
        return match[1], match[2] or ""

    def address(self) -> str:
        return self.urls()[0]

    def end(self) -> tuple[int, str, str]:
        out, err = self.popen.communicate(timeout=DEADLINE_S)
        return self.popen.returncode, out, err
