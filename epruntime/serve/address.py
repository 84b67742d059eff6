"""Where to listen: text forms of addresses, sockets for them, and why one cannot be bound."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import ExitStack, suppress

from epruntime.errors import ConfigError

_BACKLOG = 2048
_TRIES = 4


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


def listen(host: str, port: int, *, flag: str) -> list[socket.socket]:
    """Sockets that listen at every address of `host`, all on one port: `port`, or a free one for 0.

    Args:
        flag: the command line's name of `port`, for the error's remedy.

    Raises:
        ConfigError: an address cannot be bound, with the reason.
    """
    try:
        for _ in range(_TRIES if port == 0 else 0):  # a port that is free at one address may be taken at the next
            with suppress(OSError):
                return _listen(host.strip("[]"), port)
        return _listen(host.strip("[]"), port)
    except socket.gaierror as error:
        why = f"the host is not known ({error.strerror}): check --host"
    except OSError as error:
        why = f"{error.strerror}; {_remedy(error.errno, flag)}"
    raise ConfigError(f"cannot listen on {join(host, port)}: {why}")


def check(host: str, port: int, *, flag: str) -> None:
    """Raises ConfigError, with the reason, if `listen` would."""
    for one in listen(host, port, flag=flag):
        one.close()


def _listen(host: str, port: int) -> list[socket.socket]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with ExitStack() as undo:
        sockets: list[socket.socket] = []
        for family, kind, protocol, _, where in found:
            one = undo.enter_context(socket.socket(family, kind, protocol))
            # after a restart connections of the last server may linger; SO_REUSEADDR shares no live listener on Linux
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # "::" takes IPv4, too; a name that has addresses of both kinds gets a socket for each
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
            try:
                one.bind((where[0], port or where[1], *where[2:]))
                one.listen(_BACKLOG)
            except OSError as error:
                # a name such as localhost may stand for an address that no interface has
                if sockets and error.errno == errno.EADDRNOTAVAIL:
                    continue
                raise
            one.setblocking(False)
            sockets.append(one)
            port = one.getsockname()[1]
        undo.pop_all()
    return sockets


def _remedy(number: int | None, flag: str) -> str:
    remedies = {
        errno.EADDRINUSE: f"another process listens there: stop it, or choose another {flag} (0 picks a free one)",
        errno.EACCES: f"this user may not bind it: choose a {flag} of 1024 or above",
        errno.EADDRNOTAVAIL: "no network interface of this machine has the address: choose another --host",
    }
    return remedies.get(number or 0, f"choose another --host or {flag}")
