"""Tokens equal transformers: 12 prompts in one batch, chunked, preempted, spread over ranks, against one at a time."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
from seeds import SEEDS

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.launchers.local import LocalLauncher
from epruntime.outputs import RequestOutput
from epruntime.testing.faulty_rank import FAULT, FAULTS
from epruntime.testing.prompts import LENGTHS, NEW_TOKENS, prompt_of
from epruntime.testing.reference import Reference, greedy_reference
from epruntime.testing.tiny_models import build, save

MIN_MARGIN = 1e-4
#: fp32 in another order of summation: measured at most 7e-5, and 9.8e-4 for granitemoe, whose multipliers widen it
#: (in its logits transformers' fp32 is up to 3.1e-4 from fp64, and ours up to 1.8e-4)
LOGPROB_BOUND = {"granitemoe": 2e-3}

OPTIONS = {
    "dtype": "float32",
    "max_num_batched_tokens": 32,
    "max_num_seqs": 12,
    "block_size": 4,
    # the longest request needs 29 blocks of 4 tokens; all twelve together need about 170
    "num_kv_blocks": 32,
}
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)


def _prompts(family: str) -> list[list[int]]:
    return [prompt_of(length, seed) for length, seed in zip(LENGTHS, SEEDS[family], strict=True)]


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """family -> (checkpoint directory, reference)."""

    @cache
    def make(family: str) -> tuple[Path, Reference]:
        _, model = build(family)
        reference = greedy_reference(model, _prompts(family), max_new_tokens=NEW_TOKENS)
        return save(model, tmp_path_factory.mktemp(family)), reference

    return make


def _wrong(outputs: list[RequestOutput], reference: Reference) -> list[int]:
    """Prompts whose tokens differ from the reference's."""
    return [i for i, out in enumerate(outputs) if out.outputs[0].token_ids != reference.tokens[i]]


def _logprob_error(outputs: list[RequestOutput], reference: Reference) -> float:
    worst = 0.0
    for output, expected in zip(outputs, reference.logprobs, strict=True):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(expected)
        for token, entries, value in zip(completion.token_ids, completion.logprobs, expected, strict=True):
            worst = max(worst, abs(entries[token].logprob - value))
    return worst


@pytest.mark.parametrize("family", SEEDS)
def test_tokens_equal_transformers(family: str, case, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    path, reference = case(family)
    assert min(reference.router_margin, reference.top1_margin) > MIN_MARGIN
    assert not math.isinf(reference.router_margin), "no selection was seen: the router is not watched"
    prompts = [{"prompt_token_ids": p} for p in _prompts(family)]
    report = [f"margins: router {reference.router_margin:.1e}, top-1 {reference.top1_margin:.1e}"]
    for size in (1, 2, 3):
        with LLM(path, ranks=ranks, expert_parallel_size=size, **OPTIONS) as llm:
            outputs = llm.generate(prompts, PARAMS, use_tqdm=False)
            info = llm.info()
        counters = {
            name: sum(rank["scheduler"][name] for rank in info["ranks"])
            for name in ("preemptions", "chunks", "mixed_steps", "empty_plans")
        }
        error = _logprob_error(outputs, reference) if not _wrong(outputs, reference) else math.nan
        report.append(f"EP {size}: logprob error {error:.1e}, {counters}")
        assert not _wrong(outputs, reference), f"EP {size}: prompts {_wrong(outputs, reference)} differ"
        assert error < LOGPROB_BOUND.get(family, 5e-4)
        assert all(output.outputs[0].finish_reason == "length" for output in outputs)
        if size == 1:
            # the only rank is never idle while there is work
            del counters["empty_plans"]
        assert all(value > 0 for value in counters.values()), f"EP {size}: not exercised: {counters}"
    with capsys.disabled():
        print(f"\n  {family}: " + "; ".join(report))


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("family", ["qwen2_moe"])
def test_a_fault_is_seen(family: str, fault: str, case, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """Negative controls: with a fault in the ranks the comparison above fails."""
    path, reference = case(family)
    monkeypatch.setenv(FAULT, fault)
    launcher = LocalLauncher(entry_module="epruntime.testing.faulty_rank")
    copies = {"num_redundant_experts": 4} if fault == "copies" else {}
    with (
        Ranks(2, launcher=launcher, threads_per_rank=1) as faulty,
        LLM(path, ranks=faulty, expert_parallel_size=2, **OPTIONS, **copies) as llm,
    ):
        outputs = llm.generate([{"prompt_token_ids": p} for p in _prompts(family)], PARAMS, use_tqdm=False)
    assert _wrong(outputs, reference)
