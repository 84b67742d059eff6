"""What goes wrong in routers, one trap each: a served MoE block against the family's formula, written out in fp64.

The formulas are on paper, token by token, and use nothing of transformers: softmax or sigmoid, groups, biases, top-k,
normalisation, scale. Most cases have a control: the known mistake gives another result on the same inputs. What
concerns the exchange (idle ranks, copies, rounds, padding) is in `tests/distributed/test_moe_matrix.py`, and for blocks
of real families in `test_routing_on_ranks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from routing_paper import (
    HIDDEN,
    TOKENS,
    Blocks,
    Choice,
    Rule,
    best,
    blocks,
    error,
    fused_expert,
    grouped_sigmoid,
    inputs,
    mlp,
    paper,
    placed,
    router_of,
    scaled,
    sigmoid,
    softmax,
    softmax_first,
    softmax_last,
)

from epruntime.moe.placement import Placement, placement_for

NEAR, FAR = 2e-5, 1e-2


def _check(case: Blocks, rule: Rule, *wrong: Rule, **more: Any) -> None:
    """The block equals the rule, and none of the mistakes does."""
    x_TH = inputs()
    expert = more.pop("expert", None) or fused_expert(case.theirs)
    weight = more.pop("weight", None)
    weight = router_of(case.theirs).weight if weight is None else weight
    found = case.forward(x_TH)
    assert error(found, paper(x_TH, weight, rule, expert, **more)) < NEAR
    for mistake in wrong:
        assert error(found, paper(x_TH, weight, mistake, expert, **more)) > FAR


@pytest.mark.parametrize("model_type", ["mixtral", "minimax"])
def test_weights_are_always_normalised(model_type: str, tmp_path: Path) -> None:
    _check(blocks(model_type, tmp_path), softmax_first(2, renorm=True), softmax_first(2))


@pytest.mark.parametrize("model_type", ["qwen3_moe", "olmoe"])
@pytest.mark.parametrize("flag", [True, False])
def test_normalisation_that_the_configuration_decides(model_type: str, flag: bool, tmp_path: Path) -> None:
    case = blocks(model_type, tmp_path, norm_topk_prob=flag)
    _check(case, softmax_first(2, renorm=flag), softmax_first(2, renorm=not flag))


def test_no_normalisation_in_jamba(tmp_path: Path) -> None:
    _check(blocks("jamba", tmp_path), softmax_first(2), softmax_first(2, renorm=True))


@pytest.mark.parametrize("k", [1, 8])
def test_one_choice_and_all_choices(k: int, tmp_path: Path) -> None:
    case = blocks("qwen3_moe", tmp_path, num_experts_per_tok=k, norm_topk_prob=False)
    _check(case, softmax_first(k))


def test_softmax_after_the_selection(tmp_path: Path) -> None:
    block = blocks("granitemoe", tmp_path)
    _check(block, softmax_last(2), softmax_first(2))


def _shared_mlp(module: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x_H: mlp(x_H, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)


def test_gated_shared_expert_once(tmp_path: Path) -> None:
    case = blocks("qwen2_moe", tmp_path)
    shared, gate = _shared_mlp(case.theirs.shared_expert), case.theirs.shared_expert_gate.weight[0].detach().double()
    for factor, near in ((1.0, True), (2.0, False), (0.0, False)):

        def gated(x_H: torch.Tensor, factor: float = factor) -> torch.Tensor:
            return factor * sigmoid(float(gate @ x_H)) * shared(x_H)

        expected = paper(inputs(), case.theirs.gate.weight, softmax_first(2), fused_expert(case.theirs), shared=gated)
        assert (error(case.forward(inputs()), expected) < NEAR) == near


def _set_bias(values: list[float]) -> Callable[[Any], None]:
    return lambda block: router_of(block).e_score_correction_bias.copy_(torch.tensor(values))


GROUPS = {"groups": 2, "kept": 1, "renorm": True}


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "dots1", "solar_open"])
def test_negative_biases_with_group_masks(model_type: str, tmp_path: Path) -> None:
    """A masked expert that scores 0.0 beats every allowed one: transformers#45440."""
    bias = [-10.0 - 0.05 * e for e in range(8)]
    case = blocks(model_type, tmp_path, _set_bias(bias), n_group=2, topk_group=1, norm_topk_prob=True)
    scale = float(router_of(case.theirs).routed_scaling_factor)
    how = {**GROUPS, "scale": scale}
    shared = _shared_mlp(case.theirs.shared_experts)
    _check(case, grouped_sigmoid(bias, 2, **how), grouped_sigmoid(bias, 2, masked=0.0, **how), shared=shared)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe"])
