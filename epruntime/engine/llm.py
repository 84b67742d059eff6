"""LLM: offline generation in one call. A synchronous face of AsyncLLM."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any

from tqdm import tqdm

from epruntime.config import EngineConfig
from epruntime.engine.async_llm import AsyncLLM
from epruntime.engine.loop_thread import LoopThread, call_at_end
from epruntime.engine.output_collector import OutputCollector
from epruntime.engine.processor import Prompt
from epruntime.engine.ranks import Ranks
from epruntime.errors import InvalidRequestError
from epruntime.launchers.caller_group import with_callers_group
from epruntime.outputs import RequestOutput
from epruntime.prompts import params_list, prompt_list
from epruntime.sampling_params import SamplingParams

Messages = Sequence[dict[str, Any]]


class LLM:
    """Loads a model on its ranks and generates.

        with LLM("path/to/model", expert_parallel_size=2) as llm:
            for output in llm.generate(["Hello"], SamplingParams(temperature=0, max_tokens=32)):
                print(output.outputs[0].text)

    Args:
        model: checkpoint directory.
        ranks: running ranks to load on; None starts `expert_parallel_size` of them and stops them at shutdown.
        **options: any field of ModelConfig, ParallelConfig, CacheConfig and SchedulerConfig.

    Raises:
        TypeError: an unknown option. ConfigError: a value that cannot work.
        UnsupportedModelError, CheckpointError: the model is refused, or damaged.
        LaunchError, RankLostError: ranks did not start, or died.
    """

    def __init__(self, model: str, *, ranks: Ranks | None = None, **options: Any) -> None:
        config = EngineConfig.from_kwargs(model=str(model), **options)
        self.config = dataclasses.replace(config, parallel=with_callers_group(config.parallel))
        own_loop = ranks is None
        self._loop_thread = LoopThread() if ranks is None else ranks.loop_thread
        try:
            self.engine: AsyncLLM = self._loop_thread.run(
                AsyncLLM.create(self.config, rank_pool=None if ranks is None else ranks.pool)
            )
        except BaseException:
            if own_loop:
                self._loop_thread.close()
            raise
        self._stop = call_at_end(self, self._loop_thread, _stop, self._loop_thread, self.engine, own_loop)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates for one prompt or many; all are batched together.

        Args:
            prompts: a string, a list of token ids, {"prompt_token_ids": [...]}, or a list of those.
            sampling_params: one for all, or one per prompt; None: the model's defaults.
            use_tqdm: show a progress bar.

        Returns:
            One finished RequestOutput per prompt, in order.

        Raises:
            InvalidRequestError: a prompt or parameter is refused; the other requests are ended too.
            EngineDeadError: the engine stopped.
        """
        items, _ = prompt_list(prompts)
        params = params_list(self.default_sampling_params() if sampling_params is None else sampling_params, len(items))
        return self._loop_thread.run(self._generate(items, params, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or many, rendered through the model's chat template.

        Args:
            messages: a list of {"role", "content"} dicts, or a list of such lists; a content is a string, or a list of
                parts of type text.
            chat_template_kwargs: keywords that the template reads, for all of them.
        """
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequestError(
                "must be a list of dicts with 'role' and 'content', or a list of such lists",
                field="messages",
                value=messages,
            )
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations = [messages] if one else list(messages)
        prompts = [{"messages": m, "chat_template_kwargs": chat_template_kwargs} for m in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the checkpoint's generation_config.json, else SamplingParams' own."""
        return self.engine.sampling_params()

    def info(self) -> dict[str, Any]:
        """What is served, by which ranks, and what they have done (see AsyncLLM.info)."""
        return self._loop_thread.run(self.engine.info())

    def shutdown(self) -> None:
        """Frees the model and stops the ranks that this object started. Safe to call again."""
        self._stop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _generate(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        limit = self.config.scheduler.max_queued_requests
        # more sequences than the engine queues are no error here: the rest wait their turn
        places = asyncio.Semaphore(limit)
        with tqdm(total=len(prompts), desc="generating", unit="prompt", disable=not use_tqdm) as bar:

            async def one(prompt: Prompt, param: SamplingParams, taken: int) -> RequestOutput:
                output = OutputCollector()
                try:
                    async with aclosing(self.engine.stream(prompt, param)) as stream:
                        async for delta in stream:
                            output.add(delta)
                finally:
                    for _ in range(taken):
                        places.release()
                bar.update()
                return output.snapshot()

            tasks = []
            try:
                async with asyncio.TaskGroup() as group:
                    for prompt, param in zip(prompts, params, strict=True):
                        taken = min(param.n, limit)
                        for _ in range(taken):
                            await places.acquire()
                        tasks.append(group.create_task(one(prompt, param, taken)))
            except BaseExceptionGroup as errors:
                # the group has ended the other requests; the caller wants the cause and not the bundle
                raise errors.exceptions[0] from None
        return [task.result() for task in tasks]


def _stop(loop_thread: LoopThread, engine: AsyncLLM, own_loop: bool) -> None:
    if loop_thread.closed:  # the ranks that it was given were stopped first, and the engine with them
        return
    try:
        loop_thread.run(engine.shutdown())
    finally:
        if own_loop:
            loop_thread.close()
