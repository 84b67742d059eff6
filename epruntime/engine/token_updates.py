"""TokenUpdates: what one step of one group has brought its live requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from epruntime.plan import FINISH_NONE, StepResult, TokenLogprobs


class TokenUpdate(NamedTuple):
    """One new token of a live request.

    Attributes:
        token: the id; -1 with FINISH_ERROR. finish: FINISH_*. logprobs: if asked for.
        error: with FINISH_ERROR what went wrong. num_preemptions: of the request so far.
        prompt_logprobs: with the request's first token, if asked for: one entry per prompt position from the second on.
    """

    rid: int
    token: int
    finish: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    num_preemptions: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(slots=True)
class TokenUpdates:
    """New tokens in parallel lists, so that a step of many thousands makes no object per token.

    Iterating gives them one by one as TokenUpdate, in the rank's order.

    Attributes:
        rids, tokens, finish: one entry per token.
        finished: rids of the requests that have ended.
        logprobs: index into the lists -> TokenLogprobs.
        errors: rid -> what went wrong, for each FINISH_ERROR.
        num_preemptions: rid -> how often, for requests that were preempted at all.
        prompt_logprobs: rid -> as in TokenUpdate, for requests that asked and whose first token this is.
    """

    rids: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    finish: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    num_preemptions: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, result: StepResult, num_preemptions: dict[int, int]) -> TokenUpdates:
        """All tokens of a rank's result."""
        return cls(
            rids=result.rids.tolist(),
            tokens=result.tokens.tolist(),
            finish=result.finish.tolist(),
            finished=result.rids[result.finish != FINISH_NONE].tolist(),
            logprobs=result.logprobs,
            errors=result.errors,
            num_preemptions=dict(num_preemptions),
        )

    def __len__(self) -> int:
        return len(self.rids)

    def __iter__(self) -> Iterator[TokenUpdate]:
        if self.logprobs or self.errors or self.num_preemptions or self.prompt_logprobs:
            return self._with_all_fields()
        return map(TokenUpdate, self.rids, self.tokens, self.finish)

    def _with_all_fields(self) -> Iterator[TokenUpdate]:
        for i, (rid, token, finish) in enumerate(zip(self.rids, self.tokens, self.finish, strict=True)):
            yield TokenUpdate(
                rid,
                token,
                finish,
                self.logprobs.get(i),
                self.errors.get(rid),
                self.num_preemptions.get(rid, 0),
                self.prompt_logprobs.get(rid),
            )

    def without(self, indices: list[int]) -> TokenUpdates:
        """All but the tokens at `indices`."""
        kept = sorted(set(range(len(self.rids))).difference(indices))
        return TokenUpdates(
            rids=[self.rids[i] for i in kept],
            tokens=[self.tokens[i] for i in kept],
            finish=[self.finish[i] for i in kept],
            finished=[self.rids[i] for i in kept if self.finish[i]],
            logprobs={new: self.logprobs[old] for new, old in enumerate(kept) if old in self.logprobs},
            errors=self.errors,
            num_preemptions=self.num_preemptions,
            prompt_logprobs=self.prompt_logprobs,
        )
