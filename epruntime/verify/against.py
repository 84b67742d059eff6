"""What transformers itself computes for the same tokens, in this process: the whole model, one request at a time.

greedy outputs of the baseline -> `generate` in the model's dtype, made to give these outputs -> the referee: the same
model in a wider dtype -> how far epruntime, and how far transformers, lie from the referee

Bits are not expected to be equal: transformers adds in another order. In bfloat16 a router between two experts that
are nearly as good is turned over by rounding now and then, in both, at different tokens: there they lie far from each
other and one of them lies far from the referee. So it is not their distance that is judged, but whether epruntime is
about as near to the referee as transformers is.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor
from transformers.utils import logging as transformers_logging

from epruntime.errors import ConfigError
from epruntime.models import adapter, text_part
from epruntime.models.info import ModelInfo
from epruntime.models.rope import recomputed_beyond
from epruntime.verify.outputs import Output
from epruntime.verify.referee import extra_bytes, widened
from epruntime.verify.requests import VerifyRequest
from epruntime.words import counted
from epruntime.worker.memory import free_memory_bytes

#: how many times as far from the referee as transformers epruntime may lie, quantile by quantile.
FACTOR = 2.0
#: in bfloat16, of N positions, it is this + that / sqrt(N) if that is less: rounding hides a fault there, and only many
#: positions show it. Of 760 positions of each of 51 tiny models the ratio was 0.80 to 1.15
#: (benchmarks/results/against.md).
_FACTOR_MANY, _FACTOR_FEW = 1.25, 6.0
#: the same for the largest error of all, in float32: one position says little about the next one.
FACTOR_LARGEST = 4.0
#: quantiles that are compared, where there are enough positions for it.
QUANTILES = (0.5, 0.75, 0.9)
#: a quantile is compared with transformers' own at a share of positions that is higher by this over sqrt(positions):
#: both are samples, of few positions.
_SLACK = 1.5
#: errors below these are taken to be these: few tokens may show none by luck.
_FLOOR = {"float32": 2e-5, "bfloat16": 1e-2}
#: taken for transformers' own error where there is no referee.
_FIXED = {"float32": 5e-4, "bfloat16": 0.2}
#: dtypes in which rounding turns no router over in practice, so that the largest error is bounded, too.
_FINE = ("float32",)
_WIDER = {"float32": torch.float64, "bfloat16": torch.float32}
_GIB = 2**30
#: tokens that differ and are shown.
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class TokenDifference:
    """An output token that is not the referee's most likely one after the same tokens.

    Attributes:
        position: in the output. margin: by how much the referee finds its own token more likely (natural log).
    """

    request: int
    position: int
    token: int
    expected_token: int
    margin: float


@dataclass(frozen=True, kw_only=True)
class ErrorQuantile:
    """`share` of epruntime's errors are at most `error`, which may be `limit`; of transformers' own, somewhat more than
    that share are at most `own_error`, as measured (None: there is no referee)."""

    share: float
    error: float
    own_error: float | None
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # not for NaN

    def __str__(self) -> str:
        own = "" if self.own_error is None else f"own {self.own_error:.2g}, "
        return f"{self.share:.0%} within {self.error:.2g} ({own}limit {self.limit:.2g}){'' if self.ok else ' TOO FAR'}"


@dataclass(frozen=True, kw_only=True)
class AgainstReport:
    """All numbers are natural logarithms of probabilities.

    An error is the distance from the referee of the log-probability of the token at a position; where an output token
    is not the referee's, at least half of what the referee finds its own more likely by: two log-probabilities had to
    be wrong by as much together.

    Attributes:
        referee: dtype in which transformers was run to know better; "" if it could not be: then `note` says why, errors
            are distances from transformers in the model's dtype, and its own are fixed values.
        num_tokens: output tokens compared; num_positions: log-probabilities compared, those of prompts included.
        num_same_bits: of them, equal bit for bit as float32 to transformers in the model's dtype.
        largest_difference, median_difference: between epruntime and transformers in the model's dtype.
        quantiles: of the errors. largest_error, largest_own_error: the largest, of epruntime and of transformers (None:
            there is no referee). largest_limit: what the largest may be; None: it is not judged.
        different_tokens: those of epruntime; num_own_different: of the same positions, how many transformers in the
            model's dtype has otherwise than the referee.
    """

    referee: str
    num_requests: int
    num_tokens: int
    num_positions: int
    num_same_bits: int
    largest_difference: float
    median_difference: float
    quantiles: tuple[ErrorQuantile, ...]
    largest_error: float
    largest_own_error: float | None
    largest_limit: float | None
    different_tokens: tuple[TokenDifference, ...] = ()
    num_own_different: int = 0
    note: str = ""

    @property
    def largest_ok(self) -> bool:
        return self.largest_limit is None or self.largest_error <= self.largest_limit

    @property
    def ok(self) -> bool:
        return self.largest_ok and all(quantile.ok for quantile in self.quantiles)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ok": self.ok}

    def lines(self) -> list[str]:
        """The verdict, the distances, and the first tokens that differ, in words."""
        same, own = self.num_tokens - len(self.different_tokens), self.num_tokens - self.num_own_different
        judge = f"transformers in {self.referee}" if self.referee else "transformers"
        words = (
            f"against transformers: {'ok' if self.ok else 'FAILED'}; over {counted(self.num_positions, 'position')} "
            f"({self.num_same_bits} have the same bits) log-probabilities differ by {self.median_difference:.2g} in "
            f"the median and {self.largest_difference:.2g} at most; {same} of {self.num_tokens} greedy tokens are "
            f"those of {judge}"
        )
        if self.referee:
            words += f", of its own in the model's dtype {own}"
        else:
            words += f"; {self.note}"
        own_error = "" if self.largest_own_error is None else f"own {self.largest_own_error:.2g}, "
        judged = "not judged: rounding may turn a router over"
        if self.largest_limit is not None:
            judged = f"limit {self.largest_limit:.2g}"
        largest = f"at most {self.largest_error:.2g} ({own_error}{judged}){'' if self.largest_ok else ' TOO FAR'}"
        lines = [words, f"distance from {judge}: {'; '.join([*map(str, self.quantiles), largest])}"]
        for found in self.different_tokens[:_SHOWN]:
            likely = f"more likely by {found.margin:.2g}" if found.margin else "as likely"
            lines.append(
                f"request {found.request}, output position {found.position}: token {found.token} where {judge} has "
                f"{found.expected_token}, {likely}"
            )
        if self.largest_limit is None:
            seen = "may hide a fault that reaches few positions" if self.ok else "may be all there is to it"
            lines.append(
                f"the rounding of the model's dtype {seen}: repeat with --dtype float32, which shows every one"
            )
        return lines


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """Of some positions of one request: log-probabilities of the tokens that are there, the most likely tokens, and
    theirs; and those of other tokens that were asked for."""

    chosen: torch.Tensor
    best: torch.Tensor
    best_value: torch.Tensor
    asked: torch.Tensor | None = None


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
    check_room(info)
    dtype = getattr(torch, info.dtype)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # it explains generation settings that are not used
    model = text_part.from_pretrained(path, adapter.read_config(Path(path)), dtype)
    plain = [_scores(model, request, outputs[request.index]) for request in chosen]
    wide, note = _wide_scores(model, info, chosen, outputs, plain, say)
    del model
    gc.collect()
    return _report(chosen, outputs, plain, wide, dtype=info.dtype, note=note)


def check_room(info: ModelInfo) -> None:
    """Is there memory for the whole model in this process?

    Raises:
        ConfigError: there is not.
    """
    _check_memory(info.num_parameters * info.dtype_bytes, "--against transformers needs the whole model")


def _report(
    requests: Sequence[VerifyRequest],
    outputs: Mapping[int, Output],
    plain: Sequence[_Scores],
    wide: Sequence[_Scores] | None,
    *,
    dtype: str,
    note: str,
) -> AgainstReport:
    differences: list[TokenDifference] = []
    gaps, errors, own_errors = [], [], []
    num_same = num_tokens = num_own_different = 0
    for request, theirs, judge in zip(requests, plain, wide or plain, strict=True):
        output, prompt = outputs[request.index], len(request.token_ids)
        ours = [entry.chosen for entry in (*(output.prompt_logprobs or ()), *output.logprobs)]
        # a request without log-probabilities of its prompt is compared from its first output token on
        first = 0 if output.prompt_logprobs is not None else prompt - 1
        ours_P = torch.tensor(ours, dtype=torch.float64)
        gaps.append((ours_P - theirs.chosen[first:]).abs())
        num_same += int((ours_P.float() == theirs.chosen[first:].float()).sum())
        num_tokens += len(output.tokens)
        error_P, own_P = (ours_P - judge.chosen[first:]).abs(), (theirs.chosen - judge.chosen)[first:].abs()
        # by how much the referee prefers its token to the one that each of the two has
        regret_O = (judge.best_value - judge.chosen)[prompt - 1 :]
        error_P[prompt - 1 - first :] = torch.maximum(error_P[prompt - 1 - first :], regret_O / 2)
        if judge.asked is not None:
            own_regret_O = (judge.best_value - judge.asked)[prompt - 1 :]
            own_P[prompt - 1 - first :] = torch.maximum(own_P[prompt - 1 - first :], own_regret_O / 2)
        num_own_different += int((theirs.best != judge.best)[prompt - 1 :].sum())
        errors.append(error_P)
        own_errors.append(own_P)
        for position, token in enumerate(output.tokens):
            expected = int(judge.best[prompt - 1 + position])
            if token != expected:
                margin = float(regret_O[position])
                differences.append(
                    TokenDifference(
                        request=request.index, position=position, token=token, expected_token=expected, margin=margin
                    )
                )
    all_gaps, error_N = torch.cat(gaps), torch.cat(errors)
    own_N = torch.cat(own_errors) if wide is not None else None
    largest_own = None if own_N is None else float(own_N.max())
    return AgainstReport(
        referee="" if wide is None else str(_WIDER[dtype]).removeprefix("torch."),
        num_requests=len(requests),
        num_tokens=num_tokens,
        num_positions=len(error_N),
        num_same_bits=num_same,
        largest_difference=float(all_gaps.max()),
        median_difference=float(all_gaps.median()),
        quantiles=compare_quantiles(error_N, own_N, dtype=dtype),
        largest_error=float(error_N.max()),
        largest_own_error=largest_own,
        largest_limit=FACTOR_LARGEST * _counted_as(largest_own, dtype) if dtype in _FINE else None,
        different_tokens=tuple(differences),
        num_own_different=num_own_different,
        note=note,
    )


def _counted_as(own_error: float | None, dtype: str) -> float:
    """An error of transformers' own, as limits are made from it."""
    return _FIXED[dtype] if own_error is None else max(own_error, _FLOOR[dtype])


