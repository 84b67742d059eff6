"""One output sequence of a live request: tokens in, CompletionDelta out.

TokenUpdate -> take -> (detokenise, stop strings) -> what is new, until `fetch` takes it
"""

from __future__ import annotations

from collections.abc import Sequence

from epruntime.engine.detokenizer import Detokenizer, StopMatcher, TokenTexts
from epruntime.engine.token_updates import TokenUpdate
from epruntime.outputs import CompletionDelta, Logprob
from epruntime.plan import FINISH_LENGTH, FINISH_NONE, FINISH_STOP, TokenLogprobs
from epruntime.sampling_params import SamplingParams

FINISH_REASONS = {FINISH_STOP: "stop", FINISH_LENGTH: "length"}


class SequenceState:
    """Keeps what its reader has not fetched yet, and of the rest only what decoding needs.

    Attributes:
        index: place among the request's sequences; rid: the engine's handle.
        num_tokens: output tokens so far. finish_reason: None while it runs.
        num_preemptions: so far.
    """

    __slots__ = (
        "_detokenizer",
        "_logprobs",
        "_min_tokens",
        "_params",
        "_pieces",
        "_stops",
        "_texts",
        "_token_ids",
        "finish_reason",
        "index",
        "num_preemptions",
        "num_tokens",
        "rid",
        "stop_reason",
    )

    def __init__(self, index: int, rid: int, params: SamplingParams) -> None:
        self.index, self.rid = index, rid
        self.num_tokens = self.num_preemptions = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._params = params
        self._min_tokens = params.min_tokens
        self._stops = StopMatcher(params.stop) if params.stop else None
        self._texts: TokenTexts | None = None
        self._detokenizer: Detokenizer | None = None
        self._pieces: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[int, Logprob]] = []

    def begin(self, texts: TokenTexts | None, prompt_token_ids: Sequence[int]) -> None:
        """Before the first token: what the text goes on from. Without `texts` there is no text."""
        self._texts = texts
        if texts is not None:
            skip = self._params.skip_special_tokens
            self._detokenizer = Detokenizer(texts, prompt_token_ids, skip_special_tokens=skip)

    def take(self, update: TokenUpdate) -> None:
        """The next token (not one with FINISH_ERROR). Raises what the tokenizer raises."""
        token, finish = update.token, update.finish
        stop: str | None = None
        self.num_tokens += 1
        self.num_preemptions = update.num_preemptions
        self._token_ids.append(token)
        if update.logprobs is not None:
            self._logprobs.append(logprob_entries(token, update.logprobs, self._texts))
        # the token that ended the sequence (end of sequence, stop id) is reported as an id and not as text
        if self._detokenizer is not None and finish != FINISH_STOP:
            text = self._detokenizer.push(token)
            if self._stops is not None:
                text, stop = self._stops.push(text, armed=self.num_tokens > self._min_tokens)
            if text:
                self._pieces.append(text)
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif finish != FINISH_NONE:
            self._end(FINISH_REASONS[finish])
            if finish == FINISH_STOP and token in self._params.stop_token_ids:
                self.stop_reason = token

    def abort(self) -> None:
        """Ends the sequence where it is."""
        self._end("abort")

    def fetch(self) -> CompletionDelta:
        """What is new; from now on it is not."""
        delta = CompletionDelta(
            index=self.index,
            text="".join(self._pieces),
            token_ids=self._token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )
        self._pieces, self._token_ids = [], []
        if self._params.logprobs is not None:
            delta.logprobs, self._logprobs = self._logprobs, []
        return delta

    def _end(self, reason: str) -> None:
        self.finish_reason = reason
        if self._stops is not None and (held := self._stops.flush()):
            self._pieces.append(held)


def logprob_entries(token: int, found: TokenLogprobs, texts: TokenTexts | None) -> dict[int, Logprob]:
    """id -> Logprob: the token itself, then the most likely ones."""
    entries = {token: found.chosen}
    entries.update(zip(found.top_ids, found.top_values, strict=True))
    return {i: Logprob(value, "" if texts is None else texts.text(i, False)) for i, value in entries.items()}
