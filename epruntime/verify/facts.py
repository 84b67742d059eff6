"""VerifyFacts: what was verified, and with what; printed above the table, and part of the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from epruntime.config import EngineConfig
from epruntime.config.verify import VerifyConfig
from epruntime.engine.model_group import ModelGroup
from epruntime.launchers.pool import RankPool
from epruntime.models.info import ModelInfo
from epruntime.verify.requests import Shape, VerifyRequest
from epruntime.worker.machine import versions


@dataclass(frozen=True, kw_only=True)
class VerifyFacts:
    """Plain values.

    Attributes:
        sizes: expert-parallel sizes; expert_parallel_size is the baseline's.
        signature: of the kernels, equal on all ranks. versions: of the packages.
        longest_prompt, max_tokens, block_size: tokens.
    """

    model: str
    architecture: str
    dtype: str
    num_parameters: int
    invariance: str
    launcher: str
    transport: str
    experts_backend: str
    expert_parallel_size: int
    sizes: tuple[int, ...]
    threads_per_rank: int
    hosts: tuple[str, ...]
    signature: dict[str, str]
    versions: dict[str, str]
    seed: int
    num_requests: int
    num_greedy: int
    longest_prompt: int
    max_tokens: int
    block_size: int
    prompts: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def collect_facts(
    config: EngineConfig,
    info: ModelInfo,
    options: VerifyConfig,
    group: ModelGroup,
    pool: RankPool,
    *,
    shape: Shape,
    seed: int,
    requests: Sequence[VerifyRequest],
    threads: int,
    sizes: tuple[int, ...],
) -> VerifyFacts:
    parallel = config.parallel
    return VerifyFacts(
        model=str(config.model.model),
        architecture=info.architecture,
        dtype=info.dtype,
        num_parameters=info.num_parameters,
        invariance=parallel.invariance,
        launcher=parallel.launcher,
        transport=group.transport,
        experts_backend=group.experts_backend,
        expert_parallel_size=parallel.expert_parallel_size,
        sizes=sizes,
        threads_per_rank=threads,
        hosts=tuple(dict.fromkeys(rank.info.host for rank in pool.ranks)),
        signature=dict(pool.ranks[0].info.signature),
        versions=versions(),
        seed=seed,
        num_requests=len(requests),
        num_greedy=sum(request.greedy for request in requests),
        longest_prompt=max(len(request.token_ids) for request in requests),
        max_tokens=shape.max_tokens,
        block_size=shape.block_size,
        prompts="random token ids" if options.prompts_file is None else options.prompts_file,
    )
