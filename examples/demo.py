"""A mixture of experts on two Ray ranks, asked several questions at once through the gRPC client.

sample model (built once) -> `epruntime serve --launcher ray` -> AsyncClient streams -> report -> what to try next

`make demo` runs it. Ctrl-C at any moment stops everything that it started. What the server logs is shown until it is
ready; then only what is more than information, so that the answers can be read.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from epruntime.client import AsyncClient, ServerInfo
from epruntime.errors import EPRuntimeError
from epruntime.testing.sample_model import sample_model
from epruntime.testing.server_process import ServerProcess

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Give me three tips for a good night's sleep.",
    "Write a short story about a robot who finds a cat.",
)
COLOURS = (36, 33, 32, 35, 34, 31)
HEARTBEAT_S = 5.0
BAR_WIDTH = 40
#: A line of the server's log that is information, its own or one that Ray brings from a rank.
INFORMATION = re.compile(r"(\(.*?\) )?(\d\d:\d\d:\d\d )?INFO ")


@dataclass(kw_only=True)
class Answer:
    """One question's answer as it came. Times in seconds after the question was sent."""

    question: str
    tokens: int = 0
    first_token_s: float | None = None
    finish_reason: str = ""


@dataclass(kw_only=True)
class Transcript:
    """Prints several streams at once, line by line, each line marked with its stream: fit for a log, too."""

    width: int
    colour: bool
    _pending: dict[int, str] = field(default_factory=dict)

    def say(self, index: int, text: str) -> None:
        """Adds text to a stream; prints the lines that are complete."""
        # A model may say anything: control characters stay away from the terminal.
        text = "".join(c if c == "\n" or c.isprintable() else " " for c in text)
        *lines, rest = (self._pending.pop(index, "") + text).split("\n")
        for line in lines:
            self._print(index, self._full_lines(index, line))
        self._pending[index] = self._full_lines(index, rest)

    def end(self, index: int, remark: str) -> None:
        rest = self._pending.pop(index, "")
        if rest:
            self._print(index, rest)
        self._print(index, remark)

    def _full_lines(self, index: int, text: str) -> str:
        """Prints what fills a line, broken between words, and returns the rest."""
        room = self.width - 4
        while len(text) > room:
            end = text.rfind(" ", 1, room + 1)
            end = room if end < 0 else end
            self._print(index, text[:end])
            text = text[end:].lstrip(" ")
        return text

    def _print(self, index: int, line: str) -> None:
        mark = f"[{index + 1}]"
        if self.colour:
            mark = f"\033[{COLOURS[index % len(COLOURS)]}m{mark}\033[0m"
        print(f"{mark} {line}".rstrip(), flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="checkpoint to serve; default: the sample model, built if need be")
    parser.add_argument("--ranks", type=int, default=2, help="expert-parallel size")
    parser.add_argument("--launcher", choices=("ray", "local"), default="ray")
    parser.add_argument("--max-tokens", type=int, default=96, help="output tokens per answer at most")
    parser.add_argument("--raw", action="store_true", help="send the questions as plain text, without chat template")
    parser.add_argument("--start-timeout-s", type=float, default=300.0)
    parser.add_argument("question", nargs="*", default=list(QUESTIONS))
    return parser.parse_intermixed_args(argv)


async def ask(client: AsyncClient, index: int, answer: Answer, options: argparse.Namespace, out: Transcript) -> None:
    """Streams one answer to the terminal."""
    prompt = answer.question if options.raw else {"messages": [{"role": "user", "content": answer.question}]}
    sent = time.monotonic()
    async with client.stream(prompt, temperature=0.0, max_tokens=options.max_tokens) as stream:
        async for chunk in stream:
            if chunk.token_ids and answer.first_token_s is None:
                answer.first_token_s = time.monotonic() - sent
            answer.tokens += len(chunk.token_ids)
            out.say(index, chunk.text)
            answer.finish_reason = chunk.finish_reason or answer.finish_reason
    out.end(index, f"-- {answer.tokens} tokens, {answer.finish_reason}")


async def converse(address: str, options: argparse.Namespace, started: float) -> None:
    """Asks all questions at once, then reports."""
    out = Transcript(width=min(shutil.get_terminal_size((100, 24)).columns, 100), colour=sys.stdout.isatty())
    answers = [Answer(question=question) for question in options.question]
    for index, answer in enumerate(answers):
        out.end(index, f"? {answer.question}")
    print(flush=True)
    async with AsyncClient(address) as client:
        sent = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for index, answer in enumerate(answers):
                    group.create_task(ask(client, index, answer, options, out))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the group has ended the others; the first cause is what helps
        seconds = time.monotonic() - sent
        info = await client.info()
    first = min((a.first_token_s for a in answers if a.first_token_s is not None), default=0.0)
    report(answers, info, seconds, sent - started + first)


