"""Ids to text, token by token: no half characters, no part of a stop string.

token -> Detokenizer.push -> text that is final -> StopMatcher.push -> text that may be shown
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from epruntime.engine.tokenizer import Tokenizer

_REPLACEMENT = "�"
#: a UTF-8 character misses at most three bytes, and each missing byte shows as at most one replacement character
_MAX_HELD = 3
#: earlier tokens that are decoded along, because tokenizers join words across tokens
_CONTEXT_TOKENS = 6
#: when a window has not become final within this many tokens (endless invalid bytes), it is taken as it is
_MAX_WINDOW = 64
#: texts of single tokens that one engine remembers
_MAX_TEXTS = 2**16


class TokenTexts:
    """Texts of single tokens, remembered: every token is the context of the next one. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

        @lru_cache(maxsize=_MAX_TEXTS)
        def text(token: int, skip_special_tokens: bool) -> str:
            return tokenizer.decode([token], skip_special_tokens=skip_special_tokens)

        self.text = text


class Detokenizer:
    """Incremental decoding of one sequence.

    Decodes a short window of ids behind the ids before it, and emits what is beyond the text of those, which works for
    every tokenizer. Trailing replacement characters may be the first bytes of a character whose rest is still to come:
    they are held back, and dropped if the rest never comes.
    """

    __slots__ = ("_context_text", "_ids", "_read", "_shown", "_skip", "_texts")

    def __init__(self, texts: TokenTexts, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._texts = texts
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
        if fresh and fresh[-1] == _REPLACEMENT:
            held = min(_MAX_HELD, len(fresh) - len(fresh.rstrip(_REPLACEMENT)))
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
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._context_text = self._texts.text(self._ids[0], self._skip) if self._read == 1 else self._decode()
        self._shown = 0

    def _decode(self) -> str:
        return self._texts.tokenizer.decode(self._ids, skip_special_tokens=self._skip)


class StopMatcher:
    """Finds stop strings in a growing text, and holds back text that may turn out to be part of one.

    The text ends at the first stop string that is complete: of all occurrences in the whole text the one that ends
    first, and of those that end together the one that begins first. So the outcome does not depend on how the text is
    cut into tokens. Occurrences that end within the text of the first `min_tokens` tokens are ordinary text; one may
    begin there and end behind.
    """

    __slots__ = ("_pending", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)

        self._pending = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Takes new text; returns (text that may be shown, the stop string found or None).

        After a match the matcher is spent: text behind it is dropped.

        Args:
            armed: whether a stop string that ends in `text` counts.
        """
        if not self._stops or not text:
            return text, None
        old = len(self._pending)
        pending = self._pending = self._pending + text
        if armed:
            best: tuple[int, int, str] | None = None
            for stop in self._stops:
                at = pending.find(stop, max(0, old - len(stop) + 1))  # one that ends in the new text
                if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                    best = (at + len(stop), at, stop)
            if best is not None:
                self._pending = ""
                return pending[: best[1]], best[2]
        cut = self._first_possible(pending)
        self._pending = pending[cut:]
        return pending[:cut], None

    def flush(self) -> str:
        """The text held back, when the sequence has ended without the rest of a stop string."""
        shown, self._pending = self._pending, ""
        return shown

    def _first_possible(self, text: str) -> int:
        """Where the earliest stop string that may still become complete begins; the text's length if there is none."""
        first = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1), first)
            while at >= 0:
                if stop.startswith(text[at:]):
                    first = at
                    break
                at = text.find(stop[0], at + 1, first)
        return first
