"""InFlightPlan: what the scheduler remembers of a plan until its result is back."""

from __future__ import annotations

from dataclasses import dataclass, field

from epruntime.engine.request import SchedulerRequest
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
