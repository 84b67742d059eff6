"""Log-probabilities in the two forms of OpenAI's API, and prompt log-probabilities in that of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from epruntime.outputs import Logprob

#: JSON has no infinity; clients of this API know this number for it.
LOWEST = -9999.0

Entry = dict[int, Logprob]


class CompletionLogprobs:
    """`logprobs` of a completion's choice: parallel lists, with offsets into the text that go on over chunks.

    The chosen token is in `top_logprobs`, too, where it is not one of the most likely.
    """

    def __init__(self) -> None:
        self._offset = 0

    def json(self, token_ids: Sequence[int], entries: Sequence[Entry | None], first: str = "") -> dict[str, Any]:
        """
        Args:
            entries: for each token; None for a prompt's first, which nothing predicts. first: its text.
        """
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in zip(token_ids, entries, strict=True):
            tokens.append(first if entry is None else _text(token, entry[token]))
            chosen.append(None if entry is None else _number(entry[token]))
            top.append(None if entry is None else _by_text(entry))
            offsets.append(self._offset)
            self._offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry], top: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice: an entry for each token, with its `top` most likely alternatives."""
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        ranked = sorted(entry.items(), key=lambda item: -item[1].logprob)[:top]
        content.append({**_one(token, entry[token]), "top_logprobs": [_one(*item) for item in ranked]})
    return {"content": content, "refusal": None}


def prompt_logprobs(entries: Sequence[Entry | None]) -> list[dict[str, Any] | None]:
    """For each position of the prompt: token id -> {logprob, decoded_token}; null for the first."""
    return [
        None
        if entry is None
        else {str(i): {"logprob": _number(one), "decoded_token": one.decoded_token} for i, one in entry.items()}
        for entry in entries
    ]


def _one(token: int, entry: Logprob) -> dict[str, Any]:
    text = _text(token, entry)
    return {"token": text, "logprob": _number(entry), "bytes": list(text.encode())}


def _by_text(entry: Entry) -> dict[str, float]:
    """Different tokens may look alike; the likelier one stands for both."""
    found: dict[str, float] = {}
    for token, one in sorted(entry.items(), key=lambda item: item[1].logprob):
        found[_text(token, one)] = _number(one)
    return dict(reversed(found.items()))


def _text(token: int, entry: Logprob) -> str:
    """A model without a tokenizer has no texts; its tokens go by number."""
    return entry.decoded_token or f"token_id:{token}"


def _number(entry: Logprob) -> float:
    return max(entry.logprob, LOWEST)
