"""Publishes this rank's progress stamps: by the extension's native thread, or by a Python one where it is absent."""

from __future__ import annotations

import logging

from epruntime.comm import beats
from epruntime.comm.identity import RankBootstrap
from epruntime.comm.progress import Stamps
from epruntime.ops import extension

logger = logging.getLogger("epruntime.worker.progress")


def publish(bootstrap: RankBootstrap, stamps: Stamps) -> beats.Publisher:
    """Starts the heartbeats of a rank that has joined; they end with the process, with `stop`, or with the coordinator.

    Raises:
        HandshakeError: the coordinator refused the connection.
    """
    native = extension.load()
    if native is None:
        logger.warning(
            "rank %d: heartbeats come from a Python thread, which code that holds the interpreter's lock delays: %s",
            bootstrap.slot,
            extension.why_absent(),
        )
    return beats.publish(bootstrap, stamps, signature=extension.kernel_signature(), native=native)
