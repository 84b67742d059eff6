"""POST /v1/completions: text continued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epruntime.outputs import CompletionDelta, Logprob, RequestDelta
from epruntime.sampling_params import derive_seed
from epruntime.serve.engine import Engine
from epruntime.serve.openai.choices import Answer, Head, HeldBack, UsageCount
from epruntime.serve.openai.fields import CompletionFields
from epruntime.serve.openai.generation import Deltas
from epruntime.serve.openai.logprobs import CompletionLogprobs, prompt_logprobs
from epruntime.serve.openai.stream import Chunks


@dataclass(frozen=True, kw_only=True)
class CompletionAnswers:
    """Turns the deltas of one request into its answer, whole or in chunks."""

    engine: Engine
    body: CompletionFields
    head: Head
    n: int

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        answers: dict[int, Answer] = {}
        usage = UsageCount()
        async for number, delta in deltas:
            if number not in answers:
                answers[number] = Answer(delta, self.n)
            answers[number].add(delta)
            usage.add(number, delta)
        choices = []
        for number, answer in sorted(answers.items()):
            prompt = await _Prompt.of(self.engine, answer.first, answer.prompt_logprobs) if self.body.echo else None
            for index, sequence in enumerate(answer.sequences):
                new = CompletionDelta(
                    index, "".join(sequence.texts), sequence.token_ids, sequence.logprobs, sequence.finish_reason,
                    sequence.stop_reason,
                )  # fmt: skip
                choice = self._choice(number, new, answer.first.seed, prompt, CompletionLogprobs())
                if self.body.prompt_logprobs is not None and answer.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
                choices.append(choice)
        return self.head.json(choices, usage=self._used(usage))

    async def chunks(self, deltas: Deltas) -> Chunks:
        options = self.body.stream_options
        last = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        usage, held = UsageCount(), HeldBack()
        prompts: dict[int, list[dict[int, Logprob] | None] | None] = {}
        writers: dict[tuple[int, int], CompletionLogprobs] = {}
        async for number, delta in deltas:
            usage.add(number, delta)
            prompts[number] = delta.prompt_logprobs or prompts.get(number)
            more = {"usage": self._used(usage)} if always else {"usage": None} if last else {}
            chunks = []
            for output in delta.outputs:
                prompt = None
                key = number, output.index
                ready = output if self.body.echo and key not in writers else held.ready(key, output)
                if ready is None:
                    continue
                if key not in writers:
                    writers[key] = CompletionLogprobs()
                    if self.body.echo:
                        prompt = await _Prompt.of(self.engine, delta, prompts[number])
                choice = self._choice(number, ready, delta.seed, prompt, writers[key])
                chunks.append(self.head.json([choice], **more))
            yield chunks
        if last:
            yield [self.head.json([], usage=self._used(usage))]

    def _choice(
        self, number: int, new: CompletionDelta, seed: int, prompt: _Prompt | None, writer: CompletionLogprobs
    ) -> dict[str, Any]:
        """
        Args:
            prompt: what is echoed before `new`.
        """
        text, ids, entries = new.text, new.token_ids, list[dict[int, Logprob] | None](new.logprobs or ())
        if self._hidden:
            text, ids, entries = "", [], []
        if prompt is not None:
            text, ids, entries = prompt.text + text, prompt.ids + ids, prompt.entries + entries
        choice: dict[str, Any] = {
            "index": number * self.n + new.index,
            "text": text,
            "logprobs": None
            if self.body.logprobs is None
            else writer.json(ids, entries, prompt.first if prompt else ""),
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
        }
        if new.finish_reason is not None:
            choice["seed"] = derive_seed(seed, new.index)
            if self._hidden:
                choice["finish_reason"], choice["stop_reason"] = "length", None
        return choice

    @property
    def _hidden(self) -> bool:
        """The one token that was computed is not what was asked for."""
        return self.body.max_tokens == 0

    def _used(self, usage: UsageCount) -> dict[str, Any]:
        used = usage.json()
        if self._hidden:
            used["completion_tokens"], used["total_tokens"] = 0, used["prompt_tokens"]
        return used


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """An echoed prompt.

    Attributes:
        entries: log-probabilities per token, where they were asked for; first: text of the first, which has none.
    """

    text: str
    first: str
    ids: list[int]
    entries: list[dict[int, Logprob] | None]

    @classmethod
    async def of(cls, engine: Engine, delta: RequestDelta, entries: list[dict[int, Logprob] | None] | None) -> _Prompt:
        text = delta.prompt
        if text is None:
            text = await engine.detokenize(delta.prompt_token_ids)
        first = await engine.detokenize(delta.prompt_token_ids[:1]) if entries else ""
        return cls(text=text, first=first, ids=delta.prompt_token_ids, entries=entries or [])
