"""One live request on the front end's side: tokens in, RequestOutput out.

TokenUpdate -> RequestState.update -> (detokenise, stop strings) -> snapshot() -> the caller's stream
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from epruntime.engine.detokenizer import Detokenizer, StopMatcher
from epruntime.engine.processor import EngineRequest
from epruntime.engine.scheduler import TokenUpdate
from epruntime.engine.tokenizer import Tokenizer
from epruntime.errors import RequestFailedError
from epruntime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from epruntime.plan import FINISH_ERROR, FINISH_LENGTH, FINISH_NONE, FINISH_STOP, TokenLogprobs

logger = logging.getLogger("epruntime.engine.request_state")

FINISH_REASONS = {FINISH_NONE: None, FINISH_STOP: "stop", FINISH_LENGTH: "length"}


class RequestState:
    """Output of one request so far. A slow reader costs nothing: it finds the newest state when it looks."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.output = CompletionOutput(logprobs=None if request.params.logprobs is None else [])
        self.metrics = RequestMetrics(arrival_time=request.arrival_time)
        self.error: BaseException | None = None
        self._changed = asyncio.Event()
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, request.prompt_token_ids, skip_special_tokens=request.params.skip_special_tokens
            )
        self._stops = StopMatcher(request.params.stop)

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def scheduled(self) -> None:
        """A rank has been given the request; the first time counts, for a preempted one comes again."""
        if self.metrics.scheduled_time is None:
            self.metrics = replace(self.metrics, scheduled_time=time.monotonic())

    def update(self, update: TokenUpdate) -> bool:
        """Takes the next token; returns whether the request is finished now, by a rank, a stop string or a fault.

        (Some tokenizers raise on ids that the model has and they have not: the end of this request, and of no other.)
        """
        try:
            self._take(update)
        except Exception as error:
            text = f"request {self.request.request_id}: token {update.token} cannot be made into text"
            logger.exception(text)
            self.fail(RequestFailedError(f"{text}: {type(error).__name__}: {error}"))
        return self.finished

    def _take(self, update: TokenUpdate) -> None:
        token, finish, logprobs = update.token, update.finish, update.logprobs
        if finish == FINISH_ERROR:
            self.fail(RequestFailedError(f"request {self.request.request_id}: {update.error}"))
            return
        output, now = self.output, time.monotonic()
        if update.num_preemptions != self.metrics.num_preemptions:
            self.metrics = replace(self.metrics, num_preemptions=update.num_preemptions)
        if self.metrics.first_token_time is None:
            self.metrics = replace(self.metrics, first_token_time=now)
        output.token_ids.append(token)
        if output.logprobs is not None and logprobs is not None:
            output.logprobs.append(self._logprobs(token, logprobs))
        stop_string = None
        # the token that ended the request (end of sequence, stop id) is reported as an id and not as text
        if self._detokenizer is not None and finish != FINISH_STOP:
            text, stop_string = self._stops.push(self._detokenizer.push(token))
            output.text += text
        if stop_string is not None:
            output.finish_reason, output.stop_reason = "stop", stop_string
        elif finish != FINISH_NONE:
            output.text += self._stops.flush()
            output.finish_reason = FINISH_REASONS[finish]
            if finish == FINISH_STOP and token in self.request.params.stop_token_ids:
                output.stop_reason = token
        if self.finished:
            self.metrics = replace(self.metrics, finished_time=now)
        self._changed.set()

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error, which the reader of the stream gets raised."""
        if not self.finished:
            self.error = error
            self.output.finish_reason = "error"
            self._changed.set()

    def abort(self) -> None:
        """Ends the request as aborted; the output so far stands."""
        if not self.finished:
            self.output.finish_reason = "abort"
            self.metrics = replace(self.metrics, finished_time=time.monotonic())
            self._changed.set()

    async def next(self) -> RequestOutput:
        """Waits for a change and returns the whole output so far.

        Raises:
            the error that ended the request.
        """
        await self._changed.wait()
        self._changed.clear()
        if self.error is not None:
            raise self.error.with_traceback(None)  # the requests of a dead engine share one error
        return self.snapshot()

    def snapshot(self) -> RequestOutput:
        output = self.output
        completion = replace(
            output,
            token_ids=list(output.token_ids),
            logprobs=None if output.logprobs is None else list(output.logprobs),
        )
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=self.finished,
            seed=self.request.spec.seed,
            metrics=self.metrics,
        )

    def _logprobs(self, token: int, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        entries = {token: logprobs.chosen}
        entries.update(zip(logprobs.top_ids, logprobs.top_values, strict=True))
        return {i: Logprob(value, self._token_text(i)) for i, value in entries.items()}

    def _token_text(self, token: int) -> str:
        return "" if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)
