"""torchrun on two hosts: both ways of meeting, what crosses the wire, and a cable that is pulled in mid-stream."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.testing import tiny_models
from epruntime.testing.hosts import Host, StandInHosts
from epruntime.testing.patience import PATIENCE_S, soon
from epruntime.testing.reference import greedy_reference
from epruntime.testing.torchrun_job import TorchrunJob

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
SERVE, EXAMPLE = str(ROOT / "launch/torchrun_serve.py"), str(ROOT / "examples/multi_node/torchrun_generate.py")
START_S, END_S = 120.0, PATIENCE_S
COUNT, LONG = 6, 400
_RANDOM = random.Random(0)
PROMPTS = [[_RANDOM.randrange(3, 128) for _ in range(48)] for _ in range(6)]
#: a silent rank is lost after so long; it gets 10 s to be confirmed dead, which nobody can across a cut link.
HEARTBEAT_TIMEOUT_S, CONFIRM_S, MARGIN_S = 3.0, 10.0, 8.0
PORT = 29500

CLIENT = """
import json, sys
from epruntime.client import Client
from epruntime.errors import EPRuntimeError
address, request = sys.argv[1], json.loads(sys.argv[2])
with Client(address, timeout=100, retries=0) as client:
    if "info" in request:
        info = client.info()
        print(json.dumps({"transport": info.raw["engine"]["transport"], "hosts": [rank.host for rank in info.ranks]}))
    elif "stream" in request:
        try:
            count = 0
            for chunk in client.stream(request["stream"], max_tokens=request["count"], temperature=0, ignore_eos=True):
                count += len(chunk.token_ids)
                print(count, flush=True)
        except EPRuntimeError as error:
            print(f"error: {error}", flush=True)
    else:
        done = client.generate(request["prompts"], max_tokens=request["count"], temperature=0, ignore_eos=True)
        print(json.dumps([list(result.outputs[0].token_ids) for result in done]))
"""


@dataclass(frozen=True)
class Model:
    """A tiny model; tokens that transformers continues PROMPTS with; bytes that must cross between two ranks."""

    path: str
    tokens: list[list[int]]
    wire_bytes: int


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    _, made = tiny_models.build("mixtral", 0)
    reference = greedy_reference(made, PROMPTS, max_new_tokens=COUNT)
    assert min(reference.router_margin, reference.top1_margin) > 1e-5  # else equality would be luck
    tokens, wire_bytes = reference.tokens, 0
    for prompt, output in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([prompt + output[:-1]])  # the last token is never an input
        with torch.no_grad():
            logits = made(ids, output_router_logits=True).router_logits
        # Experts 0-3 are rank 0's. A token whose layer needs one of the other rank's sends a row, and gets one back.
        # Which rank has the request is not told here: the lesser number.
        crossings = [
            sum(int((layer.topk(2).indices // 4 == other).any(-1).sum()) for layer in logits) for other in (0, 1)
        ]
        wire_bytes += min(crossings) * made.config.hidden_size * 4
    return Model(str(tiny_models.save(made, tmp_path_factory.mktemp("tiny"))), tokens, wire_bytes)


@pytest.fixture
def hosts() -> Iterator[StandInHosts]:
    with StandInHosts() as hosts:
        yield hosts


@contextlib.contextmanager
def jobs(
    hosts: StandInHosts, options: list[str], program: list[str], **environment: str
) -> Iterator[list[TorchrunJob]]:
    """The same torchrun on all hosts, but for --node-rank."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                TorchrunJob(
                    ["--nnodes", "2", *options, *([] if "--rdzv-backend" in options else ["--node-rank", str(number)])],
                    program,
                    environment=environment,
                    popen=host.popen,
                )
            )
            for number, host in enumerate(hosts)
        ]


def static(hosts: StandInHosts) -> list[str]:
    return ["--master-addr", hosts[0].address, "--master-port", str(PORT)]


def c10d(hosts: StandInHosts) -> list[str]:
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{hosts[0].name}:{PORT}", "--rdzv-id", "job"]


def ask(host: Host, address: str, **request: Any) -> Any:
    return json.loads(host.run([sys.executable, "-c", CLIENT, address, json.dumps(request)]).stdout.splitlines()[-1])


def free_of_processes(host: Host) -> None:
    deadline = time.monotonic() + PATIENCE_S / 2
    while left := host.processes():
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_text() for pid in left]
        time.sleep(0.05)


