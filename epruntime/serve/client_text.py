"""What clients are told of an error: its own words in one line, and never what a rank has printed."""

from __future__ import annotations

from epruntime.errors import EngineDeadError, UnavailableError
from epruntime.launchers.rank_end import without_words


def client_text(error: BaseException) -> str:
    """The text of `error` for whoever sent the request. A rank's output is for those who read the server's log."""
    text = str(error)
    return one_line(text) if isinstance(error, (EngineDeadError, UnavailableError)) else text


def one_line(text: str) -> str:
    """The same for a reason that is text already."""
    return " ".join(without_words(text).split())
