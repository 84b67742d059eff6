"""`epruntime verify` on tiny models: what holds is reported as proven, what a rank does wrong is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from epruntime.cli.main import main
from epruntime.config.verify import CASES
from epruntime.engine import block_pool, kv_cache
from epruntime.engine.kv_reference import ReferenceKVCache
from epruntime.engine.ranks import Ranks
from epruntime.errors import ConfigError
from epruntime.launchers.local import LocalLauncher
from epruntime.testing import faulty_verify
from epruntime.testing.tiny_models import build, save
from epruntime.verify import VerifyConfig, VerifyReport, against, verify
from epruntime.verify.report import CaseReport
from epruntime.verify.requests import PARAMETERS, make_requests, shape_of

VOCABULARY = 99
SMALL: dict[str, Any] = {"num_prompts": 6, "max_tokens": 6, "max_prompt_tokens": 20, "seed": 11}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save(build("mixtral")[1], tmp_path_factory.mktemp("mixtral")))


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, Path]]:
    """Two ranks, and the file that says what is wrong with them."""
    path = tmp_path_factory.mktemp("faults") / "fault"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(faulty_verify.FAULT_FILE, str(path))
        launcher = LocalLauncher(entry_module="epruntime.testing.faulty_verify")
        with Ranks(2, launcher=launcher, threads_per_rank=1) as ranks:
            yield ranks, path


def _statuses(report: VerifyReport) -> dict[str, str]:
    return {case.name: case.status for case in report.cases}


def test_all_cases_are_proven(mixtral: str, ranks: Ranks) -> None:
    options = VerifyConfig(**SMALL, trace_layers=True, against="transformers", expert_parallel_sizes="1,2,3")
    lines: list[str] = []
    report = verify(mixtral, options, ranks=ranks, progress=lines.append, expert_parallel_size=2)
    statuses = _statuses(report)
    assert {name.partition("-")[0].replace("size", "sizes").replace("ss", "s") for name in statuses} == {
        "alone",
        *CASES,
    }
    assert statuses.pop("alone") == "baseline"
    assert set(statuses.values()) == {"identical"}, report.summary
    assert {"threads-2", "size-1", "size-3"} <= set(statuses)
    assert report.exit_code == 0
    # what covers all that the baseline covers has its hash
    whole = {case.digest for case in report.cases if case.name not in ("rows", "preempted")}
    assert len(whole) == 1
    counters = {name: number for case in report.cases for name, number in case.counters.items()}
    assert counters["row counts"] == 12 + 2 * (6 - 1)  # as many further ones as two waves of six tokens have
    for words in ("with penalties", "bias", "filters", "recomputed in pieces", "outputs continued"):
        assert counters[words] > 0, words
    # the control is found in the very layer that was made to depend on the batch
    control = report.control
    assert control.status == "caught"
    assert control.difference is not None
    assert control.difference.layer == "1"
    assert control.difference.layer_position is not None
    assert report.against is not None
    assert report.against.ok
    assert report.against.num_tokens == 3 * 6
    assert report.against.referee == "float64"
    assert not report.against.different_tokens
    assert report.against.largest_difference < 1e-3
    assert any("num_redundant_experts" in line for line in lines)


@pytest.mark.parametrize(
    ("model_type", "dtype"), [("gpt_oss", "float32"), ("deepseek_v3", "bfloat16"), ("gemma4_text", "bfloat16")]
)
def test_other_families(model_type: str, dtype: str, ranks: Ranks, tmp_path: Path) -> None:
    path = str(save(build(model_type, dtype=getattr(torch, dtype))[1], tmp_path))
    options = VerifyConfig(**SMALL, cases="batch,chunks,preempted,rounds", against="transformers")
    report = verify(path, options, ranks=ranks, expert_parallel_size=3)
    assert list(_statuses(report).values()) == ["baseline"] + ["identical"] * 4, report.summary
    assert report.exit_code == 0
    assert report.against is not None
    assert report.against.ok, report.against.lines()


def test_lengths_of_a_few_tokens(mixtral: str, ranks: Ranks) -> None:
    options = VerifyConfig(seed=3, cases="batch,rows,chunks,preempted,prefix,rounds")
    report = verify(mixtral, options, ranks=ranks, max_model_len=10)
    assert report.exit_code == 0, report.summary
    # where nothing can be chunked that is said, and not taken for proof
    report = verify(mixtral, VerifyConfig(seed=3, cases="batch,chunks"), ranks=ranks, max_model_len=2)
    assert _statuses(report)["chunks"] == "skipped"
    assert report.exit_code == 0
    report = verify(mixtral, VerifyConfig(seed=3, cases="chunks"), ranks=ranks, max_model_len=2)
    assert report.exit_code == 3
    # outputs of one token: nothing decodes, and the control is caught all the same
    report = verify(mixtral, VerifyConfig(seed=3, cases="batch,chunks,prefix", max_tokens=1), ranks=ranks)
    assert _statuses(report) == {
        "alone": "baseline", "batch": "identical", "prefix": "identical", "chunks": "skipped",
    }  # fmt: skip
    assert report.exit_code == 0
    report = verify(mixtral, VerifyConfig(seed=3, cases="rows,chunks,preempted"), ranks=ranks, max_model_len=4)
    assert report.exit_code == 0, report.summary


def _after(parent: int, token_ids: bytes) -> bytes:
    return parent.to_bytes(8, "little") + token_ids


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(lambda parent, ids: ids, id="whatever-precedes-it"),
        pytest.param(lambda parent, ids: _after(parent, ids[4:]), id="without-its-first-token", marks=pytest.mark.full),
        pytest.param(lambda parent, ids: _after(parent, ids[:-4]), id="without-its-last-token"),
        pytest.param(lambda parent, ids: _after(parent, bytes(sorted(ids))), id="in-any-order", marks=pytest.mark.full),
    ],
)
def test_a_block_found_by_a_wrong_key(
    key: Callable[[int, bytes], bytes], mixtral: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_native", lambda: None)
    monkeypatch.setattr(block_pool, "content_key", key)
    options = VerifyConfig(num_prompts=9, max_tokens=2, max_prompt_tokens=30, seed=3, cases="prefix")
    assert _statuses(verify(mixtral, options, ranks=ranks))["prefix"] == "different"


def _publish_when_admitted(patch: pytest.MonkeyPatch) -> None:
    admit = ReferenceKVCache.admit

    def faulty(self: ReferenceKVCache, rid: int, num_skippable: int) -> Any:
        admitted = admit(self, rid, num_skippable)
        if admitted is not None and self.prefix_caching:
            self._publish(self._sequences[rid], len(self._sequences[rid].token_ids))
        return admitted

    patch.setattr(ReferenceKVCache, "admit", faulty)


def _publish_before_the_last_token_is_computed(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: ReferenceKVCache, rids: np.ndarray, token_ids: np.ndarray) -> list[int]:
        for rid, token in zip(rids.tolist(), token_ids.tolist(), strict=True):
            sequence = self._sequences[rid]
            sequence.token_ids.append(token)
            if sequence.publish_at <= len(sequence.token_ids) <= len(sequence.block_ids) * self.block_size:
                self._publish(sequence, len(sequence.token_ids))
        return []

    patch.setattr(ReferenceKVCache, "append", faulty)


def _keep_the_key_of_an_evicted_block(patch: pytest.MonkeyPatch) -> None:
    def faulty(self: block_pool.BlockPool, block: int) -> None:
        self._key_of[block] = None  # it may be published anew, and is still found as what it was

    def share(self: block_pool.BlockPool, blocks: list[int]) -> None:
        for block in blocks:
            self._cached.pop(block, None)
            if block in self._free:
                self._free.remove(block)
            self._refs[block] += 1

    patch.setattr(block_pool.BlockPool, "_forget", faulty)
    patch.setattr(block_pool.BlockPool, "share", share)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        (_publish_when_admitted, "preempted"),
        (_publish_before_the_last_token_is_computed, "prefix"),
        (_keep_the_key_of_an_evicted_block, "preempted"),
    ],
)
def test_a_block_that_does_not_hold_what_it_is_found_for(
    fault: Callable[[pytest.MonkeyPatch], None], case: str, mixtral: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_native", lambda: None)
    fault(monkeypatch)
    options = VerifyConfig(num_prompts=8, max_tokens=6, max_prompt_tokens=60, seed=3, cases=case)
    assert _statuses(verify(mixtral, options, ranks=ranks))[case] == "different"


def test_without_room_for_transformers_the_rest_counts(
    mixtral: str, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = VerifyConfig(**SMALL, cases="batch", against="transformers")
    free = iter([2**60, 0])
    monkeypatch.setattr(against, "free_memory_bytes", lambda: next(free))
    report = verify(mixtral, options, ranks=ranks)
    assert _statuses(report)["batch"] == "identical"
    assert "needs the whole model in this process" in report.against_refused
    assert report.exit_code == 3
    # known before anything is run
    monkeypatch.setattr(against, "free_memory_bytes", lambda: 0)
    with pytest.raises(ConfigError, match="needs the whole model in this process"):
        verify(mixtral, options, ranks=ranks)


def test_a_row_that_depends_on_its_place_is_found(mixtral: str, faulty: tuple[Ranks, Path]) -> None:
    wrong, fault = faulty
    fault.write_text("crowded_row")
    # prompts are too short for that row: alone nothing is wrong
    options = VerifyConfig(**{**SMALL, "max_prompt_tokens": faulty_verify.ROW}, cases="batch,rows", trace_layers=True)
    report = verify(mixtral, options, ranks=wrong)
    assert _statuses(report) == {"alone": "baseline", "batch": "different", "rows": "different"}
    for case in report.cases[1:]:
        found = case.difference
        assert found is not None
        assert found.layer == str(faulty_verify.LAYER)
        assert found.rank == 0
    batch = report.cases[1]
    assert batch.difference is not None
    # the first request has the first rows of every step of the batch, and the second has the tenth
    assert (batch.difference.request, batch.difference.layer_position) == (1, 0)
    assert batch.digest != report.cases[0].digest
    assert report.exit_code == 1


def _some(names: Iterable[str], quick: set[str]) -> list[Any]:
    """Of these `make test` runs a few."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.full) for name in names]


