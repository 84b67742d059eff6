"""One live request, from the moment its place is taken until its reader leaves: tokens in, RequestDeltas out.

TokenUpdate -> RequestState.update -> SequenceState (one per sequence) -> next() -> the reader's stream
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from epruntime.engine.detokenizer import TokenTexts
from epruntime.engine.processor import EngineRequest
from epruntime.engine.sequence_state import SequenceState, logprob_entries
from epruntime.engine.text_thread import TextThread
from epruntime.engine.token_updates import TokenUpdate
from epruntime.errors import RequestFailedError
from epruntime.outputs import Logprob, RequestDelta, RequestMetrics
from epruntime.plan import FINISH_ERROR, NewRequest, TokenLogprobs
from epruntime.sampling_params import SamplingParams, derive_seed

logger = logging.getLogger("epruntime.engine.request_state")


class RequestState:
    """What is new in a request since its reader looked last.

    A slow reader costs nothing but its own tokens: it finds all that came in one delta.

    Attributes:
        sequences: one per output sequence. num_tokens: output tokens of all of them, so far.
        request: the checked request; None until it is admitted. metrics: times so far.
        error: what ended it, for the reader to be raised.
    """

    def __init__(self, request_id: str, params: SamplingParams, rids: Sequence[int], *, arrival_time: float) -> None:
        self.request_id = request_id
        self.params = params
        self.request: EngineRequest | None = None
        self.sequences = tuple(SequenceState(index, rid, params) for index, rid in enumerate(rids))
        self.metrics = RequestMetrics(arrival_time=arrival_time)
        self.num_tokens = 0
        self.error: BaseException | None = None
        self._num_running = len(self.sequences)
        self._num_cached_tokens: int | None = None
        self._texts: TokenTexts | None = None
        self._news: dict[int, SequenceState] = {}
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._changed = asyncio.Event()

    @property
    def finished(self) -> bool:
        """No more tokens are wanted: every sequence has ended, or an error has ended all of them."""
        return self._num_running == 0 or self.error is not None

    @property
    def num_prompt_tokens(self) -> int:
        """0 until it is admitted."""
        return 0 if self.request is None else len(self.request.prompt_token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; 0 until a rank has it."""
        return self._num_cached_tokens or 0

    # ---- the engine's side

    def admit(self, request: EngineRequest, texts: TokenTexts | None) -> list[EngineRequest]:
        """Takes the checked request; returns one request per sequence, as the engine core takes them.

        Sequence 0 is the request itself; the others differ in rid and seed, and report no prompt logprobs.
        """
        self.request, self._texts = request, texts
        for sequence in self.sequences:
            sequence.begin(texts, request.prompt_token_ids)
        return [
            request,
            *(
                replace(
                    request,
                    rid=s.rid,
                    spec=replace(request.spec, seed=derive_seed(request.spec.seed, s.index), prompt_logprobs=-1),
                )
                for s in self.sequences[1:]
            ),
        ]

    def scheduled(self, sequence: SequenceState, new: NewRequest) -> None:
        """A rank has been given a sequence; the first time counts, for a preempted one comes again."""
        if self.metrics.scheduled_time is None:
            self.metrics = replace(self.metrics, scheduled_time=time.monotonic())
        if sequence.index == 0 and self._num_cached_tokens is None:
            self._num_cached_tokens = new.num_computed_tokens

    def update(self, sequence: SequenceState, update: TokenUpdate) -> bool:
        """Takes the next token of a running sequence; returns whether the sequence has ended.

        It ends by the rank, by a stop string, or by a fault, which ends the whole request. (Some tokenizers raise on
        ids that the model has and they have not: the end of this request, and of no other.)
        """
        if update.finish == FINISH_ERROR:
            self.fail(RequestFailedError(f"request {self.request_id}: {update.error}"))
            return True
        preemptions = update.num_preemptions - sequence.num_preemptions
        try:
            sequence.take(update)
        except Exception as error:
            text = f"request {self.request_id}: token {update.token} cannot be made into text"
            logger.exception(text)
            self.fail(RequestFailedError(f"{text}: {type(error).__name__}: {error}"))
            return True
        self.num_tokens += 1
        if update.prompt_logprobs is not None:
            self._prompt_logprobs = update.prompt_logprobs
        if preemptions:
            self.metrics = replace(self.metrics, num_preemptions=self.metrics.num_preemptions + preemptions)
        if self.metrics.first_token_time is None:
            self.metrics = replace(self.metrics, first_token_time=time.monotonic())
        ended = sequence.finish_reason is not None
        if ended:
            self._ended(1)
        self._news[sequence.index] = sequence
        self._changed.set()
        return ended

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error, which the reader of the stream gets raised."""
        if not self.finished:
            self.error = error
            self._changed.set()

    def abort(self) -> None:
        """Ends the sequences that still run as aborted; the output so far stands."""
        if self.finished:
            return
        running = [sequence for sequence in self.sequences if sequence.finish_reason is None]
        for sequence in running:
            sequence.abort()
            self._news[sequence.index] = sequence
        self._ended(len(running))
        self._changed.set()

    def _ended(self, count: int) -> None:
        self._num_running -= count
        if self._num_running == 0:
            self.metrics = replace(self.metrics, finished_time=time.monotonic())

    # ---- the reader's side

    def wake(self, *_: object) -> None:
        """Makes `changed` return."""
        self._changed.set()

    async def changed(self) -> None:
        """Waits for something new, or for `wake`.

        Raises:
            the error that ended the request.
        """
        await self._changed.wait()
        self._changed.clear()
        self.check()

    def check(self) -> None:
        """Raises the error that ended the request, if one did."""
        if self.error is not None:
            raise self.error.with_traceback(None)  # the requests of a dead engine share one error

    async def next(self, thread: TextThread) -> RequestDelta:
        """Waits until there is something new, and returns all of it.

        Raises:
            the error that ended the request.
        """
        await self.changed()
        found, self._prompt_logprobs = self._prompt_logprobs, None
        if found is None:
            return self.fetch()
        # a long prompt has many: making their texts must not keep the others waiting
        entries = await thread.run(lambda: self._prompt_entries(found), size=len(found))
        delta = self.fetch()
        delta.prompt_logprobs = entries
        return delta

    def fetch(self) -> RequestDelta:
        """All that is new; the prompt where nothing is."""
        request, news = self.request, self._news
        if len(news) == 1:
            outputs = [sequence.fetch() for sequence in news.values()]
        else:
            outputs = [news[index].fetch() for index in sorted(news)]
        news.clear()
        return RequestDelta(
            request_id=self.request_id,
            prompt=None if request is None else request.prompt,
            prompt_token_ids=[] if request is None else request.prompt_token_ids,
            outputs=outputs,
            finished=self._num_running == 0,
            # one that was aborted before it was admitted has drawn none
            seed=(self.params.seed or 0) if request is None else request.spec.seed,
            metrics=self.metrics,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_tokens,
        )

    def _prompt_entries(self, found: Sequence[TokenLogprobs]) -> list[dict[int, Logprob] | None]:
        assert self.request is not None
        tokens = self.request.prompt_token_ids[1:]
        return [None, *(logprob_entries(*pair, self._texts) for pair in zip(tokens, found, strict=True))]