def test_tiny_sigmoid_with_a_large_bias(model_type: str, tmp_path: Path) -> None:
    """Scores of 1e-8 beside biases of 12: the score cannot be had back from their sum (flashinfer#3875)."""
    bias = [12.0 + 0.01 * e for e in range(8)]

    def edit(block: Any) -> None:
        _set_bias(bias)(block)
        router_of(block).weight.mul_(0.3)
        router_of(block).weight[:, 0] = -18.0

    case = blocks(model_type, tmp_path, edit, n_group=2, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5)
    shared = _shared_mlp(case.theirs.shared_experts)
    how = {**GROUPS, "scale": 2.5}
    found = case.forward(inputs())
    weight, expert = router_of(case.theirs).weight, fused_expert(case.theirs)
    assert error(found, paper(inputs(), weight, grouped_sigmoid(bias, 2, **how), expert, shared=shared)) < NEAR
    recovered = grouped_sigmoid(bias, 2, recover=True, **{**how, "renorm": False})
    assert error(found, paper(inputs(), weight, recovered, expert, shared=shared)) > FAR


@pytest.mark.parametrize("renorm", [True, False])
def test_scale_and_shared_expert_once(renorm: bool, tmp_path: Path) -> None:
    bias = [0.1 * (-1) ** e for e in range(8)]
    case = blocks(
        "deepseek_v3",
        tmp_path,
        _set_bias(bias),
        n_group=1,
        topk_group=1,
        norm_topk_prob=renorm,
        routed_scaling_factor=2.5,
    )
    shared = _shared_mlp(case.theirs.shared_experts)
    one, never, twice = (
        grouped_sigmoid(bias, 2, groups=1, kept=1, renorm=renorm, scale=scale) for scale in (2.5, 1.0, 6.25)
    )
    _check(case, one, never, twice, shared=shared)
    expected = paper(inputs(), case.theirs.gate.weight, one, fused_expert(case.theirs), shared=lambda x: 2 * shared(x))
    assert error(case.forward(inputs()), expected) > FAR


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2_scales_and_never_normalises(method: str, tmp_path: Path) -> None:
    """`norm_topk_prob` is in its configuration, and nothing reads it. A group's score is its best expert's."""

    def rule(z: list[float]) -> list[Choice]:
        p = softmax(z)
        group = best([max(p[:4]), max(p[4:])], 1)[0]
        open_ = [v if method == "greedy" or e // 4 == group else 0.0 for e, v in enumerate(p)]
        return scaled([(e, p[e]) for e in best(open_, 2)], scale=3.0)

    case = blocks("deepseek_v2", tmp_path, topk_method=method, routed_scaling_factor=3.0, norm_topk_prob=True)
    _check(case, rule, softmax_first(2, renorm=True, scale=3.0), shared=_shared_mlp(case.theirs.shared_experts))


def test_softmax_with_a_correction_bias(tmp_path: Path) -> None:
    """ERNIE 4.5: the bias decides which, and is no part of how much."""
    bias = [0.3 * (-1) ** e for e in range(8)]

    def rule(z: list[float], biased: bool = True) -> list[Choice]:
        p = softmax(z)
        picked = best([a + b * biased for a, b in zip(p, bias, strict=True)], 2)
        return scaled([(e, p[e]) for e in picked], renorm=True)

    def edit(block: Any) -> None:
        block.gate.moe_statics.e_score_correction_bias.copy_(torch.tensor(bias)[None])

    case = blocks("ernie4_5_moe", tmp_path, edit)
    shared = _shared_mlp(case.theirs.shared_experts)
    _check(case, rule, lambda z: rule(z, biased=False), shared=shared)


def test_sparsemixer(tmp_path: Path) -> None:
    """Phi-3.5-MoE: each of two by a softmax over what is near the best of those left, with no joint normalisation."""
    jitter = 0.1

    def rule(z: list[float]) -> list[Choice]:
        choices: list[Choice] = []
        left = list(range(len(z)))
        for _ in range(2):
            first = best([z[e] if e in left else -math.inf for e in range(len(z))], 1)[0]
            # the threshold looks at all scores, also at those that are out already
            near = [e for e in left if (z[first] - z[e]) / max(abs(z[e]), z[first]) <= 2 * jitter]
            choices.append((first, 1 / sum(math.exp(z[e] - z[first]) for e in near)))
            left.remove(first)
        return choices

    case = blocks("phimoe", tmp_path, router_jitter_noise=jitter)
    _check(case, rule, softmax_first(2), softmax_first(2, renorm=True))


def test_gpt_oss_interleaved_clamped_and_biased_once(tmp_path: Path) -> None:
    case = blocks("gpt_oss", tmp_path)
    experts = case.theirs.experts
    alpha, limit = 1.702, 7.0

    def expert(x_H: torch.Tensor, e: int, *, halves: bool = False, biases: int = 1) -> torch.Tensor:
        h = x_H @ experts.gate_up_proj[e].double() + biases * experts.gate_up_proj_bias[e].double()
        gate, up = h.chunk(2) if halves else (h[::2], h[1::2])
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        inner = (up + 1) * gate / (1 + torch.exp(-alpha * gate))
        return inner @ experts.down_proj[e].double() + biases * experts.down_proj_bias[e].double()

    router = case.theirs.router
    found = case.forward(inputs())
    for how, near in (({}, True), ({"halves": True}, False), ({"biases": 2}, False), ({"biases": 0}, False)):
        expected = paper(
            inputs(), router.weight, softmax_last(2), lambda x, e, how=how: expert(x, e, **how), bias_E=router.bias
        )
        assert (error(found, expected) < NEAR) == near, how


@pytest.mark.parametrize("k", [1, 2])
def test_llama4_scales_the_input(k: int, tmp_path: Path) -> None:
    case = blocks("llama4_text", tmp_path, num_experts_per_tok=k)
    experts, weight = case.theirs.experts, case.theirs.router.weight.double()
    shared = _shared_mlp(case.theirs.shared_expert)

    def expert(x_H: torch.Tensor, e: int) -> torch.Tensor:
        return mlp(x_H, *experts.gate_up_proj[e].t().chunk(2), experts.down_proj[e].t())

    def scaled_in(x_H: torch.Tensor, e: int) -> torch.Tensor:
        return expert(sigmoid(float(weight[e] @ x_H)) * x_H, e)

    def ones(z: list[float]) -> list[Choice]:
        return [(e, 1.0) for e in best(z, k)]

    def sigmoids(z: list[float]) -> list[Choice]:
        return [(e, sigmoid(z[e])) for e in best(z, k)]

    found = case.forward(inputs())
    assert error(found, paper(inputs(), weight, ones, scaled_in, shared=shared)) < NEAR
    assert error(found, paper(inputs(), weight, sigmoids, expert, shared=shared)) > FAR  # the output, scaled


def test_longcat_identity_experts_stay_where_the_token_is(tmp_path: Path) -> None:
    """Ids from 8 on are the identity. They count as no expert's tokens, and a token may have nothing but them."""

    def edit(block: Any) -> None:
        block.router.classifier.weight[8:, 1] = 12.0  # tokens with a large x[1] choose identities alone

    case = blocks("longcat_flash", tmp_path, edit, moe_topk=3, zero_expert_num=4, routed_scaling_factor=2.0)
    bias = case.theirs.router.e_score_correction_bias.tolist()
    experts = case.theirs.experts
    chosen: list[list[int]] = []

    def rule(z: list[float]) -> list[Choice]:
        p = softmax(z)
        chosen.append(best([a + b for a, b in zip(p, bias, strict=True)], 3))
        return scaled([(e, p[e]) for e in chosen[-1]], scale=2.0)

    def expert(x_H: torch.Tensor, e: int) -> torch.Tensor:
        return x_H if e >= 8 else mlp(x_H, *experts.gate_up_proj[e].chunk(2), experts.down_proj[e])

    expected = paper(inputs(), case.theirs.router.classifier.weight, rule, expert)
    assert error(case.forward(inputs()), expected) < NEAR
    routed = [e for ids in chosen for e in ids if e < 8]
    assert any(all(e >= 8 for e in ids) for ids in chosen)
    assert routed
    (counts,) = [layer for layer in case.stats.snapshot()["layers"].values() if sum(layer["expert_tokens"])]
    assert counts["expert_tokens"] == [routed.count(e) for e in range(8)]


@pytest.mark.parametrize("norm", [1.0, 2.0, None])
def test_dbrx_normalises_by_the_norm_it_is_told(norm: float | None, tmp_path: Path) -> None:
    config = {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 3, "moe_normalize_expert_weights": norm}
    case = blocks("dbrx", tmp_path, ffn_config=config)
    w1, v1, w2 = (getattr(case.theirs.experts.mlp, m).view(8, 40, HIDDEN) for m in ("w1", "v1", "w2"))

    def rule(z: list[float], norm: float | None = norm) -> list[Choice]:
        p = softmax(z)
        picked = best(z, 3)
        size = 1.0 if norm is None else sum(p[e] ** norm for e in picked) ** (1 / norm)
        return [(e, p[e] / size) for e in picked]

    others = [lambda z, n=n: rule(z, n) for n in (1.0, 2.0, None) if n != norm]
    expert = lambda x_H, e: mlp(x_H, w1[e], v1[e], w2[e].t())  # noqa: E731
    _check(case, rule, *others, expert=expert, weight=case.theirs.router.layer.weight)


def test_an_expert_without_tokens_and_one_with_all(tmp_path: Path) -> None:
    def edit(block: Any) -> None:
        block.gate.weight.mul_(0.1)
        block.gate.weight[5, 0], block.gate.weight[2, 0] = 50.0, -50.0

    case = blocks("qwen3_moe", tmp_path, edit, norm_topk_prob=True)
    _check(case, softmax_first(2, renorm=True))
    (counts,) = [layer for layer in case.stats.snapshot()["layers"].values() if sum(layer["expert_tokens"])]
    assert (counts["expert_tokens"][5], counts["expert_tokens"][2]) == (TOKENS, 0)


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "granitemoe", "llama4_text"])
def test_ties_are_broken_as_transformers_breaks_them(model_type: str, tmp_path: Path) -> None:
    """All experts score the same. Whom torch's top-k names then is not the lowest id; it does not depend on the row."""

    def edit(block: Any) -> None:
        router = router_of(block)
        router.weight.copy_(router.weight[:1].expand_as(router.weight))
        for name in ("bias", "e_score_correction_bias"):
            value = getattr(router, name, None)
            if isinstance(value, torch.Tensor):
                value.zero_()

    case = blocks(model_type, tmp_path, edit)
    x_TH = inputs()
    with torch.inference_mode():
        theirs = case.theirs(x_TH[None])
    theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).view(x_TH.shape)
    found = case.forward(x_TH)
    assert error(found, theirs.double()) < NEAR
    for rows in (x_TH[5:6], x_TH[5:8], x_TH.flip(0)[: TOKENS - 5].flip(0)):
        alone = case.forward(rows)
        assert error(alone[:1], found[5:6].double()) < NEAR


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gpt_oss", "longcat_flash", "dbrx", "llama4_text"])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_row_stays_alone(model_type: str, poison: float, tmp_path: Path) -> None:
    case = blocks(model_type, tmp_path)
    x_TH = inputs()
    clean = case.forward(x_TH)
    x_TH[7, 3] = poison
    found = case.forward(x_TH)
    others = [t for t in range(TOKENS) if t != 7]
    assert not found[7].isfinite().all()
    assert error(found[others], clean[others].double()) < 1e-6


