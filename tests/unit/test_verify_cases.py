"""Requests and cases are shaped by the model: what is to be varied can happen, also where lengths are tiny."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from epruntime.config import EngineConfig
from epruntime.config.verify import CASES
from epruntime.errors import ConfigError
from epruntime.verify.cases import ROWS, Setting, baseline, control_runs, make_cases
from epruntime.verify.requests import Shape, make_requests, random_prompts, shape_of


def _shape(max_model_len: int) -> Shape:
    return shape_of(max_model_len=max_model_len, max_tokens=12, max_prompt_tokens=48, block_size=16)


def _setting(size: int = 2, *, num: int = 16, max_model_len: int = 512, sizes: tuple[int, ...] = (1, 2)) -> Setting:
    shape = _shape(max_model_len)
    info = SimpleNamespace(num_experts=8, expert_bytes=((8, 100),), checkpoint_bytes=10_000)
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
    assert prompts == random_prompts(16, shape, vocab_size=50, seed=3)
    assert prompts != random_prompts(16, shape, vocab_size=50, seed=4)


def test_no_room_at_all() -> None:
    with pytest.raises(ConfigError, match="no room"):
        _shape(1)


def test_requests_are_of_all_kinds() -> None:
    requests = _setting().requests
    assert sum(request.greedy for request in requests) == 8
    assert sum(request.spec.prompt_logprobs >= 0 for request in requests) == 4
    assert len({request.spec.seed for request in requests}) == 16
    assert all(request.spec.stop_ids == () for request in requests)


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
        "rows", "chunks", "prefix", "pipeline", "ranks", "placement",
    ]  # fmt: skip


def test_requests_stay_on_their_rank_but_where_ranks_vary() -> None:
    setting = _setting()
    for case in make_cases(setting, ("batch", "prefix", "pipeline", "rounds")):
        for run in case.runs:
            assert all(s.rank == s.request.index % 2 for wave in run.waves for s in wave)
    (ranks,) = make_cases(setting, ("ranks",))
    assert all(s.rank != s.request.index % 2 for run in ranks.runs for wave in run.waves for s in wave)
    (rows,) = make_cases(setting, ("rows",))
    assert [len(wave) for wave in rows.runs[0].waves] == list(range(1, ROWS + 1))
    assert all(len({s.rank for s in wave}) == 1 for wave in rows.runs[0].waves)


def test_the_baseline_is_alone_and_the_control_is_both() -> None:
    setting = _setting(num=1)
    assert [len(wave) for wave in baseline(setting).waves] == [1]
    alone, crowd = control_runs(setting)
    assert [len(wave) for wave in alone.waves] == [1]
    assert [len(wave) for wave in crowd.waves] == [4]
