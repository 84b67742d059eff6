"""The verdict of verify: exit code, sentence, table and JSON."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import pytest
import torch

from epruntime.cli.main import main
from epruntime.config.verify import CASES, VerifyConfig
from epruntime.errors import ConfigError
from epruntime.verify import report as r
from epruntime.verify.against import AgainstReport, ErrorQuantile, TokenDifference, compare_quantiles, factor_of
from epruntime.verify.compare import Difference
from epruntime.verify.facts import VerifyFacts
from epruntime.verify.report import CaseReport, VerifyReport, render
from epruntime.verify.run import silent_about_replicas

FACTS = VerifyFacts(
    model="/models/m", architecture="MixtralForCausalLM", dtype="bfloat16", num_parameters=692_000_000,
    invariance="strict", launcher="local", transport="gloo", experts_backend="native", expert_parallel_size=2,
    sizes=(1, 2), threads_per_rank=1, hosts=("one", "two"), signature={"torch": "2.13", "isa": "avx512"},
    versions={"python": "3.11"}, seed=77, num_requests=16, num_greedy=8, longest_prompt=48, max_tokens=12,
    block_size=16, prompts="random token ids",
)  # fmt: skip
ALONE = CaseReport(name="alone", varied="every request alone", status=r.BASELINE, num_compared=16, digest="ab" * 8)
BATCH = CaseReport(
    name="batch", varied="64 requests at once", status=r.IDENTICAL, counters={"largest step": 512}, num_compared=64
)
RANKS = CaseReport(name="ranks", varied="other ranks", status=r.SKIPPED, reason="there is one rank")
CONTROL = CaseReport(name="control", varied="negative control", status=r.CAUGHT)
GOOD = VerifyReport(facts=FACTS, cases=(ALONE, BATCH), control=CONTROL)
DIFFERENCE = Difference(
    request=3, rank=1, where="output", position=4, expected_token=17, got_token=99, expected_logprob=-1.5,
    got_logprob=-1.25, layer="7", layer_position=30,
)  # fmt: skip
MEDIAN = ErrorQuantile(share=0.5, error=0.001, own_error=0.001, limit=0.002)
AGAINST = AgainstReport(
    referee="float64", num_requests=2, num_tokens=24, num_positions=50, num_same_bits=1, largest_difference=0.01,
    median_difference=0.001, quantiles=(MEDIAN,), largest_error=0.01, largest_own_error=0.01, largest_limit=0.04,
)  # fmt: skip


def _with(status: str, **more) -> VerifyReport:  # type: ignore[no-untyped-def]
    return replace(GOOD, cases=(ALONE, replace(BATCH, status=status, **more)))


@pytest.mark.parametrize(
    ("report", "code", "words"),
    [
        (GOOD, 0, "the contract holds: 1 case bit for bit the same"),
        (_with(r.SKIPPED, reason="there is one rank"), 3, "nothing is proven: every case was skipped"),
        (replace(GOOD, cases=(ALONE, BATCH, RANKS)), 0, "; skipped: ranks"),
        (replace(GOOD, against_refused="no room"), 3, "but nothing was compared with transformers"),
        (
            replace(_with(r.DIFFERENT), against=replace(AGAINST, largest_error=0.041)),
            1,
            "does not hold: batch gave other bits; and transformers gives something else",
        ),
        (replace(GOOD, facts=replace(FACTS, invariance="fast")), 0, "nothing differed here, which invariance=fast"),
        (_with(r.DIFFERENT, difference=DIFFERENCE), 1, "does not hold: batch gave other bits"),
        (_with(r.NOT_EXERCISED, reason="no chunk"), 3, "not all that batch should vary did happen"),
        (replace(GOOD, control=replace(CONTROL, status=r.NOT_CAUGHT)), 3, "nothing is proven"),
        # a difference is one, whatever the control says
        (replace(_with(r.DIFFERENT), control=replace(CONTROL, status=r.NOT_CAUGHT)), 1, "does not hold"),
        (replace(GOOD, against=AGAINST), 0, "the contract holds"),
        (replace(GOOD, against=replace(AGAINST, largest_error=0.041)), 1, "transformers gives something else"),
        (
            replace(GOOD, against=replace(AGAINST, quantiles=(MEDIAN, replace(MEDIAN, error=0.0021)))),
            1,
            "transformers gives something else",
        ),
        (
            replace(GOOD, against=replace(AGAINST, quantiles=(replace(MEDIAN, error=math.nan),))),
            1,
            "transformers gives something else",
        ),
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


def test_words_against_transformers() -> None:
    other = TokenDifference(request=0, position=3, token=5, expected_token=6, margin=0.07)
    text = "\n".join(replace(AGAINST, different_tokens=(other,), num_own_different=2).lines())
    assert "23 of 24 greedy tokens are those of transformers in float64, of its own in the model's dtype 22" in text
    assert "token 5 where transformers in float64 has 6, more likely by 0.07" in text
    assert "50% within 0.001 (own 0.001, limit 0.002); at most 0.01 (own 0.01, limit 0.04)" in text
    assert "TOO FAR" not in text
    assert "float32" not in text
    assert "at most 0.05 (own 0.01, limit 0.04) TOO FAR" in "\n".join(replace(AGAINST, largest_error=0.05).lines())
    far = replace(AGAINST, quantiles=(replace(MEDIAN, error=0.003),))
    assert "50% within 0.003 (own 0.001, limit 0.002) TOO FAR" in "\n".join(far.lines())
    fixed = replace(MEDIAN, own_error=None, limit=0.4)
    alone = replace(
        AGAINST, referee="", note="no room", quantiles=(fixed,), largest_own_error=None, largest_limit=0.002
    )
    text = "\n".join(alone.lines())
    assert text.endswith(
        "no room\ndistance from transformers: 50% within 0.001 (limit 0.4); at most 0.01 (limit 0.002) TOO FAR"
    )
    assert not alone.ok


def test_routers_turned_over_in_either_run_do_not_count_where_rounding_is_coarse() -> None:
    coarse = replace(AGAINST, largest_limit=None, largest_error=5.0)
    assert coarse.ok
    assert "not judged" in coarse.lines()[1]
    assert "repeat with --dtype float32" in coarse.lines()[-1]


def test_quantiles_are_those_that_positions_can_tell() -> None:
    error_N = torch.full((100,), 0.02)
    error_N[:8] = 5.0  # routers turned over, at other positions than in the other run
    found = compare_quantiles(error_N, error_N.flip(0), dtype="bfloat16")
    assert [q.share for q in found] == [0.5, 0.75]
    assert all(q.ok for q in found)
    # an error at half of the positions is none of rounding
    error_N[:60] = 0.2
    own_N = torch.full((100,), 0.02)
    assert not all(q.ok for q in compare_quantiles(error_N, own_N, dtype="bfloat16"))
    assert [q.share for q in compare_quantiles(error_N[:8], own_N[:8], dtype="bfloat16")] == [0.5]
    assert [q.share for q in compare_quantiles(own_N.repeat(3), own_N.repeat(3), dtype="bfloat16")] == [0.5, 0.75, 0.9]
    # errors so small are luck; what was measured is told all the same
    lucky = compare_quantiles(own_N * 0.9, own_N * 0, dtype="bfloat16")[0]
    assert lucky.ok
    assert lucky.own_error == 0
    assert not compare_quantiles(own_N * 1.01, own_N * 0, dtype="bfloat16")[0].ok


def test_many_positions_tell_more_in_bfloat16() -> None:
    assert factor_of("bfloat16", 20) == factor_of("float32", 20) == factor_of("float32", 10_000) == 2
    assert factor_of("bfloat16", 10_000) == pytest.approx(1.31)
    few, many = torch.full((40,), 0.05), torch.full((4000,), 0.05)
    assert compare_quantiles(few * 1.8, few, dtype="bfloat16")[0].ok
    assert not compare_quantiles(many * 1.8, many, dtype="bfloat16")[0].ok


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
    assert "--seed 77 --cases batch --trace-layers" in flat
    assert "batch not exercised: no chunk" in render(_with(r.NOT_EXERCISED, reason="no chunk"))


def test_fast_is_said_to_promise_nothing() -> None:
    report = replace(_with(r.DIFFERENT, difference=DIFFERENCE), facts=replace(FACTS, invariance="fast"))
    assert "invariance=fast does not promise" in report.summary


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cases": "batch,chunk"}, "no 'chunk'"),
        ({"cases": ""}, "at least one"),
        ({"cases": " ,"}, "at least one"),
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


def test_each_version_is_told_once_and_what_is_what() -> None:
    facts = replace(FACTS, signature={"torch": "2.13"}, versions={"torch": "2.13", "python": "3.11"})
    head = render(replace(GOOD, facts=facts)).split("\n\n")[0]
    assert head.count("2.13") == 1
    assert "versions: python 3.11" in head
    assert "launcher local, transport gloo" in head


def test_one_rank_is_told_what_more_ranks_would_vary() -> None:
    hint = "only EP 1 was run"
    alone = replace(FACTS, expert_parallel_size=1, sizes=(1,))
    assert hint in render(replace(GOOD, facts=alone))
    assert hint not in render(GOOD)
    assert hint not in render(replace(GOOD, facts=replace(alone, sizes=(1, 2))))
    # what differs comes first
    assert hint not in render(replace(_with(r.DIFFERENT, difference=DIFFERENCE), facts=alone))


def test_nobody_is_warned_of_the_copies_that_a_case_asks_for(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("epruntime.engine.model_group")
    for parallel, expected in (({}, 2), ({"num_redundant_experts": 2}, 1)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), silent_about_replicas(parallel):
            log.warning("num_redundant_experts=%d: with %d ...", 2, 0)
            log.warning("something else")
        assert len(caplog.messages) == expected
    assert not log.filters
