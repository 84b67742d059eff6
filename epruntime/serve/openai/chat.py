"""POST /v1/chat/completions: the next message of a chat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epruntime.outputs import CompletionDelta
from epruntime.sampling_params import derive_seed
from epruntime.serve.openai.choices import Answer, Head, HeldBack, UsageCount
from epruntime.serve.openai.fields import ChatFields
from epruntime.serve.openai.generation import Deltas
from epruntime.serve.openai.logprobs import chat_logprobs, prompt_logprobs
from epruntime.serve.openai.stream import Chunks


@dataclass(frozen=True, kw_only=True)
class ChatAnswers:
    """Turns the deltas of one request into its answer, whole or in chunks."""

    body: ChatFields
    head: Head
    n: int

    async def whole(self, deltas: Deltas) -> dict[str, Any]:
        answer: Answer | None = None
        usage = UsageCount()
        async for number, delta in deltas:
            answer = answer or Answer(delta, self.n)
            answer.add(delta)
            usage.add(number, delta)
        assert answer is not None
        choices = []
        for index, sequence in enumerate(answer.sequences):
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": "".join(sequence.texts), "refusal": None},
                    "logprobs": chat_logprobs(sequence.token_ids, sequence.logprobs, self._top)
                    if self._wanted
                    else None,
                    "finish_reason": sequence.finish_reason,
                    "stop_reason": sequence.stop_reason,
                    "seed": sequence.seed,
                }
            )
        more = {}
        if answer.prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs)
        return self.head.json(choices, usage=usage.json(), **more)

    async def chunks(self, deltas: Deltas) -> Chunks:
        """The role of every choice first, then texts, then usage where it is asked for."""
        options = self.body.stream_options
        last = options is not None and bool(options.include_usage)
        always = options is not None and bool(options.continuous_usage_stats)
        usage, held = UsageCount(), HeldBack()
        begun = False
        async for number, delta in deltas:
            usage.add(number, delta)
            more = {"usage": usage.json()} if always else {"usage": None} if last else {}
            chunks = []
            if not begun:
                begun = True
                for index in range(self.n):
                    opening = {"role": "assistant", "content": ""}
                    choice = {"index": index, "delta": opening, "logprobs": None, "finish_reason": None}
                    chunks.append(self.head.json([choice], **more))
            for output in delta.outputs:
                ready = held.ready(output.index, output)
                if ready is not None:
                    chunks.append(self.head.json([self._choice(ready, delta.seed)], **more))
            yield chunks
        if last:
            yield [self.head.json([], usage=usage.json())]

    def _choice(self, new: CompletionDelta, seed: int) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": new.index,
            "delta": {"content": new.text} if new.text else {},
            "logprobs": chat_logprobs(new.token_ids, new.logprobs or (), self._top) if self._wanted else None,
            "finish_reason": new.finish_reason,
        }
        if new.finish_reason is not None:
            choice["stop_reason"] = new.stop_reason
            choice["seed"] = derive_seed(seed, new.index)
        return choice

    @property
    def _wanted(self) -> bool:
        return bool(self.body.logprobs)

    @property
    def _top(self) -> int:
        return self.body.top_logprobs or 0