def factor_of(dtype: str, num_positions: int) -> float:
    """How many times transformers' own error epruntime's may be, of so many positions."""
    return FACTOR if dtype in _FINE else min(FACTOR, _FACTOR_MANY + _FACTOR_FEW * num_positions**-0.5)


def compare_quantiles(error_N: torch.Tensor, own_N: torch.Tensor | None, *, dtype: str) -> tuple[ErrorQuantile, ...]:
    """The quantiles that so many positions can tell; always the median.

    Args:
        error_N, own_N: errors of epruntime and of transformers at the same positions; without the latter a fixed value
            stands for each of them.
        dtype: of the model.
    """
    slack = _SLACK * len(error_N) ** -0.5
    shares = [share for share in QUANTILES if share == QUANTILES[0] or share + slack <= 1]
    own = [None if own_N is None else float(own_N.quantile(min(1.0, share + slack))) for share in shares]
    factor = factor_of(dtype, len(error_N)) if own_N is not None else FACTOR
    return tuple(
        ErrorQuantile(
            share=share,
            error=float(error_N.quantile(share)),
            own_error=value,
            limit=factor * _counted_as(value, dtype),
        )
        for share, value in zip(shares, own, strict=True)
    )


class _Force(LogitsProcessor):
    """Lets `generate` continue with tokens that are given."""

    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        self._tokens, self._num_prompt_tokens = tokens, num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._tokens[input_ids.shape[1] - self._num_prompt_tokens]] = 0.0
        return forced


