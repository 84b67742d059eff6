"""SchedulerRequest: what the scheduler knows of one request between its arrival and its end."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from epruntime.errors import ProtocolError
from epruntime.plan import SamplingSpec, TokenLogprobs

#: A step or position that is never reached.
NEVER = 2**62


class RequestState(enum.Enum):
    """Where a request stands. The last three are "running": the rank holds its state.

    WAITING -> PREFILL -> DECODE -> ENDING -> GONE; a preemption leads from PREFILL or DECODE back to WAITING.
    """

    WAITING = "in the queue, new or preempted"
    PREFILL = "on the rank, part of its history not yet in any plan"
    DECODE = "on the rank, decodes one token in every plan"
    ENDING = "on the rank, its last token (by length) is in a plan already made"
    GONE = "finished or dropped"


@dataclass(eq=False, slots=True)
class SchedulerRequest:
    """One request. Compared and hashed by identity.

    Attributes:
        rid: the engine's handle.
        arrival: counts up with every request added to the scheduler; kept across preemptions.
        num_tokens: known tokens when it was added or last admitted: prompt, then tokens applied by then.
        spec: its max_tokens already capped.
        num_scheduled: leading tokens computed by plans made so far (kept up to date during prefill only).
        due: step whose plan must grant the next KV block (NEVER: none needed before `end`).
        end: last step that can sample a token for it, reached if nothing stops it earlier.
        recompute: step by which it would pass the length up to which keys have the frequencies of short sequences, so
            that the plan takes it off the rank to be computed anew (NEVER: it does not).
        marked: its history stands in the books as one whose keys have the frequencies of long sequences.
        shares: it may take over blocks of other histories.
        ready_after: a preempted request may be readmitted once the result of this step has been applied.
        num_prompt_logprobs: prompt positions, from the second on, whose log-probabilities have come.
        prompt_logprobs: those, until they are handed out with the first token.
    """

    rid: int
    arrival: int
    num_tokens: int
    num_prompt_tokens: int
    spec: SamplingSpec
    state: RequestState = RequestState.WAITING
    num_scheduled: int = 0
    due: int = NEVER
    end: int = NEVER
    recompute: int = NEVER
    marked: bool = False
    shares: bool = True
    ready_after: int = -1
    num_prompt_logprobs: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.spec.prompt_logprobs >= 0

    def take_prompt_logprobs(self, entries: Sequence[TokenLogprobs], num_computed: int) -> None:
        """Keeps what the rank reports once the first `num_computed` tokens are computed.

        Raises:
            ProtocolError: there are entries too many or too few.
        """
        before, last = self.num_prompt_logprobs, self.num_prompt_tokens - 1
        self.num_prompt_logprobs = max(before, min(num_computed, last))
        if before + len(entries) != self.num_prompt_logprobs:
            raise ProtocolError(
                f"request {self.rid}: {len(entries)} prompt log-probabilities came with its tokens up to "
                f"{num_computed}; {self.num_prompt_logprobs - before} were due (it has {before} of {last})"
            )
        self.prompt_logprobs += entries

    @property
    def num_skippable_tokens(self) -> int:
        """Leading tokens that need not be computed again if their KV is at hand.

        The log-probability of a prompt token comes from computing the token before it.
        """
        if not self.shares:
            return 0
        if not self.wants_prompt_logprobs or self.num_prompt_logprobs == self.num_prompt_tokens - 1:
            return NEVER
        return self.num_prompt_logprobs


class StepBuckets:
    """Requests filed under the step at which something is to happen to them; every operation is O(1)."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[SchedulerRequest, None]] = {}

    def add(self, step: int, request: SchedulerRequest) -> None:
        self._buckets.setdefault(step, {})[request] = None

    def add_all(self, step: int, requests: list[SchedulerRequest]) -> None:
        if requests:
            self._buckets.setdefault(step, {}).update(dict.fromkeys(requests))

    def discard(self, step: int, request: SchedulerRequest) -> None:
        bucket = self._buckets.get(step)
        if bucket is not None:
            bucket.pop(request, None)
            if not bucket:
                del self._buckets[step]

    def pop(self, step: int) -> list[SchedulerRequest]:
        """Removes and returns the requests filed under `step`, in the order in which they were added."""
        return list(self._buckets.pop(step, ()))
