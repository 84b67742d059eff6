"""OutputCollector: RequestDeltas of one request, added up to a RequestOutput."""

from __future__ import annotations

from epruntime.outputs import CompletionDelta, CompletionOutput, Logprob, RequestDelta, RequestOutput


class _Sequence:
    """One sequence so far; its text in the pieces in which it came."""

    def __init__(self, index: int) -> None:
        self.output = CompletionOutput(index=index)
        self.pieces: list[str] = []

    def add(self, new: CompletionDelta) -> None:
        output = self.output
        if new.text:
            self.pieces.append(new.text)
        output.token_ids += new.token_ids
        if new.logprobs is not None:
            if output.logprobs is None:
                output.logprobs = []
            output.logprobs += new.logprobs
        if new.finish_reason is not None:
            output.finish_reason, output.stop_reason = new.finish_reason, new.stop_reason

    def snapshot(self) -> CompletionOutput:
        output = self.output
        if len(self.pieces) > 1:
            self.pieces = ["".join(self.pieces)]
        return CompletionOutput(
            index=output.index,
            text=self.pieces[0] if self.pieces else "",
            token_ids=output.token_ids.copy(),
            logprobs=None if output.logprobs is None else output.logprobs.copy(),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
        )


class OutputCollector:
    """Adding costs what is new, a snapshot what there is so far."""

    def __init__(self) -> None:
        self._sequences: dict[int, _Sequence] = {}
        self._last: RequestDelta | None = None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def add(self, delta: RequestDelta) -> None:
        self._last = delta
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = delta.prompt_logprobs
        for new in delta.outputs:
            sequence = self._sequences.get(new.index)
            if sequence is None:
                sequence = self._sequences[new.index] = _Sequence(new.index)
            sequence.add(new)

    def snapshot(self) -> RequestOutput:
        """All so far, for the caller to keep; at least one delta must have been added."""
        last = self._last
        assert last is not None
        return RequestOutput(
            request_id=last.request_id,
            prompt=last.prompt,
            prompt_token_ids=last.prompt_token_ids,
            outputs=[self._sequences[index].snapshot() for index in sorted(self._sequences)],
            finished=last.finished,
            seed=last.seed,
            metrics=last.metrics,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=last.num_cached_tokens,
        )
