"""The blocks of a KV cache: which are free, referenced, cached or in quarantine. Ids only, no memory.

    free --allocate--> referenced --release--> free, or (published) cached --evict--> free
                            \\--quarantine(until step)--> released when that step has ended

A block's reference count is the number of block tables it stands in, plus one for each table that
has been given up but may still be written (or read) by a plan in flight: the quarantine keeps the
reference until the result of the last such plan has been applied. So a block is never handed out
while an in-flight plan may write it, and nothing else has to know about plans.

What a published block holds has a number, its content: a history of tokens up to the block's end.
Blocks are found by key, the content before the block and the block's own token ids, so each is a
node of a tree of histories. Nothing is hashed down to a digest: keys are compared in full, and a
wrong hit is impossible. Contents are numbered as they are published and no number is used twice, so
a key is never mistaken after an eviction; the blocks below an evicted one are not found any more
and are evicted in their turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

#: The content before the first block: no token.
NO_CONTENT = 0

_TOKEN_BYTES = 4  # token ids are int32


def content_key(parent: int, token_ids: bytes) -> bytes:
    """Names the content that block `token_ids` (int32) makes after content `parent` (NO_CONTENT: at the start)."""
    return parent.to_bytes(8, "little") + token_ids


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
        self._key_of: list[bytes | None] = [None] * num_blocks  # of published blocks
        self._content_of = [NO_CONTENT] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._num_contents = NO_CONTENT
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
        refs, key_of = self._refs, self._key_of
        for block in blocks:
            count = refs[block] - 1
            if count < 0:
                raise ValueError(f"KV block {block} released more often than referenced")
            refs[block] = count
            if not count:
                if key_of[block] is None:
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

    def num_returning(self, tables: Iterable[Sequence[int]] = ()) -> int:
        """Blocks that become free once the quarantine has ended and `tables` are released (a lower bound)."""
        refs = self._refs
        groups = (*self._quarantine.values(), *tables)
        return sum(refs[block] == 1 for blocks in groups for block in blocks)

    def publish(self, block: int, parent: int, token_ids: bytes) -> int:
        """Offers a referenced block, full and confirmed, for reuse; the first block published for a content wins.

        Args:
            parent: content before the block (NO_CONTENT: it is the first). token_ids: its own ids, int32.

        Returns:
            the content up to the block's end, for the next block to be published after.
        """
        if self._refs[block] < 1:
            raise ValueError(f"KV block {block} is not referenced and cannot be published")
        key = content_key(parent, token_ids)
        winner = self._block_of.get(key)
        if winner is not None:
            return self._content_of[winner]
        if self._key_of[block] is not None:
            raise ValueError(f"KV block {block} is published already, with another content")
        self._block_of[key] = block
        self._key_of[block] = key
        self._num_contents += 1
        self._content_of[block] = self._num_contents
        return self._num_contents

    def match(self, token_ids: bytes, block_size: int) -> list[int]:
        """Published blocks of the longest known prefix of `token_ids` (int32, whole blocks); takes no reference."""
        blocks, content, width = [], NO_CONTENT, block_size * _TOKEN_BYTES
        for start in range(0, len(token_ids), width):
            block = self._block_of.get(content_key(content, token_ids[start : start + width]))
            if block is None:
                break
            blocks.append(block)
            content = self._content_of[block]
        return blocks

    def content_of(self, block: int) -> int:
        """What a published block holds."""
        return self._content_of[block]

    def can_take(self, shared: Sequence[int], count: int) -> bool:
        """Whether `share(shared)` followed by `allocate(count)` succeeds (shared blocks may be evictable ones)."""
        return count + sum(self._refs[block] == 0 for block in shared) <= self.num_free

    def _forget(self, block: int) -> None:
        key = self._key_of[block]
        if key is not None:
            self._key_of[block] = None
            del self._block_of[key]
