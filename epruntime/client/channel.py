"""Addresses, channel options, and the parts of grpc.health.v1 that a client needs."""

from __future__ import annotations

import ipaddress
from typing import Any

from epruntime.errors import ConfigError
from epruntime.proto import keys

DEFAULT_ADDRESS = "127.0.0.1:50051"
_MAX_RECEIVE_BYTES = 256 * 2**20

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
#: grpc.health.v1.HealthCheckResponse.ServingStatus
HEALTH_STATUSES = {0: "unknown", 1: "serving", 2: "not serving", 3: "service unknown"}


def check_address(address: str) -> str:
    """`address` if it looks like host:port.

    Raises:
        ConfigError: it does not.
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"address={address!r}: must be HOST:PORT, for example {DEFAULT_ADDRESS}")
    return address


def options(address: str) -> list[tuple[str, Any]]:
    """Channel options: large answers are taken, and a server whose host is gone is noticed within 40 s."""
    chosen: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
    if _is_loopback(address):
        chosen.append(("grpc.enable_http_proxy", 0))  # http_proxy is not meant for this machine
    return chosen


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# grpc.health.v1 has two messages of one field each. They are written out here because the package that has them
# generated (grpcio-health-checking) is not part of the base install.


def health_request(_: None) -> bytes:
    """HealthCheckRequest{service = 1: string} for our service."""
    name = keys.SERVICE.encode()
    return bytes([0x0A, len(name)]) + name


def health_status(data: bytes) -> str:
    """Status of a HealthCheckResponse{status = 1: enum}, in words."""
    value = data[1] if len(data) >= 2 and data[0] == 0x08 else 0
    return HEALTH_STATUSES.get(value, "unknown")
