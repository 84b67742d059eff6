"""Tls: certificate, key and client authorities of the server, read and checked once for both front ends."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path

from epruntime.config import ServeConfig
from epruntime.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Tls:
    """PEM bytes, as gRPC takes them, and a context for asyncio.

    Attributes:
        certificate_chain: the server's own certificate first.
        client_authorities: clients must bring a certificate that one of these signed (mTLS); None: they need none.
        context: server side, TLS 1.2 or newer.
    """

    certificate_chain: bytes
    private_key: bytes = field(repr=False)
    client_authorities: bytes | None
    context: ssl.SSLContext


def load_tls(config: ServeConfig) -> Tls | None:
    """Reads and checks the files that the config names; None if it names none.

    Raises:
        ConfigError: a file is missing or unreadable, is not PEM, or the key is not that of the certificate.
    """
    if config.ssl_certfile is None or config.ssl_keyfile is None:
        return None
    certificate = _read("ssl_certfile", config.ssl_certfile)
    key = _read("ssl_keyfile", config.ssl_keyfile)
    if b"ENCRYPTED" in key:
        raise ConfigError(
            f"ssl_keyfile={config.ssl_keyfile!r}: the key is encrypted, and nobody is there to type its password: "
            "decrypt it with `openssl pkey`, and let only this user read it"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except ssl.SSLError as error:
        raise ConfigError(
            f"ssl_certfile={config.ssl_certfile!r} and ssl_keyfile={config.ssl_keyfile!r} do not work "
            f"({error.reason or error}): give a PEM certificate chain, server first, and the PEM key of the first"
        ) from error
    authorities = None
    if config.ssl_ca_certs is not None:
        authorities = _read("ssl_ca_certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"ssl_ca_certs={config.ssl_ca_certs!r}: not a file of PEM certificates: {error}"
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return Tls(certificate_chain=certificate, private_key=key, client_authorities=authorities, context=context)


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name}={path!r}: cannot be read: {error.strerror}; check the path and who may read it"
        ) from error