@pytest.mark.parametrize(
    "name", _some([*faulty_verify.ADJUSTED, *faulty_verify.FILTERS], {"presence_penalty", "repetition_penalty"})
)
def test_a_parameter_that_is_lost_in_company_is_found(name: str, mixtral: str, faulty: tuple[Ranks, Path]) -> None:
    assert name in _lost_in_company(f"lost_{name}", mixtral, faulty)


def test_a_top_k_that_is_another_request_s_is_found(mixtral: str, faulty: tuple[Ranks, Path]) -> None:
    assert "top_k" in _lost_in_company("largest_top_k", mixtral, faulty)


def _lost_in_company(name: str, mixtral: str, faulty: tuple[Ranks, Path]) -> tuple[str, ...]:
    """Parameters of the first request that differs."""
    wrong, fault = faulty
    fault.write_text(name)
    options = VerifyConfig(num_prompts=12, max_tokens=8, max_prompt_tokens=8, seed=3, cases="batch")
    (_, batch) = verify(mixtral, options, ranks=wrong).cases
    assert batch.status == "different"
    return _parameters(batch)


def _parameters(case: CaseReport) -> tuple[str, ...]:
    """Of the request of the case's first difference."""
    assert case.difference is not None
    shape = shape_of(max_model_len=512, max_tokens=8, max_prompt_tokens=20, block_size=16)
    requests = make_requests([[5]] * 12, shape, vocab_size=VOCABULARY, seed=3)
    return requests[case.difference.request].kinds


