"""Case: one variation of a verification, with what proves that it happened; Setting: what cases are made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epruntime.config import EngineConfig, SchedulerConfig
from epruntime.config.verify import CASES
from epruntime.models.info import ModelInfo
from epruntime.verify.requests import Shape, VerifyRequest
from epruntime.verify.row_counts import ROWS
from epruntime.verify.session import RunFacts, RunSettings, Submission

#: fewest submissions of a case that needs a crowd; few requests are submitted several times.
_CROWD = 8


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the counters say. `counters` are shown; `missing` says what did not happen, "" if all did."""

    counters: dict[str, int]
    missing: str = ""


#: runs of the case, statistics of its ranks, those of the baseline's ranks -> Proof
Prove = Callable[[Sequence[RunFacts], Sequence[dict[str, Any]], Sequence[dict[str, Any]]], Proof]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variation.

    Attributes:
        name: of the kind, as in CASES, with a number where there are several. varied: in words.
        parallel: fields of ParallelConfig that differ from the configuration; the model is loaded anew for them.
        runs: made one after another.
        num_tokens: output tokens of each submission.
        skipped: why it makes no sense here; then there are no runs.
    """

    name: str
    varied: str
    prove: Prove
    runs: tuple[RunSettings, ...] = ()
    parallel: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int
    skipped: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What cases are made from.

    Attributes:
        config: of the baseline, with lengths and blocks of `shape`.
        sizes: expert-parallel sizes to compare with that of `config`.
        threads: compute threads of each rank of the baseline.
    """

    config: EngineConfig
    info: ModelInfo
    shape: Shape
    requests: Sequence[VerifyRequest]
    sizes: tuple[int, ...]
    threads: int

    @property
    def size(self) -> int:
        return self.config.parallel.expert_parallel_size

    @property
    def num_kv_blocks(self) -> int | None:
        """That each rank has, where the configuration says so."""
        cache = self.config.cache
        if cache.num_kv_blocks is not None or cache.kv_cache_memory_gb is None:
            return cache.num_kv_blocks
        return int(cache.kv_cache_memory_gb * 2**30) // self.info.kv_bytes_per_block(cache.block_size)

    def submissions(
        self, number: int | None = None, *, num_ranks: int | None = None, shift: int = 0
    ) -> tuple[Submission, ...]:
        """The requests in order, again from the first where `number` is larger; dealt to `num_ranks` ranks."""
        ranks = num_ranks or self.size
        return tuple(
            Submission(request=self.requests[i % len(self.requests)], rank=(i % len(self.requests) + shift) % ranks)
            for i in range(number or len(self.requests))
        )

    def crowd(self) -> tuple[Submission, ...]:
        """Enough submissions on each rank that has any."""
        number = max(_CROWD, len(self.requests))
        return self.submissions(number, num_ranks=max(1, min(self.size, number // _CROWD)))

    def at_once(self, submissions: Sequence[Submission], **scheduler: Any) -> RunSettings:
        return RunSettings(waves=(tuple(submissions),), scheduler=replace(self.config.scheduler, **scheduler))


def skipped_case(s: Setting, name: str, reason: str) -> Case:
    return Case(
        name=name, varied=CASES[name], prove=lambda *_: Proof(counters={}), num_tokens=s.shape.max_tokens,
        skipped=reason,
    )  # fmt: skip


def most_rows(scheduler: SchedulerConfig, shape: Shape) -> int:
    """Rows of the largest step of any run."""
    return max(scheduler.max_num_batched_tokens, ROWS * shape.longest_prompt, shape.max_model_len)
