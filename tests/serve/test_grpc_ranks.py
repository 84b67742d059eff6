"""gRPC on two real rank processes: however a client leaves, its request's blocks are free within a step."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from raw_http2 import UnreadCall
from serving import Serving, wait_until

from epruntime.client import Client
from epruntime.errors import RequestAbortedError, RequestTimeoutError
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import keys
from epruntime.testing.patience import soon

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
START_S = 120
#: Plans in flight: a request that leaves is out of the plan after these.
PIPELINE_DEPTH = 2
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}


class RankServing(Serving):
    """Serving on an AsyncLLM with two ranks instead of a FakeLLM."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model

    def __enter__(self) -> RankServing:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._create(), self._loop).result(START_S)
        return self

    async def _create(self) -> None:
        from epruntime.config import EngineConfig
        from epruntime.engine.async_llm import AsyncLLM

        config = EngineConfig.from_kwargs(
            model=self._model, expert_parallel_size=2, threads_per_rank=1, block_size=4, num_kv_blocks=512,
            max_num_seqs=8, max_num_batched_tokens=32, pipeline_depth=PIPELINE_DEPTH,
        )  # fmt: skip
        self.llm: Any = await AsyncLLM.create(config)
        await self._start()

    def __exit__(self, *exc_info: object) -> None:
        self.run(self.gate.close("the test is over"))
        asyncio.run_coroutine_threadsafe(self.llm.shutdown(), self._loop).result(START_S)
        super().__exit__(*exc_info)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RankServing]:
    from epruntime.testing.tiny_models import build, save

    path = tmp_path_factory.mktemp("tiny")
    save(build("mixtral", seed=0)[1], path)
    with RankServing(str(path)) as running:
        yield running


@dataclass(frozen=True, kw_only=True)
class Freed:
    """Seconds on the monotonic clock, and steps of the engine."""

    at: float
    steps_after_the_stream_ended: int


def _load(server: RankServing) -> tuple[int, float]:
    """Running and waiting sequences, and used shares of KV blocks, over all ranks."""
    ranks = server.llm.stats_snapshot().ranks
    return sum(r.num_running + r.num_waiting for r in ranks), sum(r.kv_usage for r in ranks)


async def _watch(server: RankServing, request_id: str, left: int) -> Freed:
    """Waits until the request has left the front end, and then until `left` sequences are in the schedulers."""
    while request_id in server.gate.live:
        await asyncio.sleep(0.0005)
    steps = server.llm.stats_snapshot().steps
    while _load(server)[0] > left:
        await asyncio.sleep(0)
    return Freed(at=time.monotonic(), steps_after_the_stream_ended=server.llm.stats_snapshot().steps - steps)


def _leave_by_cancel(server: RankServing, request: pb.GenerateRequest, watch: Callable[[], Any]) -> tuple[float, Any]:
    with Client(server.address, timeout=60) as client:
        stream = client._start(request, None)
        next(stream)
        watching = watch()
        left_at = time.monotonic()
        stream.close()
        with pytest.raises(RequestAbortedError):
            list(stream)
        return left_at, watching


def _leave_by_deadline(server: RankServing, request: pb.GenerateRequest, watch: Callable[[], Any]) -> tuple[float, Any]:
    with Client(server.address) as client:
        left_at = time.monotonic() + 0.8
        stream = client._start(request, 0.8)
        next(stream)
        watching = watch()
        with pytest.raises(RequestTimeoutError):
            list(stream)
        return left_at, watching


def _leave_by_disconnect(
    server: RankServing, request: pb.GenerateRequest, watch: Callable[[], Any]
) -> tuple[float, Any]:
    """The socket is closed without a word of HTTP/2, as when the client's process is killed."""
    call = UnreadCall(server.address, f"/{keys.SERVICE}/Generate", request.SerializeToString())
    wait_until(lambda: request.request_id in server.gate.live, "it has begun")
    wait_until(lambda: _load(server)[0] > 1, "it runs")
    watching = watch()
    left_at = time.monotonic()
    call.close()
    return left_at, watching


