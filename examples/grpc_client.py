"""The gRPC client SDK, sync and asyncio. It needs the base install only (no torch).

epruntime serve MODEL --expert-parallel-size 2 &
python examples/grpc_client.py [--server 127.0.0.1:50051] [--tls-ca FILE] [PROMPT ...]

Where the server wants an access token, put it into EPRUNTIME_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from epruntime.client import AsyncClient, Client, Tls
from epruntime.errors import EPRuntimeError, InvalidRequestError

PROMPTS = ["The capital of France is", "Once upon a time", "Two plus two is"]


def one_after_the_other(server: str, tls: Tls | None, prompts: list[str], max_tokens: int) -> None:
    # A call that fails before its first token because the server is not reachable, is full or restarts is tried again.
    with Client(server, tls=tls, timeout=120, retries=3) as client:
        info, model = client.info(), client.model_info()
        print(f"{info.model} on {info.expert_parallel_size} ranks, {info.state}")
        print(f"{model.num_experts} experts, {model.top_k} for each token; sampling defaults: {model.default_sampling}")
        tokens = client.tokenize(prompts[0]).token_ids
        print(f"{prompts[0]!r} is {len(tokens)} tokens: {tokens} -> {client.detokenize(tokens)!r}")

        # The whole answer at once; a list of prompts is sent concurrently and comes back in order.
        for prompt, result in zip(prompts, client.generate(prompts, temperature=0, max_tokens=max_tokens), strict=True):
            print(f"{prompt!r} -> {result.text!r} ({result.finish_reason}, {result.usage.output_tokens} tokens)")

        # As it comes. Leaving the loop early would end the request on the server.
        print("streamed:", end=" ")
        for chunk in client.stream(prompts[0], temperature=0.8, seed=7, max_tokens=max_tokens):
            print(chunk.text, end="", flush=True)
        print()

        # Several sequences from one prompt, with the log-probability of each chosen token.
        result = client.generate(prompts[0], n=2, temperature=1.0, seed=7, max_tokens=max_tokens, logprobs=0)
        for output in result.outputs:
            chosen = zip(output.token_ids, output.logprobs or (), strict=True)
            total = sum(entry[token].logprob for token, entry in chosen)
            print(f"sequence {output.index}: {output.text!r}, log-probability {total:.2f}")

        # What cannot be served is refused with the field, the value and the remedy.
        try:
            client.generate(prompts[0], top_p=1.5)
        except InvalidRequestError as error:
            print("refused:", error)


async def all_at_once(server: str, tls: Tls | None, prompts: list[str], max_tokens: int) -> None:
    async with AsyncClient(server, tls=tls, timeout=120) as client:

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
    parser.add_argument("--tls-ca", metavar="FILE", help="talk TLS; the authority that signed the server's certificate")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("prompt", nargs="*", default=PROMPTS)
    options = parser.parse_intermixed_args()
    try:
        tls = Tls(ca=options.tls_ca) if options.tls_ca else None
        one_after_the_other(options.server, tls, options.prompt, options.max_tokens)
        asyncio.run(all_at_once(options.server, tls, options.prompt, options.max_tokens))
    except EPRuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
