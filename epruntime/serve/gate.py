"""Gate: whether requests are taken, and which ones are live. Shared by all front ends of a process."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from epruntime.errors import EngineDeadError, InvalidRequestError, RequestNotFoundError, UnavailableError
from epruntime.serve.engine import Engine

LOADING_RETRY_S = 5.0
DRAINING_RETRY_S = 1.0
#: How long an abort waits for a request whose id is claimed to enter the engine, and how often it looks.
_ENTRY_S, _ENTRY_POLL_S = 1.0, 0.005


class ServerState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Gate:
    """LOADING -> READY -> DRAINING, or DEAD from any of them. Only READY takes new requests.

    Attributes:
        state; reason: words for a state that is not READY.
        started: wall clock of the start, in seconds.
    """

    def __init__(self) -> None:
        self.state = ServerState.LOADING
        self.reason = "the model is being loaded"
        self.started = time.time()
        self._engine: Engine | None = None
        self._error: EngineDeadError | None = None
        self._live: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing: UnavailableError | None = None
        self._watchers: list[Callable[[], None]] = []

    @property
    def engine(self) -> Engine | None:
        """The engine; None while it loads."""
        return self._engine

    @property
    def live(self) -> frozenset[str]:
        """Ids of the requests whose streams have not ended."""
        return frozenset(self._live)

    @property
    def closing(self) -> UnavailableError | None:
        """What a stream that is cut off because the server stops ends with; None while it does not."""
        return self._closing

    def on_change(self, callback: Callable[[], None]) -> None:
        """Calls back after each change of state."""
        self._watchers.append(callback)

    def ready(self, engine: Engine) -> None:
        self._engine = engine
        self._become(ServerState.READY, "")

    def drain(self) -> None:
        """Takes no new requests; live ones go on."""
        if self.state is not ServerState.DEAD:
            self._become(ServerState.DRAINING, "the server is draining before it stops")

    def die(self, error: EngineDeadError) -> None:
        self._error = error
        self._become(ServerState.DEAD, str(error))

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
            UnavailableError: loading or draining, with a retry hint.
            EngineDeadError: the engine is dead, with the reason.
        """
        engine = self.reach()
        if self.state is not ServerState.READY:
            raise UnavailableError(f"{self.reason}; send the request elsewhere", retry_after_s=DRAINING_RETRY_S)
        return engine

    def reach(self) -> Engine:
        """The engine, for a call about what already runs; it answers while the server drains, too.

        Raises:
            UnavailableError: still loading. EngineDeadError: the engine is dead.
        """
        if self._error is not None:
            raise self._error
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
        self.state, self.reason = state, reason
        for callback in self._watchers:
            callback()
