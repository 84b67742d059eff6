"""Runs a function on N spawned CPU processes: free port, one deadline, results or the first traceback."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed

from epruntime.comm.transport import GroupInfo

distributed: Any = torch.distributed  # its type stubs lack the store classes


class RanksFailed(AssertionError):
    """A rank raised, died or outlived the deadline; the message holds its traceback."""


@dataclass(frozen=True, kw_only=True)
class Died:
    """Result of a rank that ended without a word and was allowed to; `exitcode` as multiprocessing gives it."""

    exitcode: int | None


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    threads: int = 1,
    exchange_timeout_s: float = 30.0,
    may_die: tuple[int, ...] = (),
) -> list[Any]:
    """Calls `function(group, *args)` on `world_size` spawned processes and returns their results in rank order.

    The store lives in this process, as it lives in the coordinator of an engine. `function` and `args` must be
    picklable (a module-level function).

    Args:
        timeout_s: all ranks must have answered within it; what still runs then is killed.
        threads: torch threads per rank.
        exchange_timeout_s: `GroupInfo.timeout_s` of the ranks.
        may_die: ranks that may end without a result (a test kills them); their result is `Died`.

    Raises:
        RanksFailed: with the first traceback.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    channels: list[Connection] = []
    try:
        work = pickle.dumps((function, args))
        for rank in range(world_size):
            group = GroupInfo(
                rank=rank,
                world_size=world_size,
                store_host="127.0.0.1",
                store_port=store.port,
                hosts=("localhost",) * world_size,
                timeout_s=exchange_timeout_s,
            )
            ours, theirs = context.Pipe(duplex=False)
            process: BaseProcess = context.Process(target=_rank_main, args=(theirs, group, threads, work), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            channels.append(ours)
        return _collect(processes, channels, time.monotonic() + timeout_s, timeout_s, may_die)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        for channel in channels:
            channel.close()


def _collect(
    processes: list[BaseProcess],
    channels: list[Connection],
    deadline: float,
    timeout_s: float,
    may_die: tuple[int, ...],
) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        waiting = {channels[r]: r for r in range(len(processes)) if r not in results}
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RanksFailed(f"ranks {sorted(waiting.values())} gave no result within {timeout_s:g} s")
        for channel in ready:
            assert isinstance(channel, Connection)
            rank = waiting[channel]
            try:
                ok, value = pickle.loads(channel.recv_bytes())  # noqa: S301 - our own child wrote it
            except EOFError:
                processes[rank].join(timeout=30)
                if rank not in may_die:
                    raise RanksFailed(
                        f"rank {rank} ended without a result, exit code {processes[rank].exitcode}"
                    ) from None
                ok, value = True, Died(exitcode=processes[rank].exitcode)
            if not ok:
                raise RanksFailed(f"rank {rank} raised:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(processes))]


def _meet(group: GroupInfo) -> None:
    """Waits until all ranks are up, so that short timeouts in a test measure the test and not the imports."""
    store = distributed.TCPStore(group.store_host, group.store_port, is_master=False, wait_for_workers=False)
    store.add("epruntime/testing/up", 1)
    while store.add("epruntime/testing/up", 0) < group.world_size:
        time.sleep(0.01)


def _rank_main(channel: Connection, group: GroupInfo, threads: int, work: bytes) -> None:
    # Everything is pickled here and not by multiprocessing, whose tensors live in memory shared with a process
    # that may be gone by the time they are read.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it kills us
    torch.set_num_threads(threads)
    try:
        function, args = pickle.loads(work)  # noqa: S301 - our own parent wrote it
        _meet(group)
        answer = pickle.dumps((True, function(group, *args)))
    except BaseException:  # noqa: BLE001 - the parent raises it, whatever it is
        answer = pickle.dumps((False, traceback.format_exc()))
    channel.send_bytes(answer)
    channel.close()
    os._exit(0)  # a peer's death may have left library threads that do not join
