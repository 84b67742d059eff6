"""Comparing what a case gave with the baseline: identical, or the first difference."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from epruntime.plan import TokenLogprobs
from epruntime.verify.outputs import Output, entry_bytes
from epruntime.verify.session import Trace
from epruntime.words import counted

NOT_COMPUTED = "not computed"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first place where a request's result is another one than alone.

    Attributes:
        request: index. rank: where it ran.
        where: "prompt", "output", "end" or "hidden state". position: in the prompt, or in the output; from 0 on.
        expected_token, got_token: of an output position, and expected_logprob, got_logprob; of a prompt position the
            token is the prompt's own and not told.
        note: words, where these numbers do not say it.
        layer: first layer whose output differs at the earliest token (prompt and output counted through) that does,
            `layer_position`; "input" is what goes into the first layer, "after the last layer" the head or the sampler,
            NOT_COMPUTED a token that no layer has seen. "" without a trace.
    """

    request: int
    rank: int
    where: str
    position: int
    expected_token: int | None = None
    got_token: int | None = None
    expected_logprob: float | None = None
    got_logprob: float | None = None
    note: str = ""
    layer: str = ""
    layer_position: int | None = None

    def __str__(self) -> str:
        parts = [f"request {self.request} on rank {self.rank}, {self.where} position {self.position}:"]
        if self.note:
            parts.append(self.note)
        elif self.expected_token != self.got_token:
            parts.append(f"token {self.got_token}, expected {self.expected_token};")
        elif self.expected_token is not None:
            parts.append(f"token {self.got_token} as expected;")
        if self.got_logprob is not None and self.expected_logprob is not None:
            parts.append(
                f"logprob {self.got_logprob!r}, expected {self.expected_logprob!r} "
                f"({self.got_logprob - self.expected_logprob:+.2g})"
            )
        if self.layer:
            at = "" if self.layer_position is None else f" at token {self.layer_position},"
            parts.append(f"- hidden states part{at} {_layer_words(self.layer)}")
        return " ".join(parts).rstrip(";")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A case beside its baseline.

    Attributes:
        num_compared: outputs; num_different: those of them that differ.
        first: of the output that was submitted first among those that differ; None: all are identical.
        digest: SHA-256 over all tokens and log-probabilities, by bits, in the order of the requests. Copies of a
            request that agree count once, parts of an output not at all: a case that covers what its baseline does,
            identically, has its digest.
    """

    num_compared: int
    num_different: int
    first: Difference | None
    digest: str


def compare(
    expected: Mapping[int, Output],
    outputs: Sequence[Output],
    *,
    num_tokens: int,
    expected_trace: Trace | None = None,
    trace: Trace | None = None,
    layers: Sequence[str] = (),
    all_computed: bool = False,
) -> Comparison:
    """Compares bit for bit.

    Args:
        expected: by request index.
        num_tokens: output tokens of each that are compared; the baseline may have more, or end before.
        expected_trace, trace: hidden states, where they were traced; they are compared, too.
        layers: names of their columns.
        all_computed: nothing was taken from a prefix cache, so that `trace` has every token that was to be computed.
    """
    first, num_different = None, 0
    for output in outputs:
        found = first_difference(expected[output.index], output, num_tokens)
        if found is not None:
            num_different += 1
            first = first or found
    if expected_trace and trace:
        due = _computed_tokens(outputs) if all_computed else {}
        first = _with_layer(first, outputs, expected_trace, trace, layers, due)
        num_different = max(num_different, first is not None)
    return Comparison(
        num_compared=len(outputs),
        num_different=num_different,
        first=first,
        digest=digest(outputs, num_tokens=num_tokens),
    )


def digest(outputs: Sequence[Output], *, num_tokens: int) -> str:
    """See Comparison.digest."""
    sums = hashlib.sha256()
    blobs: dict[bytes, int] = {}
    for output in outputs:
        if not output.start and output.end >= num_tokens:
            blobs.setdefault(output.to_bytes(num_tokens), output.index)
    for blob in sorted(blobs, key=lambda blob: blobs[blob]):  # stable: copies that differ stay in their order
        sums.update(blob)
    return sums.hexdigest()[:16]


def first_difference(expected: Output, got: Output, num_tokens: int) -> Difference | None:
    """None if all bits of the tokens that were asked for are equal, up to `num_tokens`, and both end there."""

    def at(where: str, position: int, **more: Any) -> Difference:
        return Difference(request=got.index, rank=got.rank, where=where, position=position, **more)

    end = min(num_tokens, got.end, len(expected.tokens))
    if got.start:
        expected = replace(
            expected,
            tokens=expected.tokens[got.start :],
            logprobs=expected.logprobs[got.start :],
            prompt_logprobs=None,
        )
    if (expected.prompt_logprobs is None) != (got.prompt_logprobs is None):
        return at("prompt", 1, note="log-probabilities of the prompt are missing on one side")
    for position, (a, b) in enumerate(zip(expected.prompt_logprobs or (), got.prompt_logprobs or (), strict=False), 1):
        if entry_bytes(a) != entry_bytes(b):
            return at("prompt", position, **_logprobs(a, b))
    if len(expected.prompt_logprobs or ()) != len(got.prompt_logprobs or ()):
        return at("prompt", min(len(expected.prompt_logprobs or ()), len(got.prompt_logprobs or ())), note="cut short")
    for position in range(min(end - got.start, len(got.tokens))):
        a, b = expected.logprobs[position], got.logprobs[position]
        tokens = (expected.tokens[position], got.tokens[position])
        if tokens[0] != tokens[1] or entry_bytes(a) != entry_bytes(b):
            logprobs = _logprobs(a, b) if tokens[0] == tokens[1] else _chosen(a, b)
            return at("output", got.start + position, expected_token=tokens[0], got_token=tokens[1], **logprobs)
    asked = min(num_tokens, got.end) - got.start
    num_got = min(asked, len(got.tokens))
    if expected.error != got.error or num_got != end - got.start:
        words = [counted(number, "token") for number in (num_got, end - got.start)]
        note = f"it ended with {got.error or words[0]!r}, expected {expected.error or words[1]!r}"
        return at("end", got.start + len(got.tokens), note=note)
    return None


def _chosen(expected: TokenLogprobs, got: TokenLogprobs) -> dict[str, Any]:
    return {"expected_logprob": expected.chosen, "got_logprob": got.chosen}


def _logprobs(expected: TokenLogprobs, got: TokenLogprobs) -> dict[str, Any]:
    """The chosen token's, or those of the most likely tokens where it does not differ."""
    if entry_bytes(TokenLogprobs(chosen=expected.chosen)) != entry_bytes(TokenLogprobs(chosen=got.chosen)):
        return _chosen(expected, got)
    for a, b, x, y in zip(expected.top_ids, got.top_ids, expected.top_values, got.top_values, strict=False):
        if (a, x) != (b, y):
            note = f"among the most likely tokens {b} ({y!r}), expected {a} ({x!r})"
            return {"note": note, "expected_logprob": x, "got_logprob": y}
    return {"note": "other bits of the log-probabilities"}


