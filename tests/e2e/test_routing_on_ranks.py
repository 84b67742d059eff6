"""Routing traps of the exchange, on the blocks of real families: three ranks against transformers' block in fp64.

A shared expert, a bias, a scale or an input factor that is applied once per rank, per copy or per round in place of
once per (token, expert) shows here, and so do tokens that lie where nobody expects them. All cases run in one set of
rank processes.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from routing_paper import HIDDEN, error

from epruntime.comm.select import make_transport
from epruntime.comm.transport import GroupInfo
from epruntime.models.loader import load_model
from epruntime.moe.placement import placement_for
from epruntime.moe.runtime import MoERuntime
from epruntime.moe.stats import MoEStats
from epruntime.moe.types import StepContext
from epruntime.testing import tiny_models
from epruntime.testing.ranks import run_ranks

RANKS, TOKENS, POISONED, NEAR = 3, 23, 5, 2e-5
#: shared expert, groups, correction bias and scale; expert biases; scaled input; identity experts that stay at home
FAMILIES = ("deepseek_v3", "gpt_oss", "llama4_text", "longcat_flash")
#: strategy, redundant experts, exchange budget; 8 experts on 3 ranks
PLACES = (("linear", 0, 4096), ("round_robin", 4, 4096), ("linear", 17, 2))
#: how tokens lie on the ranks
SHARES = {
    "uneven": (3, 7, 13),
    "idle": (0, 0, 23),  # nothing comes from two ranks
    "nothing": (0, 0, 0),
    "alike": (3, 7, 13),  # all tokens are the same one: most experts, and with K = 1 two ranks, get nothing
    "poisoned": (3, 7, 13),  # one token is NaN
}


def tokens_of(layout: str) -> torch.Tensor:
    x_TH = torch.randn(sum(SHARES[layout]), HIDDEN, generator=torch.Generator().manual_seed(3))
    if layout == "alike":
        x_TH[:] = x_TH[0].clone()
    elif layout == "poisoned":
        x_TH[POISONED, 3] = torch.nan
    return x_TH


def block_name(model: torch.nn.Module) -> str:
    return [n for n, _ in model.named_modules() if n.endswith(".experts")][-1].rpartition(".")[0]


Found = dict[tuple[str, int, str], tuple[torch.Tensor, dict[str, int]]]


def serve(group: GroupInfo, folder: str) -> Found:
    """One rank's part of every case: its tokens' outputs, and its counters."""
    found: Found = {}
    generation = 0
    for family in FAMILIES:
        for place, (strategy, redundant, budget) in enumerate(PLACES):
            generation += 1
            transport = make_transport("gloo", replace(group, generation=generation))
            runtime = MoERuntime(
                transport=transport,
                placement_for=functools.partial(
                    placement_for, world_size=RANKS, strategy=strategy, num_redundant=redundant
                ),
                backend="auto",
                strict=True,
                budget_rows=budget,
                context=StepContext(),
                stats=MoEStats(),
            )
            model = load_model(Path(folder) / family, dtype="float32", moe=runtime)
            name = block_name(model.module)
            layer = name.split(".")[2]
            for layout, shares in SHARES.items():
                first = sum(shares[: group.rank])
                mine_TH = tokens_of(layout)[first : first + shares[group.rank]]
                runtime.context.num_tokens = len(mine_TH)
                # a row of padding, that nobody may look at
                rows_TH = torch.cat([mine_TH, torch.full((1, HIDDEN), torch.nan)])
                before = runtime.stats.snapshot()["layers"][layer]
                with torch.inference_mode():
                    out = model.module.get_submodule(name)(rows_TH[None])
                out_TH = (out[0] if isinstance(out, tuple) else out).view(rows_TH.shape)[:-1]
                after = runtime.stats.snapshot()["layers"][layer]
                keys = ("rounds", "steps", "rows_received", "pairs_received", "replica_pairs", "not_routed")
                found[family, place, layout] = out_TH, {key: after[key] - before[key] for key in keys}
            transport.close()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, torch.nn.Module]:
    """family -> transformers' own block in fp64."""
    blocks = {}
    for family in FAMILIES:
        _, model = tiny_models.build(family)
        tiny_models.save(model, folder / family)
        model.set_experts_implementation("eager")
        blocks[family] = copy.deepcopy(model.get_submodule(block_name(model))).double()
    return blocks


@pytest.fixture(scope="module")
def found(folder: Path, expected: object) -> list[Found]:
    return run_ranks(RANKS, serve, str(folder), timeout_s=300)


@pytest.mark.parametrize("layout", SHARES)
@pytest.mark.parametrize("place", range(len(PLACES)), ids=lambda i: "-".join(map(str, PLACES[i])))
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_equal_fp64(
    family: str, place: int, layout: str, found: list[Found], expected: dict[str, torch.nn.Module]
) -> None:
    outputs, counters = zip(*(rank[family, place, layout] for rank in found), strict=True)
    assert tuple(map(len, outputs)) == SHARES[layout]
    y_TH, x_TH = torch.cat(outputs), tokens_of(layout)
    sound = [t for t in range(len(x_TH)) if bool(x_TH[t].isfinite().all())]
    if sound:
        with torch.inference_mode():
            out = expected[family](x_TH[sound][None].double())
        want = (out[0] if isinstance(out, tuple) else out).view(len(sound), HIDDEN)
        assert error(y_TH[sound], want) < NEAR
    if layout == "poisoned":
        assert not y_TH[POISONED].isfinite().all()
    # the same bits wherever experts lie, in one round or in many
    assert torch.equal(y_TH[sound], torch.cat([rank[family, 0, layout][0] for rank in found])[sound])
    assert {c["steps"] for c in counters} == {1}, "every rank takes part, also with nothing"
    rounds = {c["rounds"] for c in counters}
    budget = PLACES[place][2]
    assert rounds == {-(-max(c["rows_received"] for c in counters) // budget)}
    if layout == "nothing":
        assert rounds == {0}
    elif budget == 2:
        assert max(rounds) > 1
    if PLACES[place][1] and layout not in ("nothing", "alike"):
        assert sum(c["replica_pairs"] for c in counters) > 0
    if layout == "alike" and not PLACES[place][1]:
        chosen = sum(c["pairs_received"] > 0 for c in counters)
        assert chosen <= (1 if family == "llama4_text" else 2), "a rank that nothing comes to"
