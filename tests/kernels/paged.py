"""A paged cache for tests, and attention computed densely in fp64 from the same numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from epruntime.ops.attention import paged_attention, write_kv_cache


@dataclass(kw_only=True)
class PagedCase:
    """Random sequences in a cache whose unwritten slots are NaN and whose blocks lie in random order.

    H query heads, K KV heads, D key size, V value size. `latent`: the values are the first V elements of the keys.
    """

    lengths: list[int]
    H: int = 4
    K: int = 2
    D: int = 16
    V: int = 16
    dtype: torch.dtype = torch.float32
    block_size: int = 16
    latent: bool = False
    options: dict[str, object] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        columns = [-(-length // self.block_size) for length in self.lengths]
        num_blocks = sum(columns) + 2
        self.k_cache = torch.full((num_blocks, self.block_size, self.K, self.D), torch.nan, dtype=self.dtype)
        if self.latent:
            self.v_cache = self.k_cache[..., : self.V]
        else:
            self.v_cache = torch.full((num_blocks, self.block_size, self.K, self.V), torch.nan, dtype=self.dtype)
        blocks = torch.randperm(num_blocks, generator=generator)[: sum(columns)].split(columns)
        self.tables = torch.full((len(self.lengths), max(columns)), -1, dtype=torch.int32)
        self.q, self.k, self.v = [], [], []
        for s, length in enumerate(self.lengths):
            self.tables[s, : columns[s]] = blocks[s]
            self.q.append(random(length, self.H, self.D))
            self.k.append(random(length, self.K, self.D))
            self.v.append(self.k[s][..., : self.V] if self.latent else random(length, self.K, self.V))
            slots = self.slots(s, 0, length)
            write_kv_cache(self.k[s], self.k_cache, slots)
            if not self.latent:
                write_kv_cache(self.v[s], self.v_cache, slots)

    def slots(self, s: int, begin: int, end: int) -> torch.Tensor:
        keys = torch.arange(begin, end)
        return self.tables[s].long()[keys // self.block_size] * self.block_size + keys % self.block_size

    def run(self, spans: list[tuple[int, int, int]], padding: int = 0) -> list[torch.Tensor]:
        """One call for the queries `begin .. end` of sequence s, for each (s, begin, end); returns their outputs."""
        counts = [end - begin for _, begin, end in spans]
        rows = [self.q[s][begin:end] for s, begin, end in spans]
        rows.append(torch.full((padding, self.H, self.D), torch.nan, dtype=self.dtype))
        out = paged_attention(
            torch.cat(rows),
            self.k_cache,
            self.v_cache,
            block_tables_SB=self.tables[[s for s, _, _ in spans]].contiguous(),
            query_starts_S1=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens_S=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            scale=self.D**-0.5,
            **self.options,
        )
        assert out.dtype == self.dtype
        assert out.shape == (sum(counts) + padding, self.H, self.V)
        assert not out[sum(counts) :].any(), "padding rows must be zero"
        return list(out[: sum(counts)].split(counts))

    def expected(self, s: int) -> torch.Tensor:
        """fp64 [length, H, V]: the textbook formula over the whole sequence."""
        group, length = self.H // self.K, self.lengths[s]
        q, k, v = (x[s].double() for x in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.D**-0.5
        if softcap := self.options.get("softcap"):
            scores = softcap * torch.tanh(scores / softcap)
        at, key = torch.arange(length)[:, None], torch.arange(length)
        seen = key <= at
        if window := self.options.get("window"):
            seen &= key > at - window
        if chunk := self.options.get("chunk"):
            seen &= key // chunk == at // chunk
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = self.options.get("sinks_H")
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, length, 1)], -1)
        weights = scores.softmax(-1)[..., :length]
        return torch.einsum("hqk,khv->qhv", weights, v)
