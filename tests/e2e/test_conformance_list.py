"""Every Mixture-of-Experts type of the installed transformers: what is listed as served passes, the rest is reported.

The list is computed (`epruntime.models.survey`), so a new transformers brings its types along. A type that is served
must give transformers' prompt log-probabilities and greedy tokens at EP 1, 2 and 3. A type that is not, but that the
probe finds nothing against, is compared and named in a warning: it wants a row in `conformance.COVERED`.
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.errors import UnsupportedModelError
from epruntime.models import adapter, loader, text_part
from epruntime.models.conformance import COVERED, PARTLY, SINCE
from epruntime.models.refusal import REFUSED
from epruntime.models.small_config import small_config
from epruntime.models.survey import Verdict, candidates, survey
from epruntime.testing import tiny_models
from epruntime.testing.prompts import prompt_of
from epruntime.testing.reference import Reference, greedy_reference

LENGTHS, NEW_TOKENS = (2, 9, 23, 40), 16
MIN_MARGIN, LOGPROB_BOUND = 1.5e-4, 5e-4
TRIES = 100
OPTIONS = {
    "dtype": "float32",
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
    "block_size": 4,
    "num_kv_blocks": 64,
}
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0, prompt_logprobs=0)
#: Types that `make test` runs here (it runs those of `test_tokens_equal`, too); `make test-all` runs all.
SLICE = frozenset({"dbrx", "glm_moe_dsa", "llama4", "longcat_flash", "qwen3_vl_moe"})

#: Weights with which prompts that have margins are found.
SEEDS = {"mistral4": 1, "mistral_large4": 2}
TYPES = [pytest.param(t, marks=() if t in SLICE else pytest.mark.full) for t in candidates()]


@cache
def _verdicts() -> dict[str, Verdict]:
    return {verdict.model_type: verdict for verdict in survey()}


def _clear_cut(model) -> tuple[list[list[int]], Reference]:  # type: ignore[no-untyped-def]
    """Prompts whose answer has margins, found by the reference alone, and that answer."""
    prompts, found = [], []
    for length in LENGTHS:
        for seed in range(TRIES):
            prompt = prompt_of(length, seed)
            reference = greedy_reference(model, [prompt], max_new_tokens=NEW_TOKENS)
            if min(reference.router_margin, reference.top1_margin) > MIN_MARGIN:
                break
        else:
            raise LookupError(f"no prompt of {length} tokens has margins above {MIN_MARGIN}")
        prompts.append(prompt)
        found.append(reference)
    assert not math.isinf(min(r.router_margin for r in found)), "no selection was seen: the router is not watched"
    return prompts, Reference(
        tokens=[r.tokens[0] for r in found],
        logprobs=[r.logprobs[0] for r in found],
        router_margin=min(r.router_margin for r in found),
        top1_margin=min(r.top1_margin for r in found),
    )


@torch.inference_mode()
def _prompt_logprobs(model, prompt: list[int]) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Of each token after the first, float64 [n - 1]."""
    logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def _check(
    path: Path, size: int, ranks: Ranks, prompts: list[list[int]], reference: Reference, known: list[torch.Tensor]
) -> None:
    with LLM(path, ranks=ranks, expert_parallel_size=size, **OPTIONS) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], PARAMS, use_tqdm=False)
    for prompt, output, tokens, logprobs, expected in zip(
        prompts, outputs, reference.tokens, reference.logprobs, known, strict=True
    ):
        (completion,) = output.outputs
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        found = [entries[t].logprob for t, entries in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=LOGPROB_BOUND), size
        assert completion.token_ids == tokens, f"EP {size}, prompt of {len(prompt)}"
        new = [entries[t].logprob for t, entries in zip(tokens, completion.logprobs, strict=True)]
        assert max(abs(a - b) for a, b in zip(new, logprobs, strict=True)) < LOGPROB_BOUND, size


@pytest.mark.parametrize("model_type", TYPES)
def test_every_type(model_type: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = _verdicts().get(model_type)
    if verdict is None:
        pytest.skip("no layer of it has experts")
    if not verdict.served and not verdict.newly:
        pytest.skip(f"not served: {verdict.reason}")
    _, model = tiny_models.build(model_type, seed=SEEDS.get(model_type, 0))
    prompts, reference = _clear_cut(model)
    known = [_prompt_logprobs(model, prompt) for prompt in prompts]
    tiny_models.save(model, tmp_path)
    if verdict.newly:
        _report(verdict, model, tmp_path, monkeypatch)
        return
    for size in (1, 2, 3):
        _check(tmp_path, size, ranks, prompts, reference, known)


def _report(verdict: Verdict, model, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    """A warning that says whether a type which is not served would pass."""
    from epruntime.testing.ragged import compare, local_runtime

    monkeypatch.setitem(COVERED, verdict.model_type, frozenset(verdict.features))
    found = compare(model, loader.load_model(path, dtype="float32", moe=local_runtime()))
    equal = found.error <= 3 * found.eager_error + 2e-6 * found.largest_logit
    warnings.warn(
        f"{verdict.model_type} is not in conformance.COVERED; nothing is known against it, and its logits "
        f"{'equal' if equal else 'DO NOT equal'} transformers' (error {found.error:.1e}, features {verdict.features})",
        stacklevel=1,
    )


def test_the_list_and_the_table_agree() -> None:
    """Every covered type of this transformers is listed as served; none else is."""
    verdicts = _verdicts()
    served = {t for t, verdict in verdicts.items() if verdict.served}
    assert served == {t for t in COVERED if adapter.version() >= SINCE.get(t, (0, 0))}
    for model_type, verdict in verdicts.items():
        told = model_type in PARTLY or text_part.has_language_part(CONFIG_MAPPING[model_type])
        assert bool(verdict.reason) == (told or not verdict.served), model_type
    assert {verdict.how for verdict in verdicts.values()} == {"", "hooked", "adapted"}
    assert not {t for t in verdicts if t in ("llama", "qwen3", "gemma3_text")}, "dense types are not listed"


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_what_is_refused_by_name_could_not_be_served(model_type: str) -> None:
    """A refusal that has become needless, because transformers changed, is found."""
    if model_type not in candidates():
        pytest.skip("this transformers has no such Mixture-of-Experts type")
    config = small_config(model_type)
    with pytest.raises(UnsupportedModelError):
        loader.features_of_model(adapter.build_meta_model(config, torch.float32), config)
