"""torchrun on one host: what is served, a rank that dies, both kinds of restart, stopping, and what stays (nothing)."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from leftovers import Leftovers

from epruntime.client import Client
from epruntime.errors import EPRuntimeError
from epruntime.testing import tiny_models
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.reference import greedy_reference
from epruntime.testing.torchrun_job import TorchrunJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
SERVE, VERIFY = str(ROOT / "launch/torchrun_serve.py"), str(ROOT / "launch/torchrun_verify.py")
EXAMPLE = str(ROOT / "examples/multi_node/torchrun_generate.py")
PROMPT, COUNT, LONG = [5, 17, 99, 3], 6, 450
GREEDY = {"temperature": 0, "ignore_eos": True}
START_S, END_S = 90.0, PATIENCE_S
SMALL = ["--port", "0", "--grpc-port", "0", "--max-model-len", "512", "--num-kv-blocks", "64", "--max-num-seqs", "8"]
STANDALONE = ["--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[str, list[int]]:
    _, made = tiny_models.build("mixtral", 0)
    expected = greedy_reference(made, [PROMPT], max_new_tokens=COUNT).tokens[0]
    return str(tiny_models.save(made, tmp_path_factory.mktemp("tiny"))), expected


@pytest.fixture(autouse=True)
def nothing_left(tmp_path_factory, monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    monkeypatch.setenv("TMPDIR", tempfile.tempdir)
    before = Leftovers.now()
    yield
    for folder in Path(tempfile.tempdir).glob("torchelastic_*"):
        shutil.rmtree(folder)  # torchrun's own; it leaves that behind, whatever it runs
    assert before.grown_by(descriptors=False) == {}


def supervisors(job: TorchrunJob) -> list[psutil.Process]:
    """The workers of a torchrun, in rank order."""
    return sorted(psutil.Process(job.process.pid).children(), key=lambda worker: int(worker.environ()["RANK"]))


def child(supervisor: psutil.Process, word: str) -> psutil.Process:
    (found,) = (process for process in supervisor.children() if word in " ".join(process.cmdline()))
    return found


def tokens(address: str) -> list[int]:
    with Client(address, timeout=START_S, retries=50) as client:
        return list(client.generate(PROMPT, max_tokens=COUNT, **GREEDY).outputs[0].token_ids)


def test_a_dead_rank_is_replaced_and_torchrun_sees_nothing_of_it_then_sigterm_drains(model):
    path, expected = model
    program = [SERVE, "--model", path, *SMALL, "--restart", "--threads-per-rank", "2"]
    with TorchrunJob(STANDALONE, program, environment={"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "70"}) as job:
        address = job.ready(START_S)
        assert tokens(address) == expected
        workers = supervisors(job)
        ranks = [child(worker, "epruntime.worker") for worker in workers]
        for worker, rank in zip(workers, ranks, strict=True):
            assert worker.environ()["OMP_NUM_THREADS"] == "1"  # torchrun's
            assert rank.environ()["OMP_NUM_THREADS"] == "2"
            assert not rank.environ().keys() & {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"}
            assert worker.memory_info().rss < 60 * 2**20  # no torch in it
        with Client(address, retries=0) as client, client.stream(PROMPT, max_tokens=LONG, **GREEDY) as stream:
            next(stream)
            ranks[1].kill()
            with pytest.raises(EPRuntimeError, match=r"rank 1 on host \S+ is lost: .*SIGKILL"):
                list(stream)
        assert tokens(address) == expected
        assert supervisors(job) == workers
        assert child(workers[0], "epruntime.worker") == ranks[0]
        assert child(workers[1], "epruntime.worker") != ranks[1]

        with Client(address, retries=0) as client, client.stream(PROMPT, max_tokens=LONG, **GREEDY) as stream:
            next(stream)
            job.signal(signal.SIGTERM)
            result = stream.result()  # what runs may end
        assert result.outputs[0].finish_reason == "length"
        assert job.wait(2 * END_S) == 1  # torchrun's own answer to a signal
    assert "draining: 1 request is running, and may for 62 s" in job.output
    assert "forcefully exiting" not in job.output


def test_torchrun_restarts_the_whole_job_and_tells_why_it_gives_up(model):
    path, expected = model
    with TorchrunJob([*STANDALONE, "--max-restarts", "1"], [SERVE, path, *SMALL]) as job:
        assert tokens(job.ready(START_S)) == expected
        before = supervisors(job)
        child(before[0], "epruntime.worker").kill()
        job.wait_for(r"the engine is dead: rank 0 on host \S+ is lost: .*SIGKILL", END_S)
        address = job.ready(START_S, times=2)
        after = supervisors(job)
        assert not set(before) & set(after)
        assert {worker.environ()["TORCHELASTIC_RESTART_COUNT"] for worker in after} == {"1"}
        assert tokens(address) == expected

        began = time.monotonic()
        child(after[0], "torchrun_serve").kill()  # the coordinator, without a word
        assert job.wait(END_S) == 1
        assert time.monotonic() - began < soon(10)
    summary = job.output.partition("torchrun_serve.py FAILED")[2]
    assert "the coordinator" in summary, job.output
    assert "killed by SIGKILL" in summary or "is gone" in summary


def test_a_program_of_ones_own_and_spare_workers(model):
    path, expected = model
    prompt = ",".join(map(str, PROMPT))
    program = [EXAMPLE, path, prompt, "--token-ids", "--expert-parallel-size", "1", "--max-tokens", str(COUNT)]
    with TorchrunJob(["--standalone", "--nproc-per-node", "2"], program) as job:
        assert job.wait(START_S) == 0, job.output
    assert f"{PROMPT} -> {expected}" in job.output
    assert job.output.count("-> [") == 1  # one process ran it


@pytest.mark.parametrize(("more", "code"), [([], 0), (["--cases", "nothing"], 2)])
def test_verify_on_the_workers(model, tmp_path, more, code):
    report = tmp_path / "report.json"
    flags = ["--num-prompts", "2", "--max-tokens", "2", "--cases", "batch,ranks", "--json", str(report), *more]
    with TorchrunJob(STANDALONE, [VERIFY, model[0], *flags]) as job:
        assert (job.wait(START_S) == 0) == (code == 0)
    if code:
        assert "there is no 'nothing'" in job.output
        assert f"exitcode  : {code}" in job.output
        return
    found = json.loads(report.read_text())
    assert (found["exit_code"], found["facts"]["launcher"], len(found["facts"]["hosts"])) == (0, "torchrun", 1)
    assert [case["status"] for case in found["cases"]] == ["baseline", "identical", "identical"]
    assert job.output.count("the contract holds: 2 cases") == 1


PROGRAM = """
import os, signal, sys, time
from epruntime.launchers.torchrun import num_workers, run_coordinator

