"""The schedulers of a generation, one per rank, and the limits that its ranks have room for."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from epruntime.config import EngineConfig
from epruntime.engine.model_group import ModelGroup
from epruntime.engine.processor import Limits
from epruntime.engine.scheduler import GroupScheduler
from epruntime.models.info import RopeLengths

logger = logging.getLogger("epruntime.engine.schedulers")


def make_schedulers(config: EngineConfig, group: ModelGroup) -> list[GroupScheduler]:
    return [
        GroupScheduler(
            config.scheduler,
            block_size=config.cache.block_size,
            num_kv_blocks=blocks,
            prefix_caching=config.cache.enable_prefix_caching,
            max_model_len=group.max_model_len,
            rope=RopeLengths(**group.info["rope"]),
            generation=group.generation,
        )
        for blocks in group.num_kv_blocks
    ]


def limits_of(group: ModelGroup, schedulers: Sequence[GroupScheduler]) -> Limits:
    """What a request may ask for, whichever rank it goes to; says in the log where the KV cache is what limits it."""
    limits = Limits(
        max_model_len=min(scheduler.max_request_tokens for scheduler in schedulers),
        vocab_size=group.info["vocab_size"],
        eos_token_ids=tuple(group.info["eos_token_ids"]),
    )
    if limits.max_model_len < group.max_model_len:
        logger.warning(
            "the KV cache holds %d tokens, less than max_model_len %d: longer requests are refused. "
            "Raise kv_cache_memory_gb or lower max_model_len",
            limits.max_model_len,
            group.max_model_len,
        )
    return limits
