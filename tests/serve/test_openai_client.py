"""The official client against the HTTP front end, sync, async and streaming. FakeLLM echoes the prompt's characters."""

from __future__ import annotations

import asyncio

import openai
import pytest
from fake_llm import CACHED_TOKENS, DRAWN_SEED, FakeLLM
from http_serving import HttpServing

from epruntime.errors import QueueFullError, RankLostError, RequestFailedError, UnavailableError
from epruntime.sampling_params import derive_seed

USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    with HttpServing() as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as made:
        yield made


def _params(server, answer):
    """The SamplingParams that the engine got for an answer."""
    return server.llm.params[answer.id]


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.object, model.created) == ("echo", "model", 1_700_000_000)
    assert client.models.retrieve("echo").id == "echo"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_completion(server, client):
    answer = client.completions.create(model="echo", prompt="abc", max_tokens=5, seed=11)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("abcab", "length", 0, None)
    assert choice.seed == 11
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 5, 8)
    assert usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS
    assert (answer.object, answer.model) == ("text_completion", "echo")
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    assert server.llm.prompts[answer.id] == "abc"


def test_keywords_for_the_chat_template(server, client):
    def prompt(**more):
        return server.llm.prompts[client.chat.completions.create(model="echo", messages=USER, **more).id]

    given = {"enable_thinking": False, "level": [1, None]}
    assert prompt(extra_body={"chat_template_kwargs": given}) == {"messages": USER, "chat_template_kwargs": given}
    assert prompt(extra_body={"chat_template_kwargs": None}) == {"messages": USER}
    for wrong in ("text", [1], {f"k{i}": i for i in range(65)}):
        with pytest.raises(openai.BadRequestError) as caught:
            prompt(extra_body={"chat_template_kwargs": wrong})
        assert caught.value.param == "chat_template_kwargs"


def test_completion_defaults(server, client):
    params = _params(server, client.completions.create(model="echo", prompt="abc"))
    assert (params.max_tokens, params.temperature, params.n, params.logprobs) == (16, 1.0, 1, None)
    params = _params(server, client.chat.completions.create(model="echo", messages=USER))
    assert (params.max_tokens, params.temperature) == (None, 1.0)


def test_the_models_own_defaults():
    llm = FakeLLM()
    llm.model_info["default_sampling"] = {"temperature": 0.6, "top_p": 0.9, "max_tokens": 3}
    with HttpServing(llm) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        for answer in (
            client.completions.create(model="echo", prompt="abcdef", top_p=0.5),
            client.chat.completions.create(model="echo", messages=USER, top_p=0.5),
        ):
            params = llm.params[answer.id]
            assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.5, 3)


def test_every_sampling_field_arrives(server, client):
    given = {"n": 2, "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.25, "frequency_penalty": -0.5, "seed": 3,
             "max_tokens": 4, "stop": ["!", "?"]}  # fmt: skip
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "min_tokens": 2, "stop_token_ids": [9],
             "ignore_eos": True, "skip_special_tokens": False, "prompt_logprobs": 1}  # fmt: skip
    expected = {**given, **extra, "stop": ("!", "?"), "stop_token_ids": (9,), "logit_bias": {97: -3.0}}
    calls = (
        lambda **more: client.completions.create(prompt="abc", logprobs=2, **more),
        lambda **more: client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=2, **more),
    )
    for call in calls:
        params = _params(server, call(model="echo", logit_bias={"97": -3}, extra_body=extra, **given))
        assert {name: getattr(params, name) for name in expected} == expected
        assert params.logprobs == 2


def test_max_completion_tokens(server, client):
    answer = client.chat.completions.create(model="echo", messages=USER, max_completion_tokens=2, max_tokens=9)
    assert answer.choices[0].message.content == "he"
    with pytest.raises(openai.BadRequestError, match=r"max_completion_tokens=0: must be in 1\.\.") as caught:
        client.chat.completions.create(model="echo", messages=USER, max_completion_tokens=0)
    assert caught.value.param == "max_completion_tokens"


