"""What tests of the invariance contract share: requests with mixed parameters, their answers as bits, and settings.

mixed_requests -> run(Setting) on ranks -> Run: an Answer per request, and what the engine's counters say has happened
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from epruntime import LLM, SamplingParams
from epruntime.engine.ranks import Ranks
from epruntime.outputs import Logprob, RequestOutput
from epruntime.testing.prompts import prompt_of

#: tokens of the prompts, in turn
_LENGTHS = (1, 4, 9, 20, 37, 50, 37, 2, 13, 30)
#: every so many prompts, one begins with the one before it, and does not ask for its prompt's log-probabilities (for
#: which nothing would be taken from the prefix cache)
_SHARED_EVERY = 4
#: longest prompt and output of `mixed_requests` with 10 new tokens: two prompts in one
MAX_LENGTH = 97

_Entries = tuple[tuple[int, str], ...]


@dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt of token ids and its parameters, always seeded or greedy."""

    prompt: tuple[int, ...]
    params: SamplingParams


def mixed_requests(count: int, *, vocab_size: int, seed: int = 5, max_tokens: int = 10) -> list[Request]:
    """Requests of which hardly two have the same parameters; the i-th is the same whatever `count` is.

    They report log-probabilities, every second one those of its prompt too, and a prompt here and there begins with
    the one before it.
    """
    requests: list[Request] = []
    for i in range(count):
        length = _LENGTHS[i % len(_LENGTHS)]
        prompt = prompt_of(length, seed + i, vocab_size=vocab_size)
        if i % _SHARED_EVERY == 2:
            prompt = [*requests[-1].prompt, *prompt]
        params = SamplingParams(
            temperature=(0, 0.7, 1.0, 1.5)[i % 4],
            top_k=(0, 5, 40)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            min_p=(0.0, 0.02, 0.0)[i % 3],
            repetition_penalty=(1.0, 1.2)[i // 2 % 2],
            presence_penalty=(0.0, 0.8, 0.0)[i % 3],
            frequency_penalty=(0.3, 0.0)[i % 2],
            logit_bias={7: 2.5, vocab_size - 4: -100.0} if i % 3 == 1 else {},
            stop_token_ids=tuple(range(vocab_size // 6, vocab_size // 2)),
            min_tokens=max_tokens - 3 + i % 3,
            prompt_logprobs=2 if i % 2 else None,
            seed=100 + i,
            n=2 if i % 10 == 2 else 1,
            max_tokens=max_tokens,
            ignore_eos=True,
            logprobs=3,
        )
        requests.append(Request(prompt=tuple(prompt), params=params))
    return requests


@dataclass(frozen=True, kw_only=True)
class Answer:
    """All that a request got: ids, and log-probabilities as hexadecimal floats, which name every bit.

    Attributes:
        tokens: of each sequence, in order; logprobs: of each sequence, per token (id, value) of all that are reported.
        prompt: (id, value) per prompt position after the first; empty if not asked for.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[_Entries, ...], ...]
    prompt: tuple[_Entries, ...]

    @property
    def digest(self) -> str:
        """Of all its bits."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    @classmethod
    def of(cls, output: RequestOutput) -> Answer:
        sequences = output.outputs
        assert all(s.finish_reason in ("stop", "length") and s.logprobs is not None for s in sequences), sequences
        assert all(s.logprobs is not None and len(s.logprobs) == len(s.token_ids) > 0 for s in sequences), sequences
        prompt = output.prompt_logprobs or []
        assert len(prompt) in (0, len(output.prompt_token_ids))
        return cls(
            tokens=tuple(tuple(s.token_ids) for s in sequences),
            logprobs=tuple(tuple(map(_hexadecimal, s.logprobs or ())) for s in sequences),
            prompt=tuple(_hexadecimal(entries) for entries in prompt[1:] if entries is not None),
        )


def _hexadecimal(entries: Mapping[int, Logprob]) -> _Entries:
    return tuple((token, entry.logprob.hex()) for token, entry in entries.items())


def first_difference(found: Sequence[Answer], expected: Sequence[Answer]) -> str | None:
    """Where two lists of answers part: request, then the first of prompt positions, then of each sequence's tokens."""
    assert len(found) == len(expected), f"{len(found)} answers, expected {len(expected)}"
    different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    if not different:
        return None
    a, b = found[different[0]], expected[different[0]]
    places = [("prompt position", a.prompt, b.prompt)]
    for s in range(len(b.tokens)):
        places += [(f"sequence {s}, token", x.logprobs[s], y.logprobs[s]) for x, y in ((a, b),)]
    where = "tokens"
    for name, left, right in places:
        k = next((k for k in range(min(len(left), len(right))) if left[k] != right[k]), None)
        if k is not None:
            where = f"{name} {k}: {left[k]} instead of {right[k]}"
            break
    return f"requests {different} of {len(expected)} differ; the first in {where}"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How an engine is run.

    Attributes:
        size: EP size; threads: compute threads per rank.
        options: further fields of the engine's configuration.
        order: "together", "reversed" (all at once, the last one first), "alone" (one after the other).
        crowd: requests that come along, beside those whose answers are compared.
        must: counters (see `happened`) -> the least value that shows that the setting did what it says.
    """

    name: str
    size: int = 1
    threads: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    order: str = "together"
    crowd: int = 0
    must: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Answers in the order of the requests, and what has happened."""

    answers: list[Answer]
    happened: dict[str, float]


def run(path: str, ranks: Ranks, setting: Setting, requests: Sequence[Request], *, compared: int, dtype: str) -> Run:
    """Generates under a setting.

    Args:
        requests: at least `compared + setting.crowd`; the first `compared` are answered in the result, with the crowd
            behind them.

    Raises:
        AssertionError: what the setting is for did not happen.
    """
    chosen = list(requests[: compared + setting.crowd])
    assert len(chosen) == compared + setting.crowd
    options = {"preflight": False, "max_model_len": MAX_LENGTH, "threads_per_rank": setting.threads, **setting.options}
    with LLM(path, ranks=ranks, expert_parallel_size=setting.size, dtype=dtype, **options) as llm:
        outputs = _generate(llm, chosen, setting.order)
        counted = happened(llm.info())
    assert counted["threads"] == setting.threads
    for name, least in setting.must.items():
        assert counted[name] >= least, f"{setting.name}: {name}={counted[name]}, not at least {least}: {counted}"
    return Run(answers=[Answer.of(output) for output in outputs[:compared]], happened=counted)


def _generate(llm: LLM, requests: Sequence[Request], order: str) -> list[RequestOutput]:
    if order == "alone":
        return [llm.generate(list(r.prompt), r.params, use_tqdm=False)[0] for r in requests]
    turned = list(requests)[::-1] if order == "reversed" else list(requests)
    prompts: list[Any] = [{"prompt_token_ids": list(r.prompt)} for r in turned]
    outputs = llm.generate(prompts, [r.params for r in turned], use_tqdm=False)
    return outputs[::-1] if order == "reversed" else outputs


def happened(info: Mapping[str, Any]) -> dict[str, float]:
    """Counters of an engine (`LLM.info()`), over all ranks.

    Returns:
        fields of SchedulerCounters -> totals; "ranks_at_work": ranks that computed a token of a prompt;
        "rows_per_step": tokens per step that was not empty, of the busiest rank; "more_rounds": exchange rounds beyond
        one per layer and step; "pairs" and "replica_pairs": (token, expert) pairs computed, and those of them computed
        by a replica; "experts_at_work": experts that a token chose, of the layer with most of them; "threads": compute
        threads of each rank, the least.
    """
    ranks, engine = info["ranks"], info["engine"]
    names = [name for name, value in ranks[0]["scheduler"].items() if isinstance(value, int)]
    totals: dict[str, float] = {name: sum(rank["scheduler"][name] for rank in ranks) for name in names}
    layers = [layer for rank in ranks for layer in rank["moe"]["layers"].values()]
    by_rank = [rank["scheduler"] for rank in ranks]
    chosen = [
        [sum(counts) for counts in zip(*(rank["moe"]["layers"][i]["expert_tokens"] for rank in ranks), strict=True)]
        for i in ranks[0]["moe"]["layers"]
    ]
    return totals | {
        "ranks_at_work": sum(rank["prefill_tokens"] > 0 for rank in by_rank),
        "rows_per_step": max(
            (rank["prefill_tokens"] + rank["decode_tokens"]) / max(engine["steps"] - rank["empty_plans"], 1)
            for rank in by_rank
        ),
        "more_rounds": sum(layer["rounds"] - layer["steps"] for layer in layers),
        "pairs": sum(layer["pairs_received"] for layer in layers),
        "replica_pairs": sum(layer["replica_pairs"] for layer in layers),
        "threads": min(rank["threads"] for rank in ranks),
        "experts_at_work": max(sum(count > 0 for count in counts) for counts in chosen),
    }
