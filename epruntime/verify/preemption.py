"""Runs in which requests are preempted, chosen by what the schedulers would do: see dry_run.py.

requests with parameters of every kind (late arrivals), and those whose output enters another KV block while these run
(early ones, often enough) -> just as many KV blocks as all prompts need -> dry runs -> the cheapest that shows most
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from epruntime.config import SchedulerConfig
from epruntime.models.info import RopeLengths
from epruntime.verify.dry_run import DryRun, dry_run
from epruntime.verify.requests import Shape, VerifyRequest, kinds_of
from epruntime.verify.session import RunSettings, Submission

#: copies of the early request that are tried, and KV blocks more than prompts need.
_COPIES, _EXTRA = (1, 2, 4, 8, 12), (0, 1, 2)
#: a step costs as much as this number of further rows, about.
_STEP_ROWS = 30
#: output tokens before and after a preemption that are enough to see what it lost.
_ENOUGH = 3


class PreemptionSearch:
    """Looks for runs in which requests are preempted.

    Args:
        num_kv_blocks, max_num_batched_tokens: that ranks have; None: as many as are needed.
    """

    def __init__(
        self,
        requests: Sequence[VerifyRequest],
        shape: Shape,
        scheduler: SchedulerConfig,
        rope: RopeLengths,
        *,
        num_kv_blocks: int | None,
        max_num_batched_tokens: int,
    ) -> None:
        self._requests, self._shape, self._scheduler, self._rope = requests, shape, scheduler, rope
        self._num_kv_blocks, self._most_rows = num_kv_blocks, max_num_batched_tokens
        self._late = _covering(requests) or [min(requests, key=lambda request: len(request.token_ids))]
        crossing = [request for request in requests if self._blocks(request) < self._blocks_at_end(request)]
        crossing = [request for request in crossing if request.num_tokens == shape.max_tokens]
        # those that need no other block at once are best: the late ones have sampled a few tokens by then
        crossing.sort(key=lambda request: (request in self._late, self._soon(request), len(request.token_ids)))
        self._early = crossing[:2]

    def whole(self) -> list[RunSettings]:
        """Prompts in one piece, mostly one run. Where it does not reach parameters of all kinds, further ones do.

        None if no request would be preempted: then no output enters another KV block.
        """
        found: list[RunSettings] = []
        reached: dict[str, int] = {}
        for late in (self._late, *([request] for request in self._late)):
            if found and all(reached.get(kind) for kind in kinds_of(late)):
                continue
            tried = list(self._tried(self._whole_candidates(late)))
            best = max(tried, key=lambda pair: self._value(pair[1]), default=None)
            if best is not None and best[1].preempted_at:
                found.append(best[0])
                reached |= self._reached(best[1])
        return found

    def in_pieces(self) -> list[RunSettings]:
        """With the prefix cache, in small steps: a request that had sampled is computed anew in pieces; one is
        preempted amid its prompt; what was evicted is asked for again."""
        tried = list(self._tried(self._piece_candidates()))
        found: list[tuple[RunSettings, DryRun]] = []
        resumed = [pair for pair in tried if pair[1].resumed]
        if resumed:
            found.append(max(resumed, key=_thorough))
        unfinished = [pair for pair in tried if pair[1].unfinished]
        if unfinished and not any(run.unfinished for _, run in found):
            found.append(max(unfinished, key=_thorough))
        return [settings for settings, _ in found]

    def amid_prompts(self) -> list[RunSettings]:
        """A run in which one goes amid its prompt when some of the log-probabilities that it wants of it had come."""
        tried = self._tried(self._reporting_candidates())
        reported = [pair for pair in tried if pair[1].reported]
        return [min(reported, key=lambda pair: _cost(pair[1]))[0]] if reported else []

    def _whole_candidates(self, late: list[VerifyRequest]) -> Iterator[RunSettings]:
        for early in self._early:
            for copies in _COPIES:
                for ordered in (late, late[::-1]) if len(late) > 1 else (late,):
                    yield from self._settings([[early] * copies + ordered], self._most_rows)

    def _piece_candidates(self) -> Iterator[RunSettings]:
        sampled = sorted(self._late, key=lambda request: (request.greedy, -len(request.token_ids)))
        for rows in self._small_steps():
            for early, late in itertools.product(self._early[:1], sampled):
                chosen = [early, late]
                flood = [request.shortened(1) for request in self._filling(sum(map(self._blocks, chosen)), chosen)]
                yield from self._settings([chosen, flood, [late]], rows, prefix_caching=True)

    def _reporting_candidates(self) -> Iterator[RunSettings]:
        wanting = [request for request in self._requests if request.spec.prompt_logprobs >= 0]
        for rows, early, late in itertools.product(self._small_steps(), self._early, wanting):
            if late is not early:
                yield from self._settings([[early, late]], rows, prefix_caching=True)

    def _small_steps(self) -> list[int]:
        """Rows of the largest step."""
        block, longest = self._shape.block_size, self._shape.longest_prompt
        return list(dict.fromkeys(max(2, min(n, longest - 1)) for n in (2 * block, block, block // 2)))

    def _settings(
        self, waves: Sequence[Sequence[VerifyRequest]], max_num_batched_tokens: int, **more: Any
    ) -> Iterator[RunSettings]:
        blocks = sum(map(self._blocks, waves[0]))
        least = max(self._blocks_at_end(request) for wave in waves for request in wave)
        scheduler = replace(
            self._scheduler,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=min(max_num_batched_tokens, max(self._scheduler.max_num_seqs, *map(len, waves))),
        )
        for number in (max(blocks, least) + extra for extra in _EXTRA):
            if self._num_kv_blocks is None or number <= self._num_kv_blocks:
                yield RunSettings(
                    waves=tuple(tuple(Submission(request=request, rank=0) for request in wave) for wave in waves),
                    scheduler=scheduler,
                    num_kv_blocks=number,
                    **more,
                )

    def _tried(self, candidates: Iterable[RunSettings]) -> Iterator[tuple[RunSettings, DryRun]]:
        for settings in candidates:
            assert settings.num_kv_blocks is not None
            yield settings, dry_run(settings, self._shape, self._rope, num_kv_blocks=settings.num_kv_blocks)

    def _value(self, run: DryRun) -> tuple[int, int]:
        """Kinds of parameters in preempted requests, the more the longer before and after; then what it costs."""
        return sum(1000 * (seen > 0) + seen for seen in self._reached(run).values()), -_cost(run)

    def _reached(self, run: DryRun) -> dict[str, int]:
        """Kind -> output tokens before or after the preemption of a request of that kind, whichever are fewer."""
        best: dict[str, int] = {}
        for index, numbers in run.preempted_at.items():
            request = self._requests[index]
            seen = max(min(number, request.num_tokens - number, _ENOUGH) for number in numbers)
            for kind in request.kinds or ("",):
                best[kind] = max(best.get(kind, 0), seen)
        return best

    def _blocks(self, request: VerifyRequest) -> int:
        return -(-len(request.token_ids) // self._shape.block_size)

    def _blocks_at_end(self, request: VerifyRequest) -> int:
        """The last token is sampled and never computed."""
        return -(-(len(request.token_ids) + request.spec.max_tokens - 1) // self._shape.block_size)

    def _soon(self, request: VerifyRequest) -> int:
        """How far from the best moment it needs another block."""
        after = -len(request.token_ids) % self._shape.block_size
        return abs(after - max(1, self._shape.max_tokens // 4))

    def _filling(self, num_blocks: int, without: Sequence[VerifyRequest]) -> list[VerifyRequest]:
        """Other requests that need so many blocks at most, and not many fewer."""
        found: list[VerifyRequest] = []
        for request in sorted(self._requests, key=self._blocks, reverse=True):
            if request not in without and self._blocks(request) <= num_blocks:
                found.append(request)
                num_blocks -= self._blocks(request)
        return found


def _cost(run: DryRun) -> int:
    return run.num_rows + _STEP_ROWS * run.num_steps


def _thorough(pair: tuple[RunSettings, DryRun]) -> tuple[bool, bool, int]:
    _, run = pair
    return run.unfinished > 0, run.prefix_hit_tokens > 0, -_cost(run)


def _covering(requests: Sequence[VerifyRequest]) -> list[VerifyRequest]:
    """Few and short requests that have every kind of parameter; those with the longest prompts first."""
    found: list[VerifyRequest] = []
    for request in sorted(requests, key=lambda request: len(request.token_ids)):
        if set(request.kinds) - set(kinds_of(found)):
            found.append(request)
    return found[::-1]
