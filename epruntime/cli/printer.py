"""How `generate` shows results: text as it comes, sequence after sequence, or one JSON object per prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from epruntime.client import Chunk
from epruntime.client.wire import Collector
from epruntime.outputs import Logprob


class Printer(Protocol):
    """One prompt after the other: begin, its chunks, end; or cut, where an error ends it."""

    def begin(self, prompt: str) -> None: ...
    def add(self, chunk: Chunk) -> None: ...
    def end(self) -> None: ...
    def cut(self) -> None: ...


class TextPrinter:
    """Text to standard output. The first unfinished sequence is printed as it comes; the others wait for their turn.

    Args:
        many: prompts are named before their output, and an empty line follows it. n: sequences per prompt.
    """

    def __init__(self, *, many: bool, n: int) -> None:
        self._many, self._n = many, n
        self._reset()

    def _reset(self) -> None:
        self._collector = Collector()
        self._current = 0
        self._waiting: list[list[str]] = [[] for _ in range(self._n)]
        self._finished = [False] * self._n
        self._in_line = False

    def begin(self, prompt: str) -> None:
        self._reset()
        if self._many:
            print(f">>> {prompt}", flush=True)
        self._name_sequence()

    def add(self, chunk: Chunk) -> None:
        self._collector.add(chunk)
        self._finished[chunk.index] |= chunk.finish_reason is not None
        self._waiting[chunk.index].append(chunk.text)
        while self._current < self._n:
            text = "".join(self._waiting[self._current])
            print(text, end="", flush=True)
            self._in_line = not text.endswith("\n") if text else self._in_line
            self._waiting[self._current].clear()
            if not self._finished[self._current]:
                return
            self._current += 1
            if self._n > 1:
                print(flush=True)
                self._in_line = False
                self._name_sequence()

    def end(self) -> None:
        if self._n == 1:
            print(flush=True)
        result = self._collector.result()
        if result.prompt_logprobs is not None:
            print("--- log-probabilities of the prompt")
            print("\n".join(map(_line, result.prompt_logprobs)))
        for output in result.outputs:
            if output.logprobs is not None:
                print("--- log-probabilities" + (f" of {output.index + 1}/{self._n}" if self._n > 1 else ""))
                print("\n".join(map(_line, output.logprobs)))
        print("\n" if self._many else "", end="", flush=True)

    def cut(self) -> None:
        """Ends the line that the output has begun: what comes next is an error's."""
        if self._in_line:
            print(flush=True)
        self._in_line = False

    def _name_sequence(self) -> None:
        if self._n > 1 and self._current < self._n:
            print(f"--- {self._current + 1}/{self._n}", flush=True)


class JsonPrinter:
    """One line per prompt: {"prompt", "outputs": [{"text", ...}, ...], ...}; log-probabilities where asked for."""

    def begin(self, prompt: str) -> None:
        self._prompt, self._collector = prompt, Collector()

    def add(self, chunk: Chunk) -> None:
        self._collector.add(chunk)

    def end(self) -> None:
        result = self._collector.result()
        outputs: list[dict[str, Any]] = []
        for output in result.outputs:
            outputs.append({
                "index": output.index,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "stop_reason": output.stop_reason,
            })  # fmt: skip
            if output.logprobs is not None:
                outputs[-1]["logprobs"] = _entries(output.logprobs)
        facts: dict[str, Any] = {
            "prompt": self._prompt,
            "outputs": outputs,
            "prompt_tokens": result.usage.prompt_tokens,
            "output_tokens": result.usage.output_tokens,
            "cached_tokens": result.usage.cached_tokens,
            "seed": result.seed,
        }
        if result.prompt_token_ids is not None:
            facts["prompt_token_ids"] = result.prompt_token_ids
        if result.prompt_logprobs is not None:
            facts["prompt_logprobs"] = _entries(result.prompt_logprobs)
        print(json.dumps(facts, ensure_ascii=False), flush=True)

    def cut(self) -> None:
        """What came of a prompt that failed is not printed: a line is there in full, or not at all."""


def _entries(positions: Sequence[dict[int, Logprob] | None]) -> list[list[dict[str, Any]] | None]:
    """The token's own entry first, then the most likely ones; None for a position that nothing predicts."""
    return [
        None
        if position is None
        else [{"token_id": i, "token": e.decoded_token, "logprob": e.logprob} for i, e in position.items()]
        for position in positions
    ]


def _line(position: dict[int, Logprob] | None) -> str:
    if position is None:
        return f"{'':>9}  (nothing predicts the first token)"
    (token, own), *others = position.items()
    line = f"{own.logprob:9.4f}  {own.decoded_token!r} ({token})"
    return line + "".join(f", {entry.decoded_token!r} ({i}) {entry.logprob:.4f}" for i, entry in others)
