"""Ids to text, token by token: no half characters, no part of a stop string.

token -> Detokenizer.push -> text that is final -> StopMatcher.push -> text that may be shown
"""

from __future__ import annotations

from collections.abc import Sequence

from epruntime.engine.tokenizer import Tokenizer

_REPLACEMENT = "�"
#: a UTF-8 character misses at most three bytes, and each missing byte shows as at most one replacement character
_MAX_HELD = 3
#: earlier tokens that are decoded along, because tokenizers join words across tokens
_CONTEXT_TOKENS = 6
#: when a window has not become final within this many tokens (endless invalid bytes), it is taken as it is
_MAX_WINDOW = 64


class Detokenizer:
    """Incremental decoding of one sequence.

    Decodes a short window of ids twice, with and without the new ones, and emits the difference, which
    works for every tokenizer. Trailing replacement characters may be the first bytes of a character
    whose rest is still to come: they are held back, and dropped if the rest never comes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._ids)  # ids before this one are emitted in full
        self._context_text = self._decode()
        self._shown = 0  # characters of the window's own text that have been emitted

    def push(self, token_id: int) -> str:
        """Takes one id; returns the text that became final, possibly empty."""
        self._ids.append(token_id)
        fresh = self._decode()[len(self._context_text) :]
        held = 0
        while held < min(_MAX_HELD, len(fresh)) and fresh[-1 - held] == _REPLACEMENT:
            held += 1
        window_full = len(self._ids) - self._read >= _MAX_WINDOW
        if window_full:
            held = 0
        text = fresh[self._shown : len(fresh) - held]
        if held:
            self._shown = max(self._shown, len(fresh) - held)
        elif fresh or window_full:
            self._advance()
        return text

    def _advance(self) -> None:
        """The window is final: it becomes the context of the next one."""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._context_text = self._decode()
        self._shown = 0

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)


class StopMatcher:
    """Finds stop strings in a growing text, and holds back text that may turn out to be part of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._pending = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes new text; returns (text that may be shown, the stop string found or None).

        The earliest match wins, the longest among those that begin together. After a match the matcher
        is spent: text behind it is dropped.
        """
        if not self._stops:
            return text, None
        self._pending += text
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = self._pending.find(stop)
            if at >= 0 and (best is None or (at, -len(stop)) < best[:2]):
                best = (at, -len(stop), stop)
        if best is not None:
            shown, self._pending = self._pending[: best[0]], ""
            return shown, best[2]
        keep = max(_overlap(self._pending, stop) for stop in self._stops)
        cut = len(self._pending) - keep
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown, None

    def flush(self) -> str:
        """The text held back, when the sequence has ended without the rest of a stop string."""
        shown, self._pending = self._pending, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
