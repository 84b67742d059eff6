"""VerifyConfig: what `epruntime verify` varies, on which prompts, and how closely it looks."""

from __future__ import annotations

from dataclasses import dataclass

from epruntime.config.engine import _at_least, _check_fields, option
from epruntime.errors import ConfigError

#: name -> what it varies, in the order in which they run. `alone` is the baseline, and always runs.
CASES: dict[str, str] = {
    "batch": "up to 64 requests at once",
    "rows": "steps of exactly 1 to 12 rows",
    "chunks": "prompts prefilled in pieces, beside requests that decode",
    "preempted": "a KV cache so small that requests are preempted",
    "prefix": "prompts found in the prefix cache",
    "pipeline": "one plan in flight, and two",
    "ranks": "requests on other ranks, in another order",
    "rounds": "an exchange budget so small that layers exchange in several rounds",
    "threads": "1 and 2 compute threads per rank",
    "placement": "experts on other ranks",
    "replicas": "experts with several copies",
    "sizes": "other expert-parallel sizes",
}


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """What is varied, and on which prompts."""

    num_prompts: int = option(
        12, "different requests, at most 64; half of them greedy, half of them sampled with a seed"
    )
    max_tokens: int = option(8, "output tokens per request; less where the model's length leaves no room")
    max_prompt_tokens: int = option(
        160, "longest prompt, the others are shorter; raise it above a sliding window to see beyond the window"
    )
    seed: int | None = option(None, "of the random prompts; default: drawn, and printed so that it can be repeated")
    prompts_file: str | None = option(None, "text file with a prompt on each line, in place of random token ids")
    cases: str | None = option(None, f"what to vary, as names with commas: {', '.join(CASES)}; default: all")
    expert_parallel_sizes: str | None = option(
        None,
        "expert-parallel sizes to compare, as numbers with commas; default: all up to --expert-parallel-size, above 8 "
        "the powers of two and that one; of a checkpoint above 8 GiB only that one",
    )
    trace_layers: bool = option(
        False, "hash every hidden state after every layer, and name the layer in which two runs part"
    )
    against: str | None = option(
        None,
        "also compare with transformers itself, which runs the whole model in this process",
        choices=("transformers",),
    )

    def __post_init__(self) -> None:
        _check_fields(self)
        _at_least(self, 1, "num_prompts", "max_tokens", "max_prompt_tokens")
        _at_least(self, 0, "seed")
        if self.num_prompts > 64:
            raise ConfigError(f"num_prompts={self.num_prompts}: must be at most 64, the size of the largest batch")
        self.case_names()
        self.sizes()

    def case_names(self) -> tuple[str, ...]:
        """Cases to run, in the order of CASES.

        Raises:
            ConfigError: an unknown name, or none.
        """
        if self.cases is None:
            return tuple(CASES)
        given = [name.strip() for name in self.cases.split(",") if name.strip()]
        for name in given:
            if name not in CASES:
                raise ConfigError(f"cases: there is no {name!r}; there are {', '.join(CASES)}")
        if not given:
            raise ConfigError(f"cases={self.cases!r}: must name at least one of {', '.join(CASES)}")
        return tuple(name for name in CASES if name in given)

    def sizes(self) -> tuple[int, ...] | None:
        """Expert-parallel sizes that were asked for, ascending; None: the default.

        Raises:
            ConfigError: one is no positive number.
        """
        if self.expert_parallel_sizes is None:
            return None
        found = set()
        for text in self.expert_parallel_sizes.split(","):
            if not text.strip().isdecimal() or int(text) < 1:
                raise ConfigError(f"expert_parallel_sizes={self.expert_parallel_sizes!r}: must be numbers, as in 1,2,4")
            found.add(int(text))
        return tuple(sorted(found))
