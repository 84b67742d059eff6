"""The invariance contract over launchers: ranks that this process, Ray or torchrun starts give the same bits."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epruntime.engine.model_group import ModelGroup
from epruntime.engine.ranks import Ranks
from epruntime.testing import invariance_program
from epruntime.testing.invariance import Run, Setting, first_difference, mixed_requests, run
from epruntime.testing.invariance_program import COMPARED, LINE
from epruntime.testing.odd_shapes import VOCABULARY, odd_shape
from epruntime.testing.tiny_models import build, save
from epruntime.testing.torchrun_job import TorchrunJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MODELS = {"deepseek_v3": "float32", "mixtral": "bfloat16"}
ALONE = Setting(
    name="alone", order="alone", options={"enable_prefix_caching": False, "pipeline_depth": 1, "num_kv_blocks": 8}
)
TOGETHER = Setting(name="together", size=2, options={"num_kv_blocks": 64}, must={"ranks_at_work": 2})
REQUESTS = mixed_requests(COMPARED, vocab_size=VOCABULARY)

#: model type -> checkpoint, and each request alone on one rank of the local launcher
Cases = dict[str, tuple[str, Run]]


@pytest.fixture(scope="module")
def local_ranks() -> Iterator[Ranks]:
    with Ranks(2, launcher="local", threads_per_rank=1) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def cases(local_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Cases:
    found = {}
    for model_type, dtype in MODELS.items():
        _, model = build(model_type, dtype=getattr(torch, dtype), **odd_shape(model_type))
        path = str(save(model, tmp_path_factory.mktemp(model_type)))
        found[model_type] = path, run(path, local_ranks, ALONE, REQUESTS, compared=COMPARED, dtype=dtype)
    return found


def _check(cases: Cases, ranks: Ranks, setting: Setting = TOGETHER) -> None:
    for model_type, dtype in MODELS.items():
        path, expected = cases[model_type]
        found = run(path, ranks, setting, REQUESTS, compared=COMPARED, dtype=dtype)
        assert first_difference(found.answers, expected.answers) is None, model_type


def test_local(cases: Cases, local_ranks: Ranks) -> None:
    _check(cases, local_ranks)


def test_ray(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    # Ray's sockets need a short path
    with tempfile.TemporaryDirectory(prefix="ept-", dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        with Ranks(2, launcher="ray", threads_per_rank=1) as ranks:
            _check(cases, ranks)


@pytest.mark.parametrize("threads", [2, pytest.param(1, marks=pytest.mark.full)])
def test_torchrun(threads: int, cases: Cases) -> None:
    program = str(Path(invariance_program.__file__))
    options = json.dumps({"launcher": "torchrun", "expert_parallel_size": 2, "threads_per_rank": threads})
    model_type, dtype = list(MODELS.items())[threads - 1]
    path, expected = cases[model_type]
    with TorchrunJob(["--standalone", "--nproc-per-node", "2"], [program, path, dtype, options]) as job:
        assert job.wait(120) == 0, job.output
    (line,) = (line for line in job.lines if line.startswith(LINE))
    facts = json.loads(line.removeprefix(LINE))
    assert (facts["launcher"], facts["transport"], facts["ranks_at_work"]) == ("torchrun", "gloo", 2)
    assert facts["digests"] == [answer.digest for answer in expected.answers]


def test_a_layer_that_depends_on_the_batch_is_seen(
    cases: Cases, local_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelGroup, "load", functools.partial(ModelGroup.load, batch_dependent=True))
    path, expected = cases["mixtral"]
    found = run(path, local_ranks, TOGETHER, REQUESTS, compared=COMPARED, dtype=MODELS["mixtral"])
    digests = [[answer.digest for answer in answers] for answers in (found.answers, expected.answers)]
    assert digests[0] != digests[1]
