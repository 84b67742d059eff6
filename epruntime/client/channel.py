"""How a client reaches a server: address, TLS, access token, channel options, and what it needs of grpc.health.v1."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from epruntime import envs
from epruntime.errors import ConfigError
from epruntime.proto import keys

DEFAULT_ADDRESS = "127.0.0.1:50051"
_MAX_RECEIVE_BYTES = 256 * 2**20

HEALTH_CHECK = "/grpc.health.v1.Health/Check"
#: grpc.health.v1.HealthCheckResponse.ServingStatus
HEALTH_STATUSES = {0: "unknown", 1: "serving", 2: "not serving", 3: "service unknown"}


@dataclass(frozen=True, kw_only=True)
class Tls:
    """TLS to a server. Without `ca`, the certificate must be signed by an authority that gRPC knows by itself.

    Attributes:
        ca: PEM file with the authorities that may have signed the server's certificate.
        cert, key: PEM files with a certificate and key of the client's own, where the server asks for one (mTLS).
        server_name: the name to look for in the server's certificate; default: the host of the address.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises ConfigError: a file cannot be read, or one of certificate and key is missing."""
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: cert and key go together: give both, or neither")
        return grpc.ssl_channel_credentials(_read("ca", self.ca), _read("key", self.key), _read("cert", self.cert))


def _read(name: str, path: str | os.PathLike[str] | None) -> bytes | None:
    if path is None:
        return None
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"tls {name}={os.fspath(path)!r}: cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:  # gRPC would say so at the first call only, and not which file
        raise ConfigError(f"tls {name}={os.fspath(path)!r}: is not a PEM file")
    return content


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A server as one client reaches it; made by `endpoint`.

    Attributes:
        metadata: sent with each call: the access token, if there is one.
    """

    address: str
    tls: Tls | None = None
    metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def channel(self) -> grpc.Channel:
        if self.tls is None:
            return grpc.insecure_channel(self.address, options=self._options())
        return grpc.secure_channel(self.address, self.tls.credentials(), options=self._options())

    def aio_channel(self) -> grpc.aio.Channel:
        if self.tls is None:
            return grpc.aio.insecure_channel(self.address, options=self._options())
        return grpc.aio.secure_channel(self.address, self.tls.credentials(), options=self._options())

    def _options(self) -> list[tuple[str, Any]]:
        """Large answers are taken, and a server whose host is gone is noticed within 40 s."""
        chosen: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", _MAX_RECEIVE_BYTES),
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            # else the text of an error longer than that would take the whole error with it
            ("grpc.max_metadata_size", 16 * 2**10),
            # a server that comes back is tried again as often as our own retries ask, not after ever longer breaks
            ("grpc.max_reconnect_backoff_ms", 2_000),
        ]
        if _is_loopback(self.address):
            chosen.append(("grpc.enable_http_proxy", 0))  # http_proxy is not meant for this machine
        if self.tls is not None and self.tls.server_name is not None:
            chosen.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return chosen


def endpoint(address: str = DEFAULT_ADDRESS, *, api_key: str | None = None, tls: Tls | bool | None = None) -> Endpoint:
    """The server at `address`, checked as far as it goes without a connection.

    Args:
        api_key: access token; None: that of EPRUNTIME_API_KEY, if it is set; "": none.
        tls: True for TLS with the authorities that gRPC knows; None or False for plain text.

    Raises:
        ConfigError: an address that is not HOST:PORT, or a token that no header can carry.
    """
    token = str(envs.get("EPRUNTIME_API_KEY")) if api_key is None else api_key
    if not all("!" <= c <= "~" for c in token):
        raise ConfigError("api_key: a token must be of printable ASCII characters without spaces")
    return Endpoint(
        address=check_address(address),
        tls=Tls() if tls is True else tls or None,
        metadata=((keys.AUTHORIZATION, f"Bearer {token}"),) if token else (),
    )


def check_address(address: str) -> str:
    """`address` if it looks like host:port.

    Raises:
        ConfigError: it does not.
    """
    if "://" in address:
        raise ConfigError(f"address={address!r}: must be HOST:PORT, without a scheme; TLS is chosen by tls (--tls)")
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"address={address!r}: must be HOST:PORT, for example {DEFAULT_ADDRESS}")
    return address


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
