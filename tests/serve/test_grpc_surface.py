"""The whole request surface over real sockets: n sequences, the prompt's tokens, model facts, tokens and text."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_llm import CACHED_TOKENS, DRAWN_SEED, MODEL_INFO, FakeLLM
from serving import Serving

from epruntime.client import AsyncClient, Client
from epruntime.errors import InvalidRequestError, UnavailableError
from epruntime.outputs import CompletionDelta, Logprob, RequestDelta
from epruntime.proto import inference_pb2 as pb
from epruntime.sampling_params import SamplingParams
from epruntime.serve.grpc.pieces import MAX_BYTES, Pieces


@pytest.fixture(scope="module")
def server():
    with Serving() as running:
        yield running


@pytest.fixture
def client(server):
    with Client(server.address, timeout=20) as c:
        yield c


def test_n_sequences_are_told_apart(server, client):
    result = client.generate("abc", n=3, max_tokens=4, logprobs=0)
    assert [(o.index, o.text, o.finish_reason) for o in result.outputs] == [
        (0, "abca", "length"), (1, "bcab", "length"), (2, "cabc", "length")
    ]  # fmt: skip
    assert [[chr(t) for t in o.token_ids] for o in result.outputs] == [list(o.text) for o in result.outputs]
    assert [len(o.logprobs) for o in result.outputs] == [4, 4, 4]
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (3, 12)
    assert result.usage.cached_tokens == CACHED_TOKENS
    assert result.seed == DRAWN_SEED
    assert server.llm.params[result.request_id].n == 3


def test_one_sequence_of_many_stops_alone(client):
    chunks = list(client.stream("abc", n=2, max_tokens=7, stop="cab"))
    texts = {i: "".join(c.text for c in chunks if c.index == i) for i in (0, 1)}
    assert texts == {0: "ab", 1: "b"}  # "bcab" and "abcab" end at the same stop string, one token apart
    assert sorted((c.index, c.stop_reason) for c in chunks if c.finish_reason) == [(0, "cab"), (1, "cab")]
    assert [c.final for c in chunks] == [False] * (len(chunks) - 1) + [True]


def test_prompt_logprobs_and_ids_only_where_asked_for(client):
    plain = client.generate("abcd", max_tokens=2)
    assert (plain.prompt_token_ids, plain.prompt_logprobs) == (None, None)
    result = client.generate("abcd", max_tokens=2, prompt_logprobs=1, return_prompt_token_ids=True)
    assert result.prompt_token_ids == [97, 98, 99, 100]
    assert result.prompt_logprobs == [
        None,
        {98: Logprob(-0.5, "b"), 0: Logprob(-1.0, "0")},
        {99: Logprob(-0.5, "c"), 0: Logprob(-1.0, "0")},
        {100: Logprob(-0.5, "d"), 0: Logprob(-1.0, "0")},
    ]
    assert (result.text, result.logprobs) == ("ab", None)
    first = next(client.stream("abcd", max_tokens=2, return_prompt_token_ids=True))
    assert (first.prompt_token_ids, first.text, first.token_ids) == ((97, 98, 99, 100), "", ())


def test_prompt_logprobs_of_a_long_prompt_fit_what_clients_take(server):
    """20 entries for each of 20,000 tokens are over 4 MiB together; the channel has gRPC's own limit of 4 MiB."""
    prompt = "x" * 20_000
    sampling = pb.SamplingParams(prompt_logprobs=20, max_tokens=1)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_stream(
            "/epruntime.v1.Inference/Generate", pb.GenerateRequest.SerializeToString, pb.GenerateResponse.FromString
        )
        request = pb.GenerateRequest(text=prompt, sampling=sampling, return_prompt_token_ids=True)
        messages = list(call(request, timeout=60))
    sizes = [m.ByteSize() for m in messages]
    assert sum(sizes) > 4 * 2**20
    assert max(sizes) < 2 * MAX_BYTES
    positions = [p for m in messages for p in m.prompt_logprobs]
    assert [p.HasField("chosen") for p in positions] == [False] + [True] * (len(prompt) - 1)
    assert [i for m in messages for i in m.prompt_token_ids] == [ord("x")] * len(prompt)
    assert [bool(m.token_ids) for m in messages] == [False] * (len(messages) - 1) + [True]


def test_pieces_count_bytes_not_tokens():
    """Tokens whose texts are long, and texts of four bytes a character."""
    long = "\N{GRINNING FACE}" * 128
    entry = {7: Logprob(-0.5, long), **{i: Logprob(-1.0, long) for i in range(10, 30)}}
    count, text = 300, "\N{GRINNING FACE}" * 700_000
    completion = CompletionDelta(0, text, [7] * count, [entry] * count, "stop", "end")
    delta = RequestDelta("r", "p", [1, 2], [completion], True, 5, num_output_tokens=count)
    messages = list(Pieces("r").of(delta))
    assert max(m.ByteSize() for m in messages) < 2 * MAX_BYTES + 2**16
    assert "".join(m.text for m in messages) == text
    assert sum(len(m.logprobs) for m in messages) == sum(len(m.token_ids) for m in messages) == count
    assert [m.finish_reason for m in messages if m.finish_reason] == [pb.FINISH_REASON_STOP]
    assert messages[-1].final
    assert (messages[-1].stop_string, messages[-1].usage.output_tokens, messages[-1].seed) == ("end", count, 5)


def test_a_delta_without_news_is_no_message():
    assert list(Pieces("r").of(RequestDelta("r", "p", [1], [], False, 5))) == []
    assert list(Pieces("r").of(RequestDelta("r", "p", [1], [CompletionDelta()], False, 5))) == []