def main():
    what = sys.argv[1]
    print("main", os.getpid(), num_workers(), flush=True)
    if what == "too many":
        from epruntime.engine.ranks import Ranks
        try:
            Ranks(num_workers() + 1, launcher="torchrun")
        except Exception as error:
            print(type(error).__name__, error, flush=True)
            return 7
    if what == "ranks":
        from epruntime.engine.ranks import Ranks
        ranks = Ranks(2, launcher="torchrun")
        print("up", flush=True)
    time.sleep(600)

run_coordinator(main)
"""


@pytest.fixture
def program(tmp_path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


def test_exit_code_of_a_program_and_more_ranks_than_workers(program):
    with TorchrunJob(STANDALONE, [program, "too many"]) as job:
        assert job.wait(END_S) == 1
    assert job.output.count("main ") == 1
    assert "exitcode  : 7" in job.output
    # worker 0's own word, or the other's, which has it from the coordinator: torchrun stops all when the first ends
    assert re.search("the coordinator(, on this host, ended:| on host .* ended with) exit code 7", job.output)
    words = "LaunchError 3 ranks were asked for (expert_parallel_size), and torchrun has started 2 workers on 1 host, "
    assert words in job.output


def test_a_program_without_handlers_ends_at_ctrl_c(program):
    with TorchrunJob(STANDALONE, [program, "sleep"]) as job:
        pid = int(job.wait_for("main ([0-9]+) 2", END_S)[1])
        assert psutil.Process(pid).ppid() == supervisors(job)[0].pid
        job.signal(signal.SIGINT)
        assert job.wait(END_S) != 0
    assert "KeyboardInterrupt" in job.output


def test_everything_ends_with_worker_0(program):
    with TorchrunJob(STANDALONE, [program, "sleep"]) as job:
        pid = int(job.wait_for("main ([0-9]+) 2", END_S)[1])
        coordinator = psutil.Process(pid)
        supervisors(job)[0].kill()
        assert psutil.wait_procs([coordinator], timeout=END_S)[1] == []
        assert job.wait(END_S) == 1


def test_everything_ends_with_the_agent(program):
    with TorchrunJob(STANDALONE, [program, "ranks"]) as job:
        job.wait_for("^up", START_S)
        everything = psutil.Process(job.process.pid).children(recursive=True)
        assert len(everything) == 5  # two supervisors, the coordinator, two ranks
        os.kill(job.process.pid, signal.SIGKILL)
        assert psutil.wait_procs(everything, timeout=END_S)[1] == []
        assert job.wait(END_S) == -signal.SIGKILL
