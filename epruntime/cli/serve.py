"""`epruntime serve MODEL`: the server process, gRPC and HTTP."""

from __future__ import annotations

import argparse
import os
from typing import Any

from epruntime.cli import flags
from epruntime.cli.parser import CommandParser
from epruntime.config import ServeConfig
from epruntime.errors import ConfigError

_DESCRIPTION = """Loads a Mixture-of-Experts model on its ranks and serves it over gRPC and HTTP.

When it takes requests it prints "epruntime is ready: gRPC on HOST:PORT, HTTP on http://HOST:PORT". The first Ctrl-C
or SIGTERM lets running requests end (see --drain-timeout-s), the second stops at once."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "serve", help="serve a model over gRPC and OpenAI-compatible HTTP", description=_DESCRIPTION,
        usage="%(prog)s [OPTIONS] MODEL", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_flags(parser)


def add_flags(parser: CommandParser, *, skip: tuple[str, ...] = ()) -> None:
    """All flags of a server but those of the fields in `skip`, and the command that they are of."""
    flags.add_engine(parser, skip=skip, server=True)
    flags.add_config(parser, ServeConfig, skip=skip)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    try:
        engine, serve = flags.engine_config(args), flags.serve_config(args)
    except ConfigError as error:
        args.parser.error(str(error))
    # Ray and the launchers start processes while gRPC runs. They exec at once, so gRPC has nothing to prepare for, and
    # it would write a line about each. It reads this when it is imported.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from epruntime.serve.server import run_server

    return run_server(engine, serve)
