"""What layers share: the store's residency, the runtime's checks, the dispatch handle's rules, statistics."""

from __future__ import annotations

import msgpack
import pytest
import torch

from epruntime.comm.local import LocalTransport
from epruntime.comm.transport import GroupInfo
from epruntime.errors import ConfigError
from epruntime.moe.dispatch import Dispatcher
from epruntime.moe.experts import native
from epruntime.moe.placement import contiguous
from epruntime.moe.runtime import MoERuntime
from epruntime.moe.stats import MoEStats
from epruntime.moe.store import ExpertStore, Residency
from epruntime.moe.types import StepContext
from epruntime.testing.experts import dense_moe, random_experts


def make_runtime(**changes: object) -> MoERuntime:
    settings: dict[str, object] = {
        "transport": LocalTransport(GroupInfo(rank=0, world_size=1)),
        "placement_for": lambda n: contiguous(n, 1),
        "backend": "auto",
        "strict": True,
        "budget_rows": 64,
        "context": StepContext(),
        "stats": MoEStats(),
        **changes,
    }
    return MoERuntime(**settings)  # type: ignore[arg-type]


def test_the_store_hands_out_resident_weights_only() -> None:
    store, weights = ExpertStore(), random_experts(3, 8, 8)
    with pytest.raises(LookupError, match=r"layer 4: no expert weights were registered, layers \[\]"):
        store.acquire(4)
    store.put(4, weights, state=Residency.LOADING)
    store.mark(4, 0, Residency.RESIDENT)
    store.mark(4, 2, Residency.ABSENT)
    with pytest.raises(LookupError, match=r"layer 4: slots {1: 'loading', 2: 'absent'} are not resident"):
        store.acquire(4)
    store.mark(4, 1, Residency.RESIDENT)
    store.mark(4, 2, Residency.RESIDENT)
    assert store.acquire(4) is weights
    assert store.state(4, 1) is Residency.RESIDENT
    store.mark(4, 1, Residency.LOADING)
    with pytest.raises(LookupError):
        store.acquire(4)
    with pytest.raises(IndexError, match="slot 3 of 3"):
        store.mark(4, 3, Residency.RESIDENT)
    store.put(5, random_experts(0, 8, 8))  # a rank without experts
    assert store.acquire(5).num_slots == 0
    store.clear()
    with pytest.raises(LookupError):
        store.acquire(5)


def test_the_runtime_checks_what_it_is_given() -> None:
    runtime = make_runtime()
    assert runtime.local_experts(5) == (0, 1, 2, 3, 4)
    with pytest.raises(ValueError, match="layer 2: weights of 4 experts on rank 0, which has 5 slots of 5"):
        runtime.make_layer(2, 5, random_experts(4, 8, 8))
    with pytest.raises(ConfigError, match="exchange_budget_tokens=0"):
        make_runtime(budget_rows=0).make_layer(0, 2, random_experts(2, 8, 8))
    with pytest.raises(ConfigError, match="placement 0 is for 2 ranks, the local transport connects 1"):
        Dispatcher(LocalTransport(GroupInfo(rank=0, world_size=1)), contiguous(4, 2), budget_rows=8)


def test_layers_may_differ_in_experts_width_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "load", lambda: None)  # as where there is no compiler
    runtime = make_runtime(strict=False)
    runtime.context.num_tokens = 6
    kinds = [random_experts(4, 16, 24, seed=1), random_experts(9, 6, 10, seed=2, activation="relu2")]
    for index, experts in enumerate(kinds):
        layer = runtime.make_layer(index, experts.num_slots, experts)
        x = torch.randn(6, experts.up_matrix.shape[1])
        ids, factors = torch.randint(0, experts.num_slots, (6, 3)), torch.rand(6, 3, dtype=torch.float64)
        want = dense_moe(x, ids, factors.float(), experts)
        assert (layer(x, ids.int(), factors).double() - want).abs().max() < 3e-6 * want.abs().max()
    assert runtime.experts_backend == "grouped_mm+reference"  # rows of 6 floats do not suit grouped_mm


def test_a_handle_is_used_in_order_and_once() -> None:
    runtime = make_runtime(budget_rows=2)
    layer = runtime.make_layer(0, 2, random_experts(2, 8, 8))
    dispatcher, stats = layer._dispatcher, runtime.stats.layer(0, 2)
    factors = torch.ones(3, 1)
    handle = dispatcher.prepare(torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int64), 3, stats)
    assert handle.num_rounds == 2
    with pytest.raises(AssertionError, match="alternate"):
        dispatcher.send_back(handle, torch.zeros(2, 8))
    for count in (2, 1):
        assert dispatcher.receive(handle).x_NH.shape == (count, 8)
        with pytest.raises(AssertionError, match="alternate"):
            dispatcher.receive(handle)
        if count == 2:
            with pytest.raises(AssertionError, match="0 of 2 rounds were run"):
                dispatcher.finalize(handle, factors)
        dispatcher.send_back(handle, torch.full((count, 8), float(count)))
    assert dispatcher.finalize(handle, factors)[:, 0].tolist() == [2, 2, 1]
    with pytest.raises(AssertionError, match="once"):
        dispatcher.finalize(handle, factors)


def test_statistics_add_up_and_are_ready_for_msgpack() -> None:
    runtime = make_runtime()
    layer = runtime.make_layer(5, 4, random_experts(4, 16, 16))
    runtime.context.num_tokens = 3
    for _ in range(2):
        layer(torch.randn(4, 16), torch.tensor([[0, 3], [3, 3], [-1, 1], [2, 2]]), torch.ones(4, 2))
    snapshot = msgpack.unpackb(msgpack.packb(runtime.stats.snapshot()))
    counted = snapshot["layers"]["5"]
    waits = counted.pop("dispatch_s"), counted.pop("combine_s")
    assert 0 < sum(waits) < 1
    # Two steps of three valid tokens; the fourth row is padding. A row: 64 bytes of x, 8 of slots, padded to 80.
    assert counted == {
        "expert_tokens": [2, 2, 0, 6],
        "local_experts": [0, 1, 2, 3],
        "pairs_received": 10,
        "replica_pairs": 0,
        "not_routed": 2,
        "steps": 2,
        "rounds": 2,
        "rows_sent": 6,
        "rows_received": 6,
        "dispatch_bytes": 2 * 3 * 80,
        "combine_bytes": 2 * 5 * 64,
    }
    with pytest.raises(AssertionError, match="layer 5: 4 experts, then 8"):
        runtime.stats.layer(5, 8)
