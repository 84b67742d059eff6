"""Gate: whether requests are taken, and which ones are live. Shared by all front ends of a process."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from epruntime.engine.status import EngineState, EngineStatus
from epruntime.errors import EngineDeadError, InvalidRequestError, RequestNotFoundError, UnavailableError
from epruntime.serve.client_text import one_line
from epruntime.serve.engine import Engine

E = TypeVar("E", bound=BaseException)

LOADING_RETRY_S = 5.0
DRAINING_RETRY_S = 1.0
RESTARTING_RETRY_S = 5.0
#: How long an abort waits for a request whose id is claimed to enter the engine, and how often it looks.
_ENTRY_S, _ENTRY_POLL_S = 1.0, 0.005


class ServerState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Gate:
    """LOADING -> READY -> DRAINING, or DEAD from any of them. Only READY takes new requests.

    While READY it follows the engine's own status: requests are refused while ranks are being replaced, and the server
    counts as serving only while every rank is alive and stepping.

    Attributes:
        started: wall clock of the start, in seconds.
    """

    def __init__(self) -> None:
        self.state = ServerState.LOADING
        self._reason = "the model is being loaded"
        self.started = time.time()
        self._engine: Engine | None = None
        self._error: EngineDeadError | None = None
        self._live: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing: UnavailableError | None = None
        self._watchers: list[Callable[[], None]] = []
        self._dead = asyncio.Event()

    @property
    def engine(self) -> Engine | None:
        """The engine; None while it loads."""
        return self._engine

    @property
    def serving(self) -> bool:
        """Whether requests are taken and every rank steps: what health probes are told."""
        return self.state is ServerState.READY and self._engine_status.state is EngineState.READY

    @property
    def reason(self) -> str:
        """Words for why it is not serving; empty while it is."""
        return one_line(self._reason or self._engine_status.reason)

    @property
    def live(self) -> frozenset[str]:
        """Ids of the requests whose streams have not ended."""
        return frozenset(self._live)

    @property
    def closing(self) -> UnavailableError | None:
        """What a stream that is cut off because the server stops ends with; None while it does not."""
        return None if self._closing is None else _fresh(self._closing)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back after each change of state, or of the engine's status."""
        self._watchers.append(callback)

    def ready(self, engine: Engine) -> None:
        self._engine = engine
        engine.on_status(self._on_engine_status)  # for as long as both live
        self._become(ServerState.READY, "")
        self._on_engine_status(engine.status)  # it may have died in the very moment

    def drain(self) -> None:
        """Takes no new requests; live ones go on."""
        if self.state is not ServerState.DEAD:
            self._become(ServerState.DRAINING, "the server is draining before it stops")

    def die(self, error: EngineDeadError) -> None:
        self._error = error
        self._become(ServerState.DEAD, str(error))
        self._dead.set()

    async def death(self) -> EngineDeadError:
        """Returns when the engine is dead, with its error."""
        await self._dead.wait()
        assert self._error is not None
        return self._error

    async def close(self, reason: str) -> None:
        """Ends the live requests: their streams end with UNAVAILABLE and this reason."""
        self._closing = UnavailableError(reason, retry_after_s=DRAINING_RETRY_S)
        for request_id in self.live:
            # one that just ended, or that a dead engine has ended, needs nothing
            with suppress(RequestNotFoundError, EngineDeadError):
                await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """Ends a live request. One that is claimed and just about to enter the engine is waited for.

        Raises:
            RequestNotFoundError: no live request has this id. UnavailableError, EngineDeadError: as `reach`.
        """
        engine = self.reach()
        for _ in range(round(_ENTRY_S / _ENTRY_POLL_S)):
            try:
                return await engine.abort(request_id)
            except RequestNotFoundError:
                if request_id not in self._live:
                    raise
            await asyncio.sleep(_ENTRY_POLL_S)
        return await engine.abort(request_id)

    def admit(self) -> Engine:
        """The engine, for a new request.

        Raises:
            UnavailableError: loading, draining, or ranks are being replaced; with a retry hint.
            EngineDeadError: the engine is dead, with the reason.
        """
        engine = self.reach()
        if self.state is not ServerState.READY:
            raise UnavailableError(f"{self.reason}; send the request elsewhere", retry_after_s=DRAINING_RETRY_S)
        if self._engine_status.state is EngineState.RESTARTING:
            raise UnavailableError(
                f"ranks are being replaced: {self.reason}; try again later", retry_after_s=RESTARTING_RETRY_S
            )
        return engine

    def reach(self) -> Engine:
        """The engine, for a call about what already runs; it answers while the server drains, too.

        Raises:
            UnavailableError: still loading. EngineDeadError: the engine is dead.
        """
        if self._error is not None:
            raise _fresh(self._error)
        if self._engine is None:
            raise UnavailableError(f"{self.reason}; try again later", retry_after_s=LOADING_RETRY_S)
        return self._engine

    @contextmanager
    def claim(self, request_id: str) -> Iterator[None]:
        """Holds the id of a request for as long as it is live.

        Raises:
            InvalidRequestError: a live request has it.
        """
        if request_id in self._live:
            raise InvalidRequestError(
                "a live request has this id; use another, or none", field="request_id", value=request_id
            )
        self._live.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._live.discard(request_id)
            if not self._live:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is live; False if `timeout_s` seconds were not enough."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def _become(self, state: ServerState, reason: str) -> None:
        self.state, self._reason = state, reason
        self._tell()

    def _tell(self) -> None:
        for callback in self._watchers:
            callback()

    @property
    def _engine_status(self) -> EngineStatus:
        return EngineStatus() if self._engine is None else self._engine.status

    def _on_engine_status(self, status: EngineStatus) -> None:
        if status.state is not EngineState.DEAD:
            self._tell()
        elif self._error is None:
            assert self._engine is not None
            self.die(self._engine.dead_error or EngineDeadError(status.reason or "the engine stopped"))


def _fresh(error: E) -> E:
    """The error that many requests end with: else each raise would add its frames, and what they hold, to the last."""
    return error.with_traceback(None)
