"""AsyncLLM: the engine on an asyncio loop. Every front end (LLM, gRPC) stands on it.

stream(prompt) -> TextThread: InputProcessor -> EngineCore -> RequestState -> RequestDeltas
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from epruntime.config import EngineConfig
from epruntime.engine.core import EngineCore
from epruntime.engine.defaults import SamplingDefaults
from epruntime.engine.detokenizer import TokenTexts
from epruntime.engine.facts import engine_facts, model_facts
from epruntime.engine.lifecycle import Lifecycle
from epruntime.engine.live_requests import LiveRequests
from epruntime.engine.model_group import ModelGroup
from epruntime.engine.observer import EngineObserver, Observers
from epruntime.engine.output_collector import OutputCollector
from epruntime.engine.preflight import Preflight
from epruntime.engine.processor import InputProcessor, Prompt, size_of
from epruntime.engine.request_state import RequestState
from epruntime.engine.schedulers import limits_of, make_schedulers
from epruntime.engine.sequence_state import SequenceState
from epruntime.engine.start_ranks import heartbeat_timeout_s, start_ranks
from epruntime.engine.stats import EngineStats, EngineView, StatsBook
from epruntime.engine.stats_poller import StatsPoller
from epruntime.engine.status import EngineState, EngineStatus
from epruntime.engine.text_thread import TextThread
from epruntime.engine.token_updates import TokenUpdates
from epruntime.engine.tokenizer import Tokenizer, load_tokenizer
from epruntime.errors import EngineDeadError, InvalidRequestError, QueueFullError, UnavailableError
from epruntime.launchers.pool import RankPool
from epruntime.models.loader import inspect_model
from epruntime.outputs import RequestDelta, RequestOutput
from epruntime.plan import NewRequest
from epruntime.sampling_params import SamplingParams

logger = logging.getLogger("epruntime.engine.async_llm")

#: called as progress(what, done, total) while ranks start and load
Progress = Callable[[str, int, int], None]


class AsyncLLM:
    """Serves one model. Make it with `create`; use it on the loop it was created on."""

    def __init__(
        self, config: EngineConfig, group: ModelGroup, pool: RankPool, tokenizer: Tokenizer | None, *, own_pool: bool
    ) -> None:
        self.config = config
        self._pool, self._own_pool = pool, own_pool
        self._tokenizer = tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._text_thread = TextThread()
        self._defaults = SamplingDefaults(group.info, source=config.model.generation_config)
        self._live = LiveRequests(config.scheduler.max_queued_requests)
        self._draining = False
        self._observers = Observers()
        self._stats_book = StatsBook()
        self._stats_poller = StatsPoller(self._stats_book, self._view)
        self._name = config.model.served_model_name or Path(config.model.model).resolve().name
        self._started = time.time()
        self._life = Lifecycle(config, pool, group, open_core=self._open_core, on_down=self._fail_live)

    def _open_core(self, group: ModelGroup) -> EngineCore:
        """The core of a generation, with the limits that its ranks have room for."""
        config = self.config
        schedulers = make_schedulers(config, group)
        self.limits = limits_of(group, schedulers)
        self._processor = InputProcessor(self._tokenizer, self.limits)
        return EngineCore(
            config,
            group.ranks,
            schedulers,
            on_scheduled=self._on_scheduled,
            on_updates=self._on_updates,
            on_dead=lambda error: self._life.core_died(error),
            on_step=self._observers.step,
        )

    @classmethod
    async def create(
        cls, config: EngineConfig, *, rank_pool: RankPool | None = None, progress: Progress | None = None
    ) -> AsyncLLM:
        """Checks the model, starts the ranks (unless `rank_pool` brings running ones), loads the model.

        Raises:
            UnsupportedModelError, CheckpointError: before any process starts where possible.
            LaunchError, RankLostError: ranks did not start, or died while loading.
            PreflightError: hosts, settings or network would not work (unless config.parallel.preflight is off).
        """
        path = Path(config.model.model)
        info = await asyncio.to_thread(inspect_model, path, dtype=config.model.dtype)
        tokenizer_path = config.model.tokenizer
        tokenizer = await asyncio.to_thread(
            load_tokenizer,
            tokenizer_path or path,
            required=tokenizer_path is not None,
            chat_template=config.model.chat_template,
        )
        pool = rank_pool or await start_ranks(config)
        pool.heartbeat_timeout_s = heartbeat_timeout_s(config.parallel)
        try:
            preflight = Preflight(config, info) if config.parallel.preflight else None
            group = await ModelGroup.load(config, pool, progress=progress, preflight=preflight)
            return cls(config, group, pool, tokenizer, own_pool=rank_pool is None)
        except BaseException:
            if rank_pool is None:
                await pool.stop()
            raise

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None if the model came without one."""
        return None if self._tokenizer is None else self._tokenizer.hf

    @property
    def errored(self) -> bool:
        return self._life.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._life.dead_error

    @property
    def status(self) -> EngineStatus:
        """Whether it takes requests and steps, now."""
        return self._life.status.status

    def on_status(self, callback: Callable[[EngineStatus], None]) -> Callable[[], None]:
        """Calls back, on the loop, after each change of `status`; returns what takes it back."""
        return self._life.status.on_change(callback)

    @property
    def model_info(self) -> dict[str, Any]:
        """JSON-ready facts of the model that never change, by the keys that serve/engine.py names; asks no rank."""
        return model_facts(
            self._group.info,
            name=self._name,
            max_model_len=self.limits.max_model_len,
            has_tokenizer=self._tokenizer is not None,
            has_chat_template=self._tokenizer is not None and self._tokenizer.has_chat_template,
            default_sampling=dict(self._defaults.values),
            created=int(self._started),
        )

    @property
    def max_sequences(self) -> int:
        """Sequences (n per request) that can be live at once; more are refused with QueueFullError."""
        return self.config.scheduler.max_queued_requests

    def sampling_params(self, **given: Any) -> SamplingParams:
        """SamplingParams of the fields given; what is left out is the model's default, else SamplingParams' own.

        Raises:
            InvalidRequestError: a value that makes no sense, or an unknown field.
        """
        return self._defaults.params(**given)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestDelta, None]:
        """What is new in a request, as it comes; the first delta, at its admission, tells the prompt and no tokens.

        What a slow reader has not fetched yet is merged into one delta, and is all that is kept for it. Leaving the
        iterator early (break and aclose, cancellation) aborts the request and frees its KV blocks within a step.

        A stop string ends its sequence as soon as it is complete, wherever token boundaries lie (detokenizer.py tells
        which one where several match); the text ends before it, and never holds a part of it.

        Args:
            prompt: text, token ids, {"prompt_token_ids": [...]}, {"prompt": text} or {"messages": [...]} (chat
                template; with "chat_template_kwargs", if it reads any). Text becomes ids on a thread of its own, in
                order of arrival; long text on another.
            sampling_params: None: the model's defaults.
            request_id: unique among live requests; drawn when absent.

        Raises:
            InvalidRequestError, QueueFullError, RequestFailedError.
            UnavailableError: the engine is draining or shut down. EngineDeadError: it cannot go on.
        """
        with self._observers.refusal():
            self._check_open()
            params = self.sampling_params() if sampling_params is None else sampling_params
            if not isinstance(params, SamplingParams):
                raise InvalidRequestError("must be a SamplingParams", field="sampling_params", value=params)
            state = self._live.reserve(params, request_id)
        try:
            with self._observers.refusal():
                await self._admit(state, prompt)
            delta = state.fetch()
            yield delta
            while not delta.finished:
                delta = await state.next(self._text_thread)
                yield delta
        finally:
            self._release(state)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams a request's output; each item holds the whole output so far, the last has `finished`.

        Each item is a copy of its own, so what one costs grows with the output: `stream` is for long ones. All else
        is as in `stream`.
        """
        output = OutputCollector()
        async with aclosing(self.stream(prompt, sampling_params, request_id)) as deltas:
            async for delta in deltas:
                output.add(delta)
                if delta.outputs or delta.finished:
                    yield output.snapshot()

    async def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt (as `stream` takes it) where it has one, and the ids that the model would get.

        Raises:
            InvalidRequestError: no tokenizer, or a prompt that cannot be read, or is longer than can be of use.
            QueueFullError: max_queued_requests texts wait already. UnavailableError: the engine was shut down.
        """
        self._check_text_queue()
        self._processor.check_tokenized(prompt)
        return await self._text_thread.run(lambda: self._processor.tokens(prompt), size=size_of(prompt))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of token ids.

        Raises:
            InvalidRequestError: no tokenizer, or ids outside the vocabulary.
            QueueFullError, UnavailableError: as `tokenize`.
        """
        self._check_text_queue()
        return await self._text_thread.run(
            lambda: self._processor.text(token_ids, skip_special_tokens=skip_special_tokens), size=size_of(token_ids)
        )

    async def abort(self, request_id: str) -> None:
        """Ends a live request, whose stream then ends with finish_reason "abort"; the output so far stands.

        Raises:
            RequestNotFoundError: no live request has this id.
        """
        state = self._live.get(request_id)
        state.abort()
        self._drop(state)

    def add_observer(self, observer: EngineObserver) -> Callable[[], None]:
        """From now on `observer` is told of requests and tokens; returns what takes it back."""
        return self._observers.add(observer)

    def stats_snapshot(self) -> EngineStats:
        """What the engine has done and how it stands; asks no rank. Counters never fall.

        What the ranks themselves count is as old as `counters_age_s` says; see `poll_stats`.
        """
        return self._stats_book.snapshot(self._view())

    def poll_stats(self, interval_s: float) -> None:
        """Asks the ranks for their own counters every `interval_s` seconds, for `stats_snapshot`, until shutdown."""
        self._stats_poller.start(interval_s)

    async def refresh_stats(self) -> bool:
        """Asks the ranks for their own counters now; False if not all answered."""
        return await self._stats_poller.poll()

    async def info(self) -> dict[str, Any]:
        """What is served, by which ranks, and what they have done; plain values only (JSON-ready)."""
        return await engine_facts(
            self._view(),
            model={"name": self._name, "max_model_len": self.limits.max_model_len},
            up=self._life.up,
            uptime_s=time.time() - self._started,
            num_requests=len(self._live),
            errored=self.errored,
        )

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones; True if all ended within `timeout_s` seconds."""
        self._draining = True
        return await self._live.wait_idle(timeout_s)

    async def shutdown(self) -> None:
        """Ends all requests, unloads the model, and stops the ranks unless they were given. Safe to call again."""
        self._draining = True
        self._stats_poller.stop()
        for state in self._live:
            state.fail(UnavailableError("the engine was shut down before this request ended"))
        self._text_thread.close()
        await self._life.close()
        if self._own_pool:
            await self._pool.stop()
        elif self._life.up:
            await self._group.unload()

    def _view(self) -> EngineView:
        return EngineView(
            config=self.config,
            core=self._core,
            group=self._group,
            restarts=self._life.num_restarts,
            answering=self.status.state in (EngineState.READY, EngineState.STALLED),
        )

    @property
    def _group(self) -> ModelGroup:
        return self._life.group

    @property
    def _core(self) -> EngineCore:
        return self._life.core

    # ---- a request's way in and out

    def _check_open(self) -> None:
        """Raises UnavailableError or EngineDeadError where no request is taken now."""
        self._life.check()
        if self._draining:
            raise UnavailableError("the engine is shutting down and takes no new requests")

    def _check_text_queue(self) -> None:
        limit = self.config.scheduler.max_queued_requests
        if self._text_thread.num_jobs >= limit:
            raise QueueFullError(f"{limit} texts wait for the tokenizer (max_queued_requests); try again later")

    async def _admit(self, state: RequestState, prompt: Prompt) -> None:
        """Hands a request that has a place to the core, unless it is aborted before its prompt is read."""
        rid = state.sequences[0].rid
        job = self._text_thread.submit(
            lambda: self._processor.process(
                prompt, state.params, rid=rid, request_id=state.request_id, arrival_time=state.metrics.arrival_time
            ),
            size=size_of(prompt),
        )
        job.add_done_callback(state.wake)
        try:
            while not (job.done() or state.finished):
                await state.changed()
        finally:
            job.cancel()
        state.check()
        if state.finished:
            return
        for request in state.admit(job.result(), self._texts):
            self._core.add(request)
        self._observers.admitted(state)

    def _release(self, state: RequestState) -> None:
        self._live.release(state)
        self._observers.finished(state)
        self._drop(state)

    def _drop(self, state: RequestState) -> None:
        for sequence in state.sequences:
            self._core.drop(sequence.rid)

    # ---- what the core tells

    def _on_scheduled(self, new: NewRequest) -> None:
        found = self._live.sequences.get(new.rid)
        if found is not None:
            state, sequence = found
            state.scheduled(sequence, new)

    def _on_updates(self, updates: TokenUpdates) -> None:
        sequences, observing = self._live.sequences, bool(self._observers)
        taken: list[tuple[int, bool]] = []
        for update in updates:
            found = sequences.get(update.rid)
            if found is None:
                continue
            state, sequence = found
            if state.error is not None or sequence.finish_reason is not None:
                continue
            preemptions = sequence.num_preemptions
            ended = state.update(sequence, update)
            if observing and state.error is None:
                taken.append((update.rid, sequence.num_preemptions > preemptions))
            if ended:
                self._let_go(state, sequence)
        if taken:
            self._observers.tokens(taken)

    def _let_go(self, state: RequestState, sequence: SequenceState) -> None:
        """Ranks forget a sequence that has ended, and all of a request that has failed."""
        if state.error is not None:
            self._drop(state)
        else:
            self._core.drop(sequence.rid)  # where the rank has ended it this does nothing

    def _fail_live(self, error: EngineDeadError) -> None:
        for state in self._live:
            state.fail(error)
