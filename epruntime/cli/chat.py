"""`epruntime chat`: a conversation with a served model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from epruntime.cli import flags
from epruntime.client import Client, Stream
from epruntime.client.channel import DEFAULT_ADDRESS
from epruntime.errors import ConfigError, EPRuntimeError, InvalidRequestError

MAX_TOKENS = 512
_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
_DESCRIPTION = f"Talks with a served model; the conversation is remembered. {_HELP}. Reads lines from a pipe, too."


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "chat", help="talk with a served model", description=_DESCRIPTION,
        usage="%(prog)s [--server HOST:PORT] [OPTIONS]",
    )  # fmt: skip
    parser.add_argument("--server", metavar="HOST:PORT", default=DEFAULT_ADDRESS, help="(default: %(default)s)")
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation")
    parser.add_argument("--timeout", type=float, metavar="X", help="seconds that each answer may take")
    flags.add_sampling(parser, defaults={"max_tokens": MAX_TOKENS})
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    try:
        sampling = flags.sampling_fields(args)
        client = Client(args.server, timeout=args.timeout)
    except (ConfigError, InvalidRequestError) as error:
        args.parser.error(str(error))
    with client:
        info = client.info(timeout=30)
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  line editing and history for input()

            print(f"{info.model or 'the model'} on {args.server}. {_HELP}.")
        return Conversation(client, sampling, args.system, interactive=interactive).run()


class Conversation:
    """Reads, asks, prints, remembers."""

    def __init__(self, client: Client, sampling: dict[str, Any], system: str | None, *, interactive: bool) -> None:
        self._client, self._sampling, self._interactive = client, sampling, interactive
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._opening)

    def run(self) -> int:
        """Until the input ends. Returns 1 if an answer failed and nobody was there to see it (piped input)."""
        failures = 0
        while True:
            try:
                line = self._read()
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print("\n(Ctrl-D or /exit leaves)")
                continue
            if line == "/exit":
                break
            if line == "/reset":
                self.messages = list(self._opening)
            elif line:
                failures += not self._answer(line)
        if self._interactive:
            print()
        return 1 if failures and not self._interactive else 0

    def _read(self) -> str:
        if self._interactive:
            return input("> ").strip()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.strip()

    def _answer(self, line: str) -> bool:
        """One turn. What was said before Ctrl-C stays in the conversation; a turn that failed does not."""
        asked = [*self.messages, {"role": "user", "content": line}]
        said: list[str] = []
        try:
            stream = self._client.chat(asked, stream=True, **self._sampling)
            try:
                self._print(stream, said)
            except KeyboardInterrupt:
                print(" [stopped]", flush=True)
                if not self._interactive:
                    raise
            finally:
                stream.close()
        except EPRuntimeError as error:
            print(f"\nepruntime chat: {error}" if said else f"epruntime chat: {error}", file=sys.stderr, flush=True)
            return False
        self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return True

    @staticmethod
    def _print(stream: Stream, said: list[str]) -> None:
        for chunk in stream:
            said.append(chunk.text)
            print(chunk.text, end="", flush=True)
        print(flush=True)
