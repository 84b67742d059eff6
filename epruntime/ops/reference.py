"""Plain-torch references of the kernels: what the C++ is tested against, and what runs where it is absent.

Row independence holds here by construction, not by luck: a row's bits come from elementwise adds, multiplications and
comparisons, which IEEE 754 rounds in one way whatever the vector width, and from sums in a fixed tree over a fixed
extent. Library reductions, matrix products and `exp` choose their order or their code by shape, and are not used.

Shape letters: T rows, S sequences, H query heads, K KV heads, G = H / K, N blocks, B slots a block, D key size,
V value size, L keys of a sequence, P keys of a partition, R rows worked on at once; of products as in `gemm.py`.
"""

from __future__ import annotations

import math

import torch

#: Keys are worked on in partitions that start at multiples of this, so that a sum's shape depends on positions alone.
PARTITION = 128
#: Elements of the largest temporary.
WORKSPACE = 1 << 22

LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375  # 10 bits: n * LN2_HIGH is exact in fp32 for the n that occur
LN2_LOW = -2.12194440e-4
#: Taylor coefficients of exp, highest first: on |r| <= ln(2) / 2 the seventh-degree polynomial is exact to 1e-8.
EXP_COEFFICIENTS = tuple(1.0 / math.factorial(n) for n in range(7, 0, -1))
EXP_LOWEST = -87.0


