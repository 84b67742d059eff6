"""A gRPC client for tests whose server is in another network: run there, prints JSON.

python client_program.py ADDRESS COMMAND ARGUMENTS, with ARGUMENTS a JSON object:
    info: all that the engine says of itself
    generate {"prompts": [[id, ...], ...], "max_tokens": N}: the token ids of each, one prompt after the other
    trace {"prompts": [[id, ...], ...]}: what the ranks have counted, before and after one token for each prompt
    stream {"prompt": [id, ...], "max_tokens": N, "at_once": M}: "begun" when all M have a token; then how each ended
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

from epruntime.client import AsyncClient, Client
from epruntime.errors import EPRuntimeError


def info(address: str) -> Any:
    with Client(address) as client:
        return client.info().raw


def generate(address: str, prompts: list[list[int]], max_tokens: int) -> Any:
    with Client(address) as client:
        return [
            client.generate(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True).outputs[0].token_ids
            for prompt in prompts
        ]


def trace(address: str, prompts: list[list[int]]) -> Any:
    with Client(address) as client:
        counts = [client.info().raw["ranks"]]
        for prompt in prompts:
            client.generate(prompt, temperature=0, max_tokens=1)
            counts.append(client.info().raw["ranks"])
        return counts


def stream(address: str, prompt: list[int], max_tokens: int, at_once: int = 1) -> Any:
    async def one(client: AsyncClient, begun: asyncio.Semaphore) -> dict[str, Any]:
        ended: dict[str, Any] = {"tokens": 0, "finish": None, "error": "", "rank": None, "host": None}
        try:
            async for chunk in client.stream(prompt, temperature=0, max_tokens=max_tokens, ignore_eos=True):
                if not ended["tokens"] and chunk.token_ids:
                    begun.release()
                ended["tokens"] += len(chunk.token_ids)
                ended["finish"] = chunk.finish_reason or ended["finish"]
        except EPRuntimeError as error:
            ended |= {"error": f"{type(error).__name__}: {error}"}
            ended |= {"rank": getattr(error, "slot", None), "host": getattr(error, "host", None)}
        return ended | {"at": time.time()}

    async def all_of_them() -> list[dict[str, Any]]:
        begun = asyncio.Semaphore(0)
        async with AsyncClient(address) as client:
            tasks = [asyncio.create_task(one(client, begun)) for _ in range(at_once)]
            for _ in tasks:
                await begun.acquire()
            print("begun", flush=True)
            return [await task for task in tasks]

    return asyncio.run(all_of_them())


if __name__ == "__main__":
    _, where, command, arguments = sys.argv
    functions = {"info": info, "generate": generate, "trace": trace, "stream": stream}
    print(json.dumps(functions[command](where, **json.loads(arguments))), flush=True)
