"""`epruntime generate [PROMPT ...]`: completes prompts, through a server or with a model loaded here.

prompts -> all at once to the source -> one queue each -> printed in order, the first unfinished one as it comes
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any, cast

from epruntime.cli import connection, flags
from epruntime.cli.hints import SERVER, in_words, is_address
from epruntime.cli.printer import JsonPrinter, Printer, TextPrinter
from epruntime.cli.source import Source, open_engine, open_server
from epruntime.client import Chunk
from epruntime.client.channel import endpoint
from epruntime.config import EngineConfig
from epruntime.errors import (
    ConfigError,
    EPRuntimeError,
    InvalidRequestError,
    RequestAbortedError,
    RequestFailedError,
)

MAX_TOKENS = 128
#: Prompts sent and not yet finished.
MAX_CONCURRENCY = 256

_DESCRIPTION = """Completes prompts and streams the output to the terminal. Prompts come from the command line or, if
there are none, from the lines of standard input. With --model it loads the model itself; else it asks a server."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate", help="complete prompts", description=_DESCRIPTION,
        usage="%(prog)s [--server HOST:PORT | --model DIRECTORY] [OPTIONS] [PROMPT ...]",
    )  # fmt: skip
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: one for each line of standard input")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--model", metavar="DIRECTORY", default=argparse.SUPPRESS, help="load this model here instead")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt, when it is finished")
    connection.add(parser, server_in=where, timeout_of="each prompt")
    flags.add_sampling(parser, defaults={"max_tokens": MAX_TOKENS})
    flags.add_engine(parser, skip=("model",))
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    try:
        sampling = flags.sampling_fields(args)
        source = _source(args)
    except (ConfigError, InvalidRequestError) as error:
        args.parser.error(str(error))
    if "server" not in args and "model" not in args and any(map(is_address, args.prompts[:1])):
        args.parser.error(
            f"{args.prompts[0]!r} looks like an address, not like a prompt: {SERVER} (give it to mean the prompt)"
        )
    prompts = args.prompts or _lines()
    if not prompts:
        args.parser.error("no prompt: give some as arguments, or lines on standard input")
    printer = JsonPrinter() if args.json else TextPrinter(many=len(prompts) > 1, n=sampling.get("n", 1))
    return asyncio.run(_generate(source, prompts, sampling, printer))


def _source(args: argparse.Namespace) -> AbstractAsyncContextManager[Source]:
    if "model" in args:
        for name in connection.given(args):
            raise ConfigError(
                f"{flags.flag_of(name)} is for a server, and --model loads the model here: drop one of them"
            )
        return open_engine(flags.engine_config(args))
    for kind in EngineConfig.SECTIONS.values():
        for name in flags.given(args, kind):
            raise ConfigError(f"{flags.flag_of(name)} is for a model that is loaded here: give --model, too")
    options = connection.options(args)
    checked = endpoint(options["address"], api_key=options.get("api_key"), tls=options["tls"])
    if checked.tls is not None:
        checked.tls.credentials()
    return open_server(options)


def _lines() -> list[str]:
    if sys.stdin.isatty():
        print("One prompt per line; Ctrl-D ends the list.", file=sys.stderr)
    return [line for line in sys.stdin.read().splitlines() if line.strip()]


async def _generate(
    opening: AbstractAsyncContextManager[Source], prompts: list[str], sampling: dict[str, Any], printer: Printer
) -> int:
    """Returns 1 if a prompt was refused or failed; the others are completed all the same."""
    room = asyncio.Semaphore(MAX_CONCURRENCY)
    queues: list[asyncio.Queue[Chunk | EPRuntimeError]] = [asyncio.Queue() for _ in prompts]
    async with opening as source:

        async def fill(prompt: str, queue: asyncio.Queue[Chunk | EPRuntimeError]) -> None:
            try:
                async with room, aclosing(cast(Any, source.stream(prompt, sampling))) as chunks:
                    async for chunk in chunks:
                        queue.put_nowait(chunk)
            except EPRuntimeError as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(fill(*pair)) for pair in zip(prompts, queues, strict=True)]
        try:
            refused = 0
            for prompt, queue in zip(prompts, queues, strict=True):
                refused += not await _print(prompt, queue, printer)
            return 1 if refused else 0
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _print(prompt: str, queue: asyncio.Queue[Chunk | EPRuntimeError], printer: Printer) -> bool:
    printer.begin(prompt)
    while True:
        item = await queue.get()
        if isinstance(item, EPRuntimeError):
            printer.cut()
            return _refused(item)
        printer.add(item)
        if item.final:
            printer.end()
            return True


def _refused(error: EPRuntimeError) -> bool:
    """Prints what is wrong with one prompt and goes on; raises what concerns all of them."""
    if not isinstance(error, (InvalidRequestError, RequestFailedError, RequestAbortedError)):
        raise error
    print(f"epruntime generate: {in_words(error)}", file=sys.stderr, flush=True)
    return False