def test_model_info(client):
    info = client.model_info()
    for name, value in MODEL_INFO.items():
        got = getattr(info, name)
        assert (list(got) if isinstance(got, tuple) else got) == value, name


@pytest.mark.parametrize(
    "defaults",
    [
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_tokens": 2048},
        {"temperature": 0.0, "repetition_penalty": 1.05, "min_p": 0.1, "max_tokens": None},
        {"stop_token_ids": (1, 2), "logit_bias": {5: -1.0}, "stop": ("x",)},
    ],
)
def test_the_models_defaults_are_told_and_used(defaults):
    llm = FakeLLM()
    llm.model_info["default_sampling"] = defaults
    with Serving(llm) as server, Client(server.address, timeout=20) as client:
        assert client.model_info().default_sampling == defaults
        result = client.generate("abc", seed=1)
        assert llm.params[result.request_id] == SamplingParams(seed=1, **defaults)
        result = client.generate("abc", temperature=1.0, max_tokens=2)
        assert llm.params[result.request_id] == SamplingParams(**{**defaults, "temperature": 1.0, "max_tokens": 2})
        # SamplingParams names every field, and so leaves nothing to the model
        result = client.generate("abc", SamplingParams(max_tokens=3, top_p=0.5))
        params = llm.params[result.request_id]
        assert (params.max_tokens, params.top_p, params.temperature) == (3, 0.5, 1.0)


def test_min_tokens_above_our_own_default_of_max_tokens(server):
    llm = FakeLLM()
    llm.model_info["default_sampling"] = {"max_tokens": 40}
    with Serving(llm) as running, Client(running.address, timeout=20) as client:
        assert client.generate("abc", min_tokens=30).usage.output_tokens == 40


def test_tokenize_and_detokenize(client):
    assert client.tokenize("héllo").token_ids == [104, 233, 108, 108, 111]
    assert client.tokenize("héllo").text == "héllo"
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
    for prompt in (messages, {"messages": messages}):
        result = client.tokenize(prompt)
        assert (result.token_ids, result.text) == ([104, 105], "hi")  # the fake renders the last message
    assert client.detokenize([104, 105]) == "hi"
    assert client.detokenize([104, 0, 105]) == "h\x00i"
    assert client.detokenize([104, 0, 105], skip_special_tokens=True) == "hi"
    assert client.detokenize([]) == ""


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda c: c.tokenize(""), "prompt"),
        (lambda c: c.tokenize([]), "chat"),
        (lambda c: c.tokenize({"prompt": "x"}), "prompt"),
        (lambda c: c.tokenize([{"role": "user"}]), "messages.0"),
        (lambda c: c.generate({"prompt_token_ids": [0x110000]}), "prompt_token_ids"),
        (lambda c: c.generate({"prompt_token_ids": [-1]}), "prompt_token_ids"),
        (lambda c: c.generate([0x110000]), "prompt_token_ids"),
        (lambda c: c.tokenize("half \ud83d"), "prompt"),
        (lambda c: c.detokenize([-1]), "token_ids"),
        (lambda c: c.detokenize([0x110000]), "token_ids"),
        (lambda c: c.detokenize([2**40]), "token_ids"),
        (lambda c: c.detokenize(["x"]), "token_ids"),
    ],
)
def test_what_is_no_text_and_no_tokens(client, call, field):
    with pytest.raises(InvalidRequestError) as caught:
        call(client)
    assert caught.value.field == field


def test_a_model_without_a_tokenizer():
    llm = FakeLLM()
    llm.model_info["has_tokenizer"] = False
    with Serving(llm) as server, Client(server.address, timeout=20) as client:
        assert client.model_info().has_tokenizer is False
        for call in (lambda: client.tokenize("x"), lambda: client.generate("x")):
            with pytest.raises(InvalidRequestError, match="tokenizer"):
                call()


def test_while_it_loads_and_while_it_drains():
    with Serving(ready=False) as server, Client(server.address, timeout=20, retries=0) as client:
        for call in (client.model_info, lambda: client.tokenize("x"), lambda: client.detokenize([1])):
            with pytest.raises(UnavailableError, match="loaded") as caught:
                call()
            assert caught.value.retry_after_s == 5
        server.call(server.gate.ready, server.llm)
        server.call(server.gate.drain)
        assert client.model_info().name == "echo"
        assert client.tokenize("x").token_ids == [120]


def test_async_client(server):
    async def main() -> None:
        async with AsyncClient(server.address, timeout=20) as client:
            assert (await client.model_info()).name == "echo"
            tokens = (await client.tokenize("abc")).token_ids
            assert await client.detokenize(tokens) == "abc"
            with pytest.raises(InvalidRequestError, match=r"^prompt_token_ids=-1") as caught:
                await client.generate([-1])
            assert caught.value.field == "prompt_token_ids"
            result = await client.generate("abc", n=2, max_tokens=2, prompt_logprobs=0, return_prompt_token_ids=True)
            assert [o.text for o in result.outputs] == ["ab", "bc"]
            assert result.prompt_token_ids == tokens
            assert [p and list(p) for p in result.prompt_logprobs] == [None, [98], [99]]
            chat = [{"role": "user", "content": "hi"}]
            stream = await client.chat(chat, stream=True, max_tokens=2, return_prompt_token_ids=True)
            assert (await stream.result()).prompt_token_ids == [104, 105]

    asyncio.run(main())
