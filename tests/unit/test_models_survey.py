"""`epruntime models`: the list is computed, its verdicts are those of the gate, and both outputs say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from epruntime.cli.main import main
from epruntime.cli.models import table
from epruntime.errors import CheckpointError, UnsupportedModelError
from epruntime.models import adapter, refusal, survey
from epruntime.models.checkpoint import Checkpoint, split_rows
from epruntime.models.conformance import COVERED, PARTLY, SINCE
from epruntime.models.loader import features_of_model
from epruntime.models.refusal import REFUSED_PART
from epruntime.models.safetensors import TensorEntry
from epruntime.models.type_names import help_with, type_of
from epruntime.testing import tiny_models


def _only(monkeypatch: pytest.MonkeyPatch, *types: str) -> None:
    monkeypatch.setattr(survey, "_CLASSES", {t: survey._CLASSES[t] for t in types})


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "mixtral", "dbrx", "llama", "qwen3_next", "llama4", "jetmoe", "gemma3_text")
    found = {verdict.model_type: verdict for verdict in survey.survey()}
    assert set(found) == {"mixtral", "dbrx", "qwen3_next", "llama4", "jetmoe"}  # the dense ones are not listed
    assert (found["mixtral"].how, found["mixtral"].reason) == ("hooked", "")
    assert found["mixtral"].architecture == "MixtralForCausalLM"
    assert found["dbrx"].how == "adapted"
    assert found["qwen3_next"].served
    assert PARTLY["qwen3_next"] in found["qwen3_next"].reason
    assert (found["llama4"].how, found["llama4"].reason) == ("adapted", "text alone")
    assert "experts interface" in found["jetmoe"].reason


def test_no_architecture_with_experts_is_left_out() -> None:
    """Told by the library's files: a type whose module defines experts and generates text is a candidate."""
    folder = Path(transformers.__file__).parent / "models"
    with_experts = {
        file.parent.name
        for file in folder.glob("*/modeling_*.py")
        if re.search(r"^class \w*(Experts|SparseMoe\w*|MoE)\(", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(with_experts) > 50
    listed = {_folder(t) for t in survey.candidates()}
    others = {_folder(t) for t in transformers.CONFIG_MAPPING if t not in survey._CLASSES}
    missing = with_experts - listed
    # one classifies tokens, and the last names a part of speech recognition so; neither generates text
    assert {folder for folder in missing if folder not in others} <= {"openai_privacy_filter", "granite_speech5"}, (
        missing
    )


def _folder(model_type: str) -> str:
    return transformers.models.auto.configuration_auto.model_type_to_module_name(model_type)


def test_one_type_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "kimi_k25"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^kimi_k25 +hooked +dense, latent; text alone$", out, re.MULTILINE)
    assert "mixtral" not in out
    with pytest.raises(SystemExit) as ended:
        main(["models", "mixtral", "qwen3_vl"])
    assert ended.value.code == 2
    assert "qwen3_vl (did you mean qwen3_vl_moe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Mixtral", "mixtral"),
        ("Qwen3-MoE", "qwen3_moe"),
        ("nllb_moe", "nllb-moe"),
        ("MixtralForCausalLM", "mixtral"),
        ("Llama4ForConditionalGeneration", "llama4"),
        ("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe"),
        *[(name, None) for name in ("llama", "LlamaForCausalLM", "bert", "mixtral8", "Mixtral-8x7B", "", "-")],
    ],
)
def test_a_type_in_another_spelling(name: str, expected: str | None) -> None:
    assert type_of(name, survey.candidates()) == expected


def test_every_type_means_itself() -> None:
    known = survey.candidates()
    assert [type_of(model_type, known) for model_type in known] == known


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mistralai/Mixtral-8x7B-v0.1", "did you mean mixtral?"),
        ("Qwen3-30B-A3B", "did you mean qwen3_moe?"),
        ("qwen3_vl", "did you mean qwen3_vl_moe?"),
        ("DeepSeek-V3.1", "did you mean deepseek_v3?"),
        ("mixtrl", "did you mean mixtral?"),
        ("gemma", "gemma is a type that transformers knows, and has no experts"),
        *[
            (name, "llama is a type that transformers knows, and has no experts; `epruntime upcycle` makes a "
            "Mixture-of-Experts model of it")
            for name in ("llama", "LlamaForCausalLM", "meta-llama/Llama-2-7b")
        ],
        ("clip", "clip is a type that transformers knows, and generates no text by itself"),
        ("something else", ""),
        ("Qwen1.5-MoE-A2.7B", ""),  # a qwen2_moe
    ],
)  # fmt: skip
def test_what_is_said_of_a_name_that_is_none(name: str, expected: str) -> None:
    assert help_with(name, survey.candidates()) == expected


def test_names_at_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "Mixtral", "MixtralForCausalLM", "--json"]) == 0
    assert [model["model_type"] for model in json.loads(capsys.readouterr().out)["models"]] == ["mixtral"]
    with pytest.raises(SystemExit):
        main(["models", "llama"])
    told = capsys.readouterr().err
    assert "llama is a type that transformers knows, and has no experts" in told
    assert "did you mean" not in told


def test_a_configuration_that_counts_experts_of_a_model_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(survey, "_has_experts", lambda model: False)
    with pytest.raises(SystemExit):
        main(["models", "Mixtral"])
    assert "Mixtral (the configuration of mixtral counts experts, but a small model of it has none)" in (
        capsys.readouterr().err
    )


def test_encoder_decoders_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "switch_transformers", "nllb-moe", "t5")
    assert {v.model_type: v.reason for v in survey.survey()} == dict.fromkeys(
        ("switch_transformers", "nllb-moe"), "an encoder-decoder model"
    )


