"""Picks the transport: the best supported one, and says why the others were passed over."""

from __future__ import annotations

import logging
from collections.abc import Callable

from epruntime.comm.transport import GroupInfo, Transport
from epruntime.errors import ConfigError
from epruntime.words import counted

logger = logging.getLogger("epruntime.comm.select")


def _local() -> type[Transport]:
    from epruntime.comm.local import LocalTransport

    return LocalTransport


def _gloo() -> type[Transport]:
    from epruntime.comm.gloo import GlooTransport

    return GlooTransport


#: name -> lazy import of the class, best first. A new transport adds one line here.
TRANSPORTS: dict[str, Callable[[], type[Transport]]] = {"local": _local, "gloo": _gloo}


def make_transport(name: str, group: GroupInfo) -> Transport:
    """Makes the transport `name`, or with "auto" the first supported of `TRANSPORTS`.

    All ranks of a group must ask alike: the answer depends only on the group, not on the rank.

    Raises:
        ConfigError: an unknown name, a named transport that is not supported here, or none supported.
    """
    if name != "auto" and name not in TRANSPORTS:
        raise ConfigError(f"transport={name!r}: must be auto or one of {', '.join(TRANSPORTS)}")
    passed_over: list[str] = []
    for candidate in TRANSPORTS if name == "auto" else (name,):
        kind = TRANSPORTS[candidate]()
        support = kind.supports(group)
        if support.ok:
            logger.debug(
                "transport %s for %s (%s)%s",
                candidate,
                counted(group.world_size, "rank"),
                "best supported" if name == "auto" else "as configured",
                "".join(f"; not {reason}" for reason in passed_over),
            )
            return kind(group)
        passed_over.append(f"{candidate}: {support.reason}")
    raise ConfigError(
        f"transport={name!r} cannot serve {group.world_size} ranks on {group.device}: "
        + "; ".join(passed_over)
        + '; use transport="auto" or another one'
    )
