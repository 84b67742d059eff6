"""EngineCore: drives all ranks in lockstep.

add/drop -> Router -> GroupScheduler.plan (one per rank) -> plans out -> ranks -> results back -> apply -> TokenUpdates
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from epruntime.config import EngineConfig
from epruntime.engine import blame
from epruntime.engine.processor import EngineRequest
from epruntime.engine.router import Router
from epruntime.engine.scheduler import GroupScheduler
from epruntime.engine.token_updates import TokenUpdates
from epruntime.errors import EngineDeadError, EPRuntimeError
from epruntime.launchers.handle import RankHandle, Reply
from epruntime.plan import NewRequest, StepResult

logger = logging.getLogger("epruntime.engine.core")


@dataclass(kw_only=True)
class CoreStats:
    """Totals since start. `overlapped_steps`: those sent while another one was in flight."""

    steps: int = 0
    overlapped_steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class EngineCore:
    """Owns the schedulers and the step loop. All methods run on one asyncio loop.

    Args:
        ranks: one handle per attention group, loaded with the model.
        schedulers: one per rank, same order.
        on_scheduled: called with each request that enters a rank, again after a preemption.
        on_updates: called with the new tokens of each step, rank by rank.
        on_step: called after each step with the numbers of prefill and decode tokens that all ranks computed in it.
        on_dead: called once, with the error, when the engine cannot go on.
        router: decides the ranks of requests; default: by load.
        first_step: number of the first step: ranks that have stepped in this generation go on from where they are.
    """

    def __init__(
        self,
        config: EngineConfig,
        ranks: Sequence[RankHandle],
        schedulers: Sequence[GroupScheduler],
        *,
        on_scheduled: Callable[[NewRequest], None],
        on_updates: Callable[[TokenUpdates], None],
        on_dead: Callable[[EngineDeadError], None],
        on_step: Callable[[int, int], None] = lambda num_prefill_tokens, num_decode_tokens: None,
        router: Router | None = None,
        first_step: int = 0,
    ) -> None:
        self._ranks, self.schedulers = list(ranks), list(schedulers)
        self._depth = config.scheduler.pipeline_depth
        self._step_timeout_s = config.parallel.step_timeout_s
        self._router = Router(len(self.schedulers)) if router is None else router
        self._on_scheduled, self._on_updates, self._on_dead = on_scheduled, on_updates, on_dead
        self._on_step = on_step
        self._wake = asyncio.Event()
        self._next_step = first_step
        self.stats = CoreStats()
        self.dead_error: EngineDeadError | None = None
        self._in_flight: deque[list[asyncio.Future[Reply]]] = deque()
        self._task = asyncio.create_task(self._run(), name="epruntime-engine-core")

    @property
    def stepping(self) -> bool:
        """A step is under way: every rank has work, or waits for one that has."""
        return bool(self._in_flight)

    @property
    def next_step(self) -> int:
        """Number of the step that will be sent next."""
        return self._next_step

    def add(self, request: EngineRequest) -> None:
        """Takes a request; its tokens come through `on_updates`."""
        if self.dead_error is not None:
            raise self.dead_error
        expected = len(request.prompt_token_ids) + request.spec.max_tokens
        group = self._router.assign(request.rid, expected)
        try:
            self.schedulers[group].add(request.rid, request.prompt_token_ids, request.spec)
        except EPRuntimeError:
            self._router.release(request.rid)
            raise
        self._wake.set()

    def drop(self, rid: int) -> None:
        """Forgets a request that is not wanted any more; unknown rids are ignored (it may just have ended).

        The next step tells its rank; if there is no other work, a step is made for that alone.
        """
        group = self._router.release(rid)
        if group is not None:
            self.schedulers[group].drop(rid)
            self._wake.set()

    def fail(self, error: EngineDeadError) -> None:
        """Takes the news that the engine cannot go on, also while no step runs."""
        if self.dead_error is None:
            self._task.cancel()
            self._die(error)

    async def stop(self) -> None:
        """Ends the loop; plans in flight are left to the ranks."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        in_flight = self._in_flight
        try:
            while True:
                while len(in_flight) < self._depth and any(s.wants_plan for s in self.schedulers):
                    in_flight.append(self._send_step())
                if in_flight:
                    results = await self._collect(in_flight[0])
                    in_flight.popleft()
                    self._apply(results)
                else:
                    self._wake.clear()
                    await self._wake.wait()
        except EngineDeadError as error:
            self._die(error)
        except EPRuntimeError as error:
            self._die(EngineDeadError(f"the engine stopped: {type(error).__name__}: {error}"))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # a fault of this program: every waiting request must learn of it, whatever it is
            logger.exception("the engine core failed")
            self._die(EngineDeadError(f"internal error in the engine core: {type(error).__name__}: {error}"))
        finally:
            for futures in in_flight:
                for future in futures:
                    future.cancel()

    def _send_step(self) -> list[asyncio.Future[Reply]]:
        """Makes and sends the next step's plan for every rank; an idle rank gets an empty one."""
        step, self._next_step = self._next_step, self._next_step + 1
        self.stats.overlapped_steps += bool(self._in_flight)
        plans = [scheduler.plan(step) for scheduler in self.schedulers]
        for plan in plans:
            for new in plan.new:
                self._on_scheduled(new)
        return [rank.call("plan", plan=plan.to_wire()) for rank, plan in zip(self._ranks, plans, strict=True)]

    async def _collect(self, futures: list[asyncio.Future[Reply]]) -> list[StepResult]:
        """Waits for every rank's result of the oldest step in flight.

        Raises:
            RankLostError: naming the rank that died or is stuck, also where other ranks complained first.
            EngineDeadError: a rank could not go on.
        """
        limit_s = self._step_timeout_s
        _, pending = await asyncio.wait(futures, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
        failed = any(future.done() and future.exception() is not None for future in futures)
        if pending or failed:
            raise await blame.cause(
                self._ranks, futures, overdue=not failed, what="a step", limit_s=limit_s, option="step_timeout_s"
            )
        return [StepResult.from_wire(future.result()["result"]) for future in futures]

    def _apply(self, results: list[StepResult]) -> None:
        num_prefill = sum(result.num_prefill_tokens for result in results)
        num_decode = sum(result.num_decode_tokens for result in results)
        self.stats.steps += 1
        self.stats.prefill_tokens += num_prefill
        self.stats.decode_tokens += num_decode
        for scheduler, result in zip(self.schedulers, results, strict=True):
            updates = scheduler.apply(result)
            for rid in updates.finished:
                self._router.release(rid)
            if updates:
                self._on_updates(updates)
        self._on_step(num_prefill, num_decode)

    def _die(self, error: EngineDeadError) -> None:
        if self.dead_error is None:
            self.dead_error = error
            self._on_dead(error)
