"""SchedulerRequest: what the scheduler knows of one request between its arrival and its end."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from epruntime.plan import SamplingSpec

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
        token_ids: int32; prompt, then every token whose result has been applied.
        spec: its max_tokens already capped.
        block_ids: KV blocks of its table on the rank, in position order; empty while waiting.
        hashes: chained content hash of each leading full block of `token_ids`, as far as computed.
        num_scheduled: leading tokens computed by plans made so far (kept up to date during prefill only).
        num_published: leading blocks of the table that have been offered to the prefix cache.
        publish_at: number of computed tokens at which the next block may be published.
        due: step whose plan must grant the next KV block (NEVER: none needed before `end`).
        end: last step that can sample a token for it, reached if nothing stops it earlier.
        ready_after: a preempted request may be readmitted once the result of this step has been applied.
        num_preemptions: how often it was preempted.
    """

    rid: int
    arrival: int
    token_ids: array[int]
    num_prompt_tokens: int
    spec: SamplingSpec
    state: RequestState = RequestState.WAITING
    block_ids: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    num_scheduled: int = 0
    num_published: int = 0
    publish_at: int = NEVER
    due: int = NEVER
    end: int = NEVER
    ready_after: int = -1
    num_preemptions: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Output tokens still to be sampled, if nothing stops it earlier."""
        return self.spec.max_tokens - self.num_output_tokens


class StepBuckets:
    """Requests filed under the step at which something is to happen to them; every operation is O(1)."""

    def __init__(self) -> None:
        self._buckets: dict[int, dict[SchedulerRequest, None]] = {}

    def add(self, step: int, request: SchedulerRequest) -> None:
        self._buckets.setdefault(step, {})[request] = None

    def discard(self, step: int, request: SchedulerRequest) -> None:
        bucket = self._buckets.get(step)
        if bucket is not None:
            bucket.pop(request, None)
            if not bucket:
                del self._buckets[step]

    def pop(self, step: int) -> list[SchedulerRequest]:
        """Removes and returns the requests filed under `step`, in the order in which they were added."""
        return list(self._buckets.pop(step, ()))