def test_what_does_not_append_token_after_token_is_refused_with_that_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _only(monkeypatch, "diffusion_gemma", "mixtral")
    found = {verdict.model_type: verdict for verdict in survey.survey()}
    assert found["mixtral"].served
    reason = found["diffusion_gemma"].reason
    assert re.fullmatch(r"it is no autoregressive model, .*: .* several steps \(block diffusion\)", reason)
    with pytest.raises(UnsupportedModelError, match=f"diffusion_gemma is not supported: {re.escape(reason)}"):
        refusal.check_raw_config(tmp_path, {"model_type": "diffusion_gemma", "text_config": {"a": 1}})


def test_a_multimodal_checkpoint_that_is_refused_by_name_is_told_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(COVERED, "qwen3_vl_moe")
    monkeypatch.setitem(refusal.REFUSED, "qwen3_vl_moe", "a reason")
    with pytest.raises(UnsupportedModelError, match="qwen3_vl_moe is not supported: a reason; "):
        refusal.check_raw_config(tmp_path, {"model_type": "qwen3_vl_moe", "vision_config": {"a": 1}})


def test_a_type_that_no_test_covers_is_not_served_and_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "olmoe", "mixtral")
    monkeypatch.delitem(COVERED, "olmoe")
    monkeypatch.setitem(COVERED, "mixtral", frozenset())
    by_type = {verdict.model_type: verdict for verdict in survey.survey()}
    assert (by_type["olmoe"].served, by_type["olmoe"].newly) == (False, True)
    assert by_type["mixtral"].served


def test_what_needs_a_newer_transformers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "olmoe", "mixtral", "jetmoe")
    monkeypatch.setitem(SINCE, "olmoe", (5, 24))
    monkeypatch.setitem(SINCE, "jetmoe", (5, 30))
    found = survey.survey()
    since = {verdict.model_type: verdict.since for verdict in found}
    assert since == {"olmoe": "5.24", "mixtral": "", "jetmoe": "5.30"}
    rows = table([verdict.to_dict() for verdict in found])
    told = {row.split()[0]: " ".join(row.split()[-5:]) for row in re.sub("\n +", " ", rows).splitlines()}
    assert told["olmoe"] == "needs transformers 5.24 or newer"
    assert told["jetmoe"] == "needs transformers 5.30 or newer"
    assert "transformers" not in told["mixtral"]


def test_a_type_whose_small_model_cannot_be_built_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    _only(monkeypatch, "olmoe")

    def fail(model_type: str) -> Any:
        raise ValueError("a field of a later release\nis missing")

    monkeypatch.setattr(survey, "small_config", fail)
    (verdict,) = survey.survey()
    assert not verdict.served
    assert verdict.reason.endswith("a field of a later release is missing")


def test_both_outputs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _only(monkeypatch, "mixtral", "jetmoe")
    assert main(["models", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["served"], facts["transformers"]) == (1, transformers.__version__)
    assert [model["model_type"] for model in facts["models"]] == ["jetmoe", "mixtral"]
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = table(facts["models"]).splitlines()
    assert lines[: len(rows) + 1] == [*rows, ""]  # then what the words mean
    assert lines[1].split() == ["mixtral", "hooked", "window"]
    assert lines[2].split()[:2] == ["jetmoe", "no"]
    assert lines[-1].startswith("1 of 2 ")
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention", "full_attention"]}),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention", "attention"]}),
        ("lfm2_moe", {"layer_types": ["conv", "full_attention", "full_attention"]}),
        ("deepseek_v4", {"layer_types": ["compressed_sparse_attention", "sliding_attention", "sliding_attention"]}),
        ("unlimited_ocr", {"layer_types": ["full_attention", "full_attention", "reference_sliding_attention"]}),
    ],
)
def test_the_part_that_is_not_served_is_refused_with_the_reason(model_type: str, fields: dict[str, Any]) -> None:
    if not tiny_models.available([model_type]):
        pytest.skip("this transformers has no such type")
    config = tiny_models.small_config(model_type, **fields)
    model = adapter.build_meta_model(config, torch.float32)
    told = f"served with {PARTLY[model_type]}; of this model that is not true: {REFUSED_PART[model_type]}"
    with pytest.raises(UnsupportedModelError, match=told):
        features_of_model(model, config)


def _checkpoint(**shapes: tuple[int, ...]) -> Checkpoint:
    tensors, offset = {}, 100
    for name, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        tensors[name] = TensorEntry(
            name=name, file=Path("f"), dtype=torch.float32, shape=shape, offset=offset, num_bytes=size
        )
        offset += size
    return Checkpoint(path=Path("d"), raw_config={}, tensors=tensors, header_bytes=0)


def test_rows_of_one_tensor_become_tensors_of_their_own() -> None:
    before = _checkpoint(**{"a.w1": (6, 5), "a.norm": (5,)})
    after = split_rows(before, {"w1": ("0.w1", "1.w1", "2.w1")})
    assert {name: (entry.shape, entry.offset) for name, entry in after.tensors.items()} == {
        "a.0.w1": ((2, 5), 100),
        "a.1.w1": ((2, 5), 140),
        "a.2.w1": ((2, 5), 180),
        "a.norm": ((5,), 220),
    }
    assert after.num_bytes == before.num_bytes
    with pytest.raises(CheckpointError, match=r"a\.w1 of shape \(6, 5\) cannot be cut into 4"):
        split_rows(before, {"w1": ("0.w1", "1.w1", "2.w1", "3.w1")})
