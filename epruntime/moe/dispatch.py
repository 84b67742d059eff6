"""Dispatch and combine of one MoE layer's tokens.

prepare (plan rows, exchange counts, agree on rounds) -> per round: receive -> experts -> send_back -> finalize

Every rank makes these calls for every layer, also with no token: the exchange is collective. Results return
unweighted, one row per (row, slot); weights are applied here, at the source, in k order and in fp32, and the sum is
cast once. So the bits of a token do not depend on where its experts are.
"""

from __future__ import annotations

from time import perf_counter

import torch

from epruntime.comm.progress import Collective, Stamps
from epruntime.comm.transport import Transport, Work
from epruntime.errors import ConfigError
from epruntime.moe.placement import Placement
from epruntime.moe.rounds import split_rounds
from epruntime.moe.rows import PlacementTables, RowFormat, RowPlan, pairs_by_peer, plan_rows
from epruntime.moe.stats import LayerStats
from epruntime.moe.types import ExpertRows
from epruntime.ops.combine import combine_rows


class DispatchHandle:
    """One layer's exchange under way; made by `Dispatcher.prepare`, consumed once by `Dispatcher.finalize`.

    Opaque to its holder but for `num_rounds`: that many times `receive`, then `send_back`.
    """

    def __init__(
        self,
        *,
        row_format: RowFormat,
        plan: RowPlan,
        sends: list[list[int]],
        receives: list[list[int]],
        num_rows: int,
        stats: LayerStats,
    ) -> None:
        self.num_rounds = len(sends)
        self._format, self._plan, self._sends, self._receives = row_format, plan, sends, receives
        self._num_rows = num_rows  # of x, padding included: rows of the result
        self._stats = stats
        self._message_NB: torch.Tensor | None = None
        self._incoming: Work | None = None
        self._row = 0  # first row of the round that `receive` returns next
        self._round = 0
        self._arrived: ExpertRows | None = None
        self._returning: list[Work] = []
        self._consumed = False


