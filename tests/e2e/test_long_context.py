"""Long sequences, in parts over the paged cache, equal transformers: rotary embeddings, windows, chunks, selection.

Some thousand tokens on tiny models: positions far beyond the original length that a rotary embedding was made for,
windows and chunks that are passed many times, an indexer that leaves out most keys. The oracle is transformers in
fp64, each sequence alone: a prompt at once, then token by token over its cache.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from epruntime.models import adapter
from epruntime.models.loader import load_model
from epruntime.testing import tiny_models
from epruntime.testing.longrope import change_by_long_factors
from epruntime.testing.margins import watch_rows
from epruntime.testing.prompts import prompt_of
from epruntime.testing.ragged import RaggedDriver, Rows, compare, fresh, local_runtime

_SCALED = {"rope_theta": 1e4, "original_max_position_embeddings": 256}
_YARN = {"rope_type": "yarn", "factor": 16.0, **_SCALED}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_SCALED}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 16.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [2.0 + 2.0 * i for i in range(8)],
    "original_max_position_embeddings": 1024,
}
_PHI = {**_LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
_FULL_AND_SLIDING = ["sliding_attention", "full_attention"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3_moe", {"rope_parameters": _YARN}),
    "yarn latent": ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "llama3": ("mixtral", {"rope_parameters": _LLAMA3}),
    "linear": ("mixtral", {"rope_parameters": _LINEAR}),
    "longrope": ("mixtral", {"rope_parameters": _LONGROPE}),
    "longrope of Phi": ("phimoe", {"rope_parameters": _PHI}),
    "longrope and linear by layers": (
        "laguna",
        {
            "layer_types": _FULL_AND_SLIDING,
            "sliding_window": 400,
            "mlp_layer_types": ["sparse", "sparse"],
            "rope_parameters": {"full_attention": _LONGROPE, "sliding_attention": _LINEAR},
        },
    ),
    "alpha": (
        "hunyuan_v1_moe",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 50.0}},
    ),
    "dynamic": ("glm4_moe", {"rope_parameters": _DYNAMIC, "max_position_embeddings": 512}),
    "window": ("mixtral", {"sliding_window": 300}),
    "window and sinks": ("gpt_oss", {"sliding_window": 128}),
    "chunks and temperature": ("llama4_text", {"attention_chunk_size": 512, "floor_scale": 256}),
    # of few index heads all may say 0, and of keys that tie torch's top-k names any: 32 leave no ties
    "sparse": ("deepseek_v32", {"index_topk": 128, "index_n_heads": 32}),
}
#: Sequences of 2,500 and 300 tokens, which share steps.
SCHEDULE = (
    (("long", 700), ("short", 90)),
    (("short", 200), ("long", 900)),
    (("long", 877), ("short", 9)),
    *((("long", 1), ("short", 1)),) * 3,
    (("long", 20),),
)
TIMES_EAGER, SHARE = 3.0, 2e-6
#: Rows that may take another expert, or other keys, than in fp64, and rows that are near enough a tie for it.
MOST_TURNED, MOST_NEAR_A_TIE = 2, 0.005


#: What `make test` runs; the others take longer, and `make test-all` runs them.
SLICE = ("yarn", "yarn latent", "llama3", "longrope", "dynamic")


def _layers(model_type: str) -> dict[str, Any]:
    if model_type == "gpt_oss":
        return {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    return {"num_hidden_layers": 4 if model_type == "llama4_text" else 2}


def _judge(rows: Rows, largest_logit: float) -> None:
    """Every row is right, but for a few that a tie between experts or keys excuses."""
    assert rows.eager_error < 1e-3 * largest_logit, f"the oracle itself is unsteady: {rows.eager_error}"
    assert int(rows.near_tie_T.sum()) <= MOST_NEAR_A_TIE * len(rows.margin_T)
    bound = TIMES_EAGER * rows.eager_error + SHARE * largest_logit
    wrong, turned = rows.beyond(bound)
    assert not wrong, f"rows {wrong[:20]}: {rows.error_T[wrong[:20]].tolist()}, above {bound}"
    assert len(turned) <= MOST_TURNED, f"rows {turned}: {rows.error_T[turned].tolist()}, above {bound}"


def _uses_long_factors(reference: Any, name: str) -> bool:
    """Else a case of longrope proves nothing of long factors."""
    if "longrope" not in name or "Phi" in name:
        return True
    return change_by_long_factors(reference, position=reference.config.max_position_embeddings - 1) > 0.01


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SLICE else pytest.mark.full) for n in CASES])
def test_long_sequences_equal_transformers(name: str, tmp_path: Path) -> None:
    model_type, overrides = CASES[name]
    _, reference = tiny_models.build(
        model_type, **{"max_position_embeddings": 4096, **_layers(model_type), **overrides}
    )
    tiny_models.save(reference, tmp_path)
    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    assert _uses_long_factors(reference, name)
    found = compare(reference, model, schedule=SCHEDULE, num_blocks=190, block_size=16, by_rows=True)
    assert found.largest_logit > 0.5
    assert found.rows is not None
    _judge(found.rows, found.largest_logit)


def _beyond(original: int, **parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 1e4, "original_max_position_embeddings": original, **parameters}


#: Sequences of 8,000, 5,000 and 2,000 tokens, then 16 of greedy decoding. name -> (type, configuration)
LONGEST: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": ("qwen3_moe", {"rope_parameters": _beyond(2048, rope_type="yarn", factor=4.0)}),
    "yarn latent": (
        "deepseek_v3",
        {"rope_parameters": _beyond(2048, rope_type="yarn", factor=4.0, mscale=0.7, mscale_all_dim=1.0)},
    ),
    "llama3": (
        "minimax_m2",
        {"rope_parameters": _beyond(4096, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "linear, window": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 1500, "max_window_layers": 1}),
    "longrope": ("mixtral", {"rope_parameters": {**_LONGROPE, "original_max_position_embeddings": 4096}}),
    "longrope of some layers, window": (
        "mellum",
        {
            "layer_types": _FULL_AND_SLIDING,
            "sliding_window": 1000,
            "rope_parameters": {
                "full_attention": {**_LONGROPE, "original_max_position_embeddings": 4096},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "dynamic": ("granitemoe", {"rope_parameters": {**_DYNAMIC, "factor": 4.0}, "max_position_embeddings": 2048}),
    "dynamic, latent, complex": (
        "deepseek_v2",
        {"rope_parameters": {**_DYNAMIC, "factor": 4.0}, "max_position_embeddings": 3000},
    ),
    "proportional, window": ("gemma4_text", {"layer_types": _FULL_AND_SLIDING, "sliding_window": 512}),
    "chunks and temperature": ("llama4_text", {"attention_chunk_size": 2048, "floor_scale": 2048}),
}
LENGTHS = {"a": 8000, "b": 5000, "c": 2000}
NEW_TOKENS = 16


def _steps() -> Iterator[dict[str, int]]:
    """Tokens of each sequence per step: parts of several hundred that differ, until all prompts are there."""
    left, sizes = dict(LENGTHS), (900, 613, 250, 1, 1024)
    for i in range(1000):
        items = {name: min(n, sizes[(i + k) % len(sizes)]) for k, (name, n) in enumerate(left.items()) if n}
        if not items:
            return
        left = {name: n - items.get(name, 0) for name, n in left.items()}
        yield items


@torch.inference_mode()
def _alone(
    reference: Any, prompt: torch.Tensor, forced: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [n + 15, V] of a prompt and its greedy continuation, or of `forced`; the 16 tokens; margins [n + 15]."""
    model = fresh(reference)
    keyword = adapter.cache_keyword(model)
    with watch_rows(len(prompt)) as margin:
        out = model(input_ids=prompt[None], use_cache=True)
    logits, tokens, margins = [out.logits[0]], [], [margin]
    for i in range(NEW_TOKENS):
        tokens.append(logits[-1][-1].argmax() if forced is None else forced[i])
        if i < NEW_TOKENS - 1:
            position = torch.tensor([[len(prompt) + i]])
            cache = {keyword: next(out[name] for name in (keyword, "past_key_values") if name in out)}
            with watch_rows(1) as margin:
                out = model(input_ids=tokens[-1][None, None], position_ids=position, use_cache=True, **cache)
            logits.append(out.logits[0])
            margins.append(margin)
    return torch.cat(logits), torch.stack(tokens), torch.cat(margins)


