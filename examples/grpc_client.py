"""The gRPC client SDK, sync and asyncio. It needs the base install only (no torch).

epruntime serve MODEL --expert-parallel-size 2 &
python examples/grpc_client.py [--server 127.0.0.1:50051] [PROMPT ...]
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from epruntime.client import AsyncClient, Client
from epruntime.errors import EPRuntimeError, InvalidRequestError

PROMPTS = ["The capital of France is", "Once upon a time", "Two plus two is"]


def one_after_the_other(server: str, prompts: list[str], max_tokens: int) -> None:
    with Client(server, timeout=120) as client:
        info = client.info()
        print(f"{info.model} on {info.expert_parallel_size} ranks, {info.state}")

        # The whole answer at once; a list of prompts is sent concurrently and comes back in order.
        for prompt, result in zip(prompts, client.generate(prompts, temperature=0, max_tokens=max_tokens), strict=True):
            print(f"{prompt!r} -> {result.text!r} ({result.finish_reason}, {result.usage.output_tokens} tokens)")

        # As it comes. Leaving the loop early would end the request on the server.
        print("streamed:", end=" ")
        for chunk in client.stream(prompts[0], temperature=0.8, seed=7, max_tokens=max_tokens):
            print(chunk.text, end="", flush=True)
        print()

        # What cannot be served is refused with the field, the value and the remedy.
        try:
            client.generate(prompts[0], top_p=1.5)
        except InvalidRequestError as error:
            print("refused:", error)


async def all_at_once(server: str, prompts: list[str], max_tokens: int) -> None:
    async with AsyncClient(server, timeout=120) as client:

        async def one(prompt: str) -> str:
            text = ""
            async with client.stream(prompt, temperature=0, max_tokens=max_tokens) as stream:
                async for chunk in stream:
                    text += chunk.text
            return text

        for prompt, text in zip(prompts, await asyncio.gather(*map(one, prompts)), strict=True):
            print(f"async {prompt!r} -> {text!r}")

        # Ending a request early frees what it holds at the next step.
        async with client.stream(prompts[0], temperature=0, max_tokens=max_tokens) as stream:
            async for chunk in stream:
                print("first piece only:", repr(chunk.text))
                break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:50051", metavar="HOST:PORT")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("prompt", nargs="*", default=PROMPTS)
    options = parser.parse_intermixed_args()
    try:
        one_after_the_other(options.server, options.prompt, options.max_tokens)
        asyncio.run(all_at_once(options.server, options.prompt, options.max_tokens))
    except EPRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
