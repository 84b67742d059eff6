"""The books of one rank's paged KV cache: which block belongs to whom. Ids only, no memory, no torch.

    free --allocate--> referenced --release--> free, or (published) cached --evict--> free
                            \\--quarantine(until step)--> released when that step has ended

A block's reference count is the number of block tables it stands in, plus one for each table that
has been given up but may still be written (or read) by a plan in flight: the quarantine keeps the
reference until the result of the last such plan has been applied. So a block is never handed out
while an in-flight plan may write it, and nothing else has to know about plans.

A full block whose content is confirmed (the result of the step that computed its last position has
been applied) may be published under the hash of all tokens up to its end. Another request whose
history begins with the same tokens then takes a reference instead of computing it again. Published
blocks are never written: a request writes only positions that are not yet computed, and the prefix
it takes over always leaves at least its last token to compute.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from epruntime.engine.request import NEVER, SchedulerRequest

_ROOT = bytes(32)


def extend_block_hashes(hashes: list[bytes], token_ids: array[int], block_size: int, num_blocks: int) -> None:
    """Extends `hashes` in place until it covers the first `num_blocks` full blocks of `token_ids`.

    Each hash is BLAKE2b-256 of the parent's hash and the block's ids (int32), so that equal hashes
    mean equal histories: 256 bits, because a collision would hand one request another's content.
    """
    parent = hashes[-1] if hashes else _ROOT
    for i in range(len(hashes), num_blocks):
        ids = token_ids[i * block_size : (i + 1) * block_size].tobytes()
        parent = hashlib.blake2b(parent + ids, digest_size=32).digest()
        hashes.append(parent)


class BlockPool:
    """`num_blocks` KV blocks with reference counts, a prefix cache with LRU eviction, and a quarantine."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: a KV cache needs at least one block")
        self.num_blocks = num_blocks
        self.num_quarantined = 0
        """References held by the quarantine."""
        self._refs = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block used last is the warmest
        self._cached: OrderedDict[int, None] = OrderedDict()  # published and unreferenced; next to evict first
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._quarantine: dict[int, list[int]] = {}  # step -> blocks, each with one reference

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out: free ones, and cached ones that nobody references."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each; evicts the least recently used cached ones if needed."""
        if count > self.num_free:
            raise ValueError(f"{count} KV blocks asked, {self.num_free} of {self.num_blocks} free")
        split = max(0, len(self._free) - count)
        blocks = self._free[split:][::-1]
        del self._free[split:]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            blocks.append(block)
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Takes one more reference to each block: prefix hits, and forks of a sequence."""
        for block in blocks:
            if self._refs[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"KV block {block} is free and has no content to share")
                del self._cached[block]
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Gives one reference to each block back. A table's tail goes first: released first, evicted first."""
        refs = self._refs
        for block in blocks:
            if refs[block] < 1:
                raise ValueError(f"KV block {block} released more often than referenced")
            refs[block] -= 1
            if refs[block] == 0:
                if self._hash_of[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def quarantine(self, blocks: list[int], until_step: int) -> None:
        """Keeps the caller's references to `blocks` until `end_step(until_step)`, then releases them."""
        self._quarantine.setdefault(until_step, []).extend(blocks)
        self.num_quarantined += len(blocks)

    def end_step(self, step: int) -> None:
        """The result of `step` has been applied: releases what waited for it."""
        blocks = self._quarantine.pop(step, None)
        if blocks is not None:
            self.num_quarantined -= len(blocks)
            self.release(blocks)

    def num_returning(self, tables: Iterable[list[int]] = ()) -> int:
        """Blocks that become free once the quarantine has ended and `tables` are released (a lower bound)."""
        refs = self._refs
        groups = (*self._quarantine.values(), *tables)
        return sum(refs[block] == 1 for blocks in groups for block in blocks)

    def publish(self, block: int, content: bytes) -> None:
        """Offers a referenced block, full and confirmed, for reuse. The first block published for a content wins."""
        if self._refs[block] < 1:
            raise ValueError(f"KV block {block} is not referenced and cannot be published")
        if self._hash_of[block] is None and content not in self._block_of:
            self._hash_of[block] = content
            self._block_of[content] = block

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Published blocks of the longest prefix of `hashes`; takes no reference."""
        blocks = []
        for content in hashes:
            block = self._block_of.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_take(self, shared: Sequence[int], count: int) -> bool:
        """Whether `share(shared)` followed by `allocate(count)` succeeds (shared blocks may be evictable ones)."""
        return count + sum(self._refs[block] == 0 for block in shared) <= self.num_free

    def _forget(self, block: int) -> None:
        content = self._hash_of[block]
        if content is not None:
            self._hash_of[block] = None
            del self._block_of[content]


class KVCacheManager:
    """Block tables of one rank's requests, on top of a BlockPool.

    Args:
        num_blocks: KV blocks of the rank. block_size: tokens per block.
        prefix_caching: reuse blocks of equal histories.
    """

    def __init__(self, *, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1")
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._ended_step = -1

    @property
    def max_tokens(self) -> int:
        """Positions that one request alone can have computed."""
        return self.pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of blocks that are referenced or in quarantine; cached ones that nobody references count as free."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def match(self, request: SchedulerRequest) -> tuple[list[int], int] | None:
        """What admitting `request` takes now: (cached prefix blocks, blocks to allocate for the rest of its history).

        None if there are not enough blocks. Takes nothing.
        """
        num_tokens = len(request.token_ids)
        hits: list[int] = []
        if self.prefix_caching:
            limit = (num_tokens - 1) // self.block_size  # the last token is always computed: it yields the next one
            extend_block_hashes(request.hashes, request.token_ids, self.block_size, limit)
            hits = self.pool.match(request.hashes[:limit])
        need = -(-num_tokens // self.block_size) - len(hits)
        return (hits, need) if self.pool.can_take(hits, need) else None

    def admit(self, request: SchedulerRequest, hits: list[int], need: int) -> None:
        """Gives `request` a table that covers its whole known history, as `match` found it possible."""
        self.pool.share(hits)  # first: allocating may evict cached blocks
        request.block_ids = hits + self.pool.allocate(need)
        request.num_published = len(hits)
        request.publish_at = (len(hits) + 1) * self.block_size if self.prefix_caching else NEVER

    def grow(self, request: SchedulerRequest) -> int | None:
        """Appends one block to the table and returns it; None if there is none."""
        if not self.pool.num_free:
            return None
        block = self.pool.allocate(1)[0]
        request.block_ids.append(block)
        return block

    def confirm(self, request: SchedulerRequest, num_computed: int) -> None:
        """The first `num_computed` positions are computed, by steps now applied: publishes full blocks."""
        if num_computed < request.publish_at:
            return
        full = num_computed // self.block_size
        extend_block_hashes(request.hashes, request.token_ids, self.block_size, full)
        for i in range(request.num_published, full):
            self.pool.publish(request.block_ids[i], request.hashes[i])
        request.num_published = full
        request.publish_at = (full + 1) * self.block_size

    def release(self, request: SchedulerRequest, until_step: int) -> None:
        """Gives the table up. Its blocks stay in quarantine until `until_step`, the last to touch them, has ended."""
        blocks = request.block_ids[::-1]
        request.block_ids = []
        request.num_published = 0
        request.publish_at = NEVER
        if until_step <= self._ended_step:
            self.pool.release(blocks)
        else:
            self.pool.quarantine(blocks, until_step)

    def end_step(self, step: int) -> None:
        """The result of `step` has been applied."""
        self._ended_step = step
        self.pool.end_step(step)