def _leave_by_abort(server: RankServing, request: pb.GenerateRequest, watch: Callable[[], Any]) -> tuple[float, Any]:
    with Client(server.address, timeout=60) as client:
        stream = client._start(request, None)
        next(stream)
        watching = watch()
        left_at = time.monotonic()
        client.abort(request.request_id)
        assert list(stream)[-1].finish_reason == "abort"
        return left_at, watching


@pytest.mark.parametrize(
    ("leave", "n"),
    [(_leave_by_cancel, 1), (_leave_by_cancel, 3), (_leave_by_deadline, 3), (_leave_by_disconnect, 3),
     (_leave_by_abort, 3)],
)  # fmt: skip
def test_blocks_are_free_within_a_step(server, leave, n):
    from epruntime.client import wire

    wait_until(lambda: _load(server) == (0, 0.0), "idle before")
    with Client(server.address, timeout=60) as other:
        stays = other.stream({"prompt_token_ids": [9, 8, 7]}, **LONG)
        next(stays)  # keeps the steps going while the other one leaves
        request = wire.request({"prompt_token_ids": [5, 6]}, {**LONG, "n": n}, f"{leave.__name__}-{n}")

        def watch() -> Any:
            return asyncio.run_coroutine_threadsafe(_watch(server, request.request_id, 1), server._loop)

        left_at, watching = leave(server, request, watch)
        freed: Freed = watching.result(60)
        assert freed.steps_after_the_stream_ended <= PIPELINE_DEPTH
        assert freed.at - left_at < soon(3.0)  # the ways of a leaving client through the network
        assert sum(len(next(stays).token_ids) for _ in range(3)) >= 3
        stays.close()
    wait_until(lambda: _load(server) == (0, 0.0), "no block is left in use")


def test_readers_that_never_read_hold_no_blocks_once_they_have_ended(server):
    """Their outputs wait in the coordinator; the ranks are done with them."""
    wait_until(lambda: _load(server) == (0, 0.0), "idle before")
    calls = [
        UnreadCall(
            server.address,
            f"/{keys.SERVICE}/Generate",
            pb.GenerateRequest(
                request_id=f"unread-{i}", token_ids=pb.TokenIds(ids=[5 + i]),
                sampling=pb.SamplingParams(max_tokens=40, ignore_eos=True, logprobs=20),
            ).SerializeToString(),
        )
        for i in range(12)
    ]  # fmt: skip
    try:
        wait_until(lambda: sum(i.startswith("unread-") for i in server.gate.live) == 12, "all have begun")
        with Client(server.address, timeout=60) as client:
            assert client.generate({"prompt_token_ids": [9]}, **{**LONG, "max_tokens": 20}).usage.output_tokens == 20
        wait_until(lambda: _load(server) == (0, 0.0), "all have been generated and hold nothing")
        assert sum(i.startswith("unread-") for i in server.gate.live) == 12
    finally:
        for call in calls:
            call.close()
    wait_until(lambda: not server.gate.live, "all have gone")


def test_tokens_and_facts_of_a_model_without_a_tokenizer(server):
    with Client(server.address, timeout=60) as client:
        info = client.model_info()
        assert (info.model_type, info.has_tokenizer, info.has_chat_template) == ("mixtral", False, False)
        assert (info.vocab_size, info.max_model_len) == (128, 512)
        assert info.num_parameters > 0
        result = client.generate(
            {"prompt_token_ids": [5, 6, 7]}, temperature=0, max_tokens=2, prompt_logprobs=2,
            return_prompt_token_ids=True,
        )  # fmt: skip
        assert result.prompt_token_ids == [5, 6, 7]
        assert result.prompt_logprobs[0] is None
        for token, entry in zip([6, 7], result.prompt_logprobs[1:], strict=True):
            assert token in entry
            assert all(e.logprob < 0 for e in entry.values())


def test_many_threads_at_once_come_and_go(server):
    def one(number: int) -> None:
        with Client(server.address, timeout=60) as client:
            stream = client.stream({"prompt_token_ids": [5 + number]}, **{**LONG, "max_tokens": 20})
            for taken, _ in enumerate(stream):
                if taken >= number % 7:
                    break
            stream.close()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wait_until(lambda: _load(server) == (0, 0.0) and not server.gate.live, "all have gone and hold nothing")