def _distances(found: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    return (found.double() - exact).abs().nan_to_num(nan=math.inf).amax(1)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", LONGEST)
def test_8000_tokens_and_their_mates(name: str, tmp_path: Path) -> None:
    model_type, overrides = LONGEST[name]
    _, reference = tiny_models.build(
        model_type, **{"max_position_embeddings": 8192, **_layers(model_type), **overrides}
    )
    tiny_models.save(reference, tmp_path)
    assert _uses_long_factors(reference, name)
    reference.set_attn_implementation("sdpa")  # eager would hold all scores at once
    reference.set_experts_implementation("eager")
    exact = copy.deepcopy(reference).double()
    prompts = {n: torch.tensor(prompt_of(size, 1)) for n, size in LENGTHS.items()}
    expected = {n: _alone(exact, prompt) for n, prompt in prompts.items()}
    plain = {n: _alone(reference, prompt, expected[n][1])[0] for n, prompt in prompts.items()}

    model = load_model(tmp_path, dtype="float32", moe=local_runtime())
    assert model.info.max_position_embeddings >= 8192
    driver = RaggedDriver(model, num_blocks=970, block_size=16, rope_lens=LENGTHS)
    found: dict[str, list[torch.Tensor]] = {n: [] for n in prompts}
    done = dict.fromkeys(prompts, 0)
    for items in _steps():
        parts = [(n, prompts[n][done[n] : done[n] + count]) for n, count in items.items()]
        for (n, part), logits in zip(parts, driver.step(parts), strict=True):
            found[n].append(logits)
            done[n] += len(part)
    for i in range(NEW_TOKENS - 1):
        for n, logits in zip(prompts, driver.step([(n, expected[n][1][i : i + 1]) for n in prompts]), strict=True):
            found[n].append(logits)

    largest = max(logits.abs().max().item() for logits, _, _ in expected.values())
    assert largest > 0.5
    errors = {n: _distances(torch.cat(found[n]), expected[n][0]) for n in prompts}
    rows = Rows(
        error_T=torch.cat(list(errors.values())),
        eager_error_T=torch.cat([_distances(plain[n], expected[n][0]) for n in prompts]),
        margin_T=torch.cat([expected[n][2] for n in prompts]),
    )
    _judge(rows, largest)
    for n, (logits, tokens, _) in expected.items():
        last = torch.cat(found[n])[-NEW_TOKENS:]
        best = logits[-NEW_TOKENS:].topk(2).values
        clear = best[:, 0] - best[:, 1] > 2 * errors[n][-NEW_TOKENS:].max()
        assert int(clear.sum()) > NEW_TOKENS // 2
        assert last.argmax(-1)[clear].tolist() == tokens[clear].tolist()
