"""Where to listen: text forms of addresses, and why one cannot be bound."""

from __future__ import annotations

import errno
import ipaddress
import socket

_REMEDIES = {
    errno.EADDRINUSE: "another process listens there: stop it, or choose another --port (0 picks a free one)",
    errno.EACCES: "this user may not bind it: choose a --port of 1024 or above",
    errno.EADDRNOTAVAIL: "no network interface of this machine has the address: choose another --host",
}


def join(host: str, port: int) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the host; a name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def why_not(host: str, port: int) -> str:
    """What stands against listening at `host:port`, in words; asks the operating system by trying."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as trial:
                trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                trial.bind(where)
                trial.listen(1)
    except socket.gaierror as error:
        return f"the host is not known ({error.strerror}): check --host"
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "choose another --host or --port")
        return f"{error.strerror}; {remedy}"
    return "gRPC refused it; choose another --host or --port"
