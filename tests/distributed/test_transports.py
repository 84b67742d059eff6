"""Transports move exactly the bytes they are given, and a dead or stuck peer ends in an error with its name."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epruntime.comm.gloo import GlooTransport
from epruntime.comm.local import LocalTransport
from epruntime.comm.select import TRANSPORTS, make_transport
from epruntime.comm.transport import GroupInfo
from epruntime.errors import ConfigError, EngineDeadError, RankLostError
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.ranks import Died, RanksFailed, run_ranks


def _byte(source: int, destination: int, i: int) -> int:
    return (source * 97 + destination * 31 + i * 7) % 251


def _exchange(group: GroupInfo, name: str, matrix: list[list[int]], row_bytes: int) -> None:
    """Sends matrix[s][d] rows from s to d, every byte a function of (s, d, row), and checks what arrives."""
    transport = make_transport(name, group)
    world, rank = group.world_size, group.rank
    counts = torch.tensor(matrix[rank] + [rank], dtype=torch.int64)
    gathered = transport.all_gather_counts(counts)
    assert gathered.tolist() == [[*matrix[r], r] for r in range(world)]
    for _ in range(3):
        send = (
            torch.tensor([_byte(rank, d, i) for d in range(world) for i in range(matrix[rank][d])], dtype=torch.uint8)
            .reshape(-1, 1)
            .repeat(1, row_bytes)
        )
        recv_counts = [matrix[s][rank] for s in range(world)]
        received = transport.all_to_all_rows(send, matrix[rank], recv_counts).wait()
        want = (
            torch.tensor([_byte(s, rank, i) for s in range(world) for i in range(recv_counts[s])], dtype=torch.uint8)
            .reshape(-1, 1)
            .repeat(1, row_bytes)
        )
        assert received.dtype == torch.uint8
        assert torch.equal(received, want)
    transport.barrier()
    transport.close()


MATRICES = {
    1: [[[5]], [[0]]],
    2: [[[3, 1], [4, 2]], [[0, 0], [0, 0]], [[0, 7], [0, 0]], [[2, 0], [0, 3]]],
    3: [[[1, 2, 3], [4, 5, 6], [7, 8, 9]], [[0, 0, 0], [0, 0, 0], [0, 64, 0]]],
}


@pytest.mark.parametrize("matrix", MATRICES[1])
def test_local_exchange(matrix: list[list[int]]) -> None:
    _exchange(GroupInfo(rank=0, world_size=1), "local", matrix, 24)


def _exchange_all(group: GroupInfo, matrices: list[list[list[int]]]) -> None:
    for generation, matrix in enumerate(matrices):
        this = GroupInfo(**{**group.__dict__, "generation": generation})
        _exchange(this, "gloo", matrix, row_bytes=1 + 33 * generation)
    _exchange(
        GroupInfo(**{**group.__dict__, "generation": 99}),
        "gloo",
        [[200] * group.world_size] * group.world_size,
        row_bytes=40_000,
    )


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gloo_exchange(world_size: int) -> None:
    run_ranks(world_size, _exchange_all, MATRICES[world_size])


def _two_in_flight(group: GroupInfo) -> None:
    transport = make_transport("gloo", group)
    works = []
    for i in range(4):
        send = torch.full((2, 1000), 16 * i + group.rank, dtype=torch.uint8)
        works.append(transport.all_to_all_rows(send, [1, 1], [1, 1]))
    for i, work in reversed(list(enumerate(works))):
        assert work.wait()[:, 0].tolist() == [16 * i, 16 * i + 1]
    transport.close()


def test_exchanges_in_flight_do_not_mix() -> None:
    run_ranks(2, _two_in_flight)


def _lose_last(group: GroupInfo) -> tuple[float, str]:
    transport = make_transport("gloo", group)
    transport.barrier()
    if group.rank == group.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    world = group.world_size
    started = time.monotonic()
    with pytest.raises(RankLostError) as caught:  # noqa: PT012 - which exchange it is, is a matter of time
        for _ in range(1000):
            transport.all_to_all_rows(torch.zeros(world, 64, dtype=torch.uint8), [1] * world, [1] * world).wait()
    took = time.monotonic() - started
    with pytest.raises(EngineDeadError):  # stays broken, and says so at once
        transport.all_gather_counts(torch.zeros(1, dtype=torch.int64))
    transport.close()
    assert caught.value.host == "localhost"
    return took, str(caught.value)


@pytest.mark.parametrize("world_size", [2, 3])
def test_killed_peer_is_named_within_seconds(world_size: int) -> None:
    *survivors, died = run_ranks(world_size, _lose_last, may_die=(world_size - 1,), exchange_timeout_s=60)
    assert died == Died(exitcode=-signal.SIGKILL)
    for took, message in survivors:
        assert took < soon(5), message
    assert any(f"rank {world_size - 1} on host localhost" in message for _, message in survivors)


def _stuck(group: GroupInfo, stopped_s: float) -> tuple[float, str]:
    if group.rank == 0:
        return _lose_last(group)
    transport = make_transport("gloo", group)
    transport.barrier()
    time.sleep(stopped_s)  # alive, sockets open, but it never makes the call
    return 0.0, ""


def test_stuck_peer_ends_at_the_timeout() -> None:
    (took, message), _ = run_ranks(2, _stuck, 5.0, exchange_timeout_s=2)
    assert 1.5 < took < 5, message
    assert "rank 1 on host localhost" in message
    assert "limit 2 s" in message


def test_absent_peer_ends_at_the_timeout() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="2 ranks of generation 7 did not meet within 1 s"):
        GlooTransport(
            GroupInfo(rank=0, world_size=2, generation=7, store_host="127.0.0.1", store_port=store.port, timeout_s=1)
        )
    assert time.monotonic() - started < soon(10)


def _sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that lists them
            found += str(entry.readlink()).startswith("socket:")
    return found


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _generations(group: GroupInfo) -> None:
    before = None
    for generation in range(4):
        transport = make_transport("gloo", GroupInfo(**{**group.__dict__, "generation": generation}))
        transport.barrier()
        transport.close()
        transport.close()
        with pytest.raises(EngineDeadError, match="closed"):
            transport.barrier()
        del transport
        gc.collect()
        deadline = time.monotonic() + PATIENCE_S / 2
        while before is not None and (_sockets(), _threads()) > before and time.monotonic() < deadline:
            time.sleep(0.05)
        now = (_sockets(), _threads())
        assert before is None or now <= before, (before, now)
        before = now if before is None else before
    assert threading.active_count() == 1


def test_close_releases_sockets_and_threads() -> None:
    run_ranks(2, _generations)


def test_selection_logs_what_was_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="epruntime"):
        transport = make_transport("auto", GroupInfo(rank=0, world_size=1))
    assert isinstance(transport, LocalTransport)
    assert "transport local for 1 rank (best supported)" in caplog.text


def test_unsupported_and_unknown_transports_are_refused_with_the_reason() -> None:
    two = GroupInfo(rank=0, world_size=2)
    with pytest.raises(ConfigError, match="local: serves one rank, the group has 2"):
        make_transport("local", two)
    with pytest.raises(ConfigError, match=r"local: .*gloo: needs the address of a TCPStore"):
        make_transport("auto", two)
    with pytest.raises(ConfigError, match="cuda"):
        make_transport("gloo", GroupInfo(rank=0, world_size=1, device="cuda"))
    with pytest.raises(ConfigError, match="must be auto or one of local, gloo"):
        make_transport("mpi", two)
    assert list(TRANSPORTS) == ["local", "gloo"]


def test_interface_address() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=r"interface_address='192\.0\.2\.1'"):  # TEST-NET-1: nobody's address
        GlooTransport(
            GroupInfo(
                rank=0,
                world_size=1,
                store_host="127.0.0.1",
                store_port=store.port,
                interface_address="192.0.2.1",
                timeout_s=2,
            )
        )


def _raise(group: GroupInfo) -> None:
    if group.rank == 1:
        raise KeyError("the reason")
    time.sleep(60)


def _die(group: GroupInfo) -> None:
    os._exit(3)


def test_the_helper_reports_failures_and_keeps_its_deadline() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 raised.*KeyError: 'the reason'"):
        run_ranks(2, _raise)
    with pytest.raises(RanksFailed, match="rank 0 ended without a result, exit code 3"):
        run_ranks(1, _die)
    with pytest.raises(RanksFailed, match="gave no result within 4 s"):
        run_ranks(1, _sleep, timeout_s=4)


def _sleep(group: GroupInfo) -> None:
    time.sleep(60)
