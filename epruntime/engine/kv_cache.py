"""The books of one rank's paged KV cache: the token history and the block table of each request.

add -> [append while preempted] -> admit -> confirm, append, grow ... -> release -> admit again, or forget

A full block whose content is confirmed (the result of the step that computed its last position has
been applied) is published. Another request whose history begins with the same tokens then takes a
reference instead of computing it again. Published blocks are never written: a request writes only
positions that are not yet computed, and the prefix it takes over always leaves at least its last
token to compute. Which block is whose, and since when: block_pool.py.

Two implementations: ReferenceKVCache (kv_reference.py), and the same in C++ (csrc/kv). One process
keeps the books of all ranks, and in Python their tens of thousands of small objects cost more time
in cache misses than all the rest of scheduling (benchmarks/results/scheduler.md has both).
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from epruntime import envs
from epruntime.engine.kv_reference import ReferenceKVCache

logger = logging.getLogger("epruntime.engine.kv_cache")


class KVCache(Protocol):
    """Requests are named by rid, steps by number; "computed" means: by steps whose results have been applied.

    Raises:
        ValueError: a call that makes no sense, such as a block released twice. KeyError: an unknown rid.
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        ...

    @property
    def prefix_caching(self) -> bool:
        """Whether blocks of equal histories are used again."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be handed out: free ones, and cached ones that nobody references."""
        ...

    def add(self, rid: int, token_ids: Sequence[int]) -> None:
        """A request with its prompt; it has no blocks yet."""
        ...

    def forget(self, rid: int) -> None:
        """The request has ended and was released, or never admitted."""
        ...

    def token_ids(self, rid: int) -> bytes:
        """The known history, int32: prompt, then every token appended."""
        ...

    def append(self, rids: np.ndarray, token_ids: np.ndarray) -> list[int]:
        """Each token joins the history of its request, whose earlier tokens are all computed if it has a table.

        Args:
            rids: int64 [N]. token_ids: int32 [N].

        Returns:
            indices of rids that are unknown, ascending; their tokens are ignored.
        """
        ...

    def can_admit(self, rid: int, num_skippable: int) -> bool:
        """Whether `admit` would succeed now. Takes nothing."""
        ...

    def admit(self, rid: int, num_skippable: int) -> tuple[int, tuple[int, ...]] | None:
        """Gives the request a table that covers its whole history, if blocks suffice.

        Args:
            num_skippable: leading tokens that need not be computed again if their KV is cached.

        Returns:
            tokens found in the prefix cache (a multiple of block_size, fewer than the history has), and the table.
        """
        ...

    def grow(self, rids: Sequence[int]) -> list[int] | None:
        """Appends one block to each table and returns these blocks; None, and no change, if there are not enough."""
        ...

    def confirm(self, rid: int, num_computed: int) -> None:
        """The first `num_computed` tokens of the history are computed: full blocks of them are published."""
        ...

    def release(self, rid: int, until_step: int) -> None:
        """Gives the table up. Its blocks stay in quarantine until `until_step`, the last to touch them, has ended."""
        ...

    def num_returning(self, rids: Sequence[int]) -> int:
        """Blocks that become free once the quarantine has ended and `rids` are released (a lower bound)."""
        ...

    def end_step(self, step: int) -> None:
        """The result of `step` has been applied."""
        ...


@functools.cache
def _native() -> Callable[..., KVCache] | None:
    if envs.get("EPRUNTIME_DISABLE_EXTENSION"):
        reason = "EPRUNTIME_DISABLE_EXTENSION=1"
    else:
        try:
            native: Callable[..., KVCache] = importlib.import_module("epruntime._kv").NativeKVCache
            return native
        except ImportError as error:
            reason = str(error)
    logger.warning("the KV cache's books are kept in Python, which is slower where ranks are many: %s", reason)
    return None


def make_kv_cache(*, num_blocks: int, block_size: int, prefix_caching: bool) -> KVCache:
    """The books of an empty cache: in C++ where the extension is built, else in Python."""
    make: Callable[..., KVCache] = _native() or ReferenceKVCache
    return make(num_blocks=num_blocks, block_size=block_size, prefix_caching=prefix_caching)