@pytest.mark.parametrize("name", _some(["output", *PARAMETERS], {"output", "top_p"}))
def test_what_a_preempted_request_loses_is_found(name: str, mixtral: str, faulty: tuple[Ranks, Path]) -> None:
    wrong, fault = faulty
    fault.write_text(f"forgotten_{name}")
    options = VerifyConfig(num_prompts=12, max_tokens=8, max_prompt_tokens=20, seed=3, cases="preempted")
    (_, preempted) = verify(mixtral, options, ranks=wrong).cases
    assert preempted.status == "different"
    counted = {"frequency_penalty", "presence_penalty"} if name == "output" else {name}
    assert counted & set(_parameters(preempted))


def test_a_history_that_is_computed_anew_at_other_positions_is_found(mixtral: str, faulty: tuple[Ranks, Path]) -> None:
    wrong, fault = faulty
    fault.write_text("shifted_piece")
    options = VerifyConfig(
        num_prompts=8, max_tokens=8, max_prompt_tokens=20, seed=3, cases="preempted", trace_layers=True
    )
    (_, preempted) = verify(mixtral, options, ranks=wrong).cases
    assert preempted.status == "different"
    assert preempted.difference is not None
    # what goes into the first layer knows no positions, and its attention does
    assert preempted.difference.layer == "0"


@pytest.mark.parametrize(
    ("name", "case", "where"),
    [
        ("other_prompt_logprobs", "preempted", "prompt"),
        ("found_but_one", "prefix", "output"),
        ("tile_row", "rows", "output"),
    ],
)
def test_what_happens_in_few_steps_is_found(
    name: str, case: str, where: str, mixtral: str, faulty: tuple[Ranks, Path]
) -> None:
    wrong, fault = faulty
    fault.write_text(name)
    options = VerifyConfig(num_prompts=12, max_tokens=8, seed=3, cases=case)
    (_, found) = verify(mixtral, options, ranks=wrong).cases
    assert found.status == "different"
    assert found.difference is not None
    assert found.difference.where == where


