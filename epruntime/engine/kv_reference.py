"""ReferenceKVCache: the KV cache's books in plain Python. csrc/kv is the same, faster; tests compare call by call."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from epruntime.engine.block_pool import NO_CONTENT, BlockPool

_NEVER = 2**62  # more tokens than any history has
_TOKEN_BYTES = 4  # token ids are int32


@dataclass(slots=True)
class _Sequence:
    """One request's history and block table.

    Attributes:
        token_ids: int32; prompt, then every token whose result has been applied.
        block_ids: its table, in position order; empty while it is not on the rank.
        num_published: leading blocks of the table that have been offered to the prefix cache.
        content: what the last of those holds.
        publish_at: number of computed tokens at which the next block may be published.
    """

    token_ids: array[int]
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    content: int = NO_CONTENT
    publish_at: int = _NEVER


class ReferenceKVCache:
    """See KVCache for what each method does."""

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self.pool = BlockPool(num_blocks)
        self.num_blocks, self.block_size, self.prefix_caching = num_blocks, block_size, prefix_caching
        self._sequences: dict[int, _Sequence] = {}
        self._ended_step = -1

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    def add(self, rid: int, token_ids: Sequence[int]) -> None:
        if rid in self._sequences:
            raise ValueError(f"rid={rid} is in use")
        self._sequences[rid] = _Sequence(array("i", token_ids))

    def forget(self, rid: int) -> None:
        if self._sequences[rid].block_ids:
            raise ValueError(f"request {rid} still has a block table")
        del self._sequences[rid]

    def token_ids(self, rid: int) -> bytes:
        return self._sequences[rid].token_ids.tobytes()

    def append(self, rids: np.ndarray, token_ids: np.ndarray) -> list[int]:
        unknown = []
        for i, (rid, token) in enumerate(zip(rids.tolist(), token_ids.tolist(), strict=True)):
            sequence = self._sequences.get(rid)
            if sequence is None:
                unknown.append(i)
                continue
            if len(sequence.token_ids) >= sequence.publish_at:
                self._publish(sequence, len(sequence.token_ids))
            sequence.token_ids.append(token)
        return unknown

    def can_admit(self, rid: int, num_skippable: int) -> bool:
        return self.pool.can_take(*self._match(self._sequences[rid], num_skippable))

    def admit(self, rid: int, num_skippable: int) -> tuple[int, tuple[int, ...]] | None:
        sequence = self._sequences[rid]
        if sequence.block_ids:
            raise ValueError(f"request {rid} has a block table already")
        hits, need = self._match(sequence, num_skippable)
        if not self.pool.can_take(hits, need):
            return None
        self.pool.share(hits)  # first: allocating may evict cached blocks
        sequence.block_ids = hits + self.pool.allocate(need)
        sequence.num_published = len(hits)
        sequence.content = self.pool.content_of(hits[-1]) if hits else NO_CONTENT
        sequence.publish_at = (len(hits) + 1) * self.block_size if self.prefix_caching else _NEVER
        return len(hits) * self.block_size, tuple(sequence.block_ids)

    def grow(self, rids: Sequence[int]) -> list[int] | None:
        if len(rids) > self.pool.num_free:
            return None
        blocks = self.pool.allocate(len(rids))
        for rid, block in zip(rids, blocks, strict=True):
            self._sequences[rid].block_ids.append(block)
        return blocks

    def confirm(self, rid: int, num_computed: int) -> None:
        sequence = self._sequences[rid]
        if num_computed >= sequence.publish_at:
            self._publish(sequence, num_computed)

    def release(self, rid: int, until_step: int) -> None:
        sequence = self._sequences[rid]
        blocks = sequence.block_ids[::-1]  # a table's tail goes first: released first, evicted first
        sequence.block_ids, sequence.num_published = [], 0
        sequence.content, sequence.publish_at = NO_CONTENT, _NEVER
        if until_step <= self._ended_step:
            self.pool.release(blocks)
        else:
            self.pool.quarantine(blocks, until_step)

    def num_returning(self, rids: Sequence[int]) -> int:
        return self.pool.num_returning(self._sequences[rid].block_ids for rid in rids)

    def end_step(self, step: int) -> None:
        self._ended_step = step
        self.pool.end_step(step)

    def _match(self, sequence: _Sequence, num_skippable: int) -> tuple[list[int], int]:
        """Cached blocks of the history's beginning, and how many blocks the rest needs."""
        num_tokens = len(sequence.token_ids)
        hits: list[int] = []
        if self.prefix_caching:
            # the last token is always computed: it yields the next one
            end = min(num_tokens - 1, num_skippable) // self.block_size * self.block_size
            hits = self.pool.match(sequence.token_ids[:end].tobytes(), self.block_size)
        return hits, -(-num_tokens // self.block_size) - len(hits)

    def _publish(self, sequence: _Sequence, num_computed: int) -> None:
        """Offers all full blocks of the first `num_computed` tokens to the prefix cache."""
        size, width = self.block_size, self.block_size * _TOKEN_BYTES
        first, full = sequence.num_published, num_computed // size
        num_tokens, num_blocks = len(sequence.token_ids), len(sequence.block_ids)
        if full > min(num_blocks, num_tokens // size):
            raise ValueError(
                f"{num_computed} tokens cannot be computed, with {num_tokens} known and {num_blocks} blocks for them"
            )
        token_ids = sequence.token_ids[first * size : full * size].tobytes()
        content = sequence.content
        for i, block in enumerate(sequence.block_ids[first:full]):
            content = self.pool.publish(block, content, token_ids[i * width : (i + 1) * width])
        sequence.content, sequence.num_published = content, full
        sequence.publish_at = (full + 1) * size
