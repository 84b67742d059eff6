"""How much memory each rank will take, told from the checkpoint's headers and the configuration. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from epruntime.config import EngineConfig
from epruntime.models.info import ModelInfo
from epruntime.moe.placement import placement_for
from epruntime.preflight.facts import MemoryNeed
from epruntime.worker.kv_budget import DEFAULT_PART_OF_FREE_MEMORY

#: what a rank process takes beside weights, cache and rows. It has imported everything when it joins; loading a tiny
#: model and the first step of it took 27 MiB more (resident memory before `load`, and after one request).
LIBRARY_BYTES = 64 << 20


def memory_needs(
    config: EngineConfig, info: ModelInfo, hosts: Sequence[str], free_bytes: Sequence[int]
) -> list[MemoryNeed]:
    """One entry per rank.

    Args:
        hosts: of each rank; free_bytes: free memory of its host.

    Raises:
        ConfigError: the experts cannot be placed as the configuration says.
    """
    weights = [_weights(config, info, rank, len(hosts)) for rank in range(len(hosts))]
    needs = []
    for rank, host in enumerate(hosts):
        here = [other for other, name in enumerate(hosts) if name == host]
        left = min(free_bytes[other] for other in here) - sum(weights[other] for other in here)
        needs.append(
            MemoryNeed(
                weights=weights[rank],
                kv=_kv(config, info, max(left, 0), len(here)),
                exchange=_exchange(config, info, len(hosts)),
                libraries=LIBRARY_BYTES + _logits(config, info),
            )
        )
    return needs


def _weights(config: EngineConfig, info: ModelInfo, rank: int, world_size: int) -> int:
    strategy, redundant = config.parallel.expert_placement, config.parallel.num_redundant_experts
    return info.weight_bytes(
        lambda experts: len(placement_for(experts, world_size, strategy, redundant).local_logical(rank))
    )


def _kv(config: EngineConfig, info: ModelInfo, left: int, ranks_on_host: int) -> int:
    """As epruntime.worker.kv_budget decides it, of what is left when the weights are there."""
    cache = config.cache
    per_block = info.kv_bytes_per_block(cache.block_size)
    if cache.num_kv_blocks is not None:
        return cache.num_kv_blocks * per_block
    if cache.kv_cache_memory_gb is not None:
        return int(cache.kv_cache_memory_gb * 2**30) // per_block * per_block
    max_model_len = config.model.max_model_len or info.max_position_embeddings
    wanted = config.scheduler.max_num_seqs * max(1, -(-(max_model_len - 1) // cache.block_size))
    share = int(left * DEFAULT_PART_OF_FREE_MEMORY) // ranks_on_host
    return min(wanted, share // per_block) * per_block


def _exchange(config: EngineConfig, info: ModelInfo, world_size: int) -> int:
    """Rows of one round as they arrive, and their experts' results, each once more while they are copied."""
    rows = min(config.parallel.exchange_budget_tokens, config.scheduler.max_num_batched_tokens * world_size)
    return 2 * rows * (1 + info.top_k) * info.hidden_size * info.dtype_bytes


def _logits(config: EngineConfig, info: ModelInfo) -> int:
    """Of all running sequences, in fp32."""
    return config.scheduler.max_num_seqs * info.vocab_size * 4
