"""AsyncLLM: the engine on an asyncio loop. Every front end (LLM, gRPC) stands on it.

generate(prompt) -> InputProcessor -> EngineCore -> RequestState -> stream of RequestOutput
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epruntime.config import EngineConfig
from epruntime.engine.core import EngineCore
from epruntime.engine.model_group import ModelGroup
from epruntime.engine.processor import InputProcessor, Limits, Prompt
from epruntime.engine.request_state import RequestState
from epruntime.engine.scheduler import GroupScheduler, TokenUpdate
from epruntime.engine.tokenizer import Tokenizer, load_tokenizer
from epruntime.errors import (
    EngineDeadError,
    InvalidRequestError,
    QueueFullError,
    RequestNotFoundError,
    UnavailableError,
)
from epruntime.launchers.pool import RankPool
from epruntime.models.loader import inspect_model
from epruntime.outputs import RequestOutput
from epruntime.sampling_params import SamplingParams
from epruntime.version import __version__

logger = logging.getLogger("epruntime.engine.async_llm")

#: called as progress(what, done, total) while ranks start and load
Progress = Callable[[str, int, int], None]


class AsyncLLM:
    """Serves one model. Make it with `create`; use it on the loop it was created on."""

    def __init__(self, config: EngineConfig, group: ModelGroup, pool: RankPool | None, tokenizer: Tokenizer | None):
        self.config = config
        self._group = group
        self._own_pool = pool
        self._tokenizer = tokenizer
        schedulers = [
            GroupScheduler(
                config.scheduler,
                block_size=config.cache.block_size,
                num_kv_blocks=blocks,
                prefix_caching=config.cache.enable_prefix_caching,
                max_model_len=group.max_model_len,
                generation=group.generation,
            )
            for blocks in group.num_kv_blocks
        ]
        self.limits = Limits(
            max_model_len=min(scheduler.max_request_tokens for scheduler in schedulers),
            vocab_size=group.info["vocab_size"],
            eos_token_ids=tuple(group.info["eos_token_ids"]),
        )
        if self.limits.max_model_len < group.max_model_len:
            logger.warning(
                "the KV cache holds %d tokens, less than max_model_len %d: longer requests are refused. "
                "Raise kv_cache_memory_gb or lower max_model_len",
                self.limits.max_model_len,
                group.max_model_len,
            )
        self._processor = InputProcessor(tokenizer, self.limits)
        self._requests: dict[int, RequestState] = {}
        self._rid_of: dict[str, int] = {}
        self._rids = itertools.count(1)
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._name = config.model.served_model_name or Path(config.model.model).resolve().name
        self._started = time.time()
        self._core = EngineCore(
            config,
            group.ranks,
            schedulers,
            on_scheduled=self._on_scheduled,
            on_updates=self._on_updates,
            on_dead=self._on_dead,
        )
        # the pool may outlive this engine by many others
        self._forget_lost = group.on_lost(self._core.fail)

    @classmethod
    async def create(
        cls, config: EngineConfig, *, rank_pool: RankPool | None = None, progress: Progress | None = None
    ) -> AsyncLLM:
        """Checks the model, starts the ranks (unless `rank_pool` brings running ones), loads the model.

        Raises:
            UnsupportedModelError, CheckpointError: before any process starts where possible.
            LaunchError, RankLostError: ranks did not start, or died while loading.
        """
        path = Path(config.model.model)
        await asyncio.to_thread(inspect_model, path)
        tokenizer_path = config.model.tokenizer
        tokenizer = await asyncio.to_thread(load_tokenizer, tokenizer_path or path, required=tokenizer_path is not None)
        pool = rank_pool
        parallel = config.parallel
        if pool is None:
            pool = await RankPool.start(
                parallel.expert_parallel_size,
                launcher=parallel.launcher,
                ray_address=parallel.ray_address,
                threads_per_rank=parallel.threads_per_rank,
                start_timeout_s=parallel.start_timeout_s,
            )
        try:
            group = await ModelGroup.load(config, pool, progress=progress)
            return cls(config, group, pool if rank_pool is None else None, tokenizer)
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
        return self._core.dead_error is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self._core.dead_error

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams a request's output; each item holds the whole output so far, the last has `finished`.

        Leaving the iterator early (break, cancellation) aborts the request and frees its KV blocks.

        Args:
            prompt: text, {"prompt_token_ids": [...]}, {"prompt": text} or {"messages": [...]} (chat template).
            request_id: unique among live requests; drawn when absent.

        Raises:
            InvalidRequestError, QueueFullError, RequestFailedError.
            UnavailableError: the engine is draining or shut down. EngineDeadError: it cannot go on.
        """
        state = self._admit(prompt, sampling_params or SamplingParams(), request_id)
        try:
            while True:
                output = await state.next()
                yield output
                if output.finished:
                    return
        finally:
            self._release(state)

    async def abort(self, request_id: str) -> None:
        """Ends a live request; its stream gets a last output with finish_reason "abort".

        Raises:
            RequestNotFoundError: no live request has this id.
        """
        rid = self._rid_of.get(request_id)
        if rid is None:
            raise RequestNotFoundError(f"no live request has the id {request_id!r}")
        self._requests[rid].abort()
        self._core.drop(rid)

    async def info(self) -> dict[str, Any]:
        """What is served, by which ranks, and what they have done; plain values only (JSON-ready).

        Each rank's `moe` entry holds its routed-token counts per layer and logical expert.
        """
        core, parallel = self._core.stats, self.config.parallel
        ranks = [] if self.errored else await self._group.stats()
        for rank, scheduler in zip(ranks, self._core.schedulers, strict=False):
            rank["scheduler"] = {
                "num_running": scheduler.num_running,
                "num_waiting": scheduler.num_waiting,
                "kv_usage": scheduler.kv_usage,
                **asdict(scheduler.counters),
            }
        return {
            "version": __version__,
            "model": {"name": self._name, "max_model_len": self.limits.max_model_len, **self._group.info},
            "engine": {
                "expert_parallel_size": parallel.expert_parallel_size,
                "launcher": parallel.launcher,
                "transport": self._group.transport,
                "experts_backend": self._group.experts_backend,
                "invariance": parallel.invariance,
                "generation": self._group.generation,
                "placement_version": 0,
                "uptime_s": time.time() - self._started,
                "num_requests": len(self._requests),
                "steps": core.steps,
                "prefill_tokens": core.prefill_tokens,
                "decode_tokens": core.decode_tokens,
                "errored": self.errored,
            },
            "ranks": ranks,
        }

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the running ones; True if all ended within `timeout_s` seconds."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        return not self._requests

    async def shutdown(self) -> None:
        """Ends all requests, unloads the model, and stops the ranks unless they were given. Safe to call again."""
        self._draining = True
        self._forget_lost()
        for state in list(self._requests.values()):
            state.fail(UnavailableError("the engine was shut down before this request ended"))
        await self._core.stop()
        if self._own_pool is not None:
            await self._own_pool.stop()
        elif not self.errored:
            await self._group.unload()

    def _admit(self, prompt: Prompt, params: SamplingParams, request_id: str | None) -> RequestState:
        if self._core.dead_error is not None:
            raise self._core.dead_error.with_traceback(None)  # else each raise would add its frames to the last one's
        if self._draining:
            raise UnavailableError("the engine is shutting down and takes no new requests")
        limit = self.config.scheduler.max_queued_requests
        if len(self._requests) >= limit:
            raise QueueFullError(f"{limit} requests are queued or running (max_queued_requests); try again later")
        request_id = request_id or uuid.uuid4().hex
        if request_id in self._rid_of:
            raise InvalidRequestError("a live request has this id", field="request_id", value=request_id)
        rid = next(self._rids)
        request = self._processor.process(prompt, params, rid=rid, request_id=request_id, arrival_time=time.monotonic())
        state = RequestState(request, self._tokenizer)
        self._core.add(request)
        self._requests[rid] = state
        self._rid_of[request_id] = rid
        self._idle.clear()
        return state

    def _release(self, state: RequestState) -> None:
        rid = state.request.rid
        self._requests.pop(rid, None)
        self._rid_of.pop(state.request.request_id, None)
        if not self._requests:
            self._idle.set()
        self._core.drop(rid)

    def _on_scheduled(self, rid: int) -> None:
        state = self._requests.get(rid)
        if state is not None:
            state.scheduled()

    def _on_updates(self, updates: list[TokenUpdate]) -> None:
        for update in updates:
            state = self._requests.get(update.rid)
            if state is None or state.finished:
                continue
            if state.update(update):  # where the rank has ended it dropping does nothing
                self._core.drop(update.rid)

    def _on_dead(self, error: EngineDeadError) -> None:
        for state in self._requests.values():
            state.fail(error)
