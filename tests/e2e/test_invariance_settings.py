"""The invariance contract, setting by setting: budgets, ranks that requests land on, few experts, transports, threads.

`test_invariance` has every family under a few settings that vary much at once; here a few models are run under many.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime import LLM
from epruntime.engine.model_group import ModelGroup
from epruntime.engine.ranks import Ranks
from epruntime.testing.invariance import MAX_LENGTH, Answer, Run, Setting, first_difference, mixed_requests, run
from epruntime.testing.odd_shapes import VOCABULARY, odd_shape
from epruntime.testing.tiny_models import build, save

COMPARED = 9
ALONE = Setting(
    name="alone",
    order="alone",
    options={"enable_prefix_caching": False, "pipeline_depth": 1, "num_kv_blocks": 8},
)
DTYPES = ("float32", "bfloat16")


def full(*values: Any) -> Any:
    """A case of `make test-all`."""
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.fixture(scope="module", params=DTYPES)
def odd(request: pytest.FixtureRequest, ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Run]:
    """A model of odd dimensions, with attention windows and sinks; its dtype; and each request alone."""
    dtype = request.param
    _, model = build("gpt_oss", dtype=getattr(torch, dtype), **odd_shape("gpt_oss"))
    path = str(save(model, tmp_path_factory.mktemp(dtype)))
    requests = mixed_requests(COMPARED, vocab_size=VOCABULARY)
    return path, dtype, run(path, ranks, ALONE, requests, compared=COMPARED, dtype=dtype)


def _same(case: tuple[str, str, Run], ranks: Ranks, setting: Setting) -> Run:
    path, dtype, expected = case
    requests = mixed_requests(COMPARED + setting.crowd, vocab_size=VOCABULARY)
    found = run(path, ranks, setting, requests, compared=COMPARED, dtype=dtype)
    assert first_difference(found.answers, expected.answers) is None, setting.name
    return found


@pytest.mark.parametrize(
    ("tokens", "sequences"),
    [(1, 1), (5, 4), (33, 9), *(full(*case) for case in ((2, 2), (3, 1), (12, 12), (31, 7), (64, 16), (97, 3)))],
)
def test_any_budget_of_tokens_and_sequences(
    tokens: int, sequences: int, odd: tuple[str, str, Run], ranks: Ranks
) -> None:
    options = {"max_num_batched_tokens": tokens, "max_num_seqs": sequences, "num_kv_blocks": 120}
    chunked = {"chunks": 1} if tokens < 50 else {}
    setting = Setting(name=f"{tokens} tokens, {sequences} sequences", options=options, must=chunked)
    found = _same(odd, ranks, setting)
    assert found.happened["rows_per_step"] <= tokens


@pytest.mark.parametrize(("block_size", "depth"), [(1, 2), (97, 1), full(1, 1), full(3, 1), full(3, 2), full(97, 2)])
def test_any_block_size_and_pipeline_depth(
    block_size: int, depth: int, odd: tuple[str, str, Run], ranks: Ranks
) -> None:
    options = {"block_size": block_size, "num_kv_blocks": 900 // block_size, "pipeline_depth": depth}
    # one after the other, so that what one has left in the prefix cache is found by the next
    alike = Setting(
        name=f"blocks of {block_size}, {depth} plans",
        order="alone",
        options=options,
        must={"prefix_hit_tokens": 1} if block_size < 9 else {},
    )
    _same(odd, ranks, alike)


def test_a_request_of_any_rank(odd: tuple[str, str, Run], ranks: Ranks) -> None:
    """Each request once on every rank, beside itself on the others."""
    path, dtype, expected = odd
    with LLM(path, ranks=ranks, expert_parallel_size=4, dtype=dtype, max_model_len=MAX_LENGTH, num_kv_blocks=64) as llm:
        for i, request in enumerate(mixed_requests(COMPARED, vocab_size=VOCABULARY)):
            before = _decoded(llm)
            outputs = llm.generate([list(request.prompt)] * 4, request.params, use_tqdm=False)
            assert all(after > b for after, b in zip(_decoded(llm), before, strict=True)), "a rank had no request"
            assert {Answer.of(output) for output in outputs} == {expected.answers[i]}, i


def _decoded(llm: LLM) -> list[int]:
    return [rank["scheduler"]["decode_tokens"] for rank in llm.info()["ranks"]]


def test_any_transport(odd: tuple[str, str, Run], ranks: Ranks) -> None:
    """One rank alone can exchange with itself through gloo, too."""
    path, dtype, _ = odd
    for transport in ("local", "gloo"):
        _same(odd, ranks, Setting(name=transport, options={"transport": transport, "num_kv_blocks": 120}))
    with LLM(path, ranks=ranks, dtype=dtype, transport="gloo", max_model_len=MAX_LENGTH) as llm:
        assert llm.info()["engine"]["transport"] == "gloo"


@pytest.mark.parametrize(
    ("placement", "redundant"),
    [("round_robin", 2), *(full("linear", n) for n in (0, 2, 9)), *(full("round_robin", n) for n in (0, 9))],
)
def test_any_placement(placement: str, redundant: int, odd: tuple[str, str, Run], ranks: Ranks) -> None:
    options = {"expert_placement": placement, "num_redundant_experts": redundant, "num_kv_blocks": 64}
    must = {"replica_pairs": 20} if redundant else {}
    _same(odd, ranks, Setting(name=placement, size=3, options=options, must=must))


@pytest.mark.parametrize(
    ("model_type", "top_k", "dtype"),
    [
        ("mixtral", 1, "float32"),
        ("deepseek_v3", 3, "bfloat16"),
        full("mixtral", 1, "bfloat16"),
        full("mixtral", 3, "float32"),
        full("mixtral", 3, "bfloat16"),
        full("deepseek_v3", 1, "float32"),
        full("deepseek_v3", 1, "bfloat16"),
        full("deepseek_v3", 3, "float32"),
    ],
)
def test_fewer_experts_than_ranks(model_type: str, top_k: int, dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    """Three experts, of which a token takes one or all; the fourth rank has none."""
    shape = odd_shape(model_type, num_experts=3, top_k=top_k)
    path = str(save(build(model_type, dtype=getattr(torch, dtype), **shape)[1], tmp_path))
    requests = mixed_requests(COMPARED, vocab_size=VOCABULARY)
    expected = run(path, ranks, ALONE, requests, compared=COMPARED, dtype=dtype)
    assert expected.happened["experts_at_work"] == 3
    for size, redundant in ((4, 0), (4, 1), (2, 0)):
        options = {"num_kv_blocks": 64, "max_num_batched_tokens": 13, "max_num_seqs": 8}
        setting = Setting(
            name=f"EP {size}, {redundant} copies",
            size=size,
            options={**options, "num_redundant_experts": redundant},
            must={"ranks_at_work": size, "chunks": 1, **({"replica_pairs": 1} if redundant else {})},
        )
        found = run(path, ranks, setting, requests, compared=COMPARED, dtype=dtype)
        assert first_difference(found.answers, expected.answers) is None, setting.name


#: wide enough for more than one thread to be worth its while in every kind of operation
WIDE: dict[str, Any] = {
    "hidden_size": 516,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 86,
    "intermediate_size": 702,
    "moe_intermediate_size": 345,
    "shared_expert_intermediate_size": 411,
    "vocab_size": 1003,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}


#: a thread of a rank's process has computed if it was on a processor for so long; those that tell of progress take 5 ms
BUSY_NS = 10_000_000


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_threads_of_a_wide_model(dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    """Prompts long enough that operations are divided among threads, and the kernel says that several have computed."""
    path = str(save(build("qwen2_moe", dtype=getattr(torch, dtype), **WIDE)[1], tmp_path))
    requests = mixed_requests(16, vocab_size=WIDE["vocab_size"], max_tokens=4)
    expected = run(path, ranks, ALONE, requests, compared=COMPARED, dtype=dtype)
    for size, threads, budget in ((1, 1, 512), (1, 2, 512), (1, 3, 512), (2, 2, 29)):
        options = {"num_kv_blocks": 120, "max_num_batched_tokens": budget, "max_num_seqs": 16}
        setting = Setting(
            name=f"EP {size}, {threads} threads",
            size=size,
            threads=threads,
            crowd=7,
            options=options,
            must={"rows_per_step": 50 if budget > 500 else 10},
        )
        before = _processor_ns(ranks)
        found = run(path, ranks, setting, requests, compared=COMPARED, dtype=dtype)
        busy = sum(spent - before.get(thread, 0) >= BUSY_NS for thread, spent in _processor_ns(ranks).items())
        assert (busy > 1) == (threads > 1), f"{setting.name}: {busy} threads have computed"
        assert first_difference(found.answers, expected.answers) is None, setting.name


def _processor_ns(ranks: Ranks) -> dict[str, int]:
    """Thread of the first rank's process -> nanoseconds on a processor so far."""
    tasks = Path(f"/proc/{ranks.pool.ranks[0].info.pid}/task")
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks.iterdir()}


def test_a_layer_that_depends_on_the_batch_is_seen(
    odd: tuple[str, str, Run], ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control, with the least that can be varied: two sequences at once."""
    monkeypatch.setattr(ModelGroup, "load", functools.partial(ModelGroup.load, batch_dependent=True))
    options = {"max_num_batched_tokens": 2, "max_num_seqs": 2, "num_kv_blocks": 120}
    with pytest.raises(AssertionError, match="two at once"):
        _same(odd, ranks, Setting(name="two at once", options=options))
