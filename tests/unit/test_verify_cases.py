"""Requests and cases are shaped by the model: what is to be varied can happen, also where lengths are tiny."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from epruntime.config import EngineConfig
from epruntime.config.verify import CASES
from epruntime.errors import ConfigError
from epruntime.models.info import LENGTH_HAS_NO_EFFECT, RopeLengths
from epruntime.verify.case import Case, Setting, most_rows
from epruntime.verify.cases import baseline, control_runs, make_cases
from epruntime.verify.dry_run import dry_run
from epruntime.verify.outputs import Output
from epruntime.verify.preemption import PreemptionSearch
from epruntime.verify.requests import Shape, kinds_of, make_requests, random_prompts, shape_of
from epruntime.verify.row_counts import ROWS
from epruntime.verify.session import RunFacts


def _shape(max_model_len: int, max_tokens: int = 12) -> Shape:
    return shape_of(max_model_len=max_model_len, max_tokens=max_tokens, max_prompt_tokens=48, block_size=16)


def _setting(
    size: int = 2, *, num: int = 16, max_model_len: int = 512, max_tokens: int = 12, sizes: tuple[int, ...] = (1, 2),
    rope: RopeLengths = LENGTH_HAS_NO_EFFECT,
) -> Setting:  # fmt: skip
    shape = _shape(max_model_len, max_tokens)
    info = SimpleNamespace(num_experts=8, expert_bytes=((8, 100),), checkpoint_bytes=10_000, rope=rope)
    prompts = random_prompts(num, shape, vocab_size=50, seed=1)
    return Setting(
        config=EngineConfig.from_kwargs(model="m", expert_parallel_size=size),
        info=info,  # type: ignore[arg-type]
        shape=shape,
        requests=make_requests(prompts, shape, vocab_size=50, seed=1),
        sizes=sizes,
        threads=1,
    )


@pytest.mark.parametrize("max_model_len", [2, 3, 4, 8, 16, 64, 4096])
def test_shapes_fit(max_model_len: int) -> None:
    shape = _shape(max_model_len)
    assert shape.max_model_len <= max_model_len
    assert shape.longest_prompt >= 1
    assert shape.max_tokens >= 1
    prompts = random_prompts(16, shape, vocab_size=50, seed=3)
    assert {len(prompt) for prompt in prompts} >= {1, shape.longest_prompt}
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    if max_model_len >= 8:
        assert shape.longest_prompt > shape.block_size, "no prompt has several KV blocks"
        assert any(len(prompt) % shape.block_size == 0 for prompt in prompts)
        block = shape.block_size
        assert prompts[1][:block] == prompts[0][:block] != prompts[2][:block]
        assert prompts[3][:block] == prompts[0][block : 2 * block] or shape.longest_prompt <= 2 * block
        assert _differing(prompts[0][:block], prompts[4][:block]) == [block - 1]
        assert _differing(prompts[0][:block], prompts[8][:block]) == [0]
    assert prompts == random_prompts(16, shape, vocab_size=50, seed=3)
    assert prompts != random_prompts(16, shape, vocab_size=50, seed=4)


def _differing(one: list[int], other: list[int]) -> list[int]:
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def test_a_block_with_its_ends_swapped() -> None:
    shape = _shape(4096)
    prompts = random_prompts(16, shape, vocab_size=50_000, seed=3)
    block = shape.block_size
    end = (min(map(len, prompts[:2])) - 1) // block * block
    one, other = prompts[0][end - block : end], prompts[1][end - block : end]
    assert prompts[0][: end - block] == prompts[1][: end - block]
    assert _differing(one, other) == [0, block - 1]
    assert sorted(one) == sorted(other)


def test_no_room_at_all() -> None:
    with pytest.raises(ConfigError, match="no room"):
        _shape(1)


def test_requests_are_of_all_kinds() -> None:
    requests = _setting().requests
    assert sum(request.greedy for request in requests) == 8
    assert sum(request.spec.prompt_logprobs >= 0 for request in requests) == 4
    assert len({request.spec.seed for request in requests}) == 16
    kinds = kinds_of(requests)
    assert set(kinds) == {
        "repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias", "top_k", "top_p", "min_p",
        "min_tokens", "stop_ids",
    }  # fmt: skip
    # what transformers is asked to compute has none of it
    assert not kinds_of(request for request in requests if request.greedy)
    (short,) = [request for request in requests if request.num_tokens < 12][:1]
    assert short.num_tokens == short.spec.min_tokens + 1
    assert short.spec.logit_bias == ((short.spec.stop_ids[0], 100.0),)


def test_every_case_is_made_and_those_without_sense_are_skipped() -> None:
    cases = make_cases(_setting(), tuple(CASES))
    names = [case.name for case in cases]
    assert names == [
        "batch", "rows", "chunks", "preempted", "prefix", "pipeline", "ranks", "rounds", "threads-2", "placement",
        "replicas", "size-1",
    ]  # fmt: skip
    assert all(case.runs and not case.skipped for case in cases)
    alone = {case.name: case for case in make_cases(_setting(1, sizes=(1,)), tuple(CASES))}
    assert [name for name, case in alone.items() if case.skipped] == ["ranks", "placement", "sizes"]
    assert alone["replicas"].runs
    small = make_cases(_setting(1, max_model_len=2), tuple(CASES))
    assert [case.name for case in small if case.skipped] == [
        "rows", "chunks", "preempted", "prefix", "pipeline", "ranks", "placement",
    ]  # fmt: skip


def test_requests_stay_on_their_rank_but_where_ranks_vary() -> None:
    setting = _setting()
    for case in make_cases(setting, ("batch", "prefix", "pipeline", "rounds")):
        for run in case.runs:
            assert all(s.rank == s.request.index % 2 for wave in run.waves for s in wave)
    (ranks,) = make_cases(setting, ("ranks",))
    assert all(s.rank != s.request.index % 2 for run in ranks.runs for wave in run.waves for s in wave)
    (rows,) = make_cases(setting, ("rows",))
    assert [len(wave) for wave in rows.runs[0].waves][:ROWS] == list(range(1, ROWS + 1))
    assert all(len({s.rank for s in wave}) == 1 for wave in rows.runs[0].waves)


def test_the_baseline_is_alone_and_the_control_is_both() -> None:
    setting = _setting(num=1)
    assert [len(wave) for wave in baseline(setting).waves] == [1]
    alone, crowd = control_runs(setting)
    assert [len(wave) for wave in alone.waves] == [1]
    assert [len(wave) for wave in crowd.waves] == [4]


def test_the_control_has_company_whatever_the_budgets() -> None:
    setting = _setting()
    scheduler = replace(setting.config.scheduler, max_num_seqs=1, max_num_batched_tokens=8)
    setting = replace(setting, config=replace(setting.config, scheduler=scheduler))
    _, crowd = control_runs(setting)
    assert crowd.scheduler.max_num_seqs >= 4
    lengths = [len(submission.request.token_ids) for submission in crowd.waves[0]]
    assert sum(lengths) <= crowd.scheduler.max_num_batched_tokens <= most_rows(scheduler, setting.shape)


def test_where_nothing_decodes_cases_are_skipped_with_the_reason() -> None:
    cases = {case.name: case for case in make_cases(_setting(max_tokens=1), tuple(CASES))}
    assert {name for name, case in cases.items() if case.skipped} == {"rows", "chunks", "preempted", "pipeline"}
    assert all("outputs of one token" in case.skipped for case in cases.values() if case.skipped)


def _search(setting: Setting, num_kv_blocks: int | None) -> PreemptionSearch:
    return PreemptionSearch(
        setting.requests, setting.shape, setting.config.scheduler, setting.info.rope, num_kv_blocks=num_kv_blocks,
        max_num_batched_tokens=most_rows(setting.config.scheduler, setting.shape),
    )  # fmt: skip


def _preemptions(setting: Setting, num_kv_blocks: int | None = None) -> tuple[list[Any], list[Any]]:
    search = _search(setting, num_kv_blocks)
    return search.whole(), search.in_pieces()


@pytest.mark.parametrize(
    ("num", "max_model_len", "max_tokens", "num_kv_blocks", "pieces"),
    [
        (12, 512, 8, None, True), (12, 512, 8, 6, True), (4, 512, 8, None, True), (6, 24, 6, None, True),
        (64, 512, 12, None, True), (12, 512, 2, None, True), (12, 10, 8, None, True), (12, 4, 8, None, False),
        (2, 512, 8, None, True), (1, 512, 8, None, True), (12, 512, 40, None, True),
    ],
)  # fmt: skip
def test_requests_of_all_kinds_are_preempted_when_they_have_sampled(
    num: int, max_model_len: int, max_tokens: int, num_kv_blocks: int | None, pieces: bool
) -> None:
    setting = _setting(1, num=num, max_model_len=max_model_len, max_tokens=max_tokens, sizes=(1,))
    whole, in_pieces = _preemptions(setting, num_kv_blocks)
    assert whole
    assert bool(in_pieces) == pieces
    reached = set()
    for settings in (*whole, *in_pieces):
        assert settings.num_kv_blocks is not None
        assert settings.num_kv_blocks <= (num_kv_blocks or 10_000)
        found = dry_run(settings, setting.shape, LENGTH_HAS_NO_EFFECT, num_kv_blocks=10_000)
        for index, numbers in found.preempted_at.items():
            request = setting.requests[index]
            if settings in whole and any(0 < number < request.num_tokens for number in numbers):
                reached.update(request.kinds)
    assert reached == set(kinds_of(setting.requests))


@pytest.mark.parametrize(
    ("num", "max_tokens", "num_kv_blocks"), [(12, 8, None), (12, 8, 6), (4, 8, None), (64, 12, None), (12, 2, None)]
)
def test_a_prompt_is_broken_off_when_some_of_its_log_probabilities_had_come(
    num: int, max_tokens: int, num_kv_blocks: int | None
) -> None:
    setting = _setting(1, num=num, max_tokens=max_tokens)
    (settings,) = _search(setting, num_kv_blocks).amid_prompts()
    found = dry_run(settings, setting.shape, LENGTH_HAS_NO_EFFECT, num_kv_blocks=num_kv_blocks or 999)
    assert found.reported > 0
    broken = [setting.requests[index] for index, numbers in found.preempted_at.items() if 0 in numbers]
    assert any(request.spec.prompt_logprobs >= 0 for request in broken)
    case = _case(setting, "preempted")
    done = [_facts(setting, {i: [1] for i in range(num)})] * len(case.runs)
    without = [replace(run, counters=run.counters | {"amid_prompt_logprobs": 0}) for run in done]
    assert case.prove(done, (), ()).missing == ""
    assert "some of the log-probabilities of its prompt" in case.prove(without, (), ()).missing


def test_pieces_are_computed_anew_and_broken_off() -> None:
    setting = _setting(1, num=12, max_tokens=8)
    found = [dry_run(run, setting.shape, LENGTH_HAS_NO_EFFECT, num_kv_blocks=999) for run in _preemptions(setting)[1]]
    assert sum(run.resumed for run in found) > 0
    assert sum(run.unfinished for run in found) > 0


def test_a_dry_run_on_paper() -> None:
    """Blocks of 2 tokens, 3 of them: the first request's second token needs the third block, and the third token none.
    So the other one, which began later, goes when it has one token, and waits until the first has ended."""
    shape = Shape(longest_prompt=2, max_tokens=3, block_size=2)
    requests = make_requests([[5, 6], [7]], shape, vocab_size=50, seed=1)
    setting = replace(_setting(1), shape=shape, requests=requests)
    scheduler = replace(setting.config.scheduler, pipeline_depth=1)
    settings = replace(setting.at_once(setting.submissions()), scheduler=scheduler)
    found = dry_run(settings, shape, LENGTH_HAS_NO_EFFECT, num_kv_blocks=2)
    # step 0: both prompts; 1, 2: the first alone; 3: two known tokens of the second; 4: its last
    assert (found.preempted_at, found.num_steps, found.num_rows) == ({1: [1]}, 5, 3 + 1 + 1 + 2 + 1)
    assert dry_run(settings, shape, LENGTH_HAS_NO_EFFECT, num_kv_blocks=4).preempted_at == {}


def _facts(setting: Setting, preempted: dict[int, list[int]], number: int = 1) -> RunFacts:
    outputs = [
        Output(index=i, tokens=[1] * request.num_tokens, preempted_at=preempted.get(i, []))
        for i, request in enumerate(setting.requests)
    ]
    counters = {"preemptions": number, "recomputed_in_pieces": 1, "amid_prompt_logprobs": 1, "prefix_hit_tokens": 0}
    return RunFacts(outputs=outputs, counters=counters, rows={}, decode_rows={})  # type: ignore[arg-type]


def _case(setting: Setting, name: str) -> Case:
    (case,) = make_cases(setting, (name,))
    return case


def test_preemptions_prove_nothing_unless_requests_of_all_kinds_had_sampled() -> None:
    setting = _setting(1, num=12, max_tokens=8)
    case = _case(setting, "preempted")
    every = {i: [2] for i in range(12)}

    def missing(preempted: dict[int, list[int]], number: int = 1) -> str:
        return case.prove([_facts(setting, preempted, number)] * len(case.runs), (), ()).missing

    assert missing(every) == ""
    assert "no request was preempted;" in missing({}, 0)
    assert "after it had sampled" in missing({i: [0] for i in range(12)})  # amid their prompts
    lost = "no request with repetition_penalty was preempted after it had sampled"
    assert (
        missing({i: [2] for i, request in enumerate(setting.requests) if "repetition_penalty" not in request.kinds})
        == lost
    )
    counters = case.prove([_facts(setting, every)], (), ()).counters
    assert counters["with penalties"] == 4
    assert counters["an early end"] == 1
    # the words tell the numbers of what is run
    for run in case.runs:
        assert str(run.num_kv_blocks) in case.varied


def test_what_never_needs_another_block_is_not_taken_for_proof() -> None:
    setting = _setting(1, num=4, max_tokens=4)
    requests = [replace(request, token_ids=(9,) * 17) for request in setting.requests]
    case = _case(replace(setting, requests=requests), "preempted")
    assert case.runs
    facts = [_facts(setting, {}, 0)] * len(case.runs)
    assert "a larger --max-tokens" in case.prove(facts, (), ()).missing


def test_outputs_that_end_with_a_block_are_gone_on_with() -> None:
    setting = _setting(1, num=12, max_tokens=8)
    (run,) = _case(setting, "prefix").runs
    continued = [wave[0] for wave in run.waves if len(wave) == 1]
    assert continued
    behind = []
    for submission in continued:
        request = submission.request
        assert request.greedy
        assert submission.num_done < request.spec.max_tokens
        behind.append((len(request.token_ids) + submission.num_done) % setting.shape.block_size)
        shortened = [s.request.spec.max_tokens for s in run.waves[0] if s.request.index == request.index]
        assert shortened == [submission.num_done - behind[-1], request.spec.max_tokens]
    # one token that is left to compute is written by itself
    assert behind[:2] == [1, 2]
    # keys that depend on the length of the prompt
    (run,) = _case(replace(_setting(1, num=12, max_tokens=8, rope=RopeLengths(longest_original=20))), "prefix").runs
    assert all(len(wave) == 12 for wave in run.waves)


def _configured(setting: Setting, **engine: Any) -> Setting:
    return replace(setting, config=EngineConfig.from_kwargs(model="m", expert_parallel_size=setting.size, **engine))


def test_preemptions_are_planned_for_the_kv_blocks_that_a_rank_has() -> None:
    setting = _setting(1, num=12, max_tokens=8)
    info = SimpleNamespace(**vars(setting.info), kv_bytes_per_block=lambda block_size: block_size * 2**20)
    setting = replace(_configured(setting, kv_cache_memory_gb=5.5 * 16 / 1024), info=info)  # type: ignore[arg-type]
    assert setting.num_kv_blocks == 5
    case = _case(setting, "preempted")
    assert len(case.runs) > 1
    assert max(run.num_kv_blocks or 999 for run in case.runs) <= 5
    assert _configured(setting, kv_cache_memory_gb=1.0, num_kv_blocks=7).num_kv_blocks == 7
    assert _configured(setting).num_kv_blocks is None


def _steps(rows: list[int], decode_rows: list[int], mixed: int = 0) -> RunFacts:
    counters = {"mixed_steps": mixed, "steps": len(rows)}
    return RunFacts(outputs=[], counters=counters, rows=Counter(rows), decode_rows=Counter(decode_rows))


def test_one_step_of_several_requests_is_a_batch() -> None:
    case = _case(_setting(2), "batch")  # prompts of 48 tokens at most, two ranks

    def missing(facts: RunFacts) -> str:
        return case.prove([facts], (), ()).missing

    assert missing(_steps([48, 2], [2])) == "no step had rows of several requests"
    assert missing(_steps([96, 2], [2])) != ""  # one on each rank
    for met in (_steps([48, 3], [3]), _steps([97, 1], [1]), _steps([48, 4], [1], mixed=1)):
        assert missing(met) == ""
    setting = _configured(_setting(1), max_num_seqs=1)
    assert _case(setting, "batch").skipped == "max_num_seqs=1: no request has company"


def test_exchanges_take_another_number_of_rounds_than_the_configured_budget_gives() -> None:
    for configured, number in ((8192, 5), (5, 4), (4, 5)):
        case = _case(_configured(_setting(2), exchange_budget_tokens=configured), "rounds")
        assert case.parallel == {"exchange_budget_tokens": number}
        assert case.varied == f"at most {number} rows in an exchange round, instead of {configured}"
    case = _case(replace(_setting(2), shape=replace(_shape(512), longest_prompt=1)), "rounds")
    assert case.varied.startswith("at most 1 row in")

    def missing(rounds: int, exchanges: int, *, alone: tuple[int, int]) -> str:
        layer = {"rounds": alone[0], "steps": alone[1], "rows_sent": 1, "pairs_received": 1, "replica_pairs": 0}
        facts = replace(_steps([1], [1]), counters={"rounds": rounds, "layer_steps": exchanges})
        return case.prove([facts], (), [{"moe": {"layers": {"0": layer}}}]).missing

    assert missing(9, 3, alone=(4, 4)) == ""
    assert missing(3, 3, alone=(4, 4)) == "no exchange took several rounds"
    assert missing(9, 3, alone=(12, 4)) == "exchanges took as many rounds as before"
