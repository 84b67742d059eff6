"""`epruntime chat`: a conversation with a served model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from epruntime.cli import connection, flags
from epruntime.cli.conversation import COMMANDS, Conversation
from epruntime.client import Client
from epruntime.errors import ConfigError, InvalidRequestError

MAX_TOKENS = 512
_DESCRIPTION = f"""Talks with a served model; the conversation is remembered. {COMMANDS}. Ctrl-C stops an answer, which
is remembered as far as it went. Reads lines from a pipe, too."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat", help="talk with a served model", description=_DESCRIPTION,
        usage="%(prog)s [OPTIONS] [HOST:PORT]",
    )  # fmt: skip
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation")
    connection.add(parser, positional=True, timeout_of="each answer")
    flags.add_sampling(parser, defaults={"max_tokens": MAX_TOKENS}, skip=("n", "logprobs", "prompt_logprobs"))
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    try:
        sampling = flags.sampling_fields(args)
        client = Client(**connection.options(args))
    except (ConfigError, InvalidRequestError) as error:
        args.parser.error(str(error))
    with client:
        info = client.info(timeout=30)
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  line editing and history for input()

            print(f"{info.model or 'the model'} on {client.address}. {COMMANDS}.")
        return Conversation(client, sampling, args.system, interactive=interactive).run()