def report(answers: list[Answer], info: ServerInfo, seconds: float, from_start_s: float) -> None:
    """Speed, and where the tokens went."""
    tokens = sum(answer.tokens for answer in answers)
    first = sorted(answer.first_token_s for answer in answers if answer.first_token_s is not None)
    print(f"\n{info.model} on {info.expert_parallel_size} ranks: {len(answers)} answers at once")
    print(f"  output            {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.1f} tokens/s")
    if first:
        print(
            f"  first token       {first[0]:.2f} s at best, {first[-1]:.2f} s at worst after the question; "
            f"{from_start_s:.1f} s after the start of the server"
        )
    for name, counts in (
        ("expert", total([load.tokens_per_expert for load in info.expert_load])),
        ("rank", total([load.tokens_per_rank for load in info.expert_load])),
    ):
        print(f"\n  tokens per {name}, all {len(info.expert_load)} MoE layers")
        for number, count in enumerate(counts):
            share = count / max(sum(counts), 1)
            bar = "█" * round(BAR_WIDTH * count / max(*counts, 1))
            print(f"  {name} {number:<3} {bar:<{BAR_WIDTH}} {count:>8} {100 * share:5.1f} %")
    print(flush=True)


def total(per_layer: list[tuple[int, ...]]) -> list[int]:
    return [sum(column) for column in zip(*per_layer, strict=True)]


async def heartbeat(what: str) -> None:
    """Says every few seconds that it is still at work."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        print(f"  {what}: {time.monotonic() - started:.0f} s", flush=True)


def what_next(model: str) -> None:
    """Commands to go on with, as they can be typed here."""
    script = Path(sys.executable).with_name("epruntime")
    command = shlex.quote(os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script))
    if not script.exists():
        command = f"{shlex.quote(sys.executable)} -m epruntime"
    path = shlex.quote(model)
    print("what next:")
    print(f'  {command} generate --model {path} --temperature 0 "The capital of France is"')
    print(f"  {command} serve {path} --expert-parallel-size 2")
    print(f"  {command} chat --temperature 0    # in another terminal, while that serves")
    print(f"  {command} verify {path} --cases batch --num-prompts 4 --max-prompt-tokens 8 --max-tokens 2", flush=True)


async def run(model: str, options: argparse.Namespace) -> int:
    """Serves, asks, stops. A signal ends the asking; the stopping always runs to its end."""
    started = time.monotonic()

    def echo(line: str) -> None:
        if not server.address or not INFORMATION.match(line):
            print(f"  server | {line}", flush=True)

    server = ServerProcess(
        [
            model,
            "--expert-parallel-size",
            str(options.ranks),
            "--launcher",
            options.launcher,
            "--port",
            "0",
            "--grpc-port",
            "0",
            "--max-num-seqs",
            "8",
            "--kv-cache-memory-gb",
            "0.25",
            "--drain-timeout-s",
            "1",
        ],
        echo=echo,
        # Ray forks while gRPC's threads run, and execs at once: gRPC need not prepare for it, nor say that it does not.
        environment={"GRPC_ENABLE_FORK_SUPPORT": "0"},
    )

    async def work() -> None:
        print(f"starting {options.ranks} ranks ({options.launcher}) and the server", flush=True)
        waiting = asyncio.create_task(heartbeat("starting"))
        try:
            address = await server.start(options.start_timeout_s)
        finally:
            waiting.cancel()
        print(f"ready after {time.monotonic() - started:.1f} s\n", flush=True)
        await converse(address, options, started)

    task = asyncio.create_task(work())
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        if len(received) == 1:
            print("\nstopping ...", flush=True)
            task.cancel()
        else:
            print("stopping at once ...", flush=True)
            server.signal(signal.SIGTERM)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await asyncio.wait({task})
    finally:
        await server.stop()
    with suppress(asyncio.CancelledError):
        task.result()
    if received:
        return 128 + received[0]
    what_next(model)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local: ask no model hub

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        model = options.model or str(sample_model(log=sys.stdout))
        print(f"model: {model}", flush=True)
        return asyncio.run(run(model, options))
    except KeyboardInterrupt:
        print("\nstopped", flush=True)
        return 130
    except EPRuntimeError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
