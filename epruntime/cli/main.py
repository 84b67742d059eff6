"""`epruntime COMMAND ...`: parses, runs one command, and turns errors into words and exit codes.

Exit codes: 0 done; 1 failed; 2 wrong usage; 128 plus the number of the signal that ended it (130: Ctrl-C).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from epruntime import envs
from epruntime.cli import (
    chat,
    collect_env,
    completion,
    generate,
    models,
    preflight,
    serve,
    server_facts,
    upcycle,
    verify,
)
from epruntime.cli.hints import in_words
from epruntime.cli.parser import CommandParser
from epruntime.errors import EPRuntimeError
from epruntime.version import __version__

logger = logging.getLogger("epruntime.cli.main")

WRONG_USAGE, INTERRUPTED = 2, 130
#: module that is missing -> extra that brings it; all others that are missing are faults
_EXTRAS = {
    "torch": "serve",
    "transformers": "serve",
    "safetensors": "serve",
    "msgpack": "serve",
    "numpy": "serve",
    "grpc_health": "serve",
    "tqdm": "serve",
    "jinja2": "serve",
    "ray": "ray",
    "gguf": "gguf",
    "accelerate": "gguf",
    "argcomplete": "cli",
}


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="epruntime", description="Serves Mixture-of-Experts language models with expert parallelism."
    )
    parser.add_argument("--version", action="version", version=f"epruntime {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in (serve, preflight, verify, generate, chat, server_facts, models, upcycle, collect_env, completion):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; argparse itself exits with 2 on wrong usage."""
    parser = make_parser()
    completion.complete(parser)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    return run(parser, argv)


def run(parser: CommandParser, argv: Sequence[str] | None = None) -> int:
    """Parses, and runs what the parser set: `run`, with `parser` for complaints. Returns the exit code."""
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.refuse(unknown)
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminated)  # what was started is ended, as at Ctrl-C
    try:
        _set_up_logging()
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader of our output has gone, as in `epruntime generate ... | head`; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except EPRuntimeError as error:
        logger.debug("failed", exc_info=True)
        return _fail(args.parser.prog, in_words(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        return _fail(
            args.parser.prog, f"{package} is not installed; this needs more than the client: pip install "
            f"'epruntime[{_EXTRAS[package]}]'"
        )  # fmt: skip
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
        # At exit the interpreter would search all of torch and transformers for garbage, which takes seconds.
        gc.freeze()


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _fail(program: str, text: str) -> int:
    print(f"{program}: {text}", file=sys.stderr, flush=True)
    return 1


def _set_up_logging() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger("epruntime")
    root.handlers[:] = [handler]
    root.setLevel(str(envs.get("EPRUNTIME_LOG_LEVEL")))
    root.propagate = False
    if not sys.stderr.isatty():  # Ray colours what it prints of its actors, in files and pipes, too
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


if __name__ == "__main__":
    sys.exit(main())
