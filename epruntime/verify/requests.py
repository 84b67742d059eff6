"""The requests of a verification, shaped so that what is to be varied does happen, whatever the model's limits."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from epruntime.errors import ConfigError
from epruntime.plan import SamplingSpec

#: most likely tokens reported at each position: their order and values are compared, too.
_TOP_LOGPROBS = 3
#: random prompts but the first are so many times shorter, if that leaves them so many KV blocks.
_SHORTER = 3
#: parameters that a request carries with it wherever it goes, and what stands for none.
PARAMETERS: dict[str, Any] = {
    "repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": (), "top_k": 0,
    "top_p": 1.0, "min_p": 0.0, "min_tokens": 0, "stop_ids": (),
}  # fmt: skip
#: the same, as they are told of.
KINDS: dict[str, tuple[str, ...]] = {
    "with penalties": ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "bias": ("logit_bias",),
    "filters": ("top_k", "top_p", "min_p"),
    "an early end": ("min_tokens", "stop_ids"),
}
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

    @property
    def num_tokens(self) -> int:
        """Output tokens that come, unless a token that ends the output comes by chance."""
        spec = self.spec
        return min(spec.max_tokens, spec.min_tokens + 1) if spec.stop_ids else spec.max_tokens

    def shortened(self, max_tokens: int) -> VerifyRequest:
        return replace(self, spec=replace(self.spec, max_tokens=max_tokens))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which parameters, of those whose effect may be lost on the way, it has."""
        spec, found = self.spec, []
        for name, none in PARAMETERS.items():
            if getattr(spec, name) != none and not (name == "logit_bias" and spec.stop_ids):
                found.append(name)
        return tuple(found)


def kinds_of(requests: Iterable[VerifyRequest]) -> tuple[str, ...]:
    """Which parameters there are in a mix."""
    return tuple(dict.fromkeys(kind for request in requests for kind in request.kinds))


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
    """Random ids. The first has the greatest length, the others about a third of it down to 1.

    Of three in a row one ends with a KV block, so that its first token needs another one, and one ends a quarter of an
    output before that. Of four in a row the second begins as the first does, up to a block in which a token or two are
    others; the fourth begins with the second block of the first, which stands elsewhere there; the next one after
    these begins with the first block of all but for a token or two.
    """
    source = random.Random(seed)
    longest, block = shape.longest_prompt, shape.block_size
    first_id = _FIRST_ID if vocab_size > 2 * _FIRST_ID else 0
    second = max(1, longest // _SHORTER, min(longest, _SHORTER * block))
    ends = {1: 0, 2: shape.max_tokens // 4 % block}  # tokens that a block's last one lacks
    prompts: list[list[int]] = []
    for i in range(number):
        length = longest if i == 0 else second - (second - 1) * (i - 1) // max(1, number - 2)
        if i % 3 in ends and length > 1:
            up, most = -(-length // block) * block - ends[i % 3], longest // block * block - ends[i % 3]
            length = min(up if up > 0 else up + block, most) if most > 0 else length
        shared: list[int] = []
        if i % 4 == 1:
            shared = prompts[i - 1][: (min(length, len(prompts[i - 1])) - 1) // block * block]
            shared[-block:] = _altered(shared[-block:], ("swapped", "first", "last")[i // 4 % 3], vocab_size)
        elif i % 4 == 3 and len(prompts[i - 3]) > 2 * block:
            shared = prompts[i - 3][block : 2 * block]
        elif i and i % 4 == 0 and len(prompts[0]) >= block:
            shared = _altered(prompts[0][:block], ("last", "first", "swapped")[(i // 4 - 1) % 3], vocab_size)
        ids = [source.randrange(first_id, vocab_size) for _ in range(length)]
        prompts.append([*shared, *ids][: min(longest, max(length, len(shared) + 1))])
    return prompts


def _altered(block: Sequence[int], how: str, vocab_size: int) -> list[int]:
    """A KV block's tokens with another first or last one, or with these two swapped."""
    ids = list(block)
    if not ids:
        return ids
    if how == "swapped" and ids[0] != ids[-1]:
        ids[0], ids[-1] = ids[-1], ids[0]
    else:
        place = 0 if how == "first" else -1
        ids[place] = ids[place] + 1 if ids[place] + 1 < vocab_size else max(0, ids[place] - 1)
    return ids


#: fields of a sampled request's SamplingSpec, which take turns; `few` biases the draw towards a few ids, among which
#: penalties and filters decide; `end` ends the output before its full length, by an id that min_tokens keeps off.
#: They are so strong that one that is lost shows in the next tokens, whatever the model's logits are, and none hides
#: another: penalties keep each of the few from coming again, and where one token in a few is to be cut off, the draw
#: among them is nearly even. Top-k and top-p are there twice, since a batch may give all of its requests the same.
_SAMPLED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("few", {"temperature": 0.3, "frequency_penalty": 30.0}),
    ("few", {"temperature": 8.0, "top_p": 0.5, "presence_penalty": 50.0}),
    ("", {"temperature": 2.0, "min_p": 0.8}),
    ("end", {"temperature": 1.0, "top_k": 40}),
    ("few", {"temperature": 3.0, "top_p": 0.9, "repetition_penalty": 1000.0}),
    ("few", {"temperature": 100.0, "top_k": 2, "frequency_penalty": 30.0}),
)
_NUM_FEW = 12
_CERTAIN = 100.0


def _spec(i: int, max_tokens: int, *, vocab_size: int, seed: int) -> SamplingSpec:
    fields: dict[str, Any] = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "stop_ids": ()}
    if i % 2 == 1:
        bias, chosen = _SAMPLED[i // 2 % len(_SAMPLED)]
        fields |= chosen
        fields["top_k"] = min(fields["top_k"], max(1, vocab_size // 4))
        if bias == "few":
            few = {(seed + i + j * max(1, vocab_size // _NUM_FEW)) % vocab_size for j in range(_NUM_FEW)}
            fields["logit_bias"] = tuple((token, _CERTAIN) for token in sorted(few))
        elif bias == "end":
            end = (seed + i) % vocab_size
            fields |= {"stop_ids": (end,), "logit_bias": ((end, _CERTAIN),), "min_tokens": max_tokens * 5 // 8}
    return SamplingSpec(
        seed=(seed * 1_000_003 + i) % 2**63,
        max_tokens=max_tokens,
        logprobs=min(_TOP_LOGPROBS, vocab_size),
        prompt_logprobs=min(1, vocab_size) if i % 4 == 2 else -1,
        **fields,
    )