def _shuffled(num_experts: int, copies: tuple[int, ...] = ()) -> Placement:
    """One rank whose slots are in another order than the experts' ids, with further copies of some."""
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(2)).tolist()
    slots = (*order[:3], *copies, *order[3:])
    return Placement(
        version=0,
        num_logical=num_experts,
        world_size=1,
        physical_to_logical=slots,
        physical_to_rank=(0,) * len(slots),
    )


@pytest.mark.parametrize(
    "model_type", ["mixtral", "deepseek_v3", "gpt_oss", "longcat_flash", "dbrx", "llama4_text", "phimoe"]
)
def test_copies_and_other_slots_change_no_bit(model_type: str, tmp_path: Path) -> None:
    """Biases, shared experts, scales and identity experts included; and what is not a number stays in its row."""
    case = blocks(model_type, tmp_path)
    clean_TH = inputs()
    dirty_TH = clean_TH.clone()
    dirty_TH[7, 3] = math.nan
    expected = [case.forward(x_TH) for x_TH in (clean_TH, dirty_TH)]
    chosen = case.stats.snapshot()["layers"]
    others = [t for t in range(TOKENS) if t != 7]
    for place in (_shuffled, lambda n: _shuffled(n, (5, 0, 5)), lambda n: placement_for(n, 1, "linear", n + 3)):
        other = placed(case, tmp_path, place)
        found = [other.forward(x_TH) for x_TH in (clean_TH, dirty_TH)]
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1][others], expected[0][others])
        counted = {name: layer for name, layer in other.stats.snapshot()["layers"].items() if layer["steps"]}
        for name, layer in counted.items():
            assert layer["expert_tokens"] == chosen[name]["expert_tokens"]  # by logical expert
            assert (layer["replica_pairs"] > 0) == (len(layer["local_experts"]) > len(layer["expert_tokens"]))
        assert counted


def test_every_router_is_transformers_own(tmp_path: Path) -> None:
    """No adapter replaces a router: what stands in the served tree is the library's class."""
    for model_type in ("dbrx", "llama4_text", "longcat_flash"):
        case = blocks(model_type, tmp_path / model_type)
        assert type(router_of(case.served)) is type(router_of(case.theirs))
        assert type(router_of(case.served)).__module__.startswith("transformers.")
