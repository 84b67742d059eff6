"""What helps beside an error: when to try again, and that a word looks like a server's address."""

from __future__ import annotations

import ipaddress
import re

from epruntime.errors import EPRuntimeError

SERVER = "the server's address is given by --server HOST:PORT"


def in_words(error: EPRuntimeError) -> str:
    """The error, and when to try again if the server has said so."""
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    return str(error) if retry_after_s is None else f"{error} (the server's hint: again in {retry_after_s:g} s)"


def is_address(text: str) -> bool:
    """Whether `text` can hardly be anything but HOST:PORT: an IP address, localhost or a name with dots, and a port."""
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[\w.-]+):(\d{2,5})", text)
    if match is None or not 0 < int(match[2]) < 65536:
        return False
    host = match[1].strip("[]")
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return host == "localhost" or re.search(r"\w\.[a-zA-Z]{2,}$", host) is not None
