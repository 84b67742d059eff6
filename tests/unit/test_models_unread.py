"""Fields of config.json on which releases of transformers disagree, and those whose meaning none of them gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from saved_model import configure

from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter, text_part
from epruntime.models.loader import inspect_model, load_model
from epruntime.models.unread import check_all_read
from epruntime.testing import tiny_models
from epruntime.testing.ragged import RaggedDriver, local_runtime, strict_ops

READ = pytest.mark.skipif(adapter.version() < (5, 24), reason="transformers 5.24 or newer reads the field")
UNREAD = pytest.mark.skipif(adapter.version() >= (5, 24), reason="transformers older than 5.24 leaves the field unread")
#: type, what config.json says on top of the tiny model's own fields
PUBLISHED = [
    ("minimax_m2", {"rotary_dim": 8}),
    ("mimo_v2_flash", {"sliding_window_size": 8}),
    ("gpt_oss", {"swiglu_limit": 0.5}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
]
IDS = torch.arange(3, 33)


def _saved(model_type: str, path: Path, **says: Any) -> None:
    """config.json as it is published: without what saving adds to say the same."""
    tiny_models.save(tiny_models.build(model_type)[1], path)
    configure(path, **says)
    if "rotary_dim" in says:
        config = json.loads((path / "config.json").read_text())
        config["rope_parameters"].pop("partial_rotary_factor", None)
        (path / "config.json").write_text(json.dumps(config))


def _logits(path: Path) -> torch.Tensor:
    with strict_ops():
        (logits,) = RaggedDriver(load_model(path, dtype="float32", moe=local_runtime()), num_blocks=48).step(
            [("a", IDS)]
        )
    return logits


def _expected(path: Path, attention: str) -> torch.Tensor:
    kind = text_part.class_of(type(adapter.read_config(path)))
    with torch.inference_mode():
        model = kind.from_pretrained(path, attn_implementation=attention).eval()
        return model(input_ids=IDS[None], use_cache=False).logits[0]


@READ
@pytest.mark.parametrize(("model_type", "says"), PUBLISHED)
def test_a_field_that_is_read_is_served(model_type: str, says: dict[str, Any], tmp_path: Path) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    _saved(model_type, with_it, **says)
    _saved(model_type, without)
    found = _logits(with_it)
    assert torch.allclose(found, _expected(with_it, "eager"), rtol=0, atol=1e-3)
    assert (found - _logits(without)).abs().max() > 1e-2  # the field counts


@UNREAD
@pytest.mark.parametrize(("model_type", "says"), PUBLISHED)
def test_a_field_that_is_not_read_is_refused(model_type: str, says: dict[str, Any], tmp_path: Path) -> None:
    _saved(model_type, tmp_path, **says)
    with pytest.raises(UnsupportedModelError, match=f"config.json says {next(iter(says))}="):
        inspect_model(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "says", "counts"),
    [
        ("minimax_m2", {"rotary_dim": 24}, "by 16"),
        ("mimo_v2_flash", {"sliding_window_size": 8}, "by 11"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "by 7.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "by 1.702"),
    ],
)
def test_what_was_read_tells(model_type: str, says: dict[str, Any], counts: str, tmp_path: Path) -> None:
    """A configuration as an older release reads it: without the field, or with a meaning of its own."""
    config = tiny_models.build(model_type)[0]
    if model_type == "minimax_m2":
        config.head_dim, config.rope_parameters = 16, {"rope_theta": 1e4, "rope_type": "default"}
    elif model_type == "mimo_v2_flash":
        config.sliding_window = 12
    with pytest.raises(UnsupportedModelError, match=f"{next(iter(says))}=.*{counts}:"):
        check_all_read(tmp_path, config, says)
    check_all_read(tmp_path, config, dict.fromkeys(says))
    check_all_read(tmp_path, config, {})


#: as published, of a model with the first layer full and dense
MIMO = {
    "rope_theta": 5000000,
    "swa_rope_theta": 10000,
    "partial_rotary_factor": 0.334,
    "layernorm_epsilon": 1e-05,
    "hybrid_layer_pattern": [0, 1, 1],
    "moe_layer_freq": [0, 1, 1],
    "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 640000),
        ("swa_rope_theta", 5000000),
        ("partial_rotary_factor", 1.0),
        ("layernorm_epsilon", 1e-2),
        ("hybrid_layer_pattern", [0, 0, 1]),
        ("moe_layer_freq", [1, 1, 1]),
        ("add_swa_attention_sink_bias", False),
        ("add_full_attention_sink_bias", True),
    ],
)
def test_fields_that_no_release_reads(field: str, value: Any, tmp_path: Path) -> None:
    """The class has fixed values in their place, which are those of the one published model."""
    config = transformers.CONFIG_MAPPING["mimo_v2_flash"](num_hidden_layers=3)
    check_all_read(tmp_path, config, MIMO)
    with pytest.raises(UnsupportedModelError, match=f"config.json says {field}="):
        check_all_read(tmp_path, config, MIMO | {field: value})


def test_a_share_that_floats_do_not_hit(tmp_path: Path) -> None:
    config = tiny_models.build("minimax_m2")[0]
    config.head_dim, config.rope_parameters = 112, {"rope_type": "default", "partial_rotary_factor": 58 / 112}
    check_all_read(tmp_path, config, {"rotary_dim": 58})


def test_a_value_that_every_release_computes_by_is_taken(tmp_path: Path) -> None:
    config = tiny_models.build("gpt_oss")[0]
    check_all_read(tmp_path, config, {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "rotary_dim": 5})


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("qwen3_moe", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": None}),
        ("mixtral", {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": None}),
        ("olmoe", {"layer_types": ["chunked_attention", "full_attention"]}),
    ],
)
def test_layer_types_of_which_transformers_makes_no_cache(
    model_type: str, says: dict[str, Any], tmp_path: Path
) -> None:
    tiny_models.save(tiny_models.build(model_type, num_hidden_layers=2)[1], tmp_path)
    configure(tmp_path, **says)
    with pytest.raises(UnsupportedModelError, match="makes no cache for layers of the types"):
        inspect_model(tmp_path)


@pytest.mark.parametrize("count", [8, 128])
def test_latents_with_more_key_heads_than_heads(count: int, tmp_path: Path) -> None:
    """Of latents every head has keys of its own, whatever the field says. DeepSeek-V3's class says 128 by itself."""
    model = tiny_models.build("deepseek_v3")[1]
    assert model.config.num_attention_heads < 8
    tiny_models.save(model, tmp_path)
    configure(tmp_path, num_key_value_heads=count)
    # eager attention repeats keys no times
    assert torch.allclose(_logits(tmp_path), _expected(tmp_path, "sdpa"), rtol=0, atol=1e-3)


def test_shared_keys_and_values_are_named(tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("gemma4_text")[1], tmp_path)
    configure(tmp_path, num_kv_shared_layers=1)
    with pytest.raises(UnsupportedModelError, match="num_kv_shared_layers=1"):
        inspect_model(tmp_path)


def test_a_refusal_is_not_its_own_cause(tmp_path: Path) -> None:
    """Who goes along the causes comes to an end."""
    tiny_models.save(tiny_models.build("mixtral")[1], tmp_path)
    configure(tmp_path, num_experts_per_tok=9)
    with pytest.raises(UnsupportedModelError) as caught:
        inspect_model(tmp_path)
    assert caught.value.__cause__ is not caught.value


@pytest.mark.parametrize("theta", [-1.0, 0.0])
def test_rotary_frequencies_that_are_no_numbers(theta: float, tmp_path: Path) -> None:
    tiny_models.save(tiny_models.build("mixtral")[1], tmp_path)
    configure(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": theta})
    with pytest.raises(UnsupportedModelError, match="rope_parameters"):
        load_model(tmp_path, dtype="float32", moe=local_runtime())
