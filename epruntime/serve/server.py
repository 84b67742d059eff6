"""The server process: both front ends on one gate and one loop.

listen -> create the engine (health: not serving) -> ready line -> serve -> drain -> stop

Signals: the first SIGTERM or SIGINT drains (while loading: gives up and cleans up), the second stops at once, the
third ends the process without cleaning up. Those that come within half a second of each other are one: `timeout`, or
a wrapper that hands on what the terminal has sent to all, sends a signal twice.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epruntime.config import EngineConfig, ServeConfig
from epruntime.errors import EngineDeadError, EPRuntimeError
from epruntime.serve.access import AccessCheck
from epruntime.serve.address import is_loopback
from epruntime.serve.engine import Engine
from epruntime.serve.gate import Gate
from epruntime.serve.grpc.server import GrpcServer
from epruntime.serve.progress import ProgressLog
from epruntime.serve.stats_log import StatsLog
from epruntime.words import counted

if TYPE_CHECKING:
    from epruntime.serve.openai.server import HttpServer

logger = logging.getLogger("epruntime.serve.server")

#: create(config, progress=...) -> the engine
CreateEngine = Callable[..., Awaitable[Engine]]

#: How long a server with a dead engine still tells clients and health probes why, before it exits.
DEAD_LINGER_S = 5.0
#: Seconds within which signals are one wish.
ONE_WISH_S = 0.5
_OPEN_FILES = 65536
#: How often ranks are asked for what they count themselves, for /metrics and the log.
_STATS_INTERVAL_S = 2.0


class FrontEnds:
    """gRPC and, where the configuration has it, HTTP, on one gate.

    Raises:
        ConfigError: a TLS file that does not work.
    """

    def __init__(self, config: ServeConfig, gate: Gate) -> None:
        self._config = config
        self._grpc = GrpcServer(config, gate)
        self._http: HttpServer | None = None
        if config.http:
            from epruntime.serve.metrics import Metrics
            from epruntime.serve.openai.server import HttpServer

            metrics = Metrics(gate, per_expert=config.expert_metrics == "expert")
            self._http = HttpServer(config, gate, metrics.render)

    async def start(self) -> str:
        """Listens; returns the addresses in words.

        Raises:
            ConfigError: one of them cannot be bound, with the reason.
        """
        where = f"gRPC on {await self._grpc.start()}"
        if self._http is not None:
            where += f", HTTP on {await self._http.start()}"
        self._warn(where)
        return where

    async def stop(self) -> None:
        """Stops listening; streams get a moment to write what they hold."""
        await asyncio.gather(self._grpc.stop(), *(() if self._http is None else (self._http.stop(),)))

    def _warn(self, where: str) -> None:
        config = self._config
        if is_loopback(config.host):
            return
        if not AccessCheck.of(config) and config.ssl_ca_certs is None:
            logger.warning("%s: anyone who reaches it can use this server; set EPRUNTIME_API_KEY or --api-key", where)
        if config.ssl_certfile is None:
            logger.warning("%s: requests and tokens cross the network unencrypted; set --ssl-certfile", where)


@dataclass(frozen=True)
class Stop:
    """How the server came to its end. `code`: exit code; `words`: for the last line of the log."""

    code: int
    words: str


class Signals:
    """Counts SIGTERM and SIGINT; use inside a running loop, as a context manager."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.last = signal.SIGTERM
        self._loop = asyncio.get_running_loop()
        self._counts_from = 0.0  # loop time before which no signal is another wish

    @property
    def exit_code(self) -> int:
        """128 plus the number of the signal, as shells count."""
        return 128 + self.last

    def __enter__(self) -> Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._arrived, number)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.remove_signal_handler(number)

    def _arrived(self, number: signal.Signals) -> None:
        if self._loop.time() < self._counts_from:
            return
        self._counts_from = self._loop.time() + ONE_WISH_S
        self.last = number
        if not self.first.is_set():
            self.first.set()
        elif not self.second.is_set():
            logger.warning("second signal: stopping at once")
            self.second.set()
        else:
            os._exit(128 + number)


