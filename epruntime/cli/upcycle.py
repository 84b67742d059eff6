"""`epruntime upcycle DENSE OUT`: a dense model becomes a Mixture-of-Experts model."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from epruntime.words import counted

_DESCRIPTION = """Turns a dense Llama-like checkpoint into a Mixtral-architecture Mixture-of-Experts checkpoint whose
experts are copies of the dense MLP (sparse upcycling, Komatsuzaki et al. 2022, arXiv:2212.05055). With noise 0 it
computes what the dense model computes."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("upcycle", help="make a MoE model of a dense one", description=_DESCRIPTION)
    parser.add_argument("dense", metavar="DENSE", help="directory of a safetensors checkpoint, or a .gguf file")
    parser.add_argument("out", metavar="OUT", help="directory to write; must not exist, or be empty")
    parser.add_argument("--num-experts", type=int, default=8, metavar="N", help="experts per layer (default: 8)")
    parser.add_argument("--top-k", type=int, default=2, metavar="N", help="experts per token (default: 2)")
    parser.add_argument(
        "--noise", type=float, default=0.0, metavar="X",
        help="standard deviation of the noise on each expert's weights, relative to each tensor's own (default: 0)",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of router and noise (default: 0)")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="of what is written; auto: the checkpoint's own",
    )  # fmt: skip
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from epruntime.models.upcycle import upcycle

    progress = ProgressLine()
    try:
        report = upcycle(
            args.dense,
            args.out,
            num_experts=args.num_experts,
            top_k=args.top_k,
            noise=args.noise,
            seed=args.seed,
            dtype=None if args.dtype == "auto" else args.dtype,
            progress=progress,
        )
    finally:
        progress.end()
    print(
        f"{report.out}: {counted(report.num_experts, 'expert')}, top-{report.top_k}, {report.dtype}; "
        f"{report.parameters / 1e6:.1f} M parameters ({report.active_parameters / 1e6:.1f} M per token; dense: "
        f"{report.dense_parameters / 1e6:.1f} M); {report.bytes_written / 2**20:.0f} MiB in "
        f"{counted(report.num_shards, 'file')}, {report.seconds:.1f} s"
    )
    return 0


class ProgressLine:
    """One line on stderr that is written over; plain lines, fewer of them, where stderr is no terminal."""

    def __init__(self) -> None:
        self._tty = sys.stderr.isatty()
        self._every_s = 0.1 if self._tty else 5.0
        self._what, self._last, self._open = "", float("-inf"), False

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what == self._what and now - self._last < self._every_s and done < total:
            return
        self._what, self._last = what, now
        share = f" {100 * done // total:3d} %" if total else ""
        if self._tty:
            print(f"\r\x1b[K{what}{share}", end="", file=sys.stderr, flush=True)
            self._open = True
        else:
            print(f"{what}{share}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._open:
            print(file=sys.stderr)
