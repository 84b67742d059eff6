"""Session: one model loaded on its ranks, on which one run after another is made, each with a scheduler of its own.

Run settings -> schedulers, core (steps go on counting: the ranks stay loaded) -> waves of requests -> RunFacts
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from epruntime.config import EngineConfig, SchedulerConfig
from epruntime.engine.core import EngineCore
from epruntime.engine.model_group import ModelGroup
from epruntime.engine.preflight import Preflight
from epruntime.engine.processor import EngineRequest
from epruntime.engine.router import Router
from epruntime.engine.scheduler import GroupScheduler
from epruntime.engine.token_updates import TokenUpdates
from epruntime.errors import EngineDeadError
from epruntime.launchers.pool import RankPool
from epruntime.models.info import RopeLengths
from epruntime.plan import FINISH_ERROR, FINISH_NONE, NewRequest
from epruntime.sampling_params import SamplingParams
from epruntime.verify.outputs import Output
from epruntime.verify.requests import VerifyRequest

#: request index and position -> every hash row that was seen there: input of the first layer, then each layer's output.
Trace = dict[tuple[int, int], list[np.ndarray]]


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A request for a rank (by ep_rank).

    Attributes:
        num_done: so many of its output tokens follow its prompt as if they were part of it, as in a conversation that
            goes on; the others are to come.
    """

    request: VerifyRequest
    rank: int
    num_done: int = 0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """What needs no new load.

    Attributes:
        waves: submitted all at once; the next one when all of the last have ended.
        num_kv_blocks: that schedulers hand out per rank; None: all there are.
    """

    waves: tuple[tuple[Submission, ...], ...]
    scheduler: SchedulerConfig
    num_kv_blocks: int | None = None
    prefix_caching: bool = False


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run gave.

    Attributes:
        outputs: of every submission, in order of the waves.
        counters: of schedulers, core and MoE layers, over all ranks, in this run; `recomputed_in_pieces`: how
            often a preempted request did not fit into a step when it came back; `amid_prompt_logprobs`: how often one
            came back that had some of the log-probabilities of its prompt, and not all; `found_but_one`: how often the
            prefix cache left one token of several to compute.
        rows: rows computed in a step -> number of such steps, over all ranks; decode_rows: of steps that only decode.
        trace: empty unless the session traces layers; layers: names of its columns.
    """

    outputs: list[Output]
    counters: dict[str, int]
    rows: Counter[int]
    decode_rows: Counter[int]
    trace: Trace = field(default_factory=dict)
    layers: tuple[str, ...] = ()


class _Collector:
    """Outputs in the making, by rid."""

    def __init__(self) -> None:
        self.outputs: dict[int, Output] = {}
        self.changed = asyncio.Event()
        self.num_open = 0
        self.error: EngineDeadError | None = None

    def expect(self, rid: int, output: Output) -> None:
        self.outputs[rid] = output
        self.num_open += 1

    def take(self, updates: TokenUpdates) -> None:
        for update in updates:
            output = self.outputs[update.rid]
            if update.finish == FINISH_ERROR:
                output.error = update.error or "failed"
            else:
                output.tokens.append(update.token)
                assert update.logprobs is not None
                output.logprobs.append(update.logprobs)
            if update.prompt_logprobs is not None:
                output.prompt_logprobs = list(update.prompt_logprobs)
            self.num_open -= update.finish != FINISH_NONE
        self.changed.set()

    def fail(self, error: EngineDeadError) -> None:
        self.error = error
        self.changed.set()

    async def wait(self) -> None:
        """Until every output has ended."""
        await self._until(lambda: not self.num_open)

    async def wait_idle(self, core: EngineCore) -> None:
        """Until the plans that found nothing left to do are back, too."""
        await self._until(lambda: not core.stepping)

    async def _until(self, met: Callable[[], bool]) -> None:
        while not met() and self.error is None:
            self.changed.clear()
            await self.changed.wait()
        if self.error is not None:
            raise self.error


class _Routes(Router):
    """Sends each request where it was said."""

    def __init__(self, num_groups: int) -> None:
        super().__init__(num_groups)
        self.routes: dict[int, int] = {}

    def assign(self, rid: int, num_tokens: int) -> int:
        return self.routes[rid]

    def release(self, rid: int) -> int | None:
        return self.routes.pop(rid, None)


class Session:
    """Make it with `open`; runs follow each other, never at once.

    Attributes:
        group: the ranks, with the model.
    """

    def __init__(self, config: EngineConfig, group: ModelGroup, *, trace_layers: bool) -> None:
        self.config, self.group = config, group
        self._trace_layers = trace_layers
        self._next_rid, self._next_step = 0, 0

    @classmethod
    async def open(
        cls,
        config: EngineConfig,
        pool: RankPool,
        *,
        trace_layers: bool,
        batch_dependent: bool = False,
        preflight: Preflight | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Session:
        """Loads the model; raises what ModelGroup.load raises."""
        group = await ModelGroup.load(
            config,
            pool,
            progress=progress,
            preflight=preflight,
            trace_layers=trace_layers,
            batch_dependent=batch_dependent,
        )
        return cls(config, group, trace_layers=trace_layers)

    async def close(self) -> None:
        await self.group.unload()

    async def run(self, settings: RunSettings, known: Mapping[int, Output] | None = None) -> RunFacts:
        """Makes one run.

        Args:
            known: by request index, where submissions go on from what is known of their output.

        Raises:
            EngineDeadError, RankLostError: the ranks cannot go on.
        """
        before = await self.group.stats()
        collector, routes = _Collector(), _Routes(len(self.group.ranks))
        schedulers = [self._scheduler(settings, blocks) for blocks in self.group.num_kv_blocks]
        rows: Counter[int] = Counter()
        decode_rows: Counter[int] = Counter()
        entered: set[int] = set()
        num_in_pieces = num_amid_prompt_logprobs = num_found_but_one = 0

        def on_step(num_prefill: int, num_decode: int) -> None:
            rows[num_prefill + num_decode] += 1
            if not num_prefill:
                decode_rows[num_decode] += 1
            collector.changed.set()

        def on_scheduled(new: NewRequest) -> None:
            nonlocal num_in_pieces, num_amid_prompt_logprobs, num_found_but_one
            left = len(new.token_ids) - new.num_computed_tokens
            num_found_but_one += left == 1 < len(new.token_ids)
            if new.rid in entered:  # it comes back
                collector.outputs[new.rid].preempted_at.append(len(new.token_ids) - new.num_prompt_tokens)
                num_in_pieces += left > settings.scheduler.max_num_batched_tokens
                num_amid_prompt_logprobs += 0 < new.num_prompt_logprobs < new.num_prompt_tokens - 1
            entered.add(new.rid)

        core = EngineCore(
            replace(self.config, scheduler=settings.scheduler),
            self.group.ranks,
            schedulers,
            on_scheduled=on_scheduled,
            on_updates=collector.take,
            on_step=on_step,
            on_dead=collector.fail,
            router=routes,
            first_step=self._next_step,
        )
        forget_lost = self.group.on_lost(core.fail)
        indices: dict[int, int] = {}
        try:
            for wave in settings.waves:
                for submission in wave:
                    rid = self._next_rid
                    self._next_rid += 1
                    indices[rid], routes.routes[rid] = submission.request.index, submission.rank
                    collector.expect(rid, _empty_output(submission))
                    done = known[submission.request.index].tokens[: submission.num_done] if known else []
                    core.add(_engine_request(rid, submission.request, done))
                await collector.wait()
            await collector.wait_idle(core)
        finally:
            forget_lost()
            await core.stop()
        self._next_step = core.next_step
        after = await self.group.stats()
        traces = await self.group.take_traces() if self._trace_layers else []
        return RunFacts(
            outputs=list(collector.outputs.values()),
            counters=_counters(core, schedulers, before, after)
            | {
                "recomputed_in_pieces": num_in_pieces,
                "amid_prompt_logprobs": num_amid_prompt_logprobs,
                "found_but_one": num_found_but_one,
            },
            rows=rows,
            decode_rows=decode_rows,
            trace=_trace(traces, indices),
            layers=tuple(traces[0]["layers"]) if traces else (),
        )

    def _scheduler(self, settings: RunSettings, blocks: int) -> GroupScheduler:
        return GroupScheduler(
            settings.scheduler,
            block_size=self.config.cache.block_size,
            num_kv_blocks=min(blocks, settings.num_kv_blocks or blocks),
            prefix_caching=settings.prefix_caching,
            max_model_len=self.group.max_model_len,
            rope=RopeLengths(**self.group.info["rope"]),
            generation=self.group.generation,
        )


def _empty_output(submission: Submission) -> Output:
    request = submission.request
    return Output(
        index=request.index,
        num_prompt_tokens=len(request.token_ids),
        rank=submission.rank,
        start=submission.num_done,
        end=request.spec.max_tokens,
    )


def _engine_request(rid: int, request: VerifyRequest, done: Sequence[int]) -> EngineRequest:
    spec = request.spec
    if done:  # the log-probabilities of the longer prompt are not those that are expected
        spec = replace(spec, max_tokens=spec.max_tokens - len(done), prompt_logprobs=-1)
    return EngineRequest(
        rid=rid,
        request_id=str(rid),
        prompt=None,
        prompt_token_ids=[*request.token_ids, *done],
        params=SamplingParams(),  # the core goes by `spec` alone
        spec=spec,
        arrival_time=0.0,
    )


def _counters(
    core: EngineCore,
    schedulers: Sequence[GroupScheduler],
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
) -> dict[str, int]:
    found: Counter[str] = Counter()
    for scheduler in schedulers:
        found.update(asdict(scheduler.counters))
    now, then = moe_totals(after), moe_totals(before)
    found.update({name: now[name] - then[name] for name in now})
    found["steps"], found["overlapped_steps"] = core.stats.steps, core.stats.overlapped_steps
    return dict(found)


def moe_totals(ranks: Sequence[dict[str, Any]]) -> Counter[str]:
    """Of all layers and ranks; `rounds` and `layer_steps` are the same on all ranks, and counted on the first."""
    found: Counter[str] = Counter()
    for rank, stats in enumerate(ranks):
        for layer in stats["moe"]["layers"].values():
            if rank == 0:
                found["rounds"] += layer["rounds"]
                found["layer_steps"] += layer["steps"]
            found["rows_sent"] += layer["rows_sent"]
            found["pairs"] += layer["pairs_received"]
            found["replica_pairs"] += layer["replica_pairs"]
            found[f"pairs_of_rank_{rank}"] += layer["pairs_received"]
    return found


def _trace(replies: Sequence[dict[str, Any]], indices: dict[int, int]) -> Trace:
    trace: Trace = {}
    for reply in replies:
        num_columns = len(reply["layers"])
        rids, positions = np.frombuffer(reply["rids"], np.int64), np.frombuffer(reply["positions"], np.int64)
        hashes_NL = np.frombuffer(reply["hashes"], np.int64).reshape(-1, num_columns)
        for rid, position, row_L in zip(rids.tolist(), positions.tolist(), hashes_NL, strict=True):
            seen = trace.setdefault((indices[rid], position), [])
            if not any(np.array_equal(row_L, other) for other in seen):
                seen.append(row_L)
    return trace
