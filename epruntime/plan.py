"""What the scheduler tells a rank each step, and what the rank answers (leaf types; msgpack-ready).

GroupScheduler.plan() -> StepPlan -> control channel -> rank: runner.step(plan) -> StepResult -> GroupScheduler.apply()

Rules both sides rely on (depth-2 pipeline: plan N+1 is sent before result N is back):

* Plans of one rank are executed in order. Within a plan the lists apply in the order of the fields.
* The rank keeps each request's tokens, block table and sampling state. A request that has its whole
  known history computed *decodes one token in every plan* without being named, until the rank
  finishes it (eos, stop token, length), or a plan names it in `drop` or `hold`. The token that it
  decodes is fed back on the rank.
* `blocks` grants are made ahead: after applying a plan, a request's table covers every position
  that the plan may write.
* The rank decides "stop" and "length" by itself (it knows eos ids, stop ids and max length); a later
  in-flight plan that still counts on the request simply finds nothing to do: whatever such a plan
  says of a request that has ended (drop, blocks, prefill, hold) is ignored. Stop strings, aborts
  and expiry are the front end's: they reach the rank as `drop`.
* A request that alone cannot go on (NaN logits, a token id outside the vocabulary) ends with
  FINISH_ERROR, token -1 and words in `errors`; its token joins no history, and its batch-mates are
  untouched. Everything else that goes wrong in a step ends the generation.
* A dropped request's state is gone on the rank. A preempted one comes back as NewRequest with its
  full history, never while a plan that may have decoded it is still in flight.
* `rid` is a per-engine integer handle, never reused; `request_id` strings stay in the front end.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import numpy as np

from epruntime.errors import ProtocolError

#: what taking apart something of another shape raises
_UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, IndexError)

FINISH_NONE, FINISH_STOP, FINISH_LENGTH, FINISH_ERROR = 0, 1, 2, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingSpec:
    """The part of the sampling parameters that a rank needs; all defaults already applied.

    Attributes:
        seed: key of the counter-based generator, in [0, 2**63).
        stop_ids: ids that end the output: end-of-sequence ids (unless ignored) and stop_token_ids.
        max_tokens: output tokens at most, already capped by max_model_len.
        logprobs: -1 none, else number of most likely tokens to report (0..20).
        prompt_logprobs: the same for the prompt's own tokens.
        min_tokens: output tokens before which no id of stop_ids is chosen.
        min_p, repetition_penalty, presence_penalty, frequency_penalty: as in SamplingParams.
        logit_bias: (token id, bias) pairs, ids ascending.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    stop_ids: tuple[int, ...]
    max_tokens: int
    logprobs: int = -1
    prompt_logprobs: int = -1
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()


