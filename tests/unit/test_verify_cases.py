"""Requests and cases are shaped by the model: what is to be varied can happen, also where lengths are tiny."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from epruntime.config import EngineConfig
from epruntime.config.verify import CASES
from epruntime.errors import ConfigError
from epruntime.verify.cases import ROWS, Setting, baseline, control_runs, make_cases
from epruntime.verify.requests import Shape, make_requests, random_prompts, shape_of
from epruntime.worker.layer_trace import LayerTrace


def _shape(max_model_len: int) -> Shape:
    return shape_of(max_model_len=max_model_len, max_tokens=12, max_prompt_tokens=48, block_size=16)


def _setting(size: int = 2, *, num: int = 16, max_model_len: int = 512, sizes: tuple[int, ...] = (1, 2)) -> Setting:
    shape = _shape(max_model_len)
    info = SimpleNamespace(num_experts=8, expert_bytes=((8, 100),))
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


class _Layer(torch.nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.attention = torch.nn.Module()
        self.attention._epruntime_attention = None
        self.index = index

    def forward(self, hidden_1TH: torch.Tensor) -> torch.Tensor:
        return hidden_1TH + self.index


def _hashes(hidden_TH: torch.Tensor) -> torch.Tensor:
    module = torch.nn.Module()
    module.layers = torch.nn.ModuleList([_Layer(0), _Layer(1)])
    trace = LayerTrace(module)
    rows = len(hidden_TH)
    forward = SimpleNamespace(
        num_tokens=rows,
        query_starts_S1=torch.tensor([0, rows], dtype=torch.int32),
        positions_T=torch.arange(4, 4 + rows),
    )
    trace.on_batch(SimpleNamespace(forward=forward, scheduled=[SimpleNamespace(rid=7)]))  # type: ignore[arg-type]
    padded_1TH = torch.cat([hidden_TH, torch.zeros(3, hidden_TH.shape[1], dtype=hidden_TH.dtype)])[None]
    for layer in module.layers:
        padded_1TH = layer(padded_1TH)
    told = trace.take()
    assert told["layers"] == ["input", "0", "1"]
    assert torch.frombuffer(bytearray(told["rids"]), dtype=torch.int64).tolist() == [7] * rows
    assert torch.frombuffer(bytearray(told["positions"]), dtype=torch.int64).tolist() == list(range(4, 4 + rows))
    assert trace.take()["hashes"] == b""
    return torch.frombuffer(bytearray(told["hashes"]), dtype=torch.int64).reshape(rows, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hash_tells_one_bit_and_not_the_place(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows_TH = torch.randn(5, 24).to(dtype)
    hashes = _hashes(rows_TH)
    assert torch.equal(_hashes(rows_TH[[3, 1]]), hashes[[3, 1]])
    assert torch.equal(hashes[:, 0], hashes[:, 1])  # layer 0 adds nothing
    assert not (hashes[:, 1] == hashes[:, 2]).any()
    changed = rows_TH.clone()
    changed[2].view({4: torch.int32, 2: torch.int16}[changed.element_size()])[17] ^= 1
    assert (_hashes(changed)[:, 0] != hashes[:, 0]).tolist() == [False, False, True, False, False]