def _computed_tokens(outputs: Sequence[Output]) -> dict[int, int]:
    """Request index -> how many tokens of its prompt and output were to be computed; the last one is only sampled."""
    found: dict[int, int] = {}
    for output in outputs:
        number = output.num_prompt_tokens + output.start + len(output.tokens) - 1
        found[output.index] = max(found.get(output.index, 0), number)
    return found


def _with_layer(
    first: Difference | None,
    outputs: Sequence[Output],
    expected: Trace,
    got: Trace,
    layers: Sequence[str],
    due: Mapping[int, int],
) -> Difference | None:
    """The first difference with its layer; one of hidden states alone where the outputs show none."""
    if first is not None:
        num_prompt = next(output.num_prompt_tokens for output in outputs if output.index == first.request)
        # the token whose logits differ comes before the position that they are for
        last = first.position - 1 + (0 if first.where == "prompt" else num_prompt)  # of the whole request
        parting = _first_parting(expected, got, due, request=first.request, last=last)
        if parting is None:
            return replace(first, layer="after the last layer")
        _, position, column = parting
        return replace(first, layer=NOT_COMPUTED if column is None else layers[column], layer_position=position)
    parting = _first_parting(expected, got, due)
    if parting is None:
        return None
    request, position, column = parting
    return Difference(
        request=request,
        rank=next(output.rank for output in outputs if output.index == request),
        where="hidden state",
        position=position,
        note="hidden states differ, tokens and log-probabilities do not",
        layer=NOT_COMPUTED if column is None else layers[column],
        layer_position=position,
    )


def _first_parting(
    expected: Trace, got: Trace, due: Mapping[int, int], *, request: int | None = None, last: int | None = None
) -> tuple[int, int, int | None] | None:
    """(request, position, column) of the earliest token whose hashes are others; no column where it has none.

    Args:
        due: request index -> so many tokens were to be computed.
        request: look at this one only. last: and at its tokens up to this one.
    """
    for index, position in sorted(expected):
        if request not in (None, index) or (last is not None and position > last):
            continue
        if (index, position) not in got:
            if position < due.get(index, 0):
                return index, position, None
            continue
        # several in the baseline where a sequence was computed anew, with the frequencies of long ones
        baselines = expected[index, position]
        equal = [max(_num_equal(row_L, baseline_L) for baseline_L in baselines) for row_L in got[index, position]]
        if min(equal) < len(baselines[0]):
            return index, position, min(equal)
    return None


def _num_equal(row_L: np.ndarray, other_L: np.ndarray) -> int:
    """Leading columns in which both are the same."""
    unequal = np.flatnonzero(row_L != other_L)
    return int(unequal[0]) if len(unequal) else len(row_L)


def _layer_words(layer: str) -> str:
    if layer == "input":
        return "before the first layer"
    if layer == NOT_COMPUTED:
        return "which was not computed"
    return layer if layer.startswith("after") else f"in layer {layer}"
