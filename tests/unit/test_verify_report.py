"""The verdict of verify: exit code, sentence, table and JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from epruntime.cli.main import main
from epruntime.config.verify import CASES, VerifyConfig
from epruntime.errors import ConfigError
from epruntime.verify import report as r
from epruntime.verify.against import AgainstReport, TokenDifference
from epruntime.verify.compare import Difference
from epruntime.verify.facts import VerifyFacts
from epruntime.verify.report import CaseReport, VerifyReport, render

FACTS = VerifyFacts(
    model="/models/m", architecture="MixtralForCausalLM", dtype="bfloat16", num_parameters=692_000_000,
    invariance="strict", launcher="local", transport="gloo", experts_backend="grouped_mm", expert_parallel_size=2,
    sizes=(1, 2), threads_per_rank=1, hosts=("one", "two"), signature={"torch": "2.13", "isa": "avx512"},
    versions={"python": "3.11"}, seed=77, num_requests=16, num_greedy=8, longest_prompt=48, max_tokens=12,
    block_size=16, prompts="random token ids",
)  # fmt: skip
ALONE = CaseReport(name="alone", varied="every request alone", status=r.BASELINE, num_compared=16, digest="ab" * 8)
BATCH = CaseReport(
    name="batch", varied="64 requests at once", status=r.IDENTICAL, counters={"largest step": 512}, num_compared=64
)
CONTROL = CaseReport(name="control", varied="negative control", status=r.CAUGHT)
GOOD = VerifyReport(facts=FACTS, cases=(ALONE, BATCH), control=CONTROL)
DIFFERENCE = Difference(
    request=3, rank=1, where="output", position=4, expected_token=17, got_token=99, expected_logprob=-1.5,
    got_logprob=-1.25, layer="7", layer_position=30,
)  # fmt: skip
AGAINST = AgainstReport(
    num_requests=2, num_tokens=24, num_positions=50, num_same_bits=1, largest_difference=0.01, median_difference=0.001,
    arithmetic_error=0.01, median_error=0.001, different_tokens=(),
)  # fmt: skip


def _with(status: str, **more) -> VerifyReport:  # type: ignore[no-untyped-def]
    return replace(GOOD, cases=(ALONE, replace(BATCH, status=status, **more)))


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        (GOOD, 0, "the contract holds: 1 cases"),
        (_with(r.SKIPPED, reason="there is one rank"), 0, "the contract holds"),
        (_with(r.DIFFERENT, difference=DIFFERENCE), 1, "does not hold: batch gave other bits"),
        (_with(r.NOT_EXERCISED, reason="no chunk"), 3, "batch did not happen"),
        (replace(GOOD, control=replace(CONTROL, status=r.NOT_CAUGHT)), 3, "nothing is proven"),
        # a difference is one, whatever the control says
        (replace(_with(r.DIFFERENT), control=replace(CONTROL, status=r.NOT_CAUGHT)), 1, "does not hold"),
        (replace(GOOD, against=AGAINST), 0, "the contract holds"),
        (replace(GOOD, against=replace(AGAINST, num_outliers=1)), 1, "transformers gives something else"),
        (replace(GOOD, against=replace(AGAINST, median_difference=0.005)), 1, "transformers gives something else"),
    ],
)
def test_exit_code_and_sentence(report: VerifyReport, code: int, words: str) -> None:
    assert report.exit_code == code
    assert report.ok == (code == 0)
    assert words in report.summary
    assert "--seed 77" in report.summary
    facts = json.loads(json.dumps(report.to_dict()))
    assert (facts["exit_code"], facts["ok"], facts["facts"]["seed"]) == (code, code == 0, 77)
    assert [case["status"] for case in facts["cases"]] == [case.status for case in report.cases]


def test_a_token_beyond_the_margin_fails() -> None:
    near = TokenDifference(request=0, position=3, token=5, expected_token=6, margin=0.07)
    within = replace(AGAINST, different_tokens=(near,))
    assert within.ok
    assert "more likely by 0.07: within the error" in str(within)
    beyond = replace(AGAINST, different_tokens=(near, replace(near, margin=0.09)))
    assert not beyond.ok
    assert beyond.num_beyond == 1
    assert "BEYOND THE ERROR" in str(beyond)
    assert "22 of 24 greedy tokens" in str(beyond)


def test_a_router_may_choose_otherwise_in_bfloat16() -> None:
    coarse = replace(AGAINST, outlier_share=0.1)
    assert replace(coarse, num_outliers=5).ok
    assert not replace(coarse, num_outliers=6).ok


def test_the_table_says_all() -> None:
    text = render(_with(r.DIFFERENT, difference=DIFFERENCE, num_different=5))
    flat = " ".join(text.split())
    assert "/models/m (MixtralForCausalLM, bfloat16, 692 M parameters)" in flat
    assert "torch 2.13, isa avx512" in flat
    assert "64 requests at once: largest step 512" in flat
    assert (
        "batch: 5 of 64 outputs differ; the first: request 3 on rank 1, output position 4: token 99, expected 17"
        in flat
    )
    assert "in layer 7" in flat
    assert max(map(len, text.splitlines())) <= 120
    assert "abababababababab" in flat
    assert "batch not exercised: no chunk" in render(_with(r.NOT_EXERCISED, reason="no chunk"))


def test_fast_is_said_to_promise_nothing() -> None:
    report = replace(_with(r.DIFFERENT, difference=DIFFERENCE), facts=replace(FACTS, invariance="fast"))
    assert "invariance=fast does not promise" in report.summary


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cases": "batch,chunk"}, "no 'chunk'"),
        ({"expert_parallel_sizes": "1,x"}, "must be numbers"),
        ({"expert_parallel_sizes": "0"}, "must be numbers"),
        ({"num_prompts": 0}, "at least 1"),
        ({"num_prompts": 65}, "at most 64"),
        ({"against": "vllm"}, "must be one of transformers"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_options_that_cannot_work(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VerifyConfig(**fields)  # type: ignore[arg-type]


def test_options() -> None:
    assert VerifyConfig().case_names() == tuple(CASES)
    assert VerifyConfig(cases="rows, batch").case_names() == ("batch", "rows")
    assert VerifyConfig(expert_parallel_sizes="4,1").sizes() == (1, 4)


@pytest.mark.parametrize(
    "flags", [["--cases", "nothing"], ["--against", "nobody"], ["--json", "/nowhere/at/all.json"], ["--max-token", "3"]]
)
def test_wrong_usage_ends_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["verify", "/no/model", *flags])
    assert caught.value.code == 2
    assert capsys.readouterr().err
