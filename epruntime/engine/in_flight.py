"""InFlightPlan: what the scheduler remembers of a plan until its result is back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from epruntime.engine.request import RequestState, SchedulerRequest
from epruntime.errors import ProtocolError
from epruntime.plan import NewRequest, StepPlan, StepResult


@dataclass(slots=True)
class InFlightPlan:
    """A plan in the making, and then in flight. The fields up to `hold` become the StepPlan's.

    Attributes:
        pieces: (request, its computed tokens after this plan, whether it then samples) of each prefill piece.
        ending: requests of which this plan samples the last possible token.
        num_decodes: requests that decode at most.
    """

    step: int
    generation: int
    new: list[NewRequest] = field(default_factory=list)
    blocks: dict[int, tuple[int, ...]] = field(default_factory=dict)
    prefill: dict[int, int] = field(default_factory=dict)
    hold: list[int] = field(default_factory=list)
    pieces: list[tuple[SchedulerRequest, int, bool]] = field(default_factory=list)
    ending: list[SchedulerRequest] = field(default_factory=list)
    num_decodes: int = 0

    def to_plan(self, *, drop: list[int], placement_version: int) -> StepPlan:
        return StepPlan(
            step=self.step,
            generation=self.generation,
            placement_version=placement_version,
            drop=tuple(drop),
            new=tuple(self.new),
            blocks=self.blocks,
            prefill=self.prefill,
            hold=tuple(self.hold),
        )

    def check(self, result: StepResult) -> None:
        """Raises ProtocolError if `result` does not answer this plan."""
        if (result.step, result.generation) != (self.step, self.generation):
            raise ProtocolError(
                f"result of step {result.step}, generation {result.generation}, where that of step {self.step}, "
                f"generation {self.generation} was due"
            )
        limit = self.num_decodes + len(self.pieces)
        if len(result.rids) > limit:
            raise ProtocolError(
                f"result of step {self.step} holds {len(result.rids)} tokens; its plan can yield {limit} at most"
            )

    def live_pieces(self, sampled: list[int], errors: dict[int, str]) -> Iterator[tuple[SchedulerRequest, int, bool]]:
        """The pieces whose requests are neither gone nor among `errors`.

        Raises:
            ProtocolError: one of them came with a token and should not have, or the other way round.
        """
        rids = set(sampled)
        for request, num_computed, samples in self.pieces:
            if request.state is RequestState.GONE or request.rid in errors:
                continue
            if samples != (request.rid in rids):
                raise ProtocolError(
                    f"result of step {self.step}: request {request.rid} was to be computed up to token "
                    f"{num_computed} of {request.num_tokens} and {'no' if samples else 'a'} token came back"
                )
            yield request, num_computed, samples

    def check_ended(self) -> None:
        """Raises ProtocolError if a request lives on, although the result that was applied has its last token."""
        for request in self.ending:
            if request.state is RequestState.ENDING:
                raise ProtocolError(
                    f"result of step {self.step}: request {request.rid} has reached max_tokens="
                    f"{request.spec.max_tokens} and the rank has not ended it"
                )
