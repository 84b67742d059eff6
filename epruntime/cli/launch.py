"""The command line of the programs in launch/: that of `epruntime serve`, or of `verify`, with a launcher already
chosen."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from epruntime.cli import main, serve, verify
from epruntime.cli.parser import CommandParser


def serve_main(
    argv: Sequence[str] | None = None,
    *,
    launcher: str,
    description: str,
    defaults: Mapping[str, Any] | None = None,
    skip: tuple[str, ...] = (),
) -> int:
    """Parses the flags of `epruntime serve`, and serves. The model may be an argument, or --model's.

    Args:
        argv: default: this program's arguments.
        launcher: what starts the ranks; there is no flag for it.
        defaults: by option name, where they differ from those of `epruntime serve`.
        skip: further options that have no flag.

    Returns:
        The exit code of the process.
    """
    parser = make_parser(launcher=launcher, description=description, defaults=defaults, skip=skip)
    return main.run(parser, argv)


def verify_main(
    argv: Sequence[str] | None = None, *, launcher: str, description: str, defaults: Mapping[str, Any] | None = None
) -> int:
    """As `serve_main`, for `epruntime verify`."""
    parser = make_parser(
        launcher=launcher, description=description, defaults=defaults, skip=("ray_address",), add_flags=verify.add_flags
    )
    return main.run(parser, argv)


def make_parser(
    *,
    launcher: str,
    description: str,
    defaults: Mapping[str, Any] | None = None,
    skip: tuple[str, ...] = (),
    add_flags: Callable[..., None] = serve.add_flags,
) -> CommandParser:
    parser = CommandParser(
        prog=Path(sys.argv[0]).name, usage="%(prog)s [OPTIONS] MODEL", description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    help_text = "directory of a transformers MoE checkpoint (config.json, *.safetensors)"
    model.add_argument("model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, help=help_text)
    model.add_argument("--model", dest="model", metavar="MODEL", default=argparse.SUPPRESS, help="the same as a flag")
    add_flags(parser, skip=("model", "launcher", *skip))
    parser.set_defaults(launcher=launcher, **(defaults or {}))
    return parser
