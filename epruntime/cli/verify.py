"""`epruntime verify MODEL`: starts ranks as `serve` would, and checks that they give the same bits in any company."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from epruntime.cli import flags
from epruntime.cli.hints import in_words
from epruntime.cli.parser import CommandParser
from epruntime.config.verify import VerifyConfig
from epruntime.errors import CheckpointError, ConfigError, EPRuntimeError, UnsupportedModelError

_DESCRIPTION = """Checks the invariance contract on your model and ranks: a request's tokens and log-probabilities are
the same, bit for bit, alone or in a batch, prefilled in pieces, preempted, on other ranks, threads, placements and
expert-parallel sizes. Each case is compared with the baseline, every request alone, and counters prove that what it
varies did happen. A layer is then made to depend on the batch on purpose, which must be seen.

Exit code: 0 if all are identical and the negative control was caught; 1 if something differs; 2 for wrong usage, or a
model or settings that are refused; 3 if nothing differs, but the control was not caught or something did not happen;
4 if ranks did not start or were lost."""

_WRONG_USAGE, _NO_RANKS = 2, 4
#: fields of the engine that make no sense here
_OF_SERVERS = ("served_model_name", "generation_config", "chat_template", "restart", "max_restarts")
_REFUSED = (ConfigError, UnsupportedModelError, CheckpointError)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify", help="check that results do not depend on batch, ranks or settings", description=_DESCRIPTION,
        usage="%(prog)s [OPTIONS] MODEL", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_flags(parser)


def add_flags(parser: CommandParser, *, skip: tuple[str, ...] = ()) -> None:
    """All flags but those of the fields in `skip`, and the command that they are of."""
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format", choices=("table", "json"), default="table", help="on standard output (default: table)"
    )
    output.add_argument("--json", metavar="FILE", dest="json_file", help="also write the report to a file, as JSON")
    flags.add_config(parser, VerifyConfig)
    flags.add_engine(parser, skip=(*_OF_SERVERS, *skip))
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    try:
        config = flags.engine_config(args)
        options = VerifyConfig(**flags.given(args, VerifyConfig))
    except ConfigError as error:
        args.parser.error(str(error))
    if args.json_file is not None:
        _check_writable(args.json_file, args.parser)
    from epruntime.verify import verify
    from epruntime.verify.report import render

    try:
        report = verify(config, options, progress=_say)
    except EPRuntimeError as error:
        code = _WRONG_USAGE if isinstance(error, _REFUSED) else _NO_RANKS
        words = in_words(error)
        if args.json_file is not None:
            _write(args.json_file, json.dumps({"ok": False, "exit_code": code, "error": words}, ensure_ascii=False))
        print(f"{args.parser.prog}: {words}", file=sys.stderr, flush=True)
        return code
    text = json.dumps(report.to_dict(), ensure_ascii=False)
    if args.json_file is not None:
        _write(args.json_file, text)
    print(text if args.format == "json" else render(report))
    return report.exit_code


def _check_writable(path: str, parser: argparse.ArgumentParser) -> None:
    """Now, and not after minutes of work; and an old report is gone, whatever happens."""
    try:
        Path(path).open("a").close()
        if Path(path).is_file():
            Path(path).unlink()
    except OSError as error:
        parser.error(f"--json {path}: cannot be written: {error.strerror}")


def _write(path: str, text: str) -> None:
    Path(path).write_text(text + "\n", encoding="utf-8")


def _say(line: str) -> None:
    print(f"epruntime verify: {line}", file=sys.stderr, flush=True)
