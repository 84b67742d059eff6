"""Flags that say which server a command talks to, and how."""

from __future__ import annotations

import argparse
from typing import Any

from epruntime.client.channel import DEFAULT_ADDRESS, Tls
from epruntime.client.retry import DEFAULT_RETRIES

_TLS_FILES = ("tls_ca", "tls_cert", "tls_key", "tls_server_name")


def add(
    parser: argparse.ArgumentParser, *, server_in: Any = None, positional: bool = False, timeout_of: str = "each call"
) -> None:
    """Adds the flags.

    Args:
        server_in: the group that --server goes to. positional: the address may be given without --server, too, for
            commands that have no other argument.
        timeout_of: what --timeout bounds, in words.
    """
    group = parser.add_argument_group("server")
    where = (server_in or group).add_mutually_exclusive_group() if positional else server_in or group
    if positional:
        where.add_argument("server", metavar="HOST:PORT", nargs="?", default=argparse.SUPPRESS, help="that of --server")
    where.add_argument(
        "--server", metavar="HOST:PORT", default=argparse.SUPPRESS, help=f"gRPC address (default: {DEFAULT_ADDRESS})"
    )
    _add(group, "--api-key", "TEXT", "access token; better set EPRUNTIME_API_KEY, which `ps` does not show")
    group.add_argument(
        "--tls", action="store_true", default=argparse.SUPPRESS, help="use TLS; the other --tls flags imply it"
    )
    _add(group, "--tls-ca", "FILE", "PEM authorities that may have signed the server's certificate")
    _add(group, "--tls-cert", "FILE", "PEM certificate of this client, where the server asks for one (mTLS)")
    _add(group, "--tls-key", "FILE", "PEM private key of --tls-cert")
    _add(group, "--tls-server-name", "NAME", "name in the server's certificate, if it is not the host of --server")
    _add(group, "--timeout", "X", f"seconds for {timeout_of} (default: no limit)", type=float)
    _add(
        group, "--retries", "N", type=int,
        text="times that a call is tried again, with growing breaks, while the server is not reachable, is full or "
        f"restarts and no output has come (default: {DEFAULT_RETRIES})",
    )  # fmt: skip


def given(args: argparse.Namespace) -> list[str]:
    """Names of the flags that the command line has set."""
    return [name for name in ("server", "api_key", "tls", *_TLS_FILES, "timeout", "retries") if name in args]


def options(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments for Client and AsyncClient."""
    tls: Tls | bool = "tls" in args
    if any(name in args for name in _TLS_FILES):
        tls = Tls(**{name.removeprefix("tls_"): getattr(args, name) for name in _TLS_FILES if name in args})
    chosen: dict[str, Any] = {"address": getattr(args, "server", DEFAULT_ADDRESS), "tls": tls}
    for name in ("api_key", "timeout", "retries"):
        if name in args:
            chosen[name] = getattr(args, name)
    return chosen


def _add(group: Any, flag: str, metavar: str, text: str, *, type: Any = str) -> None:
    group.add_argument(flag, metavar=metavar, type=type, default=argparse.SUPPRESS, help=text)
