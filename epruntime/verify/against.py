"""What transformers itself computes for the same tokens, in this process: the whole model, one request at a time.

greedy outputs of the baseline -> `generate` in the model's dtype, made to give these outputs -> the same in a wider one
-> differences of log-probabilities, tokens that are not transformers' own, and whether arithmetic explains them

Bits are not expected to be equal: transformers adds in another order. How far two orders of one dtype may lie apart is
measured on the model itself: it is as far as transformers lies from its own result in the wider dtype.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor
from transformers.utils import logging as transformers_logging

from epruntime.errors import ConfigError
from epruntime.models import adapter
from epruntime.models.info import ModelInfo
from epruntime.models.rope import recomputed_beyond
from epruntime.verify.outputs import Output
from epruntime.verify.requests import VerifyRequest
from epruntime.worker.memory import free_memory_bytes

#: how many times transformers' own error epruntime may lie from transformers: both err, and not on the same tokens.
FACTOR = 4.0
#: errors below these are taken to be these: few tokens may show none by luck.
_FLOOR = {"float32": 2e-5, "bfloat16": 1e-2}
#: taken where the wider run is impossible.
_FIXED = {"float32": 5e-4, "bfloat16": 0.2}
#: part of the positions that may lie beyond: in bfloat16 rounding makes a router choose another expert now and then.
_OUTLIERS = {"float32": 0.0, "bfloat16": 0.1}
_WIDER = {"float32": torch.float64, "bfloat16": torch.float32}
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """An output token that is not transformers' most likely one after the same tokens.

    Attributes:
        position: in the output. margin: by how much transformers finds its own token more likely (natural log).
    """

    request: int
    position: int
    token: int
    expected_token: int
    margin: float


@dataclass(frozen=True, kw_only=True)
class AgainstReport:
    """All numbers are natural logarithms of probabilities.

    Attributes:
        num_tokens: output tokens compared; num_positions: log-probabilities compared, those of prompts included.
        num_same_bits: of them, equal bit for bit as float32.
        largest_difference, median_difference: between epruntime's and transformers' log-probability of a token.
        arithmetic_error, median_error: the same between transformers in the model's dtype and in the wider one. Where
            rounding makes a router choose another expert a token may lie far off; the medians see what all have.
        num_outliers: positions that differ by more than `bound`; outlier_share: part of them that may.
        note: how that was found, if not by running it.
    """

    num_requests: int
    num_tokens: int
    num_positions: int
    num_same_bits: int
    largest_difference: float
    median_difference: float
    arithmetic_error: float
    median_error: float
    different_tokens: tuple[TokenDifference, ...]
    num_outliers: int = 0
    outlier_share: float = 0.0
    note: str = ""

    @property
    def bound(self) -> float:
        """Most that log-probabilities may differ by; a token may be another one up to a margin of twice it."""
        return FACTOR * self.arithmetic_error

    @property
    def num_beyond(self) -> int:
        """Tokens that differ by more than arithmetic explains."""
        return sum(not found.margin <= 2 * self.bound for found in self.different_tokens)

    @property
    def ok(self) -> bool:
        medians = self.median_difference <= FACTOR * self.median_error
        few = self.num_outliers <= self.outlier_share * self.num_positions
        return medians and few and self.num_beyond <= self.outlier_share * self.num_tokens

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "bound": self.bound, "num_beyond": self.num_beyond, "ok": self.ok}

    def __str__(self) -> str:
        same = self.num_tokens - len(self.different_tokens)
        words = (
            f"against transformers: {'ok' if self.ok else 'FAILED'}; {same} of {self.num_tokens} greedy tokens are its "
            f"own; over {self.num_positions} positions ({self.num_same_bits} have the same bits) log-probabilities "
            f"differ by {self.median_difference:.2g} in the median and {self.largest_difference:.2g} at most; "
            f"arithmetic explains {FACTOR:g} times {self.median_error:.2g} and {FACTOR:g} times "
            f"{self.arithmetic_error:.2g} ({self.note or 'its own distance from the wider dtype'}), and "
            f"{self.num_outliers} positions lie beyond, of {int(self.outlier_share * self.num_positions)} that may"
        )
        for found in self.different_tokens[:4]:
            kind = "within the error" if found.margin <= 2 * self.bound else "BEYOND THE ERROR"
            likely = f"more likely by {found.margin:.2g}" if found.margin else "as likely"
            words += (
                f"; request {found.request}, output position {found.position}: token {found.token} where transformers "
                f"has {found.expected_token}, {likely}: {kind}"
            )
        return words


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """Of some positions of one request: log-probabilities of the tokens that are there, the most likely tokens, and
    theirs."""

    chosen: torch.Tensor
    best: torch.Tensor
    best_value: torch.Tensor


def compare_with_transformers(
    path: str,
    info: ModelInfo,
    requests: Sequence[VerifyRequest],
    outputs: Mapping[int, Output],
    *,
    say: Callable[[str], None],
) -> AgainstReport:
    """Every greedy request, its prompt and epruntime's output after it.

    Raises:
        ConfigError: the model does not fit in this process's memory, or no request is greedy and has ended well.
    """
    chosen = [request for request in requests if request.greedy and not outputs[request.index].error]
    # a penalty is no part of the model
    chosen = [request for request in chosen if request.spec.repetition_penalty == 1.0]
    if not chosen:
        raise ConfigError("against transformers: no greedy request has ended well; raise num_prompts")
    _check_memory(info, info.dtype_bytes, "--against transformers")
    dtype = getattr(torch, info.dtype)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it explains generation settings that are not used
    model = AutoModelForCausalLM.from_pretrained(path, config=adapter.read_config(Path(path)), dtype=dtype).eval()
    plain = [_scores(model, request, outputs[request.index]) for request in chosen]
    wide, note = _wide_scores(model, info, chosen, outputs, say)
    del model
    gc.collect()
    error = median = _FIXED[info.dtype]
    if wide is not None:
        gaps = torch.cat([(a.chosen - b.chosen).abs() for a, b in zip(plain, wide, strict=True)])
        error, median = (max(float(value), _FLOOR[info.dtype]) for value in (gaps.max(), gaps.median()))
    return _report(chosen, outputs, plain, dtype=info.dtype, error=error, median_error=median, note=note)


def _report(
    requests: Sequence[VerifyRequest],
    outputs: Mapping[int, Output],
    scores: Sequence[_Scores],
    *,
    dtype: str,
    error: float,
    median_error: float,
    note: str,
) -> AgainstReport:
    differences: list[TokenDifference] = []
    gaps: list[torch.Tensor] = []
    num_same = num_tokens = 0
    for request, score in zip(requests, scores, strict=True):
        output, prompt = outputs[request.index], len(request.token_ids)
        ours = [entry.chosen for entry in (*(output.prompt_logprobs or ()), *output.logprobs)]
        # a request without log-probabilities of its prompt is compared from its first output token on
        first = 0 if output.prompt_logprobs is not None else prompt - 1
        theirs = score.chosen[first:]
        ours_P = torch.tensor(ours, dtype=torch.float64)
        gaps.append((ours_P - theirs).abs())
        num_same += int((ours_P.float() == theirs.float()).sum())
        num_tokens += len(output.tokens)
        for position, token in enumerate(output.tokens):
            row = prompt - 1 + position
            expected = int(score.best[row])
            if token != expected:
                margin = float(score.best_value[row] - score.chosen[row])
                differences.append(
                    TokenDifference(
                        request=request.index, position=position, token=token, expected_token=expected, margin=margin
                    )
                )
    all_gaps = torch.cat(gaps)
    return AgainstReport(
        num_requests=len(requests),
        num_tokens=num_tokens,
        num_positions=len(all_gaps),
        num_same_bits=num_same,
        largest_difference=float(all_gaps.max()),
        median_difference=float(all_gaps.median()),
        arithmetic_error=error,
        median_error=median_error,
        different_tokens=tuple(differences),
        num_outliers=int((all_gaps > FACTOR * error).sum()),
        outlier_share=_OUTLIERS[dtype],
        note=note,
    )


class _Force(LogitsProcessor):
    """Lets `generate` continue with tokens that are given."""

    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        self._tokens, self._num_prompt_tokens = tokens, num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._tokens[input_ids.shape[1] - self._num_prompt_tokens]] = 0.0
        return forced


@torch.inference_mode()
def _scores(model: Any, request: VerifyRequest, output: Output) -> _Scores:
    """Row p is what predicts the token at p + 1: those of the prompt at once, those of the output one by one."""
    if "dynamic" in adapter.rope_types(model):
        model = copy.deepcopy(model)  # it remembers the longest sequence that it has seen
    prompt_1P, num_prompt = torch.tensor([request.token_ids]), len(request.token_ids)
    prompt_PV = model(input_ids=prompt_1P, use_cache=False).logits[0]
    generated = model.generate(
        prompt_1P,
        attention_mask=torch.ones_like(prompt_1P),
        max_new_tokens=len(output.tokens),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        # transformers 5.16 computes too little where it gives up its cache
        use_cache=not recomputed_beyond(model.config.model_type),
        return_dict_in_generate=True,
        output_logits=True,
        logits_processor=[_Force(output.tokens, num_prompt)],
    )
    assert generated.sequences[0, num_prompt:].tolist() == output.tokens
    logits_TV = torch.cat([prompt_PV[:-1], *generated.logits])
    logprobs_TV = logits_TV.double().log_softmax(-1)
    best = logprobs_TV.max(-1)
    ids_T = torch.tensor([*request.token_ids[1:], *output.tokens])
    return _Scores(
        chosen=logprobs_TV.gather(1, ids_T[:, None])[:, 0], best=logits_TV.argmax(-1), best_value=best.values
    )


def _wide_scores(
    model: Any,
    info: ModelInfo,
    requests: Sequence[VerifyRequest],
    outputs: Mapping[int, Output],
    say: Callable[[str], None],
) -> tuple[list[_Scores] | None, str]:
    """The same in the wider dtype, into which the model is turned; None, and why, if that cannot be done."""
    wider = _WIDER[info.dtype]
    try:
        _check_memory(info, wider.itemsize - info.dtype_bytes, "the wider run")
        say(f"transformers: again in {wider}, to see what arithmetic explains")
        model.to(wider)
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the fast ones know no float64
        return [_scores(model, request, outputs[request.index]) for request in requests], ""
    except (ConfigError, RuntimeError) as error:
        return None, f"a fixed value, since it could not be run in {wider}: {str(error).splitlines()[0]}"


def _check_memory(info: ModelInfo, bytes_each: int, what: str) -> None:
    needed, free = info.num_parameters * bytes_each, free_memory_bytes()
    if needed > free:
        raise ConfigError(
            f"{what} needs the whole model in this process: {needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free"
        )
