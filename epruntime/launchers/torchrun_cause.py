"""The cause of a job's end, from what its coordinator has written on standard error: for torchrun's summary.

torchrun prints a traceback of its own agent and a summary when a job fails, below whatever the job has said. So the
one line that tells why goes into that summary, too.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

#: characters that are kept, and that a cause may have.
_TAIL_CHARS, _CAUSE_CHARS = 16_384, 600
#: what says why, in any of these forms: a complaint of a command line; an exception; a log line of an error.
_TELLING = (
    re.compile(r"(?P<cause>(?:epruntime|[\w-]+\.py)(?: \w+)?: \S.*)"),
    re.compile(r"(?P<cause>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)"),
    re.compile(r"\S+ (?:ERROR|CRITICAL) [\w.]+: (?P<cause>.*)"),
)


class RememberingStream:
    """A text stream that remembers the end of what is written to it; else it is that stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._tail = ""

    def write(self, text: str) -> int:
        self._tail = (self._tail + text)[-_TAIL_CHARS:]
        written: int = self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def cause(self) -> str:
        return cause_in(self._tail)


def of_exit(leaving: SystemExit) -> tuple[int, str]:
    """Exit code and cause of `sys.exit(...)`, which takes a code, or words that Python prints, with code 1."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0, ""
    return 1, " ".join(str(leaving.code).split())[:_CAUSE_CHARS]


def leave(error_file: str, cause: str) -> None:
    """Leaves the cause where the supervisor finds it that has started this coordinator: beside the file in which
    torchrun wants to be told of errors. A job may fail before the supervisors and the coordinator have met."""
    if error_file and cause:
        with contextlib.suppress(OSError):  # the output has it all the same
            _beside(error_file).write_text(cause)


def left(error_file: str) -> str:
    """What `leave` has left, once; "" if there is nothing."""
    if not error_file:
        return ""
    try:
        cause = _beside(error_file).read_text()
        _beside(error_file).unlink()
    except OSError:
        return ""
    return cause


def _beside(error_file: str) -> Path:
    return Path(error_file + ".cause")


def cause_in(text: str) -> str:
    """The last line that says what went wrong; "" if there is none."""
    for line in reversed(text.splitlines()):
        for form in _TELLING:
            found = form.match(line)
            if found is not None:
                return found["cause"].strip()[:_CAUSE_CHARS]
    return ""