def test_a_rank_that_computes_otherwise_is_found(mixtral: str, faulty: tuple[Ranks, Path]) -> None:
    wrong, fault = faulty
    fault.write_text("other_rank")
    options = VerifyConfig(**SMALL, cases="pipeline,ranks", trace_layers=True)
    report = verify(mixtral, options, ranks=wrong, expert_parallel_size=2)
    assert _statuses(report) == {"alone": "baseline", "pipeline": "identical", "ranks": "different"}
    found = report.cases[-1].difference
    assert found is not None
    # the last request comes first; alone it was on the second rank
    assert (found.request, found.rank, found.layer, found.layer_position) == (5, 0, "2", 0)
    assert report.exit_code == 1


def test_a_control_that_is_not_caught_fails(mixtral: str, faulty: tuple[Ranks, Path]) -> None:
    wrong, fault = faulty
    fault.write_text("no_control")
    report = verify(mixtral, VerifyConfig(**SMALL, cases="batch"), ranks=wrong)
    assert _statuses(report)["batch"] == "identical"
    assert report.control.status == "not caught"
    assert report.exit_code == 3
    assert "nothing is proven" in report.summary


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_transformers_computes_otherwise_fails(dtype: str, faulty: tuple[Ranks, Path], tmp_path: Path) -> None:
    wrong, fault = faulty
    path = str(save(build("mixtral", dtype=getattr(torch, dtype))[1], tmp_path))
    options = VerifyConfig(**SMALL, cases="batch", against="transformers")
    fault.write_text("")
    found = verify(path, options, ranks=wrong).against
    assert found is not None
    assert found.ok, found.lines()
    fault.write_text("weights_twice")
    report = verify(path, options, ranks=wrong)
    assert _statuses(report)["batch"] == "identical"
    assert report.against is not None
    assert not report.against.ok
    assert report.exit_code == 1
    # not by a hair
    for quantile in report.against.quantiles:
        assert quantile.error > 2 * quantile.limit, report.against.lines()


def test_without_a_referee_that_is_said(
    faulty: tuple[Ranks, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong, fault = faulty
    path = str(save(build("mixtral", dtype=torch.bfloat16)[1], tmp_path))
    options = VerifyConfig(**SMALL, cases="batch", against="transformers")
    monkeypatch.setattr(against, "extra_bytes", lambda *_: 2**60)
    for name, ok in (("", True), ("weights_twice", False)):
        fault.write_text(name)
        found = verify(path, options, ranks=wrong).against
        assert found is not None
        assert found.ok == ok, found.lines()
        assert found.referee == ""
        assert "there is no referee" in found.lines()[0]
        assert "1073741824.0 GiB" in found.note


def test_command_line(mixtral: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    flags = [
        "--num-prompts",
        "4",
        "--max-tokens",
        "4",
        "--seed",
        "5",
        "--cases",
        "batch,rows",
        "--threads-per-rank",
        "1",
    ]
    code = main(["verify", mixtral, "--json", str(file), *flags])
    out, err = capsys.readouterr()
    assert code == 0
    assert "64 requests at once" in out
    assert out.rstrip().splitlines()[-1].startswith("the contract holds: 2 cases bit for bit")
    assert "--seed 5" in out
    assert "epruntime verify: batch: identical" in err
    report = json.loads(file.read_text())
    assert (report["ok"], report["exit_code"]) == (True, 0)
    assert [case["name"] for case in report["cases"]] == ["alone", "batch", "rows"]
    assert report["control"]["status"] == "caught"
    assert report["facts"]["signature"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("model", "more", "code"),
    [
        ("nowhere", [], 2),
        ("mixtral", ["--prompts-file", "nowhere.txt"], 2),
        ("mixtral", ["--max-model-len", "1"], 2),
        ("mixtral", ["--launcher", "ray", "--ray-address", "127.0.0.1:1"], 4),
    ],
)
def test_what_cannot_be_run_is_no_difference(
    model: str, more: list[str], code: int, mixtral: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    file.write_text('{"ok": true}')
    assert main(["verify", mixtral if model == "mixtral" else model, "--json", str(file), *more]) == code
    err = capsys.readouterr().err
    report = json.loads(file.read_text())
    assert (report["ok"], report["exit_code"]) == (False, code)
    assert err.rstrip().endswith(report["error"])
    assert err.count(report["error"]) == 1