_SPEC_FIELDS = tuple(f.name for f in fields(SamplingSpec))
_spec_values = attrgetter(*_SPEC_FIELDS)


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """A request entering (or re-entering) a rank.

    Attributes:
        token_ids: prompt, then tokens generated before a preemption (of any sequence type).
        num_prompt_tokens: length of the original prompt inside `token_ids`.
        num_computed_tokens: leading tokens whose KV is already in `block_ids` (prefix cache), < len(token_ids).
        block_ids: KV blocks granted so far, in position order.
        num_prompt_logprobs: prompt positions (from the second on) whose log-probabilities the coordinator already has,
            where the request asks for them; num_computed_tokens then does not exceed this number unless it has all.
    """

    rid: int
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[int, ...]
    sampling: SamplingSpec
    num_prompt_logprobs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One rank's part of one lockstep step. An idle rank gets one with nothing in it.

    Attributes:
        step: counts up by one per lockstep step of a generation, the same on every rank.
        drop: rids whose state is discarded (finished by the front end, aborted, preempted).
        new: requests entering.
        blocks: rid -> KV blocks appended to its table.
        prefill: rid -> number of known, not yet computed tokens to compute now (> 0). When this
            reaches the end of the known history, the request samples its next token in this step.
        hold: rids of decoding requests that sit this step out.
    """

    step: int
    generation: int = 0
    placement_version: int = 0
    drop: tuple[int, ...] = ()
    new: tuple[NewRequest, ...] = ()
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    prefill: dict[int, int] = field(default_factory=dict)
    hold: tuple[int, ...] = ()

    def to_wire(self) -> list[Any]:
        new = [
            [
                r.rid,
                array("i", r.token_ids).tobytes(),
                r.num_prompt_tokens,
                r.num_computed_tokens,
                r.block_ids,
                r.num_prompt_logprobs,
                _spec_values(r.sampling),
            ]
            for r in self.new
        ]
        return [
            self.step,
            self.generation,
            self.placement_version,
            self.drop,
            new,
            self.blocks,
            self.prefill,
            self.hold,
        ]

    @classmethod
    def from_wire(cls, wire: Any) -> StepPlan:
        """Raises ProtocolError: not a plan as `to_wire` writes it."""
        try:
            return cls._from_wire(wire)
        except _UNREADABLE as error:
            raise ProtocolError(f"a step plan is unreadable: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_wire(cls, wire: Any) -> StepPlan:
        step, generation, version, drop, new, blocks, prefill, hold = wire
        requests = []
        for rid, token_bytes, num_prompt, num_computed, block_ids, num_prompt_logprobs, spec in new:
            sampling = dict(zip(_SPEC_FIELDS, spec, strict=True))
            sampling["stop_ids"] = tuple(sampling["stop_ids"])
            sampling["logit_bias"] = tuple((token, bias) for token, bias in sampling["logit_bias"])
            requests.append(
                NewRequest(
                    rid=rid,
                    token_ids=tuple(np.frombuffer(token_bytes, np.int32).tolist()),
                    num_prompt_tokens=num_prompt,
                    num_computed_tokens=num_computed,
                    block_ids=tuple(block_ids),
                    num_prompt_logprobs=num_prompt_logprobs,
                    sampling=SamplingSpec(**sampling),
                )
            )
        return cls(
            step=step,
            generation=generation,
            placement_version=version,
            drop=tuple(drop),
            new=tuple(requests),
            blocks={k: tuple(v) for k, v in blocks.items()},
            prefill=dict(prefill),
            hold=tuple(hold),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one output position: the chosen token's, then the most likely ones (descending)."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top_values: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a rank did in one step. Arrays are parallel, one entry per sampled token.

    Attributes:
        rids: int64 [N]; tokens: int32 [N]; finish: int8 [N], FINISH_*.
        logprobs: index into the arrays -> TokenLogprobs, for requests that asked.
        errors: rid -> what went wrong, one for each entry with FINISH_ERROR.
        num_prefill_tokens / num_decode_tokens: rows really computed.
        prompt_logprobs: rid -> log-probabilities of the prompt tokens at the positions that follow those reported so
            far, for requests that asked; without an entry in the arrays if the prompt goes on.
    """

    step: int
    generation: int = 0
    rids: np.ndarray
    tokens: np.ndarray
    finish: np.ndarray
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    errors: dict[int, str] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    def to_wire(self) -> list[Any]:
        logprobs = {i: _packed(entry) for i, entry in self.logprobs.items()}
        return [
            self.step,
            self.generation,
            self.rids.astype(np.int64).tobytes(),
            self.tokens.astype(np.int32).tobytes(),
            self.finish.astype(np.int8).tobytes(),
            logprobs,
            self.num_prefill_tokens,
            self.num_decode_tokens,
            self.errors,
            {rid: [_packed(entry) for entry in entries] for rid, entries in self.prompt_logprobs.items()},
        ]

    @classmethod
    def from_wire(cls, wire: Any) -> StepResult:
        """Raises ProtocolError: not a result as `to_wire` writes it."""
        try:
            return cls._from_wire(wire)
        except _UNREADABLE as error:
            raise ProtocolError(f"a step result is unreadable: {type(error).__name__}: {error}") from error

    @classmethod
    def _from_wire(cls, wire: Any) -> StepResult:
        step, generation, rids, tokens, finish, logprobs, num_prefill, num_decode, errors, prompt_logprobs = wire
        return cls(
            step=step,
            generation=generation,
            rids=np.frombuffer(rids, np.int64),
            tokens=np.frombuffer(tokens, np.int32),
            finish=np.frombuffer(finish, np.int8),
            logprobs={i: _unpacked(entry) for i, entry in logprobs.items()},
            num_prefill_tokens=num_prefill,
            num_decode_tokens=num_decode,
            errors=dict(errors),
            prompt_logprobs={rid: tuple(map(_unpacked, entries)) for rid, entries in prompt_logprobs.items()},
        )


def _packed(entry: TokenLogprobs) -> list[Any]:
    return [entry.chosen, entry.top_ids, entry.top_values]


def _unpacked(wire: list[Any]) -> TokenLogprobs:
    chosen, ids, values = wire
    return TokenLogprobs(chosen=chosen, top_ids=tuple(ids), top_values=tuple(values))