def test_static_meeting_tokens_wire_and_a_cut(hosts, model):
    a, b = hosts
    flags = [
        "--port", "0", "--grpc-port", "0", "--max-model-len", "512", "--num-kv-blocks", "256",
        "--heartbeat-timeout-s", str(HEARTBEAT_TIMEOUT_S),
    ]  # fmt: skip
    with jobs(hosts, ["--nproc-per-node", "1", *static(hosts)], [SERVE, model.path, *flags]) as (on_a, on_b):
        address = on_a.ready(START_S)
        for rank, host in enumerate((a, b)):
            on_a.wait_for(
                f"rank {rank} on host {host.name}, .*gloo exchange at address {host.address}, .*eth0", PATIENCE_S
            )
        assert ask(a, address, info=True) == {"transport": "gloo", "hosts": ["host-a", "host-b"]}
        before = a.bytes_sent, b.bytes_sent, a.bytes_received, b.bytes_received
        assert ask(a, address, prompts=PROMPTS, count=COUNT) == model.tokens
        after = a.bytes_sent, b.bytes_sent, a.bytes_received, b.bytes_received
        assert model.wire_bytes > 100_000
        for old, new in zip(before, after, strict=True):
            assert new - old > model.wire_bytes

        request = json.dumps({"stream": PROMPTS[0], "count": LONG})
        with a.popen([sys.executable, "-c", CLIENT, address, request], stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout.readline() == "1\n"
            hosts.link_down()
            cut = time.monotonic()
            words = client.stdout.read()
        assert time.monotonic() - cut < soon(HEARTBEAT_TIMEOUT_S + CONFIRM_S + MARGIN_S)
        assert "error: " in words
        assert "rank 1 on host host-b is lost: no heartbeat for" in words
        # Nobody is left on the near side, nor on the far side, which hears from nobody.
        assert on_a.wait(END_S) == 1
        assert on_b.wait(END_S) == 1
        assert time.monotonic() - cut < soon(60)
        assert "the coordinator on host host-a is gone" in on_b.output
    for host in hosts:
        free_of_processes(host)


def test_c10d_meeting_two_workers_per_host(hosts, model):
    prompts = [",".join(map(str, prompt)) for prompt in PROMPTS[:2]]
    program = [EXAMPLE, model.path, *prompts, "--token-ids", "--max-tokens", str(COUNT)]
    with jobs(hosts, ["--nproc-per-node", "2", *c10d(hosts)], program) as both:
        assert [job.wait(START_S) for job in both] == [0, 0], "\n".join(job.output for job in both)
    lines = [line for job in both for line in job.lines if " -> [" in line]
    assert lines == [f"{prompt} -> {tokens}" for prompt, tokens in zip(PROMPTS[:2], model.tokens[:2], strict=True)]
    for host in hosts:
        free_of_processes(host)


#: ends as a server that drains, once all workers are there
PROGRAM = """
import signal, sys, time
from epruntime.launchers.torchrun import num_workers, run_coordinator
from epruntime.launchers.torchrun_hub import this_hub

def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while len(this_hub()._links) < num_workers():
        time.sleep(0.01)
    print("main", flush=True)
    signal.pause()

run_coordinator(main)
"""


def test_one_endpoint_again_and_stopping_one_host_stops_all(hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--nproc-per-node", "1", "--max-restarts", "3", *c10d(hosts)]
    for secret in ({}, {"EPRUNTIME_JOB_SECRET": "hush"}):
        with jobs(hosts, options, [str(program)], **secret) as both:
            wait_for_any("main", both)
            both[1].signal(signal.SIGTERM)
            # Also on the host that was not told to stop, whose workers ended well, and which had restarts left.
            assert [job.wait(END_S) for job in both] == [1, 1], "\n".join(job.output for job in both)
        assert sum(job.lines.count("main") for job in both) == 1
        assert "hush" not in "".join(job.output for job in both)
        for host in hosts:
            free_of_processes(host)


#: ends while other workers still look for it, or when it is told to
EARLY = """
import sys, time
from epruntime.launchers.torchrun import run_coordinator

def main():
    print("main", flush=True)
    if sys.argv[1] == "waits":
        time.sleep(600)
    sys.exit(int(sys.argv[1]))

run_coordinator(main)
"""


# With c10d the agents may count a restart apart, so how often they start all anew is not told here.
@pytest.mark.parametrize(("meet", "code", "restarts"), [(static, 0, 0), (static, 3, 1), (c10d, 0, 0), (c10d, 3, 0)])
def test_a_program_that_ends_at_once_ends_the_job(hosts, tmp_path, meet, code, restarts):
    program = tmp_path / "program.py"
    program.write_text(EARLY)
    options = ["--nproc-per-node", "1", "--max-restarts", str(restarts), *meet(hosts)]
    began = time.monotonic()
    with jobs(hosts, options, [str(program), str(code)]) as both:
        assert [job.wait(START_S) for job in both] == [int(code > 0)] * 2, "\n".join(job.output for job in both)
    assert time.monotonic() - began < soon(60)
    assert sum(job.lines.count("main") for job in both) == 1 + restarts
    for host in hosts:
        free_of_processes(host)


def test_stopping_a_host_whose_workers_have_not_come_stops_all(hosts, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(EARLY)
    with jobs(hosts, ["--nproc-per-node", "1", *static(hosts)], [str(program), "waits"]) as (on_a, on_b):
        on_a.wait_for("^main", START_S)
        on_b.signal(signal.SIGTERM)
        assert [on_a.wait(END_S), on_b.wait(END_S)] == [1, 1], on_a.output + on_b.output
    for host in hosts:
        free_of_processes(host)


def wait_for_any(line: str, both: list[TorchrunJob]) -> None:
    """Until one of them has printed this line: c10d decides where worker 0 is."""
    deadline = time.monotonic() + START_S
    while not any(line in job.lines for job in both):
        assert time.monotonic() < deadline, "\n".join(job.output for job in both)
        time.sleep(0.05)
