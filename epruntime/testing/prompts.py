"""Random prompts whose reference answer is clear-cut, found by margin alone.

python -m epruntime.testing.prompts mixtral qwen2_moe     prints the seeds for tests/e2e/seeds.py
"""

from __future__ import annotations

import sys

import torch
import transformers

from epruntime.testing.reference import Reference, greedy_reference
from epruntime.testing.tiny_models import build

#: prompt lengths of the token-equality test
LENGTHS = (1, 2, 3, 5, 8, 13, 21, 34, 45, 55, 72, 90)
NEW_TOKENS = 24
_WANTED = 1.5e-4
_MAX_TRIES = 200


def prompt_of(length: int, seed: int, *, vocab_size: int = 128) -> list[int]:
    """`length` random ids from 3 up (below are special tokens), the same for the same seed."""
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


def find_seed(model: transformers.PreTrainedModel, length: int) -> tuple[int, Reference]:
    """The first seed whose prompt gives margins wide enough.

    Raises:
        LookupError: none of the first 200.
    """
    for seed in range(_MAX_TRIES):
        prompt = prompt_of(length, seed)
        reference = greedy_reference(model, [prompt], max_new_tokens=NEW_TOKENS)
        if min(reference.router_margin, reference.top1_margin) > _WANTED:
            return seed, reference
    raise LookupError(f"no prompt of {length} tokens has margins above {_WANTED}")


def main() -> None:
    for model_type in sys.argv[1:]:
        _, model = build(model_type)
        seeds = tuple(find_seed(model, length)[0] for length in LENGTHS)
        print(f'    "{model_type}": {seeds},', flush=True)


if __name__ == "__main__":
    main()