class Dispatcher:
    """Moves rows between tokens and experts for one transport and one placement.

    Args:
        budget_rows: most rows that this rank receives in one round; the same on every rank.
        stamps: where it says what it waits in; every rank waits equally often.
    """

    def __init__(
        self, transport: Transport, placement: Placement, *, budget_rows: int, stamps: Stamps | None = None
    ) -> None:
        if placement.world_size != transport.world_size:
            raise ConfigError(
                f"placement {placement.version} is for {placement.world_size} ranks, the "
                f"{transport.name} transport connects {transport.world_size}"
            )
        if budget_rows < 1:
            raise ConfigError(f"exchange_budget_tokens={budget_rows}: must be at least 1")
        self._transport = transport
        self._budget_rows = budget_rows
        self._stamps = stamps or Stamps()
        self._tables = PlacementTables(placement)
        here = placement.replica_slots(transport.rank)
        # by slot; the last entry, which -1 reaches, stands for "not routed"
        self._replica_S1 = torch.tensor([*here, False]) if any(here) else None

    def prepare(
        self, x_TH: torch.Tensor, topk_ids_TK: torch.Tensor, num_tokens: int, stats: LayerStats
    ) -> DispatchHandle:
        """Plans and starts the exchange.

        Args:
            x_TH: hidden states; rows from `num_tokens` on are padding and go nowhere.
            topk_ids_TK: logical expert ids, -1 for none.
        """
        ids_TK = topk_ids_TK[:num_tokens].long()
        stats.count_experts(ids_TK)
        # Which replica a row goes to follows from its rank, its place and the layer's step: the same in every run.
        plan = plan_rows(ids_TK, self._tables, first=self._transport.rank + stats.steps)
        started = perf_counter()
        self._stamps.wait(Collective.COUNTS)
        rows_RR = self._transport.all_gather_counts(plan.rows_R)
        self._stamps.go_on()
        stats.dispatch_s += perf_counter() - started
        rounds = split_rounds(rows_RR, self._budget_rows)
        rank = self._transport.rank
        sends, receives = rounds[:, rank].tolist(), rounds[:, :, rank].tolist()
        if len(sends) > 1:
            by_destination = rounds[:, rank].t()
            round_N = torch.arange(len(sends)).repeat(len(by_destination)).repeat_interleave(by_destination.flatten())
            plan = plan.permuted(round_N.argsort(stable=True))
        row_format = RowFormat(hidden_size=x_TH.shape[1], top_k=ids_TK.shape[1], dtype=x_TH.dtype)
        handle = DispatchHandle(
            row_format=row_format, plan=plan, sends=sends, receives=receives, num_rows=x_TH.shape[0], stats=stats
        )
        stats.rounds += len(sends)
        if sends:
            handle._message_NB = row_format.pack(x_TH, plan)
            stats.rows_sent += handle._message_NB.shape[0]
            stats.dispatch_bytes += handle._message_NB.nbytes
            self._start_round(handle)
        return handle

    def receive(self, handle: DispatchHandle) -> ExpertRows:
        """Waits for the current round's rows."""
        assert handle._incoming is not None, "receive and send_back alternate"
        started = perf_counter()
        self._stamps.wait(Collective.DISPATCH)
        message_NB = handle._incoming.wait()
        self._stamps.go_on()
        handle._stats.dispatch_s += perf_counter() - started
        handle._incoming = None
        handle._stats.rows_received += message_NB.shape[0]
        handle._arrived = ExpertRows(
            x_NH=handle._format.hidden_of(message_NB), slots_NK=handle._format.slots_of(message_NB)
        )
        return handle._arrived

    def send_back(self, handle: DispatchHandle, y_MH: torch.Tensor) -> None:
        """Starts the return of the current round's results, and the next round.

        Args:
            y_MH: one unweighted row per slot >= 0 of the received rows, by row and then by k, in the model dtype.
        """
        assert handle._arrived is not None, "receive and send_back alternate"
        sends, receives = handle._sends[handle._round], handle._receives[handle._round]
        to_sources = pairs_by_peer(handle._arrived.slots_NK, receives)
        first = handle._row
        handle._row += sum(sends)
        from_experts = pairs_by_peer(handle._plan.slots_NK[first : handle._row], sends)
        result_MB = y_MH.contiguous().view(torch.uint8)
        handle._returning.append(self._transport.all_to_all_rows(result_MB, to_sources, from_experts))
        handle._stats.combine_bytes += result_MB.nbytes
        handle._stats.pairs_received += sum(to_sources)
        if self._replica_S1 is not None:
            handle._stats.replica_pairs += int(self._replica_S1[handle._arrived.slots_NK.long()].sum())
        handle._arrived = None
        handle._round += 1
        if handle._round < handle.num_rounds:
            self._start_round(handle)

    def finalize(self, handle: DispatchHandle, topk_weights_TK: torch.Tensor) -> torch.Tensor:
        """Waits for all results and combines them.

        Returns:
            [T, H] in the model dtype; zeros where nothing was routed. T includes padding rows.
        """
        assert not handle._consumed, "a dispatch handle is consumed once"
        assert handle._round == handle.num_rounds, f"{handle._round} of {handle.num_rounds} rounds were run"
        handle._consumed = True
        started = perf_counter()
        self._stamps.wait(Collective.COMBINE)
        parts = [work.wait() for work in handle._returning]
        self._stamps.go_on()
        handle._stats.combine_s += perf_counter() - started
        row_format = handle._format
        if parts:
            result_MB = parts[0] if len(parts) == 1 else torch.cat(parts)
            results_MH = result_MB.view(row_format.dtype)
        else:
            results_MH = torch.empty((0, row_format.hidden_size), dtype=row_format.dtype)
        index_TK = handle._plan.index_TK(handle._num_rows)
        return combine_rows(results_MH, index_TK, topk_weights_TK.float())

    def _start_round(self, handle: DispatchHandle) -> None:
        assert handle._message_NB is not None
        sends, receives = handle._sends[handle._round], handle._receives[handle._round]
        message_NB = handle._message_NB[handle._row : handle._row + sum(sends)]
        handle._incoming = self._transport.all_to_all_rows(message_NB, sends, receives)
