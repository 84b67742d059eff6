"""How many KV blocks a rank gets, and how long a sequence may be."""

from __future__ import annotations

from epruntime.errors import ConfigError

#: Part of the free memory, divided by the ranks of the host, that the default may take.
DEFAULT_PART_OF_FREE_MEMORY = 0.25

_GIB = 2**30


def resolve_max_model_len(asked: int | None, *, model_limit: int) -> int:
    """The longest prompt plus output, in tokens: what was asked, else the model's own limit.

    Raises:
        ConfigError: more was asked than the model was made for.
    """
    if asked is None:
        return model_limit
    if asked > model_limit:
        raise ConfigError(
            f"max_model_len={asked} is above the model's own limit of {model_limit} tokens "
            "(max_position_embeddings): lower it, or leave it out"
        )
    return asked


def num_kv_blocks(
    *,
    num_blocks: int | None,
    memory_bytes: int | None,
    block_size: int,
    bytes_per_block: int,
    max_model_len: int,
    whole_length: bool,
    max_num_seqs: int,
    ranks_on_host: int,
    free_bytes: int,
) -> int:
    """KV blocks of this rank.

    Args:
        num_blocks: as configured; overrides `memory_bytes`.
        memory_bytes: budget as configured; None takes what `max_num_seqs` sequences of `max_model_len` need, at
            most a quarter of the free memory divided by the ranks of this host.
        block_size: tokens per block; bytes_per_block: all layers.
        whole_length: a sequence of `max_model_len` must fit, because the user named that length. Otherwise one
            block is enough: the engine refuses requests that are longer than the cache.
        free_bytes: free memory of this host, the weights already loaded.

    Raises:
        ConfigError: the blocks would not hold what they must, or not fit in memory.
    """
    # The last token of a sequence is sampled and never computed.
    blocks_per_sequence = max(1, -(-(max_model_len - 1) // block_size))
    share = int(free_bytes * DEFAULT_PART_OF_FREE_MEMORY) // ranks_on_host
    if num_blocks is not None:
        blocks, source = num_blocks, f"num_kv_blocks={num_blocks}"
    elif memory_bytes is not None:
        blocks = memory_bytes // bytes_per_block
        source = f"kv_cache_memory_gb={memory_bytes / _GIB:.3g}"
    else:
        blocks = min(max_num_seqs * blocks_per_sequence, share // bytes_per_block)
        source = (
            f"the default KV budget (a quarter of {_gib(free_bytes)} free memory, divided by {ranks_on_host} "
            f"ranks on this host: {_gib(share)})"
        )
    needed, what = (
        (blocks_per_sequence, f"one sequence of max_model_len={max_model_len}") if whole_length else (1, "any sequence")
    )
    if blocks < needed:
        lower = f"lower max_model_len to at most {blocks * block_size + 1}, or " if whole_length and blocks else ""
        raise ConfigError(
            f"{source} gives {blocks} KV blocks of {block_size} tokens ({bytes_per_block} bytes each), but {what} "
            f"needs {needed} ({_gib(needed * bytes_per_block)}): {lower}raise the budget (kv_cache_memory_gb or "
            "num_kv_blocks)"
        )
    if blocks * bytes_per_block > free_bytes:
        raise ConfigError(
            f"{source} takes {_gib(blocks * bytes_per_block)}, but this host has {_gib(free_bytes)} of free memory: "
            "lower it, or leave it out for the default"
        )
    return blocks


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.3g} GiB"