@torch.no_grad()
def _scores(
    model: Any, request: VerifyRequest, output: Output, *, asked: torch.Tensor | None = None, at_once: bool = False
) -> _Scores:
    """Row p is what predicts the token at p + 1: those of the prompt at once, those of the output one by one.

    Args:
        asked: a token for each row, whose log-probability is wanted.
        at_once: those of the output at once, too, which is the same up to rounding, if no factor of a rotary embedding
            depends on the length.
    """
    kinds = adapter.rope_types(model)
    if "dynamic" in kinds:
        model = copy.deepcopy(model)  # it remembers the longest sequence that it has seen
    num_prompt = len(request.token_ids)
    ids_T = torch.tensor([*request.token_ids[1:], *output.tokens])
    if at_once and not kinds & {"dynamic", "longrope"}:
        rows_1T = torch.tensor([[*request.token_ids, *output.tokens[:-1]]])
        logits_TV = model(input_ids=rows_1T, use_cache=False).logits[0]
    else:
        prompt_1P = torch.tensor([request.token_ids])
        prompt_PV = model(input_ids=prompt_1P, use_cache=False).logits[0]
        generated = model.generate(
            prompt_1P,
            attention_mask=torch.ones_like(prompt_1P),
            max_new_tokens=len(output.tokens),
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            # transformers 5.16 computes too little where it gives up its cache
            use_cache=not recomputed_beyond(text_part.language_config(model.config).model_type),
            return_dict_in_generate=True,
            output_logits=True,
            logits_processor=[_Force(output.tokens, num_prompt)],
        )
        assert generated.sequences[0, num_prompt:].tolist() == output.tokens
        logits_TV = torch.cat([prompt_PV[:-1], *generated.logits])
    logprobs_TV = logits_TV.double().log_softmax(-1)
    best = logprobs_TV.max(-1)
    return _Scores(
        chosen=logprobs_TV.gather(1, ids_T[:, None])[:, 0],
        best=logits_TV.argmax(-1),
        best_value=best.values,
        asked=None if asked is None else logprobs_TV.gather(1, asked[:, None])[:, 0],
    )


def _wide_scores(
    model: Any,
    info: ModelInfo,
    requests: Sequence[VerifyRequest],
    outputs: Mapping[int, Output],
    plain: Sequence[_Scores],
    say: Callable[[str], None],
) -> tuple[list[_Scores] | None, str]:
    """The referee: the same in the wider dtype, a layer at a time; None, and why, if that cannot be done."""
    wider = _WIDER[info.dtype]
    try:
        _check_memory(extra_bytes(model, wider), "one layer of it at a time")
        say(f"transformers: again in {wider}, as the referee of both")
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the fast ones know no float64
        with widened(model, wider):
            return [
                _scores(model, request, outputs[request.index], asked=theirs.best, at_once=True)
                for request, theirs in zip(requests, plain, strict=True)
            ], ""
    except (ConfigError, RuntimeError) as error:
        return None, f"there is no referee, since it could not be run in {wider}: {str(error).splitlines()[0]}"


def _check_memory(needed: int, what: str) -> None:
    free = free_memory_bytes()
    if needed > free:
        raise ConfigError(f"{what} in this process: {needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free")
