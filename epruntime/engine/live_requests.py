"""LiveRequests: which requests hold a place in the engine, by their ids and by those of their sequences."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress

from epruntime.engine.request_state import RequestState
from epruntime.engine.sequence_state import SequenceState
from epruntime.errors import InvalidRequestError, QueueFullError, RequestNotFoundError
from epruntime.sampling_params import SamplingParams


class LiveRequests:
    """At most `limit` sequences. A request is live from `reserve` to `release`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: dict[str, RequestState] = {}
        #: rid -> the sequence and its request
        self.sequences: dict[int, tuple[RequestState, SequenceState]] = {}
        self._rids = itertools.count(1)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(list(self._states.values()))

    def reserve(self, params: SamplingParams, request_id: str | None) -> RequestState:
        """Takes a place for a request that has just arrived, before anything is done for it; draws an id if need be.

        Raises:
            QueueFullError: there is no place now. InvalidRequestError: a live request has the id, or there are more
            sequences than could ever be live.
        """
        limit = self._limit
        if params.n > limit:
            raise InvalidRequestError(
                f"the engine takes at most {limit} sequences (max_queued_requests)", field="n", value=params.n
            )
        if len(self.sequences) + params.n > limit:
            raise QueueFullError(
                f"{params.n} of {limit} places (max_queued_requests) are asked for and {len(self.sequences)} are "
                "taken; try again later"
            )
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._states:
            raise InvalidRequestError("a live request has this id", field="request_id", value=request_id)
        rids = list(itertools.islice(self._rids, params.n))
        state = RequestState(request_id, params, rids, arrival_time=time.monotonic())
        self._states[request_id] = state
        self.sequences.update((sequence.rid, (state, sequence)) for sequence in state.sequences)
        self._idle.clear()
        return state

    def release(self, state: RequestState) -> None:
        """Gives the place back."""
        del self._states[state.request_id]
        for sequence in state.sequences:
            del self.sequences[sequence.rid]
        if not self._states:
            self._idle.set()

    def get(self, request_id: str) -> RequestState:
        """Raises RequestNotFoundError: no live request has this id."""
        try:
            return self._states[request_id]
        except KeyError:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}") from None

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until none is live; False if `timeout_s` seconds were not enough."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._states
