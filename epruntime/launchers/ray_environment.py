"""What surrounds Ray's own start: a look whether anybody listens, signals, environment. Imports no Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from epruntime.errors import LaunchError
from epruntime.launchers.import_path import import_path
from epruntime.launchers.signal_disposition import kept_disposition

logger = logging.getLogger("epruntime.launchers.ray_environment")

_PROBE_TIMEOUT_S = 5.0


def probe(address: str, source: str = "") -> None:
    """Finds out in seconds what Ray's own attempt takes minutes for: that nobody listens there.

    Args:
        address: HOST:PORT. source: how it was found, in words.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise LaunchError(f"ray_address={address!r}{source}: must be HOST:PORT or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        stale = " That cluster has ended: `ray stop` and a new `ray start` clear it up." if source else ""
        raise LaunchError(
            f"no Ray cluster listens at ray_address={address!r}{source}: {error}.{stale} `ray status` on its head node "
            "shows whether it is up; the port is the one of `ray start --head --port`, 6379 by default"
        ) from error


def auth_hint() -> str:
    """What to do where a cluster does not take this process, by what its environment says of a token."""
    if os.environ.get("RAY_AUTH_MODE", "") != "token":
        return (
            "If the cluster uses token authentication, this process needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH "
            "(a file that holds the cluster's token) in its environment before it starts."
        )
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if value := os.environ.get(name):
            source = name if name == "RAY_AUTH_TOKEN" else f"{name}={value}"
            break
    else:
        source = "~/.ray/auth_token"
    return (
        f"This process has RAY_AUTH_MODE=token and its token from {source}. It must be the one that the cluster's head "
        "node was started with: RAY_AUTH_TOKEN_PATH names the file that holds it."
    )


def is_own_address(address: str) -> bool:
    """Whether an IP address is one of this machine's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe_socket:
        try:
            probe_socket.bind((address, 0))
        except OSError:
            return False
    return True


def own_sigterm() -> contextlib.AbstractContextManager[None]:
    """Around ray.init: SIGTERM stays this process's own.

    Ray's core would take it for a crash: print a stack, hand it on, and abort the process three seconds later, in the
    middle of a drain.
    """
    return kept_disposition(signal.SIGTERM)


@contextlib.contextmanager
def private_environment(ray_constants: Any, folder: Path) -> Iterator[None]:
    """While the private cluster starts: no usage reports, this process's modules, loopback only, a token of its own.

    A local Ray listens on every interface, and runs code for whoever connects. Where Ray treats the machine as one
    that never joins a cluster it stays on loopback. Left alone, it would also write a token into the home directory,
    and ask for it from then on.

    Args:
        ray_constants: the module ray._private.ray_constants, where that switch is.
        folder: private to this user; the token's file is made in it.
    """
    changes = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(import_path())}
    if "RAY_AUTH_MODE" not in os.environ:
        token = folder / "token"
        token.write_text(secrets.token_hex(32))
        changes |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    before = {name: os.environ.get(name) for name in changes}
    is_switch_there = hasattr(ray_constants, "ENABLE_RAY_CLUSTER")
    if not is_switch_there:
        logger.warning("this version of Ray cannot be kept on loopback: its ports are open to the network")
    cluster = getattr(ray_constants, "ENABLE_RAY_CLUSTER", None)
    try:
        os.environ.update(changes)
        if is_switch_there:
            ray_constants.ENABLE_RAY_CLUSTER = False
        yield
    finally:
        if is_switch_there:
            ray_constants.ENABLE_RAY_CLUSTER = cluster
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
