"""How near to a referee epruntime is in bfloat16, as a share of how near transformers is; also with a fault put in.

    python benchmarks/bench_against.py mixtral qwen3_moe gpt_oss --scale 1 1.02 1.05
    python benchmarks/bench_against.py --all --sequences 40

It is what `epruntime verify --against transformers` judges, on tiny random models, per quantile of the errors of the
log-probability of every next token; the referee is transformers in float32. --scale multiplies the scores of attention,
a fault in every layer. Prints rows of a Markdown table.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from epruntime.models import attention
from epruntime.models.conformance import COVERED
from epruntime.models.loader import load_model
from epruntime.testing.ragged import RaggedDriver, local_runtime, strict_ops
from epruntime.testing.tiny_models import available, build, save
from epruntime.verify.against import QUANTILES
from epruntime.verify.referee import widened

LENGTH = 20


def errors(model_type: str, seed: int, sequences: int, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Distances from the referee of epruntime and of transformers, at the same positions."""
    config, plain = build(model_type, seed, dtype=torch.bfloat16)
    model = load_model(save(plain, folder), dtype="bfloat16", moe=local_runtime())
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, config.vocab_size, (LENGTH,), generator=generator) for _ in range(sequences)]
    if hasattr(plain, "set_experts_implementation"):
        plain.set_experts_implementation("eager")

    def transformers(prompt: torch.Tensor) -> torch.Tensor:
        return plain(input_ids=prompt[None], use_cache=False).logits[0]

    def epruntime(prompt: torch.Tensor) -> torch.Tensor:
        with strict_ops():
            return RaggedDriver(model).step([("a", prompt)])[0]

    own, ours = ([_next(run(p), p) for p in prompts] for run in (transformers, epruntime))
    with widened(plain, torch.float32):
        exact = torch.cat([_next(transformers(p), p) for p in prompts])
    return (torch.cat(ours) - exact).abs(), (torch.cat(own) - exact).abs()


def _next(logits_TV: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token after the first."""
    return logits_TV[:-1].double().log_softmax(-1).gather(1, prompt[1:, None])[:, 0]


def scaled(factor: float) -> Any:
    """A forward of attention whose scores are so many times too large."""
    right = attention.PagedLayer._attend_cache

    def attend(self: Any, query: torch.Tensor, scale: float, *more: Any) -> torch.Tensor:
        return right(self, query, scale * factor, *more)

    return attend


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=["mixtral", "qwen3_moe", "gpt_oss"])
    parser.add_argument("--all", action="store_true", help="every served type")
    parser.add_argument("--scale", type=float, nargs="+", default=[1.0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {args.sequences * (LENGTH - 1)} positions per line, seed {args.seed}\n")
    print("| type | scores | " + " | ".join(f"{share:.0%}" for share in QUANTILES) + " |")
    print("|---|---|" + "---|" * len(QUANTILES))
    right = attention.PagedLayer._attend_cache
    for model_type in sorted(available(COVERED)) if args.all else args.types:
        for factor in args.scale:
            attention.PagedLayer._attend_cache = scaled(factor) if factor != 1 else right  # type: ignore[method-assign]
            with tempfile.TemporaryDirectory() as folder:
                ours, own = errors(model_type, args.seed, args.sequences, Path(folder))
            ratios = (float(ours.quantile(share) / own.quantile(share)) for share in QUANTILES)
            print(f"| {model_type} | x {factor:g} | " + " | ".join(f"{r:.2f}" for r in ratios) + " |", flush=True)
            attention.PagedLayer._attend_cache = right  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
