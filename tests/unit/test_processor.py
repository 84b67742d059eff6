"""The edge: what is refused, with which field, and which defaults are applied."""

from __future__ import annotations

import math

import pytest

from epruntime.config import EngineConfig
from epruntime.engine.processor import InputProcessor, Limits
from epruntime.errors import ConfigError, InvalidRequestError, status_of
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
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", True),
        ("max_tokens", 0),
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
    assert status_of(caught.value) == ("INVALID_ARGUMENT", 400)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [100]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
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
