"""The edge: what is refused, with which field, and which defaults are applied."""

from __future__ import annotations

import math

import msgpack
import pytest

from epruntime.config import EngineConfig
from epruntime.engine.processor import InputProcessor, Limits, size_of
from epruntime.errors import ConfigError, InvalidRequestError, status_of
from epruntime.plan import NewRequest, SamplingSpec, StepPlan
from epruntime.sampling_params import SamplingParams

LIMITS = Limits(max_model_len=32, vocab_size=100, eos_token_ids=(2, 5))


def _process(prompt: object, **params: object):  # type: ignore[no-untyped-def]
    processor = InputProcessor(None, LIMITS)
    return processor.process(
        prompt,
        SamplingParams(**params),
        rid=7,
        request_id="r",
        arrival_time=0.0,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("logit_bias", {5: 10**400}),
        ("temperature", "x" * 10**5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", True),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 1.0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("min_tokens", math.inf),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("n", 2.0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("min_p", False),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", "1.1"),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("presence_penalty", True),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", -math.inf),
        ("logit_bias", [1, 2]),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {True: 1.0}),
        ("logit_bias", {5: 101}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: None}),
        ("logit_bias", {5: True}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("top_p", True),
        ("top_k", True),
        ("top_k", 2**31),
        ("seed", 1.0),
        ("ignore_eos", 1),
        ("skip_special_tokens", "yes"),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("stop", 5),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [1.0]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", 5),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
    ],
)
def test_senseless_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    shown, _, remedy = str(caught.value).partition(": ")
    assert shown.startswith(f"{field}=")
    assert len(remedy) > 10, "says what to do"
    assert len(str(caught.value)) < 300
    assert status_of(caught.value) == ("INVALID_ARGUMENT", 400)


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty", "top_k", "seed", "max_tokens"])
def test_integers_too_long_to_be_written(field: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{field}=<int>: ") as caught:
        SamplingParams(**{field: 10**5000})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [100]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ([100], "prompt"),
        ([-1], "prompt"),
        ((True,), "prompt"),
        ({"prompt_token_ids": [1] * 32}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({}, "prompt"),
        (3, "prompt"),
        ("text", "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(prompt: object, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        _process(prompt)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("params", "field", "words"),
    [
        ({"stop_token_ids": [3, 100]}, "stop_token_ids", "stop_token_ids=100: .* ids go from 0 to 99"),
        ({"logit_bias": {1: 1.0, 100: -1.0}}, "logit_bias", "logit_bias=100: .* ids go from 0 to 99"),
        ({"min_tokens": 3, "max_tokens": 16}, "min_tokens", "min_tokens=3: .*30 tokens.*room for 2 output"),
        ({"stop": "x"}, "stop", "need a tokenizer"),
    ],
)
def test_parameters_that_this_model_or_prompt_rules_out(params: dict[str, object], field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        _process({"prompt_token_ids": [1] * 30}, **params)
    assert caught.value.field == field


def test_every_parameter_reaches_the_rank() -> None:
    spec = _process(
        {"prompt_token_ids": [1]},
        temperature=1,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=2,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias={7: 1, 3: -2.5},
        seed=9,
        max_tokens=8,
        min_tokens=4,
        stop_token_ids=[11],
        logprobs=2,
        prompt_logprobs=0,
    ).spec
    assert spec == SamplingSpec(
        temperature=1.0,
        top_k=3,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=2.0,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias=((3, -2.5), (7, 1.0)),
        seed=9,
        stop_ids=(2, 5, 11),
        max_tokens=8,
        min_tokens=4,
        logprobs=2,
        prompt_logprobs=0,
    )
    plan = StepPlan(step=0, new=(NewRequest(
        rid=1, token_ids=(1,), num_prompt_tokens=1, num_computed_tokens=0, block_ids=(), sampling=spec),
    ))  # fmt: skip
    assert StepPlan.from_wire(msgpack.unpackb(msgpack.packb(plan.to_wire()), strict_map_key=False)) == plan


def test_defaults_are_applied_once_at_the_edge() -> None:
    request = _process({"prompt_token_ids": [1] * 30}, max_tokens=16, stop_token_ids=[5, 9], top_k=-1)
    assert request.spec.max_tokens == 2  # 32 - 30
    assert request.spec.stop_ids == (2, 5, 9)
    assert request.spec.top_k == 0
    assert 0 <= request.spec.seed < 2**63
    assert _process({"prompt_token_ids": [1]}, max_tokens=None).spec.max_tokens == 31
    assert _process({"prompt_token_ids": [1]}, ignore_eos=True, stop_token_ids=[9]).spec.stop_ids == (9,)
    assert _process({"prompt_token_ids": [1]}, seed=3).spec.seed == 3
    seeds = {_process({"prompt_token_ids": [1]}).spec.seed for _ in range(8)}
    assert len(seeds) == 8


def test_sampling_params_travel() -> None:
    params = SamplingParams(temperature=0.5, stop="x", stop_token_ids=[1], seed=4, logprobs=2)
    assert SamplingParams.from_wire(params.to_wire()) == params


def test_engine_options() -> None:
    config = EngineConfig.from_kwargs(model="m", expert_parallel_size=2, block_size=8)
    assert (config.parallel.expert_parallel_size, config.cache.block_size) == (2, 8)
    with pytest.raises(TypeError, match="did you mean 'expert_parallel_size'"):
        EngineConfig.from_kwargs(model="m", expert_paralel_size=2)
    for bad in (
        {"expert_parallel_size": 0},
        {"dtype": "float16"},
        {"transport": "carrier-pigeon"},
        {"max_num_seqs": 65, "max_num_batched_tokens": 64},
        {"pipeline_depth": 3},
        {"kv_cache_memory_gb": 0},
        {"block_size": True},
    ):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            EngineConfig.from_kwargs(model="m", **bad)


class _Template:
    """A tokenizer whose texts are refused by length; making ids of one would fail."""

    has_chat_template = True

    def tokens_at_least(self, text: str) -> int:
        return len(text) // 10

    def encode(self, text: str) -> list[int]:
        raise AssertionError("tokenised")

    def encode_chat(self, messages, *, keywords=None, check=None):  # type: ignore[no-untyped-def]
        if check is not None:
            check("".join(message["content"] for message in messages))
        raise AssertionError("tokenised")


@pytest.mark.parametrize(
    "prompt",
    ["a" * 320, {"prompt": "a" * 320}, {"messages": [{"role": "user", "content": "a" * 320}]}, ["no id"] * 32,
     {"prompt_token_ids": ["no id"] * 32}],
)  # fmt: skip
def test_what_is_certainly_too_long_is_not_looked_at(prompt: object) -> None:
    with pytest.raises(InvalidRequestError, match="32 tokens and max_model_len is 32"):
        InputProcessor(_Template(), LIMITS).process(  # type: ignore[arg-type]
            prompt,
            SamplingParams(),
            rid=7,
            request_id="r",
            arrival_time=0.0,  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("prompt", "size"),
    [
        ("abc", 3), ([1, 2], 2), ({"prompt": "abcd"}, 4), ({"prompt_token_ids": [1]}, 1), ({}, 0), (None, 0), (7, 0),
        ({"messages": [{"role": "user", "content": "a" * 1000}] * 3}, 3 * (1000 + 64)), ({"messages": [{}, 1]}, 128),
    ],
)  # fmt: skip
def test_how_much_work_a_prompt_is(prompt: object, size: int) -> None:
    assert size_of(prompt) == size


def test_ids_that_are_made_into_text_at_once_are_bounded() -> None:
    with pytest.raises(InvalidRequestError, match="at most 1048576"):
        InputProcessor(_Template(), LIMITS).text([1] * (2**20 + 1), skip_special_tokens=True)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["max_tokens", "min_tokens", "top_k", "stop_token_ids", "logit_bias"])
def test_the_remedy_of_a_number_that_is_too_large_names_the_largest(field: str) -> None:
    value: object = {"stop_token_ids": [2**31], "logit_bias": {2**31: 1}}.get(field, 2**31)
    with pytest.raises(InvalidRequestError, match=r"\.\.2147483647"):
        SamplingParams(**{field: value})  # type: ignore[arg-type]
