"""Generate over real sockets: what goes in, what comes out, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import time

import grpc
import pytest
from fake_llm import INFO, FakeLLM
from serving import Serving, wait_until

from epruntime.client import AsyncClient, Client, LayerLoad
from epruntime.errors import (
    EngineDeadError,
    EPRuntimeError,
    InvalidRequestError,
    QueueFullError,
    RankLostError,
    RequestAbortedError,
    RequestNotFoundError,
    RequestTimeoutError,
    UnavailableError,
)
from epruntime.outputs import Logprob
from epruntime.proto import inference_pb2 as pb
from epruntime.proto import keys
from epruntime.sampling_params import SamplingParams
from epruntime.testing.patience import soon

UNICODE = "Grüße, 世界 👩‍👩‍👧 \u0000\u202e\ufeff"


@pytest.fixture(scope="module")
def server():
    with Serving() as running:
        yield running


@pytest.fixture
def slow():
    with Serving(FakeLLM(delay_s=0.02)) as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.address, timeout=20) as c:
        yield c


def test_one_prompt_gives_one_result(client):
    result = client.generate("abc", max_tokens=5)
    assert (result.text, result.token_ids, result.finish_reason) == ("abcab", [97, 98, 99, 97, 98], "length")
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (3, 5)
    assert result.seed == 7
    assert 0 <= result.timing.ttft_s <= result.timing.e2e_s < 20
    assert result.timing.queue_s is None  # the fake does not say


def test_list_gives_results_in_order(client):
    prompts = [f"prompt {i}" for i in range(300)]
    params = [SamplingParams(max_tokens=8 + i % 3) for i in range(300)]
    results = client.generate(prompts, params)
    assert [r.text for r in results] == [(p * 2)[: 8 + i % 3] for i, p in enumerate(prompts)]
    assert client.generate([], max_tokens=2) == []


@pytest.mark.parametrize(
    ("prompt", "seen"),
    [
        ([104, 105], {"prompt_token_ids": [104, 105]}),
        ({"prompt_token_ids": [104, 105]}, {"prompt_token_ids": [104, 105]}),
        ({"prompt": "hi"}, "hi"),
        ({"messages": [{"role": "user", "content": "hi"}]}, {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
def test_kinds_of_prompt(server, client, prompt, seen):
    result = client.generate(prompt, max_tokens=2)
    assert result.text == "hi"
    assert server.llm.prompts[result.request_id] == seen


def test_list_of_token_id_lists_is_many_prompts(client):
    assert [r.text for r in client.generate([[97], [98, 99]], max_tokens=2)] == ["aa", "bc"]


def test_unicode_survives(client):
    assert client.generate(UNICODE, max_tokens=len(UNICODE)).text == UNICODE
    assert "".join(c.text for c in client.stream(UNICODE, max_tokens=len(UNICODE))) == UNICODE
    with pytest.raises(InvalidRequestError, match="Unicode") as caught:
        client.generate("half \ud83d")
    assert caught.value.field == "prompt"


def test_absent_is_not_zero(server, client):
    absent = client.generate("abc")
    assert server.llm.params[absent.request_id] == SamplingParams()
    everything = SamplingParams(
        temperature=0.0, top_k=0, top_p=0.3, min_p=0.0, repetition_penalty=1.5, presence_penalty=-2.0,
        frequency_penalty=0.0, logit_bias={0: -100.0, 7: 0.0}, seed=0, max_tokens=None, min_tokens=0, stop=("q", "zz"),
        stop_token_ids=(0, 5), ignore_eos=True, logprobs=0, prompt_logprobs=0, skip_special_tokens=False,
    )  # fmt: skip
    result = client.generate("abc", everything)
    assert server.llm.params[result.request_id] == everything
    assert (result.text, result.finish_reason, result.stop_reason, result.seed) == ("abc", "length", None, 0)


def test_stop_string_and_its_reason(client):
    result = client.generate("abc", stop="b", max_tokens=9)
    assert (result.text, result.finish_reason, result.stop_reason) == ("a", "stop", "b")


def test_logprobs(client):
    result = client.generate("ab", logprobs=2, max_tokens=2)
    assert result.logprobs == [
        {97: Logprob(-0.5, "a"), 0: Logprob(-1.0, "0"), 1: Logprob(-2.0, "1")},
        {98: Logprob(-0.5, "b"), 0: Logprob(-1.0, "0"), 1: Logprob(-2.0, "1")},
    ]
    assert client.generate("ab", max_tokens=2).logprobs is None
    assert [len(entry) for entry in client.generate("ab", max_tokens=2, logprobs=0).logprobs] == [1, 1]


def test_stream_pieces_and_final_message(slow):
    with Client(slow.address) as client:
        chunks = list(client.stream("abcdefgh", max_tokens=8))
    assert len(chunks) > 3
    assert "".join(c.text for c in chunks) == "abcdefgh"
    assert [c.final for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(c.usage is None and c.finish_reason is None for c in chunks[:-1])
    assert chunks[-1].finish_reason == "length"
    assert chunks[-1].usage.output_tokens == sum(len(c.token_ids) for c in chunks) == 8


def test_chat(client):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hello"}]
    assert client.chat(messages, max_tokens=5).text == "hello"
    assert "".join(c.text for c in client.chat(messages, stream=True, max_tokens=5)) == "hello"


def test_request_id_is_in_the_initial_metadata_before_any_token():
    with Serving(FakeLLM(delay_s=30)) as server, grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream(
            f"/{keys.SERVICE}/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )(pb.GenerateRequest(text="abc"), timeout=10)
        request_id = dict(call.initial_metadata())[keys.REQUEST_ID]
        with Client(server.address) as client:
            client.abort(request_id)
        (last,) = call
        assert (last.final, last.finish_reason, last.request_id) == (True, pb.FINISH_REASON_ABORT, request_id)


def test_abort_from_another_connection(slow):
    with Client(slow.address) as one, Client(slow.address) as two:
        stream = one.stream("abc", max_tokens=10_000, request_id="mine")
        first = next(stream)
        two.abort("mine")
        *_, last = [first, *stream]
        assert (last.finish_reason, last.final) == ("abort", True)
        assert last.usage.output_tokens >= 1
        with pytest.raises(RequestNotFoundError, match="mine"):
            two.abort("mine")


def test_a_duplicate_id_is_refused_and_leaves_the_first_alone(slow):
    with Client(slow.address) as client:
        stream = client.stream("abc", max_tokens=30, request_id="same")
        next(stream)
        with pytest.raises(InvalidRequestError, match="live request") as caught:
            list(client.stream("xyz", request_id="same"))
        assert caught.value.field == "request_id"
        assert list(stream)[-1].finish_reason == "length"


@pytest.mark.parametrize("how", ["close", "with", "forget", "channel"])
def test_leaving_a_stream_ends_the_request(slow, how):
    client = Client(slow.address)
    stream = client.stream("abc", max_tokens=100_000)
    next(stream)
    assert stream.request_id in slow.llm.live
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    elif how == "channel":
        client.close()
    else:
        del stream
        gc.collect()
    wait_until(lambda: not slow.llm.live, "the request ended")
    assert slow.gate.live == frozenset()
    client.close()


def test_deadline_ends_the_request(slow):
    with Client(slow.address) as client:
        began = time.monotonic()
        with pytest.raises(RequestTimeoutError, match="timeout"):
            client.generate("abc", max_tokens=100_000, timeout=0.3)
        assert time.monotonic() - began < soon(3)
        wait_until(lambda: not slow.llm.live, "the request ended")


def test_async_cancellation_ends_the_request(slow):
    async def main() -> None:
        async with AsyncClient(slow.address) as client:
            task = asyncio.create_task(client.generate("abc", max_tokens=100_000))
            while not slow.llm.live:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(wait_until, lambda: not slow.llm.live, "the request ended")
            stream = client.stream("abc", max_tokens=100_000)
            await anext(stream)
            stream.close()
            with pytest.raises(RequestAbortedError):
                await stream.result()
            await asyncio.to_thread(wait_until, lambda: not slow.llm.live, "the request ended")
            async for _ in client.stream("abc", max_tokens=100_000):
                break
            gc.collect()
            await asyncio.to_thread(wait_until, lambda: not slow.llm.live, "the request ended")

    asyncio.run(main())


def test_a_hundred_streams_with_cancels():
    with Serving(FakeLLM(delay_s=0.005)) as server:

        async def main() -> list[str]:
            async with AsyncClient(server.address, timeout=20) as client:

                async def one(number: int) -> str:
                    async with client.stream(f"prompt {number}", max_tokens=40) as stream:
                        text = ""
                        async for chunk in stream:
                            text += chunk.text
                            if number % 3 == 0 and len(text) > 5:
                                break
                        return text

                return await asyncio.gather(*(one(i) for i in range(100)))

        texts = asyncio.run(main())
        for number, text in enumerate(texts):
            whole = (f"prompt {number}" * 10)[:40]
            assert text == whole if number % 3 else whole.startswith(text)
        wait_until(lambda: not server.llm.live and not server.gate.live, "all requests ended")
        assert len(server.llm.ended) == 100


def test_async_list_in_order_and_first_failure_ends_the_rest(slow):
    async def main() -> None:
        async with AsyncClient(slow.address, timeout=20) as client:
            results = await client.generate(["ab", "cd"], max_tokens=2)
            assert [r.text for r in results] == ["ab", "cd"]
            with pytest.raises(InvalidRequestError):
                await client.generate(["abc", ""], max_tokens=100_000)
            await asyncio.to_thread(wait_until, lambda: not slow.llm.live, "the other request ended")

    asyncio.run(main())
    with Client(slow.address, timeout=20) as client, pytest.raises(InvalidRequestError):
        client.generate(["abc", ""], max_tokens=100_000)
    wait_until(lambda: not slow.llm.live, "the other request ended")


@pytest.mark.parametrize(
    ("error", "kind", "attributes"),
    [
        (InvalidRequestError("too long; shorten it", field="prompt", value="9 tokens"), None, {"field": "prompt"}),
        (QueueFullError("full", retry_after_s=2.5), None, {"retry_after_s": 2.5}),
        (EngineDeadError("it is over"), None, {}),
        (RankLostError(slot=3, host="höst", detail="step 7, layer 2, all_to_all"), None, {"slot": 3}),
        (RequestAbortedError("gone"), None, {}),
        (KeyError("a fault"), EPRuntimeError, {}),
        (InvalidRequestError("use less. " + "é" * 9000 + " the remedy", field="stop", value="x" * 9000), None, {}),
    ],
)
def test_errors_come_back_as_themselves(error, kind, attributes):
    with Serving() as server, Client(server.address, timeout=10, retries=0) as client:
        server.llm.errors["boom"] = error
        with pytest.raises(kind or type(error)) as caught:
            client.generate("boom")
        assert type(caught.value) is (kind or type(error))
        if kind is None and len(str(error)) < 500:
            assert str(caught.value) == str(error)
        assert str(caught.value).endswith(str(error)[-8:]) or kind
        for name, value in attributes.items():
            assert getattr(caught.value, name) == value


def test_engine_death_ends_streams_with_unavailable(slow):
    with Client(slow.address, timeout=10, retries=0) as client:
        stream = client.stream("abc", max_tokens=100_000)
        next(stream)
        error = RankLostError(slot=1, host="b", detail="layer 3, all_to_all")
        slow.call(slow.llm.die, error)
        with pytest.raises(RankLostError, match="layer 3") as caught:
            list(stream)
        assert caught.value.__cause__.code() is grpc.StatusCode.UNAVAILABLE
        slow.call(slow.gate.die, error)
        with pytest.raises(RankLostError):
            client.generate("abc")
        assert client.health() == "not serving"
        assert client.info().state == "dead"


def test_info(server, client):
    info = client.info()
    assert (info.model, info.state, info.expert_parallel_size) == ("echo", "ready", 2)
    assert [(r.slot, r.incarnation, r.host) for r in info.ranks] == [(0, 1, "a"), (1, 2, "b")]
    # three experts on two ranks: the first owns two; each rank counted its own tokens
    assert info.expert_load == (
        LayerLoad(layer=3, tokens_per_expert=(11, 22, 33), tokens_per_rank=(33, 33)),
        LayerLoad(layer=11, tokens_per_expert=(1, 0, 9), tokens_per_rank=(1, 9)),
    )
    assert info.raw == INFO
    assert info.uptime_s > 0


def test_health_and_requests_follow_the_gate():
    with Serving(ready=False) as server, Client(server.address, timeout=10, retries=0) as client:
        assert client.health() == "not serving"
        assert client.info().state == "loading"
        with pytest.raises(UnavailableError, match="loaded") as caught:
            client.generate("abc")
        assert caught.value.retry_after_s == 5
        server.call(server.gate.ready, server.llm)
        wait_until(lambda: client.health() == "serving", "health follows")
        assert client.generate("abc", max_tokens=3).text == "abc"
        server.call(server.gate.drain)
        wait_until(lambda: client.health() == "not serving", "health follows")
        with pytest.raises(UnavailableError, match="draining") as caught:
            client.generate("abc")
        assert caught.value.retry_after_s == 1
