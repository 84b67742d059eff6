"""`epruntime serve` on two rank processes and a tiny random model: the whole way, with signals and dead ranks."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from serving import wait_until

from epruntime.client import AsyncClient, Client
from epruntime.errors import EPRuntimeError, InvalidRequestError, RankLostError
from epruntime.testing.patience import PATIENCE_S, soon

torch = pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 120
NEW_TOKENS = 16
PROMPTS = [[(7 * i + 3 * j) % 120 + 3 for j in range(n)] for i, n in enumerate((1, 2, 5, 17, 31, 40, 60, 90))]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, list[list[int]]]:
    """A saved model and what transformers generates from each of PROMPTS alone."""
    from epruntime.testing.reference import greedy_reference
    from epruntime.testing.tiny_models import build, save

    path = tmp_path_factory.mktemp("tiny")
    _, made = build("mixtral", seed=0)
    reference = greedy_reference(made, PROMPTS, max_new_tokens=NEW_TOKENS)
    assert min(reference.router_margin, reference.top1_margin) > 1e-5
    save(made, path)
    return path, reference.tokens


class Server:
    """The server in a process group of its own, as a terminal would have it."""

    def __init__(self, model: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "epruntime.cli", "serve", str(model), "--expert-parallel-size", "2", "--port", "0",
             "--grpc-port", "0", "--max-num-batched-tokens", "32", "--max-num-seqs", "8", "--threads-per-rank", "1"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.popen.stderr:
            self.log.append(line)

    def address(self) -> str:
        line = self.popen.stdout.readline()
        assert line.startswith("epruntime is ready: gRPC on "), (line, "".join(self.log))
        return line.split()[5].rstrip(",")

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.log)

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.popen.pid).children(recursive=True)

    def interrupt(self) -> None:
        """Ctrl-C: the terminal signals the whole group."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def end(self, children: list[psutil.Process]) -> int:
        """Exit code, once it has ended and none of the children is left."""
        code = self.popen.wait(DEADLINE_S)
        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S / 2)
        assert not alive
        return code

    def kill(self) -> None:
        children = self.children() if self.popen.poll() is None else []
        self.popen.kill()
        for child in children:
            child.kill()
        self.popen.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        self.popen.stdout.close()
        self.popen.stderr.close()


@pytest.fixture
def start(model) -> Iterator[Callable[[], Server]]:
    started: list[Server] = []

    def starter() -> Server:
        started.append(Server(model[0]))
        return started[-1]

    yield starter
    for server in started:
        server.kill()


def _idle(client: Client) -> bool:
    ranks = client.info().raw["ranks"]
    return all(not r["scheduler"]["num_running"] and not r["scheduler"]["num_waiting"] for r in ranks)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_tokens_cancels_refusals_and_ctrl_c(start, model):
    server = start()
    with Client(server.address(), timeout=DEADLINE_S) as client:
        prompts = [{"prompt_token_ids": p} for p in PROMPTS]
        results = client.generate(prompts, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=2)
        assert [r.token_ids for r in results] == model[1]
        for result in results:
            assert [max(entry, key=lambda i: entry[i].logprob) for entry in result.logprobs] == result.token_ids
            assert result.finish_reason == "length"

        for prompt, options, field in (
            ({"prompt_token_ids": [128]}, {}, "prompt_token_ids"),
            ({"prompt_token_ids": [5] * 600}, {}, "prompt"),
            ("text without a tokenizer", {}, "prompt"),
            ({"messages": [{"role": "user", "content": "x"}]}, {}, "messages"),
            ({"prompt_token_ids": [5]}, {"stop_token_ids": [999]}, "stop_token_ids"),
        ):
            with pytest.raises(InvalidRequestError) as caught:
                client.generate(prompt, **options)
            assert caught.value.field == field

        asyncio.run(_many_with_cancels(client.address, model[1]))
        wait_until(lambda: _idle(client), "all requests have left the schedulers")
        info = client.info()
        assert info.state == "ready"
        assert len(info.ranks) == info.expert_parallel_size == 2
        assert sum(sum(layer.tokens_per_expert) for layer in info.expert_load) > 0
        for layer in info.expert_load:
            assert sum(layer.tokens_per_expert) == sum(layer.tokens_per_rank)

        # Ctrl-C while a request runs: it is allowed to end
        stream = client.stream({"prompt_token_ids": [5]}, max_tokens=200, ignore_eos=True, temperature=0)
        next(stream)
        children = server.children()
        assert len(children) >= 2
        server.interrupt()
        *_, last = stream
        assert (last.finish_reason, last.usage.output_tokens) == ("length", 200)
        assert server.end(children) == 0


async def _many_with_cancels(address: str, expected: list[list[int]]) -> None:
    """60 streams, a third of them left early; the others are not touched by that."""
    choose = random.Random(0)
    async with AsyncClient(address, timeout=DEADLINE_S) as client:

        async def one(number: int) -> None:
            which, leave_after = number % len(PROMPTS), choose.randrange(NEW_TOKENS) if number % 3 == 0 else None
            tokens: list[int] = []
            prompt = {"prompt_token_ids": PROMPTS[which]}
            async with client.stream(prompt, temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True) as stream:
                async for chunk in stream:
                    tokens += chunk.token_ids
                    if leave_after is not None and len(tokens) > leave_after:
                        return
            assert tokens == expected[which]

        await asyncio.gather(*(one(i) for i in range(60)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_is_named_and_ends_the_server(start):
    server = start()
    with Client(server.address(), timeout=DEADLINE_S) as client:
        children, ranks = server.children(), client.info().ranks
        stream = client.stream({"prompt_token_ids": [5]}, max_tokens=400, ignore_eos=True, temperature=0)
        next(stream)
        began = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGKILL)
        with pytest.raises(RankLostError, match="rank 1") as caught:
            list(stream)
        assert time.monotonic() - began < soon(5)
        assert caught.value.slot == 1
        wait_until(lambda: _health(client) != "serving", "health says so")
        assert server.end(children) == 1
        assert server.logged("the engine is dead")


def _health(client: Client) -> str:
    try:
        return client.health()
    except EPRuntimeError:
        return "gone"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("moment", ["at once", "ranks are up"])
def test_ctrl_c_while_it_starts_leaves_nothing(start, moment):
    server = start()
    if moment == "at once":
        wait_until(lambda: len(server.children()) >= 2, "rank processes have started")
    else:
        wait_until(lambda: server.logged(moment), moment)
    children = server.children()
    server.interrupt()
    assert server.end(children) == 130
    assert not server.logged("Traceback")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_offline_generate_on_the_command_line(tmp_path):
    import json

    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from epruntime.testing.reference import greedy_reference
    from epruntime.testing.tiny_models import build, save

    _, made = build("mixtral", seed=0)
    reference = greedy_reference(made, [[5, 7], [11]], max_new_tokens=8)
    save(made, tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)

    done = subprocess.run(
        [sys.executable, "-m", "epruntime.cli", "generate", "--model", str(tmp_path), "--expert-parallel-size", "2",
         "--temperature", "0", "--ignore-eos", "--max-tokens", "8", "--json", "w5 w7", "w11"],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [r["outputs"][0]["token_ids"] for r in results] == reference.tokens
    assert [r["outputs"][0]["text"].split() for r in results] == [
        [f"w{i}" for i in tokens] for tokens in reference.tokens
    ]
