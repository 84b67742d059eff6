"""The invariance contract over hosts: ranks on two hosts, started by Ray or torchrun, give the bits of one process."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_cluster import RayCluster, ray_environment

from epruntime.engine.model_group import ModelGroup
from epruntime.engine.ranks import Ranks
from epruntime.testing import invariance_program
from epruntime.testing.hosts import StandInHosts
from epruntime.testing.invariance import Setting, mixed_requests, run
from epruntime.testing.invariance_program import COMPARED, LINE
from epruntime.testing.odd_shapes import VOCABULARY, odd_shape
from epruntime.testing.tiny_models import build, save
from epruntime.testing.torchrun_job import TorchrunJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
PROGRAM, DTYPE = str(Path(invariance_program.__file__)), "bfloat16"
ALONE = Setting(name="alone", order="alone", options={"enable_prefix_caching": False, "num_kv_blocks": 8})


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A checkpoint, and digests of each request alone on one rank of this machine."""
    _, model = build("deepseek_v3", dtype=getattr(torch, DTYPE), **odd_shape("deepseek_v3"))
    path = str(save(model, tmp_path_factory.mktemp("model")))
    requests = mixed_requests(COMPARED, vocab_size=VOCABULARY)
    with Ranks(1, threads_per_rank=1) as ranks:
        alone = run(path, ranks, ALONE, requests, compared=COMPARED, dtype=DTYPE)
        with pytest.MonkeyPatch.context() as patch:  # negative control
            patch.setattr(ModelGroup, "load", functools.partial(ModelGroup.load, batch_dependent=True))
            together = Setting(name="together", options={"num_kv_blocks": 64})
            wrong = run(path, ranks, together, requests, compared=COMPARED, dtype=DTYPE)
    assert [answer.digest for answer in wrong.answers] != [answer.digest for answer in alone.answers]
    return path, [answer.digest for answer in alone.answers]


@pytest.fixture
def hosts() -> Iterator[StandInHosts]:
    with StandInHosts() as hosts:
        yield hosts


def _facts(lines: list[str]) -> dict[str, Any]:
    found = [line for line in lines if line.startswith(LINE)]
    assert len(found) == 1, "\n".join(lines)
    facts: dict[str, Any] = json.loads(found[0].removeprefix(LINE))
    assert facts["hosts"] == ["host-a", "host-b"]
    assert facts["transport"] == "gloo"
    assert facts["ranks_at_work"] == 2
    return facts


def test_torchrun(hosts: StandInHosts, case: tuple[str, list[str]]) -> None:
    path, expected = case
    options = json.dumps({"launcher": "torchrun", "expert_parallel_size": 2})
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", hosts[0].address, "--master-port", "29500"]
    jobs = [
        TorchrunJob([*meeting, "--node-rank", str(number)], [PROGRAM, path, DTYPE, options], popen=host.popen)
        for number, host in enumerate(hosts)
    ]
    with jobs[0], jobs[1]:
        assert [job.wait(120) for job in jobs] == [0, 0], "\n".join(job.output for job in jobs)
    assert _facts([line for job in jobs for line in job.lines])["digests"] == expected


def test_ray(hosts: StandInHosts, case: tuple[str, list[str]], tmp_path: Path) -> None:
    pytest.importorskip("ray")
    path, expected = case
    cluster = RayCluster(hosts.hosts, {**ray_environment(tmp_path), "PYTHONPATH": str(ROOT)})
    cluster.start()
    options = json.dumps({"launcher": "ray", "ray_address": cluster.address, "expert_parallel_size": 2})
    done = cluster.head.run(
        [sys.executable, PROGRAM, path, DTYPE, options], environment=cluster.environment, timeout_s=150, cwd=ROOT
    )
    assert _facts(done.stdout.splitlines())["digests"] == expected
