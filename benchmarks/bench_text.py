"""Cost of the coordinator's part of a token: RequestState.update (text, stop strings, log-probabilities) and delta.

    python benchmarks/bench_text.py            # prints a Markdown table; redirect it to benchmarks/results/

CPU time of one thread, best of several runs. "1 / delta": a reader that takes every token by itself; "8 / delta": one
that takes eight at a time, as a busy server's readers do.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import tempfile
import time
from pathlib import Path

from epruntime.engine.detokenizer import TokenTexts
from epruntime.engine.processor import InputProcessor, Limits
from epruntime.engine.request_state import RequestState
from epruntime.engine.text_thread import TextThread
from epruntime.engine.token_updates import TokenUpdate
from epruntime.engine.tokenizer import Tokenizer
from epruntime.plan import FINISH_NONE, TokenLogprobs
from epruntime.sampling_params import SamplingParams
from epruntime.testing.tiny_tokenizer import save_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog again and again, 你好 and so on, "
STOPS = ("\n\nUser:", "###")


async def microseconds(tokenizer: Tokenizer, params: SamplingParams, *, tokens: int, per_delta: int) -> float:
    """CPU time per token of one sequence of `tokens` output tokens."""
    processor = InputProcessor(tokenizer, Limits(max_model_len=10**6, vocab_size=10**6, eos_token_ids=()))
    request = processor.process("the quick", params, rid=1, request_id="r", arrival_time=0.0)
    state = RequestState("r", params, (1,), arrival_time=0.0)
    state.admit(request, TokenTexts(tokenizer))
    count, thread, sequence = params.logprobs, TextThread(), state.sequences[0]
    found = None
    if count is not None:
        found = TokenLogprobs(chosen=-1.0, top_ids=tuple(range(5, 5 + count)), top_values=(-1.0,) * count)
    ids = tokenizer.encode(TEXT)
    updates = [TokenUpdate(1, ids[i % len(ids)], FINISH_NONE, found) for i in range(tokens)]
    began = time.thread_time()
    for i, update in enumerate(updates, 1):
        state.update(sequence, update)
        if i % per_delta == 0:
            await state.next(thread)
    spent = time.thread_time() - began
    thread.close()
    return spent / tokens * 1e6


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 8192], help="output lengths")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    repeats = range(options.repeats)
    print(f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} CPUs\n")
    print("| stop strings | logprobs | output tokens | us per token, 1 / delta | us per token, 8 / delta |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = Tokenizer(save_tokenizer(Path(directory), [TEXT] * 4))
    for stop in ((), STOPS):
        for logprobs in (None, 5, 20):
            params = SamplingParams(max_tokens=None, stop=stop, logprobs=logprobs, seed=1)
            for tokens in options.tokens:
                best = []
                for n in (1, 8):
                    runs = [await microseconds(tokenizer, params, tokens=tokens, per_delta=n) for _ in repeats]
                    best.append(min(runs))
                print(f"| {len(stop)} | {logprobs} | {tokens} | {best[0]:.1f} | {best[1]:.1f} |", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
