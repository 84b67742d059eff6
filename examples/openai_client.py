"""The official OpenAI client against an epruntime server (pip install openai).

epruntime serve MODEL --expert-parallel-size 2 &
python examples/openai_client.py [--server http://127.0.0.1:8000] [PROMPT ...]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import openai

PROMPTS = ["The capital of France is", "Once upon a time", "Two plus two is"]


def one_after_the_other(client: openai.OpenAI, prompts: list[str], max_tokens: int) -> None:
    model = client.models.list().data[0].id
    print("model:", model)

    # A list of prompts is one request; its answers come back in order.
    answer = client.completions.create(model=model, prompt=prompts, temperature=0, max_tokens=max_tokens)
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        print(f"{prompt!r} -> {choice.text!r} ({choice.finish_reason})")
    assert answer.usage is not None
    print(f"{answer.usage.completion_tokens} tokens")

    # As it comes. Closing the stream early would end the request on the server.
    print("streamed:", end=" ")
    stream = client.completions.create(
        model=model, prompt=prompts[0], temperature=0.8, seed=7, max_tokens=max_tokens, stream=True
    )
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()

    # What OpenAI's API has no name for goes into extra_body.
    answer = client.completions.create(
        model=model, prompt=prompts[0], seed=7, max_tokens=max_tokens, extra_body={"top_k": 5, "min_p": 0.05}
    )
    print(f"top_k and min_p: {answer.choices[0].text!r}")

    # What cannot be served is refused with the field, the value and the remedy.
    try:
        client.completions.create(model=model, prompt=prompts[0], top_p=1.5)
    except openai.BadRequestError as error:
        print("refused:", error.body["message"] if isinstance(error.body, dict) else error)


async def all_at_once(client: openai.AsyncOpenAI, prompts: list[str], max_tokens: int) -> None:
    model = (await client.models.list()).data[0].id

    async def chat(prompt: str) -> str:
        stream = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_completion_tokens=max_tokens,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    for prompt, text in zip(prompts, await asyncio.gather(*map(chat, prompts)), strict=True):
        print(f"chat {prompt!r} -> {text!r}")


async def run_async(server: str, key: str, prompts: list[str], max_tokens: int) -> None:
    async with openai.AsyncOpenAI(base_url=server + "/v1", api_key=key) as client:
        await all_at_once(client, prompts, max_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="http://127.0.0.1:8000", metavar="URL")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("prompt", nargs="*", default=PROMPTS)
    options = parser.parse_intermixed_args()
    server = options.server.rstrip("/")
    key = os.environ.get("EPRUNTIME_API_KEY", "none")  # the client insists on one; a server without tokens takes any
    try:
        with openai.OpenAI(base_url=server + "/v1", api_key=key) as client:
            one_after_the_other(client, options.prompt, options.max_tokens)
        asyncio.run(run_async(server, key, options.prompt, options.max_tokens))
    except openai.APIConnectionError as error:
        print(f"error: no server answers at {server} ({error.__cause__ or error})", file=sys.stderr)
        return 1
    except openai.OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