def test_n_and_several_prompts(client):
    answer = client.completions.create(model="echo", prompt=["abc", "xyz"], n=2, max_tokens=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "ab"), (1, "bc"), (2, "xy"), (3, "yz")]
    assert [c.seed for c in answer.choices] == [DRAWN_SEED, derive_seed(DRAWN_SEED, 1)] * 2
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 8)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [([97, 98], ["ab"]), ([[97, 98], [99, 100]], ["ab", "cd"]), (["ab"], ["ab"]), ("ab", ["ab"])],
)
def test_forms_of_prompts(client, prompt, texts):
    answer = client.completions.create(model="echo", prompt=prompt, max_tokens=2)
    assert [c.text for c in answer.choices] == texts


def test_echo_and_logprobs(client):
    answer = client.completions.create(model="echo", prompt="ab", max_tokens=2, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "abab"
    assert choice.logprobs.tokens == ["a", "b", "a", "b"]
    assert choice.logprobs.token_logprobs == [None, -0.5, -0.5, -0.5]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]
    assert choice.logprobs.top_logprobs == [None, *[{one: -0.5, "0": -1.0} for one in "bab"]]


def test_scoring_without_output(client):
    """As lm-eval asks for it: token ids in, their log-probabilities out."""
    answer = client.completions.create(model="echo", prompt=[97, 98], max_tokens=0, echo=True, logprobs=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("ab", "length")
    assert choice.logprobs.tokens == ["a", "b"]
    assert choice.logprobs.token_logprobs == [None, -0.5]
    assert answer.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="max_tokens=0"):
        client.completions.create(model="echo", prompt="ab", max_tokens=0)


def test_prompt_logprobs(client):
    body = {"prompt_logprobs": 0}
    answer = client.completions.create(model="echo", prompt="ab", extra_body=body)
    expected = [None, {"98": {"logprob": -0.5, "decoded_token": "b"}}]
    assert answer.choices[0].prompt_logprobs == expected
    chat = client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "ab"}], extra_body=body)
    assert chat.prompt_logprobs == expected


def test_completion_stream(client):
    chunks = list(client.completions.create(model="echo", prompt=["abc", "xy"], max_tokens=4, n=2, stream=True))
    texts = {}
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] = texts.get(choice.index, "") + choice.text
        assert chunk.usage is None
    assert texts == {0: "abca", 1: "bcab", 2: "xyxy", 3: "yxyx"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert sorted(c.choices[0].index for c in chunks if c.choices[0].finish_reason == "length") == [0, 1, 2, 3]


def test_completion_stream_with_echo_and_logprobs(client):
    stream = client.completions.create(model="echo", prompt="ab", max_tokens=3, echo=True, logprobs=0, stream=True)
    choices = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in choices) == "ababa"
    assert [token for choice in choices for token in choice.logprobs.tokens] == list("ababa")
    assert [offset for choice in choices for offset in choice.logprobs.text_offset] == [0, 1, 2, 3, 4]


def test_usage_in_streams(client):
    def usages(**options):
        stream = client.chat.completions.create(
            model="echo", messages=USER, max_tokens=3, stream=True, stream_options=options
        )
        return [(len(chunk.choices), chunk.usage) for chunk in stream]

    *chunks, last = usages(include_usage=True)
    assert all(usage is None for _, usage in chunks)
    assert (last[0], last[1].prompt_tokens, last[1].completion_tokens) == (0, 5, 3)
    counts = [usage.completion_tokens for _, usage in usages(include_usage=True, continuous_usage_stats=True)]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_chat(server, client):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "Ann"},
    ]
    answer = client.chat.completions.create(model="echo", messages=messages)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "one\ntwo")
    assert choice.finish_reason == "length"
    assert (answer.object, answer.id[:9]) == ("chat.completion", "chatcmpl-")
    assert server.llm.prompts[answer.id] == {
        "messages": [messages[0], {"role": "user", "content": "one\ntwo", "name": "Ann"}]
    }


