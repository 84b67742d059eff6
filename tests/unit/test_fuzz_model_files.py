"""config.json, generation_config.json and tokenizer files with anything in them: taken, or refused in our words."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from epruntime.engine.tokenizer import load_tokenizer
from epruntime.errors import CheckpointError, ConfigError, UnsupportedModelError
from epruntime.models.loader import inspect_model
from epruntime.testing import tiny_models
from epruntime.testing.patience import soon

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
#: seconds within which any of them is decided on a slow, shared machine
LIMIT_S = 20

NUMBER = st.integers(-2, 9) | st.sampled_from([2**31, 2**40, 2**63, -(2**63), 10**30, 0.5, -1.5, float("nan"), 1e308])
JUNK = st.recursive(
    st.none() | st.booleans() | NUMBER | st.text(max_size=6) | st.sampled_from(["mixtral", "float32", "silu", "eager"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, model = tiny_models.build("mixtral", num_hidden_layers=1)
    return tiny_models.save(model, tmp_path_factory.mktemp("mixtral"))


def _inspect(path: Path) -> None:
    begin = time.monotonic()
    with contextlib.suppress(CheckpointError, UnsupportedModelError, ConfigError):
        inspect_model(path)
    assert time.monotonic() - begin < soon(LIMIT_S)


_FIELDS = (
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "num_local_experts", "num_experts_per_tok", "hidden_act", "dtype",
    "torch_dtype", "max_position_embeddings", "sliding_window", "rope_parameters", "rope_theta", "rope_scaling",
    "rms_norm_eps", "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "layer_types", "auto_map",
    "quantization_config", "text_config", "attention_dropout", "initializer_range", "use_cache", "router_jitter_noise",
    "transformers_version", "attn_implementation", "_attn_implementation", "id2label", "num_labels", "problem_type",
)  # fmt: skip


@FUZZ
@given(changes=st.dictionaries(st.sampled_from(_FIELDS) | st.text(max_size=5), JUNK, min_size=1, max_size=3))
@example(changes={"num_local_experts": 2**40})
@example(changes={"hidden_size": 2**63})
@example(changes={"vocab_size": -1})
@example(changes={"num_hidden_layers": 10**30})
@example(changes={"max_position_embeddings": "many"})
@example(changes={"num_attention_heads": 0})
@example(changes={"eos_token_id": [[2]]})
@example(changes={"eos_token_id": "two"})
@example(changes={"rope_parameters": {"rope_type": ["x"]}})
@example(changes={"sliding_window": -7})
@example(changes={"layer_types": ["full_attention"] * 7})
@example(changes={"dtype": "../../etc"})
@example(changes={"model_type": ["mixtral"]})
@example(changes={"architectures": {"x": 1}})
def test_config(mixtral, changes):
    file = mixtral / "config.json"
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), **changes}))
    try:
        _inspect(mixtral)
    finally:
        file.write_text(before)


_GENERATION = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "max_length", "do_sample",
    "eos_token_id", "bos_token_id", "pad_token_id", "num_beams", "stop_strings", "typical_p", "cache_implementation",
)  # fmt: skip


@FUZZ
@given(config=st.dictionaries(st.sampled_from(_GENERATION), JUNK, max_size=4) | JUNK)
@example(config={"temperature": "hot"})
@example(config={"temperature": float("nan")})
@example(config={"top_k": 2.5, "do_sample": "yes"})
@example(config={"eos_token_id": {"a": 1}})
@example(config={"eos_token_id": [1, None]})
@example(config={"max_new_tokens": -1})
@example(config=[])
def test_generation_config(mixtral, config):
    file = mixtral / "generation_config.json"
    before = file.read_text() if file.exists() else None
    file.write_text(json.dumps(config))
    try:
        _inspect(mixtral)
    finally:
        file.unlink()
        if before is not None:
            file.write_text(before)


@settings(FUZZ, max_examples=40)
@given(data=st.binary(max_size=60), name=st.sampled_from(["config.json", "generation_config.json"]))
@example(data=b"", name="config.json")
@example(data=b"[" * 100_000, name="config.json")
@example(data=b"[" * 100_000, name="generation_config.json")
@example(data=b'{"model_type": "mixtral"}', name="config.json")
@example(data=b"\xff\xfe", name="generation_config.json")
def test_bytes_that_are_no_json(mixtral, data, name):
    file = mixtral / name
    before = file.read_bytes() if file.exists() else None
    file.write_bytes(data)
    try:
        _inspect(mixtral)
    finally:
        file.unlink()
        if before is not None:
            file.write_bytes(before)


_TOKENIZER = ("tokenizer_class", "bos_token", "eos_token", "added_tokens_decoder", "chat_template", "model_max_length",
              "auto_map", "add_bos_token", "extra_special_tokens", "tokenizer_file", "backend")  # fmt: skip


@settings(FUZZ, max_examples=30)
@given(
    config=st.dictionaries(st.sampled_from(_TOKENIZER), JUNK, max_size=3) | JUNK,
    tokenizer=st.none() | st.binary(max_size=30) | JUNK.map(lambda junk: json.dumps(junk).encode()),
)
@example(config={"tokenizer_class": "PreTrainedTokenizerFast"}, tokenizer=b'{"model": {"type": "BPE"}}')
@example(config={"tokenizer_class": ["x"], "chat_template": "{{ 1 / 0 }}"}, tokenizer=b"{}")
@example(config={"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None]}}, tokenizer=None)
def test_tokenizer_files(tmp_path_factory, config: Any, tokenizer):
    path = tmp_path_factory.mktemp("t")
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if tokenizer is not None:
        (path / "tokenizer.json").write_bytes(tokenizer)
    begin = time.monotonic()
    with contextlib.suppress(CheckpointError):
        load_tokenizer(path, required=True)
    assert time.monotonic() - begin < soon(LIMIT_S)
