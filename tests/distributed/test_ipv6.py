"""Ranks and coordinator that reach each other by IPv6 only."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from epruntime.comm.control import Connection, ControlClient, ControlServer, RankBootstrap
from epruntime.comm.gloo import GlooTransport
from epruntime.comm.interfaces import rank_address
from epruntime.comm.transport import GroupInfo
from epruntime.launchers.store import host_store

LOOPBACK = "::1"


@pytest.fixture(autouse=True)
def _ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind((LOOPBACK, 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")


def test_gloo_and_its_store() -> None:
    store, port = host_store(LOOPBACK)

    def rank(number: int) -> tuple[str, list[int]]:
        transport = GlooTransport(
            GroupInfo(rank=number, world_size=2, store_host=LOOPBACK, store_port=port, timeout_s=20)
        )
        counts = transport.all_gather_counts(torch.tensor([number + 5]))
        transport.close()
        return transport.interface_address, counts.flatten().tolist()

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, (0, 1))) == [(LOOPBACK, [5, 6])] * 2
    del store
    assert rank_address(LOOPBACK, port).interface == "lo"


def test_control_channel() -> None:
    joined: list[Connection] = []

    async def body() -> None:
        secret = bytes(32)
        server = ControlServer(secret, on_join=joined.append)
        server.expect(3, 0)
        address = await server.listen_tcp(LOOPBACK)
        letter = RankBootstrap(address=address, secret=secret, slot=3, host="h", connect_timeout_s=30)
        client = await asyncio.to_thread(ControlClient.connect, letter, signature={})
        client.close()
        server.close()

    asyncio.run(body())
    assert [connection.info.slot for connection in joined] == [3]
