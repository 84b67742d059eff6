"""Sockets to listen on, and words for why there are none."""

from __future__ import annotations

import socket

import pytest

from epruntime.config import ServeConfig
from epruntime.errors import ConfigError
from epruntime.serve import address


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_text_forms():
    assert address.join("127.0.0.1", 1) == "127.0.0.1:1"
    assert address.join("::1", 1) == "[::1]:1"
    own = ["127.0.0.1", "127.9.9.9", "::1", "localhost"]
    assert [host for host in [*own, "0.0.0.0", "::", "10.0.0.1", "example.org"] if address.is_loopback(host)] == own


def test_a_name_is_listened_at_with_all_its_addresses_on_one_port():
    sockets = address.listen("localhost", 0, flag="--port")
    try:
        assert len({one.getsockname()[1] for one in sockets}) == 1
        for one in sockets:
            socket.create_connection(one.getsockname()[:2], timeout=5).close()
        with pytest.raises(ConfigError, match="another process listens there"):
            address.check("localhost", sockets[0].getsockname()[1], flag="--port")
    finally:
        for one in sockets:
            one.close()


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
def test_ipv6():
    (one,) = address.listen("::1", 0, flag="--port")
    with one, pytest.raises(ConfigError, match=r"cannot listen on \[::1\]:\d+: Address already in use"):
        address.check("::1", one.getsockname()[1], flag="--port")
    (both,) = address.listen("::", 0, flag="--port")
    with both:
        socket.create_connection(("127.0.0.1", both.getsockname()[1]), timeout=5).close()


@pytest.mark.parametrize(
    ("host", "words"), [("203.0.113.1", "no network interface"), ("no-such-host.invalid", "the host is not known")]
)
def test_other_hosts_are_refused_in_words(host, words):
    with pytest.raises(ConfigError, match=rf"cannot listen on {host}:0: .*{words}.*--host"):
        address.listen(host, 0, flag="--port")


def test_both_front_ends_need_a_port_each():
    with pytest.raises(ConfigError, match="port=5 and grpc_port=5"):
        ServeConfig(port=5, grpc_port=5)
    ServeConfig(port=5, grpc_port=5, http=False)
