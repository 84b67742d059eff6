"""The requests of a verification, shaped so that what is to be varied does happen, whatever the model's limits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from epruntime.errors import ConfigError
from epruntime.plan import SamplingSpec

#: most likely tokens reported at each position: their order and values are compared, too.
_TOP_LOGPROBS = 3
#: random prompts but the first are so many times shorter, if that leaves them so many KV blocks.
_SHORTER = 3
#: ids below it are special in most vocabularies; the embedding of padding is zero, which makes ties of what is scored.
_FIRST_ID = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths in tokens.

    Attributes:
        longest_prompt, max_tokens: of any request.
        block_size: tokens per KV block: as configured, but small enough that some prompts have several blocks.
    """

    longest_prompt: int
    max_tokens: int
    block_size: int

    @property
    def max_model_len(self) -> int:
        return self.longest_prompt + self.max_tokens

    def blocks_of(self, num_prompt_tokens: int) -> int:
        """KV blocks of a request at its end; the last token is sampled and never computed."""
        return -(-(num_prompt_tokens + self.max_tokens - 1) // self.block_size)


@dataclass(frozen=True, kw_only=True)
class VerifyRequest:
    """One of the different requests. `index` names it in reports."""

    index: int
    token_ids: tuple[int, ...]
    spec: SamplingSpec

    @property
    def greedy(self) -> bool:
        return self.spec.temperature == 0

    def shortened(self, max_tokens: int) -> VerifyRequest:
        return replace(self, spec=replace(self.spec, max_tokens=max_tokens))


def shape_of(*, max_model_len: int, max_tokens: int, max_prompt_tokens: int, block_size: int) -> Shape:
    """What fits into `max_model_len`.

    Raises:
        ConfigError: not even one token in and one out.
    """
    if max_model_len < 2:
        raise ConfigError(f"max_model_len={max_model_len} leaves no room for a prompt and output")
    tokens = min(max_tokens, max(1, max_model_len // 2))
    longest = min(max_prompt_tokens, max_model_len - tokens)
    return Shape(longest_prompt=longest, max_tokens=tokens, block_size=min(block_size, max(1, longest // 3)))


def make_requests(prompts: Sequence[Sequence[int]], shape: Shape, *, vocab_size: int, seed: int) -> list[VerifyRequest]:
    """A request for each prompt: every other one greedy, every fourth with log-probabilities of its prompt."""
    return [
        VerifyRequest(
            index=i, token_ids=tuple(prompt), spec=_spec(i, shape.max_tokens, vocab_size=vocab_size, seed=seed)
        )
        for i, prompt in enumerate(prompts)
    ]


def random_prompts(number: int, shape: Shape, *, vocab_size: int, seed: int) -> list[list[int]]:
    """Random ids. The first has the greatest length, the others about a third of it down to 1; every third ends with
    a KV block, so that its first token needs another one. Of four in a row, the second begins with blocks of the first,
    and the fourth with the second block of the first, which stands elsewhere there."""
    source = random.Random(seed)
    longest, block = shape.longest_prompt, shape.block_size
    first_id = _FIRST_ID if vocab_size > 2 * _FIRST_ID else 0
    second = max(1, longest // _SHORTER, min(longest, _SHORTER * block))
    prompts: list[list[int]] = []
    for i in range(number):
        length = longest if i == 0 else second - (second - 1) * (i - 1) // max(1, number - 2)
        if i % 3 == 1:
            length = min(-(-length // block) * block, longest // block * block) or length
        shared: list[int] = []
        if i % 4 == 1:
            shared = prompts[i - 1][: (min(length, len(prompts[i - 1])) - 1) // block * block]
        elif i % 4 == 3 and len(prompts[i - 3]) > 2 * block:
            shared = prompts[i - 3][block : 2 * block]
        ids = [source.randrange(first_id, vocab_size) for _ in range(length)]
        prompts.append([*shared, *ids][: max(length, len(shared) + 1)])
    return prompts


def _spec(i: int, max_tokens: int, *, vocab_size: int, seed: int) -> SamplingSpec:
    sampled = i % 2 == 1
    return SamplingSpec(
        temperature=(0.7, 1.0, 1.3)[i // 2 % 3] if sampled else 0.0,
        top_k=(0, min(40, vocab_size))[i // 2 % 2] if sampled else 0,
        top_p=(1.0, 0.9)[i // 4 % 2] if sampled else 1.0,
        min_p=0.01 if i % 8 == 5 else 0.0,
        repetition_penalty=1.2 if i % 8 == 3 else 1.0,
        frequency_penalty=0.5 if i % 8 == 7 else 0.0,
        presence_penalty=0.7 if i % 8 == 5 else 0.0,
        logit_bias=((0, -100.0), (vocab_size - 1, 1.5)) if i % 8 == 1 and vocab_size > 1 else (),
        seed=(seed * 1_000_003 + i) % 2**63,
        stop_ids=(),  # every output has its full length, so that it is known what must come
        max_tokens=max_tokens,
        logprobs=min(_TOP_LOGPROBS, vocab_size),
        prompt_logprobs=min(1, vocab_size) if i % 4 == 2 else -1,
    )