def exp_nonpositive(x: torch.Tensor) -> torch.Tensor:
    """exp(x) for fp32 x <= 0, elementwise operations only; 0 below -87 (exp there is under 2e-38); NaN stays NaN."""
    n = torch.round(x.clamp(min=EXP_LOWEST) * LOG2_E)
    r = (x.clamp(min=EXP_LOWEST) - n * LN2_HIGH) - n * LN2_LOW
    y = torch.full_like(r, EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        y = y * r + coefficient
    y = y * r + 1.0
    power = (n.nan_to_num().to(torch.int32) + 127).bitwise_left_shift(23).view(torch.float32)
    return torch.where(x < EXP_LOWEST, torch.zeros_like(x), y * power)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension in one fixed order: halves are added until one element is left."""
    size = x.shape[-1]
    width = 1 << (size - 1).bit_length()
    if width != size:
        x = torch.nn.functional.pad(x, (0, width - size))
    while width > 1:
        width //= 2
        x = x[..., :width] + x[..., width:]
    return x[..., 0]


def soft_cap(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """cap * tanh(scores / cap)."""
    x = scores / cap
    e = exp_nonpositive(x.abs() * -2.0)
    return torch.copysign((1.0 - e) / (1.0 + e), x) * cap


def write_kv_cache(x_TKD: torch.Tensor, cache_NBKD: torch.Tensor, slots_T: torch.Tensor) -> None:
    valid = slots_T >= 0
    slots, block_size = slots_T[valid], cache_NBKD.shape[1]
    cache_NBKD[slots // block_size, slots % block_size] = x_TKD[valid]


def paged_attention(
    q_THD: torch.Tensor,
    k_cache_NBKD: torch.Tensor,
    v_cache_NBKV: torch.Tensor,
    block_tables_SB: torch.Tensor,
    query_starts_S1: torch.Tensor,
    seq_lens_S: torch.Tensor,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    num_heads, key_size = q_THD.shape[1:]
    _, block_size, num_kv_heads, value_size = v_cache_NBKV.shape
    out_THV = q_THD.new_zeros(q_THD.shape[0], num_heads, value_size)
    starts = query_starts_S1.tolist()
    sinks_KG1 = None if sinks_H is None else sinks_H.float().view(num_kv_heads, -1, 1)
    rows_at_once = max(1, WORKSPACE // (num_heads * PARTITION * max(key_size, value_size)))
    for s, length in enumerate(seq_lens_S.tolist()):
        num_queries = starts[s + 1] - starts[s]
        blocks = block_tables_SB[s, : -(-length // block_size)].long()
        blocks = blocks.clamp(min=0)  # entries below every query's window may be gone; no query reads them
        for first in range(0, num_queries, rows_at_once):
            rows = min(rows_at_once, num_queries - first)
            positions_R = torch.arange(rows, device=q_THD.device) + (length - num_queries + first)
            begin_R = torch.zeros_like(positions_R)
            if window:
                begin_R = torch.maximum(begin_R, positions_R - window + 1)
            if chunk:
                begin_R = torch.maximum(begin_R, positions_R // chunk * chunk)
            begin, end = int(begin_R.min()), int(positions_R.max()) + 1
            q_RKGD = q_THD[starts[s] + first :][:rows].float().view(rows, num_kv_heads, -1, key_size)
            merged = _Softmax(q_RKGD, value_size)
            for base in range(begin // PARTITION * PARTITION, end, PARTITION):
                low, high = max(base, begin // block_size * block_size), min(base + PARTITION, length)
                k_KPD, v_KPV = (_partition(cache, blocks, low, high, base) for cache in (k_cache_NBKD, v_cache_NBKV))
                scores_RKGP = tree_sum(q_RKGD[:, :, :, None] * k_KPD[None, :, None]) * scale
                if softcap:
                    scores_RKGP = soft_cap(scores_RKGP, softcap)
                keys_P = torch.arange(base, base + PARTITION, device=q_THD.device)
                seen_RP = (keys_P >= begin_R[:, None]) & (keys_P <= positions_R[:, None])
                merged.add(scores_RKGP, v_KPV, seen_RP[:, None, None])
            out_THV[starts[s] + first :][:rows] = merged.result(sinks_KG1).flatten(1, 2).to(out_THV.dtype)
    return out_THV


def _partition(cache_NBKD: torch.Tensor, blocks: torch.Tensor, low: int, high: int, base: int) -> torch.Tensor:
    """fp32 [K, P, D] of keys base .. base + P; those outside low .. high were never written here and read as zero."""
    block_size = cache_NBKD.shape[1]
    keys = torch.arange(low, high, device=blocks.device)
    out_PKD = torch.zeros(PARTITION, *cache_NBKD.shape[2:], device=cache_NBKD.device)
    out_PKD[low - base : high - base] = cache_NBKD[blocks[keys // block_size], keys % block_size].float()
    return out_PKD.transpose(0, 1)


class _Softmax:
    """Running softmax of R rows: each partition's own (max, sum, weighted values), merged in ascending order."""

    def __init__(self, q_RKGD: torch.Tensor, value_size: int) -> None:
        self.max_RKG1 = torch.full_like(q_RKGD[..., :1], -math.inf)
        self.sum_RKG1 = torch.zeros_like(self.max_RKG1)
        self.out_RKGV = q_RKGD.new_zeros(*q_RKGD.shape[:-1], value_size)

    def add(self, scores_RKGP: torch.Tensor, v_KPV: torch.Tensor, seen: torch.Tensor) -> None:
        any_seen = seen.any(-1, keepdim=True)
        peak = torch.where(seen, scores_RKGP, -math.inf).amax(-1, keepdim=True)
        p_RKGP = torch.where(seen, exp_nonpositive(scores_RKGP - peak), 0.0)
        weighted_RKGVP = p_RKGP[:, :, :, None] * v_KPV.transpose(1, 2)[None, :, None]
        weighted_RKGVP = torch.where(seen[..., None, :], weighted_RKGVP, 0.0)
        self._merge(any_seen, peak, tree_sum(p_RKGP)[..., None], tree_sum(weighted_RKGVP))

    def _merge(self, take: torch.Tensor, peak: torch.Tensor, total: torch.Tensor, out: torch.Tensor) -> None:
        new_peak = torch.maximum(self.max_RKG1, peak)
        old_factor, new_factor = exp_nonpositive(self.max_RKG1 - new_peak), exp_nonpositive(peak - new_peak)
        self.sum_RKG1 = torch.where(take, self.sum_RKG1 * old_factor + total * new_factor, self.sum_RKG1)
        self.out_RKGV = torch.where(take, self.out_RKGV * old_factor + out * new_factor, self.out_RKGV)
        self.max_RKG1 = torch.where(take, new_peak, self.max_RKG1)

    def result(self, sinks_KG1: torch.Tensor | None) -> torch.Tensor:
        if sinks_KG1 is not None:
            take = torch.ones_like(self.max_RKG1, dtype=torch.bool)
            sink = sinks_KG1.expand_as(self.max_RKG1)
            self._merge(take, sink, torch.ones_like(sink), torch.zeros_like(self.out_RKGV))
        return self.out_RKGV / self.sum_RKG1


def combine_rows(rows_MH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
    sum_TH = torch.zeros(index_TK.shape[0], rows_MH.shape[1], dtype=torch.float32, device=rows_MH.device)
    if rows_MH.shape[0]:
        for k in range(index_TK.shape[1]):
            index_T = index_TK[:, k]
            term_TH = rows_MH[index_T.clamp(min=0)].float() * weights_TK[:, k, None]
            sum_TH = torch.where(index_T[:, None] >= 0, sum_TH + term_TH, sum_TH)
    return sum_TH.to(rows_MH.dtype)


def pack_rows(
    x_TH: torch.Tensor, token_N: torch.Tensor, slots_NK: torch.Tensor, slots_at: int, row_bytes: int
) -> torch.Tensor:
    message_NB = torch.zeros(token_N.shape[0], row_bytes, dtype=torch.uint8, device=x_TH.device)
    for part, at in ((x_TH[token_N], 0), (slots_NK, slots_at)):
        part_NB = part.contiguous().view(torch.uint8)
        message_NB[:, at : at + part_NB.shape[1]] = part_NB
    return message_NB


def matmul(a_MK: torch.Tensor, b_KN: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    """k after k: each product is rounded before it is added."""
    sum_MN = torch.zeros(a_MK.shape[0], b_KN.shape[1], dtype=torch.float32, device=a_MK.device)
    a_KM1, b_KN = a_MK.float().t().contiguous()[:, :, None], b_KN.float().contiguous()
    term_MN = torch.empty_like(sum_MN)
    for k in range(b_KN.shape[0]):
        torch.mul(a_KM1[k], b_KN[k], out=term_MN)
        sum_MN += term_MN
    if bias_N is not None:
        sum_MN += bias_N.float()
    return sum_MN.to(a_MK.dtype)


def bmm(a_BMK: torch.Tensor, b_BKN: torch.Tensor) -> torch.Tensor:
    out_BMN = a_BMK.new_empty(a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2])
    for out_MN, a_MK, b_KN in zip(out_BMN, a_BMK, b_BKN, strict=True):
        out_MN.copy_(matmul(a_MK, b_KN, None))
    return out_BMN


def grouped_matmul(x_PI: torch.Tensor, matrix_SIO: torch.Tensor, ends_S: torch.Tensor) -> torch.Tensor:
    out_PO = x_PI.new_zeros(x_PI.shape[0], matrix_SIO.shape[2])
    start = 0
    for matrix_IO, end in zip(matrix_SIO, ends_S.tolist(), strict=True):
        if end > start:
            out_PO[start:end] = matmul(x_PI[start:end], matrix_IO, None)
        start = end
    return out_PO
