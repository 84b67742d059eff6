"""What a front end needs from an engine. AsyncLLM has it; tests stand in with less."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from epruntime.errors import EngineDeadError
from epruntime.outputs import RequestOutput
from epruntime.sampling_params import SamplingParams


class Engine(Protocol):
    """One loaded model."""

    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> EngineDeadError | None: ...

    def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative outputs: a consumer that is slow finds the newest one. Closing it early aborts the request."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a live request, whose stream then ends with finish_reason "abort".

        Raises:
            RequestNotFoundError: no live request has this id.
        """
        ...

    async def info(self) -> dict[str, Any]:
        """JSON-ready facts."""
        ...

    async def drain(self, timeout_s: float) -> bool:
        """Waits for the live requests; True if all ended in time."""
        ...

    async def shutdown(self) -> None: ...
