"""What surrounds Ray's own start: a look whether anybody listens, signals, environment. Imports no Ray."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

from epruntime.errors import LaunchError
from epruntime.launchers.import_path import import_path
from epruntime.launchers.signal_disposition import kept_disposition

logger = logging.getLogger("epruntime.launchers.ray_environment")

_PROBE_TIMEOUT_S = 5.0


def probe(address: str) -> None:
    """Finds out in seconds what Ray's own attempt takes minutes for: that nobody listens there."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise LaunchError(
            f"no Ray cluster listens at ray_address={address!r}: {error}. `ray status` on its head node shows whether "
            "it is up; the port is the one of `ray start --head --port`, 6379 by default"
        ) from error


def own_sigterm() -> contextlib.AbstractContextManager[None]:
    """Around ray.init: SIGTERM stays this process's own.

    Ray's core would take it for a crash: print a stack, hand it on, and abort the process three seconds later, in the
    middle of a drain.
    """
    return kept_disposition(signal.SIGTERM)


@contextlib.contextmanager
def private_environment(ray_constants: Any) -> Iterator[None]:
    """While the private cluster starts: no usage reports, this process's modules, and loopback only.

    A local Ray listens on every interface, and runs code for whoever connects. Where Ray treats the machine as one
    that never joins a cluster it stays on loopback.

    Args:
        ray_constants: the module ray._private.ray_constants, where that switch is.
    """
    changes = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(import_path())}
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
