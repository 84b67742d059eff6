"""`epruntime preflight MODEL`: starts ranks as `serve` would, checks them and their network, and stops them."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from epruntime.cli import flags
from epruntime.errors import ConfigError

_DESCRIPTION = """Starts the ranks that `epruntime serve` with the same flags of the engine would start, and checks
them before any weight is read: versions and kernels, checkpoint, memory, limits, clocks, addresses, and the transport
between all pairs of ranks: that every byte comes where it belongs, and how fast.

Exit code: 0 if nothing is in the way of a start (there may be warnings), 1 if something is."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "preflight", help="check hosts and network before serving", description=_DESCRIPTION,
        usage="%(prog)s [OPTIONS] MODEL", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    flags.add_engine(parser, skip=("preflight",))
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    try:
        config = flags.engine_config(args)
    except ConfigError as error:
        args.parser.error(str(error))
    from epruntime.engine.start_ranks import preflight_alone
    from epruntime.models.loader import inspect_model
    from epruntime.preflight.table import render

    info = inspect_model(config.model.model, dtype=config.model.dtype)
    verdict = asyncio.run(preflight_alone(config, info))
    print(json.dumps(verdict.to_dict(), ensure_ascii=False) if args.json else render(verdict))
    return 0 if verdict.ok else 1