def run_server(
    llm_config: EngineConfig, serve_config: ServeConfig, *, create_engine: CreateEngine | None = None
) -> int:
    """Serves until a signal ends it or the engine dies; blocks.

    When requests are taken, prints one line to stdout: `epruntime is ready: gRPC on HOST:PORT, HTTP on URL`
    (without HTTP it ends after the first address).

    Args:
        create_engine: makes the engine; default: AsyncLLM.create.

    Returns:
        The exit code of the process: 0 after a drain, 1 after a failure (its reason is on stderr), 128 plus the
        signal's number when it was stopped while loading, or by a second signal.
    """
    if create_engine is None:
        from epruntime.engine.async_llm import AsyncLLM

        create_engine = AsyncLLM.create
    _raise_open_files()
    try:
        return asyncio.run(_serve(llm_config, serve_config, create_engine))
    except EPRuntimeError as error:
        logger.debug("failed", exc_info=True)
        print(f"epruntime: {error}", file=sys.stderr, flush=True)
        return 1


def _raise_open_files() -> None:
    """Each connection is an open file, and the usual soft limit is 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(llm_config: EngineConfig, serve_config: ServeConfig, create_engine: CreateEngine) -> int:
    gate = Gate()
    front_ends = FrontEnds(serve_config, gate)
    engine: Engine | None = None
    stats_log: StatsLog | None = None
    with Signals() as signals:
        try:
            where = await front_ends.start()
            engine = await _create(llm_config, create_engine, signals)
            if engine is None:
                stop = Stop(signals.exit_code, "the model was not loaded yet")
            else:
                # What was imported and made up to here stays: a full collection would go through some 380,000 objects
                # for 190 ms, in which no stream got a token.
                gc.collect()
                gc.freeze()
                gate.ready(engine)
                engine.poll_stats(_STATS_INTERVAL_S)
                if serve_config.log_stats_interval_s:
                    stats_log = StatsLog(engine, serve_config.log_stats_interval_s)
                print(f"epruntime is ready: {where}", flush=True)
                stop = await _until_stopped(gate, engine, serve_config, signals)
        finally:
            await front_ends.stop()  # first, so that streams end as the gate says
            if stats_log is not None:
                stats_log.stop()
            if engine is not None:
                await engine.shutdown()
    logger.info("stopped: %s", stop.words)
    return stop.code


async def _create(config: EngineConfig, create_engine: CreateEngine, signals: Signals) -> Engine | None:
    """The engine; None if a signal came first, after everything started for it has been cleaned up."""
    task = asyncio.ensure_future(create_engine(config, progress=ProgressLog()))
    if not await _first_of(task, signals.first.wait()):
        return task.result()
    logger.warning("stopped while loading: cleaning up")
    task.cancel()
    cleaned = asyncio.ensure_future(asyncio.wait([task]))
    if await _first_of(cleaned, signals.second.wait()):
        os._exit(signals.exit_code)
    if task.cancelled():
        return None
    if task.exception() is None:  # it was ready in the very moment
        await task.result().shutdown()
    return None


async def _until_stopped(gate: Gate, engine: Engine, config: ServeConfig, signals: Signals) -> Stop:
    death = asyncio.ensure_future(gate.death())
    if not await _first_of(death, signals.first.wait()):
        return await _dead(death.result(), signals)
    gate.drain()
    running = len(gate.live)
    words = counted(running, "request is", "requests are")
    logger.info("draining: %s running, and may for %g s", words, config.drain_timeout_s)

    def outcome() -> str:
        cut = len(gate.live)
        return f"{counted(running - cut, 'request')} ended while draining, {counted(cut, 'was', 'were')} cut off"

    drain = asyncio.ensure_future(_drain(gate, engine, config.drain_timeout_s))
    if await _first_of(drain, signals.second.wait()):
        stop = Stop(signals.exit_code, f"at once, by a second signal; {outcome()}")
        await gate.close("the server was stopped before this request ended")
        return stop
    if death.done():
        return await _dead(death.result(), signals)
    death.cancel()
    stop = Stop(0, outcome())
    if not drain.result():
        await gate.close(f"the server stopped; this request did not end within {config.drain_timeout_s:g} s of that")
    return stop


async def _drain(gate: Gate, engine: Engine, timeout_s: float) -> bool:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    return await engine.drain(timeout_s) and await gate.wait_idle(max(deadline - loop.time(), 0.0))


async def _dead(error: EngineDeadError, signals: Signals) -> Stop:
    logger.error("the engine is dead: %s. Exiting in %g s", error, DEAD_LINGER_S)
    linger = asyncio.ensure_future(asyncio.sleep(DEAD_LINGER_S))
    await _first_of(linger, signals.first.wait())
    return Stop(1, "the engine is dead")


async def _first_of(task: asyncio.Future[Any], event: Any) -> bool:
    """Waits for `task` or `event`, whichever comes first; True if it was the event. Cancels `task` never."""
    waiter = asyncio.ensure_future(event)
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    return not task.done()
