"""Configuration: unknown names, values of a wrong type, values out of range."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from epruntime.config import EngineConfig, ServeConfig
from epruntime.errors import ConfigError, InvalidRequestError
from epruntime.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("max_num_seqs", 2.5, "must be int"),
        ("max_num_seqs", True, "must be int"),
        ("max_num_seqs", 0, "at least 1"),
        ("max_num_seqs", 1000, "above max_num_batched_tokens"),
        ("expert_parallel_size", "2", "must be int"),
        ("num_kv_blocks", "many", "must be int or None"),
        ("step_timeout_s", float("nan"), "at least 0"),
        ("kv_cache_memory_gb", float("nan"), "must be positive"),
        ("enable_prefix_caching", "no", "must be bool"),
        ("dtype", "float16", "one of auto, float32, bfloat16"),
        ("dtype", None, "must be str"),
        ("launcher", "slurm", "one of local, ray"),
        ("pipeline_depth", 3, "1 or 2"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_name(option: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig.from_kwargs(model="m", **{option: value})
    assert str(caught.value).startswith(f"{option}={value!r}")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        EngineConfig.from_kwargs(model="m", max_num_seq=2)


def test_paths_and_whole_numbers_are_taken() -> None:
    config = EngineConfig.from_kwargs(model=Path("a/b"), tokenizer=Path("c"), kv_cache_memory_gb=1, step_timeout_s=5)
    assert (config.model.model, config.model.tokenizer) == ("a/b", "c")
    with pytest.raises(ConfigError, match="port=70000"):
        ServeConfig(port=70000)


@pytest.mark.parametrize("origin", ["http://a", "https://a.example:8443", "http://[::1]:3000", "app://x", "*"])
def test_origins_are_taken(origin: str) -> None:
    assert ServeConfig(allowed_origins=(origin,)).allowed_origins == (origin,)


@pytest.mark.parametrize("origin", ['["*"]', "", "a.example", "https://a.example/", "https://a,https://b", "https://"])
def test_what_no_browser_sends_as_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins: .*SCHEME://HOST") as caught:
        ServeConfig(allowed_origins=(origin,))
    assert repr(origin) in str(caught.value)


def test_lists_of_sampling_params_are_lists() -> None:
    assert SamplingParams(stop="end", stop_token_ids=[1, 2]).stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    for field in ("stop", "stop_token_ids"):
        with pytest.raises(InvalidRequestError, match=f"{field}=5"):
            SamplingParams(**{field: 5})  # type: ignore[arg-type]