def test_chat_stream(client):
    stream = client.chat.completions.create(model="echo", messages=USER, n=2, max_tokens=5, stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert [(c.index, c.delta.role, c.delta.content) for c in chunks[:2]] == [
        (0, "assistant", ""),
        (1, "assistant", ""),
    ]
    texts = {i: "".join(c.delta.content or "" for c in chunks if c.index == i) for i in (0, 1)}
    assert texts == {0: "hello", 1: "elloh"}
    assert [c.finish_reason for c in chunks].count("length") == 2


def test_chat_logprobs(client):
    answer = client.chat.completions.create(model="echo", messages=USER, max_tokens=1, logprobs=True, top_logprobs=2)
    (entry,) = answer.choices[0].logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("h", -0.5, [104])
    assert [(one.token, one.logprob) for one in entry.top_logprobs] == [("h", -0.5), ("0", -1.0)]
    stream = client.chat.completions.create(model="echo", messages=USER, max_tokens=3, logprobs=True, stream=True)
    entries = [e for chunk in stream if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
    assert [(entry.token, entry.top_logprobs) for entry in entries] == [(one, []) for one in "hel"]


@pytest.mark.parametrize("stop", ["l", ["ll", "zz"]])
def test_stop(client, stop):
    for stream in (False, True):
        answer = client.chat.completions.create(model="echo", messages=USER, stop=stop, stream=stream)
        if stream:
            chunks = [chunk.choices[0] for chunk in answer]
            text, choice = "".join(c.delta.content or "" for c in chunks), chunks[-1]
        else:
            (choice,) = answer.choices
            text = choice.message.content
        assert (text, choice.finish_reason) == ("he", "stop")
        assert choice.stop_reason == (stop if isinstance(stop, str) else "ll")


def test_async():
    llm = FakeLLM(delay_s=0.005)

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:

            async def one(text: str) -> str:
                messages = [{"role": "user", "content": text}]
                stream = await client.chat.completions.create(
                    model="echo", messages=messages, max_tokens=8, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = [f"{number:08d}" for number in range(20)]
            assert await asyncio.gather(*map(one, texts)) == texts
            whole = await asyncio.gather(
                *(client.completions.create(model="echo", prompt=text, max_tokens=8) for text in texts)
            )
            assert [answer.choices[0].text for answer in whole] == texts

    with HttpServing(llm) as server:
        asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "kind", "status", "retry"),
    [
        (QueueFullError("the queue is full", retry_after_s=2.5), openai.RateLimitError, 429, "3"),
        (UnavailableError("restarting", retry_after_s=4.0), openai.InternalServerError, 503, "4"),
        (RankLostError(slot=1, host="b", detail="step 3"), openai.InternalServerError, 503, "5"),
        (RequestFailedError("not numbers"), openai.InternalServerError, 500, None),
        (KeyError("a fault"), openai.InternalServerError, 500, None),
    ],
)
def test_errors_before_the_first_token_are_statuses(server, client, error, kind, status, retry, stream):
    server.llm.errors["bad"] = error
    for call in (
        lambda: client.completions.create(model="echo", prompt=["good", "bad"], stream=stream),
        lambda: client.chat.completions.create(
            model="echo", messages=[{"role": "user", "content": "bad"}], stream=stream
        ),
    ):
        with pytest.raises(kind) as caught:
            call()
        assert caught.value.status_code == status
        assert caught.value.response.headers.get("Retry-After") == retry
        assert caught.value.body["message"]


def test_error_in_a_stream_is_an_event():
    llm = FakeLLM(delay_s=0.01)
    with HttpServing(llm) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        stream = client.completions.create(model="echo", prompt="abc", max_tokens=10_000, stream=True)
        assert next(stream).choices[0].text == "a"
        server.call(llm.fail_all, RankLostError(slot=1, host="b", detail="step 3"))
        with pytest.raises(openai.APIError, match="rank 1 on host b is lost: step 3"):
            list(stream)


def test_abort_ends_with_its_own_reason(server):
    llm = FakeLLM(delay_s=0.01)
    with HttpServing(llm) as slow, openai.OpenAI(base_url=slow.url + "/v1", api_key="x") as client:
        stream = client.completions.create(model="echo", prompt="abc", max_tokens=10_000, stream=True)
        slow.run(slow.gate.abort(next(stream).id))
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "abort"


def test_token_texts_that_look_alike_keep_the_likelier(server):
    from epruntime.outputs import Logprob
    from epruntime.serve.openai.logprobs import CompletionLogprobs

    entry = {5: Logprob(-2.0, "x"), 6: Logprob(-1.0, "x"), 7: Logprob(float("-inf"), "")}
    written = CompletionLogprobs().json([5], [entry])
    assert written["top_logprobs"] == [{"x": -1.0, "token_id:7": -9999.0}]
    assert written["token_logprobs"] == [-2.0]
