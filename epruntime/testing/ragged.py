"""Drives a LoadedModel the way a runner does (ragged, chunked, mixed, scattered blocks), for comparison.

Unwritten cache slots hold NaN and block ids are scrambled: a read that should not happen shows in the result.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from epruntime.comm.local import LocalTransport
from epruntime.comm.transport import GroupInfo
from epruntime.models import adapter
from epruntime.models.batch import ForwardBatch
from epruntime.models.loaded import LoadedModel
from epruntime.moe.placement import Placement, contiguous
from epruntime.moe.runtime import MoERuntime
from epruntime.moe.stats import MoEStats
from epruntime.moe.types import StepContext
from epruntime.ops import batch_invariant
from epruntime.testing.margins import watch_rows

#: Per step, (sequence, new tokens): ragged prefill, mixed chunks and decodes, decode only, and a long chunk.
SCHEDULE: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 5), ("b", 11), ("c", 8)),
    (("a", 1), ("b", 4), ("c", 1)),
    (("c", 1), ("a", 1), ("b", 1)),
    (("c", 6), ("a", 6), ("b", 3)),
    (("b", 1), ("c", 1)),
)


class RaggedDriver:
    """Keeps block tables of a few sequences over one model's cache.

    Args:
        rope_lens: ForwardBatch.rope_lens_S by sequence: the length that it had when it came; 1 where it is not named.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int = 48,
        block_size: int = 4,
        rope_lens: Mapping[str, int] | None = None,
    ) -> None:
        self.model, self.block_size = model, block_size
        model.allocate_kv(num_blocks, block_size)
        for layer in model.layers:
            layer.k_cache_NBKD.fill_(float("nan"))
            layer.v_cache_NBKV.fill_(float("nan"))
        generator = torch.Generator().manual_seed(7)
        self._free = torch.randperm(num_blocks, generator=generator).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: Counter[str] = Counter()
        self._rope_lens = rope_lens or {}

    def step(self, items: Sequence[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Computes new tokens (int64 [n]) of some sequences; returns logits [n, V] of each."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, lengths = [0], []
        for name, tokens in items:
            table = self._tables.setdefault(name, [])
            first, last = self._lengths[name], self._lengths[name] + len(tokens)
            while len(table) * self.block_size < last:
                table.append(self._free.pop())
            ids += tokens.tolist()
            positions += range(first, last)
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in range(first, last)]
            starts.append(starts[-1] + len(tokens))
            lengths.append(last)
            self._lengths[name] = last
        width = max(len(self._tables[name]) for name, _ in items)
        tables = torch.full((len(items), width), -1, dtype=torch.int32)
        for row, (name, _) in enumerate(items):
            tables[row, : len(self._tables[name])] = torch.tensor(self._tables[name], dtype=torch.int32)
        total = starts[-1]
        logits = self.model.forward(
            ForwardBatch(
                input_ids_T=torch.tensor(ids),
                positions_T=torch.tensor(positions),
                slots_T=torch.tensor(slots),
                query_starts_S1=torch.tensor(starts, dtype=torch.int32),
                seq_lens_S=torch.tensor(lengths, dtype=torch.int32),
                block_tables_SB=tables,
                logits_rows_N=torch.arange(total),
                num_tokens=total,
                rope_lens_S=torch.tensor([self._rope_lens.get(name, 1) for name, _ in items], dtype=torch.int32),
            )
        )
        return [logits[starts[i] : starts[i + 1]] for i in range(len(items))]


def local_runtime(
    *, backend: str = "reference", strict: bool = True, place: Callable[[int], Placement] | None = None
) -> MoERuntime:
    """A one-rank MoE runtime. `place`: number of experts -> placement; by default each has one slot, in order."""
    return MoERuntime(
        transport=LocalTransport(GroupInfo(rank=0, world_size=1)),
        placement_for=place or (lambda num: contiguous(num, 1)),
        backend=backend,
        strict=strict,
        budget_rows=4096,
        context=StepContext(),
        stats=MoEStats(),
    )


@contextlib.contextmanager
def strict_ops() -> Iterator[None]:
    """torch's ops as a strict rank has them, in this process."""
    batch_invariant.install(complex_products=True)
    try:
        yield
    finally:
        batch_invariant.uninstall()


#: Scores of order one err by some 1e-6 in fp32: a selection that is nearer a tie than this may turn out otherwise.
NEAR_TIE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Distances of rows from transformers in fp64, of T rows in all. Among thousands a router, or an indexer, finds two
    choices alike to the last bits now and then, and takes the other: that row alone may be far off.

    Attributes:
        error_T, eager_error_T: largest over the vocabulary; of the model under test, and of eager transformers.
        margin_T: least gap of any selection in fp64.
    """

    error_T: torch.Tensor
    eager_error_T: torch.Tensor
    margin_T: torch.Tensor

    @property
    def near_tie_T(self) -> torch.Tensor:
        return self.margin_T < NEAR_TIE

    @property
    def eager_error(self) -> float:
        """Eager transformers' largest error where no selection is near a tie."""
        return float(self.eager_error_T[~self.near_tie_T].max())

    def beyond(self, bound: float) -> tuple[list[int], list[int]]:
        """Rows whose error is above `bound`, or no number: those that no near tie excuses, and the others."""
        beyond_T = ~(self.error_T <= bound)
        wrong_T, turned_T = beyond_T & ~self.near_tie_T, beyond_T & self.near_tie_T
        return wrong_T.nonzero().flatten().tolist(), turned_T.nonzero().flatten().tolist()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Distances from transformers' eager forward in fp64, over all logits.

    Attributes:
        error, median_error: of the model under test. eager_error, median_eager_error: of eager transformers in the
            model's dtype. largest_logit: for scale.
        rows: the same row by row; None where it was not asked for.
    """

    error: float
    median_error: float
    eager_error: float
    median_eager_error: float
    largest_logit: float
    rows: Rows | None = field(default=None, repr=False)


def sequences_for(
    vocab_size: int, schedule: Sequence[Sequence[tuple[str, int]]], *, seed: int
) -> dict[str, torch.Tensor]:
    """Random token ids, as many per sequence as the schedule computes."""
    lengths: Counter[str] = Counter()
    for items in schedule:
        for name, count in items:
            lengths[name] += count
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randint(3, vocab_size, (n,), generator=generator) for name, n in sorted(lengths.items())}


def reference_logits(
    reference: Any,
    sequences: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    margins: dict[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Eager transformers' logits [n, V] of each sequence alone; in `dtype`, all weights cast, if given.

    `margins`: takes, where it is given, the least gap of any selection in each row, fp64 [n] by sequence.
    """
    if dtype is not None:
        reference = copy.deepcopy(reference).to(dtype)
    reference.set_attn_implementation("eager")
    reference.set_experts_implementation("eager")
    logits = {}
    for name, ids in sequences.items():
        with torch.inference_mode(), contextlib.ExitStack() as stack:
            if margins is not None:
                margins[name] = stack.enter_context(watch_rows(len(ids)))
            logits[name] = fresh(reference)(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def fresh(reference: Any) -> Any:
    """The model as it is before any forward: rotary embeddings remember. Dynamic ones the longest sequence so far,
    those of longrope, in the oldest transformers, that there was a long one: they fail at the second."""
    remembers = {"dynamic", "longrope"} & set(adapter.rope_types(reference))
    return copy.deepcopy(reference) if remembers else reference


def compare(
    reference: Any,
    model: LoadedModel,
    *,
    seed: int = 1,
    schedule: Sequence[Sequence[tuple[str, int]]] = SCHEDULE,
    num_blocks: int = 48,
    block_size: int = 4,
    by_rows: bool = False,
) -> Comparison:
    """Runs the schedule on `model` and measures it, and eager transformers, against eager transformers in fp64.

    The model runs on row-independent ops, as a strict rank has them; transformers on torch's own.
    `by_rows`: also row by row.
    """
    sequences = sequences_for(model.info.vocab_size, schedule, seed=seed)
    margins: dict[str, torch.Tensor] = {}
    exact = reference_logits(reference, sequences, torch.float64, margins=margins if by_rows else None)
    eager = reference_logits(reference, sequences)
    lengths = {name: len(ids) for name, ids in sequences.items()}
    driver = RaggedDriver(model, num_blocks=num_blocks, block_size=block_size, rope_lens=lengths)
    done: Counter[str] = Counter()
    errors, eager_errors, row_margins = [], [], []
    for items in schedule:
        with strict_ops():
            found = driver.step([(name, sequences[name][done[name] : done[name] + n]) for name, n in items])
        for (name, n), logits in zip(items, found, strict=True):
            rows = slice(done[name], done[name] + n)
            errors.append((logits.double() - exact[name][rows]).abs())
            eager_errors.append((eager[name][rows].double() - exact[name][rows]).abs())
            row_margins += [margins[name][rows]] if by_rows else []
            done[name] += n
    error, eager_error = torch.cat(errors).nan_to_num(nan=math.inf), torch.cat(eager_errors)
    assert bool(eager_error.isfinite().all()), "the oracle has NaN"
    return Comparison(
        error=error.max().item(),
        median_error=error.median().item(),
        eager_error=eager_error.max().item(),
        median_eager_error=eager_error.median().item(),
        largest_logit=max(x.abs().max().item() for x in exact.values()),
        rows=Rows(error_T=error.amax(1), eager_error_T=eager_error.amax(1), margin_T=torch.cat(row_margins))
        if by_rows
        else None,
    )


def alone_and_among_others(model: LoadedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, V] of one sequence of the schedule, on a strict rank's ops: at once by itself, and in parts among the
    others."""
    tokens = sequences_for(model.info.vocab_size, SCHEDULE, seed=5)
    with strict_ops():
        (alone,) = RaggedDriver(model).step([("b", tokens["b"])])
        driver, done, parts = RaggedDriver(model), dict.fromkeys(tokens, 0), []
        for items in SCHEDULE:
            out = driver.step([(n, tokens[n][done[n] : done[n] + count]) for n, count in items])
            for (name, count), logits in zip(items, out, strict=True):
                done[name] += count
                if name == "b":
                    parts.append(logits)
    return alone, torch.cat(parts)
