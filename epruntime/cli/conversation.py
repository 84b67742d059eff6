"""Conversation: reads a line, asks, prints the answer as it comes, remembers; survives what happens to an answer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from epruntime.cli.hints import in_words
from epruntime.client import Client, Stream
from epruntime.errors import EngineDeadError, EPRuntimeError, UnavailableError

COMMANDS = "/clear forgets, /system TEXT gives instructions, /retry asks again, /exit or Ctrl-D leaves"
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?$", re.DOTALL)


class Conversation:
    """One conversation with a served model.

    Attributes:
        messages: what is remembered, as the model gets it: the system message if there is one, then question and
            answer in turn. A turn that failed leaves no trace.
    """

    def __init__(self, client: Client, sampling: dict[str, Any], system: str | None, *, interactive: bool) -> None:
        self._client, self._sampling, self._interactive = client, sampling, interactive
        self._system = system
        self._question: str | None = None
        self.messages: list[dict[str, str]] = []
        self._clear("")

    def run(self) -> int:
        """Until the input ends. Returns 1 if an answer failed and nobody was there to see it (piped input)."""
        commands: dict[str, Callable[[str], bool]] = {
            "clear": self._clear, "system": self._instruct, "retry": self._retry, "help": self._help,
        }  # fmt: skip
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
            command = _COMMAND.match(line)
            if line in ("/exit", "/quit"):
                break
            if command is not None:
                failures += not commands.get(command[1], self._unknown)(command[2] or "")
            elif line:
                failures += not self._ask(line)
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

    def _ask(self, question: str, before: list[dict[str, str]] | None = None) -> bool:
        """One turn, after the messages `before` (default: all that are remembered); False if it failed."""
        self._question = question
        asked = [*(self.messages if before is None else before), {"role": "user", "content": question}]
        said: list[str] = []
        try:
            stream = self._client.chat(asked, stream=True, **self._sampling)
            try:
                self._print(stream, said)
            except KeyboardInterrupt:
                print(" [stopped]" if said else "[stopped: the question is forgotten]", flush=True)
                if not self._interactive:
                    raise
            finally:
                stream.close()
        except EPRuntimeError as error:
            self._failed(error, in_answer=bool(said))
            return False
        if said:
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]
        return True

    def _print(self, stream: Stream, said: list[str]) -> None:
        reason = None
        for chunk in stream:
            if chunk.text:
                said.append(chunk.text)
                print(chunk.text, end="", flush=True)
            reason = chunk.finish_reason or reason
        print(flush=True)
        if reason == "length" and self._interactive:
            print("(cut: --max-tokens, or the model's own limit)", file=sys.stderr, flush=True)

    def _failed(self, error: EPRuntimeError, *, in_answer: bool) -> None:
        words = f"epruntime chat: {in_words(error)}"
        if self._interactive and isinstance(error, (UnavailableError, EngineDeadError)):
            words += "\n(The conversation is kept: /retry asks again, or go on when the server is back.)"
        print(f"\n{words}" if in_answer else words, file=sys.stderr, flush=True)

    def _clear(self, _: str) -> bool:
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._question = None
        return True

    def _instruct(self, text: str) -> bool:
        """A new system message, for the conversation from here on; without text, none."""
        rest = [message for message in self.messages if message["role"] != "system"]
        self._system = text or None
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]
        return True

    def _retry(self, _: str) -> bool:
        """Asks the last question again, in place of the answer that it had."""
        if self._question is None:
            return self._say("nothing was asked yet")
        answered = self.messages[-2:-1] == [{"role": "user", "content": self._question}]
        return self._ask(self._question, self.messages[:-2] if answered else None)

    def _help(self, _: str) -> bool:
        print(COMMANDS, flush=True)
        return True

    def _unknown(self, _: str) -> bool:
        return self._say(f"no such command. {COMMANDS}")

    @staticmethod
    def _say(words: str) -> bool:
        """A line that could not be carried out."""
        print(f"epruntime chat: {words}", file=sys.stderr, flush=True)
        return False
