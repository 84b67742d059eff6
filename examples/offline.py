"""Offline generation: the model's ranks live in this script.

    python examples/offline.py MODEL [--expert-parallel-size 2] [PROMPT ...]

MODEL is a directory with a transformers MoE checkpoint; `python -m epruntime.testing.sample_model` makes a small one.
"""

from __future__ import annotations

import argparse

from epruntime import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Mixture-of-experts models are", "Once upon a time"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="*", default=PROMPTS)
    parser.add_argument("--expert-parallel-size", type=int, default=2)
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_intermixed_args()

    with LLM(
        options.model,
        expert_parallel_size=options.expert_parallel_size,
        launcher=options.launcher,
        max_model_len=512,
    ) as llm:
        # Greedy, with the two likeliest tokens at each position.
        greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens, logprobs=2)
        for output in llm.generate(options.prompt, greedy):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")

        # Sampled: the same seed gives the same tokens again, whatever else is in the batch.
        sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=options.max_tokens)
        first, again = llm.generate([options.prompt[0]] * 2, sampled, use_tqdm=False)
        print("sampled:", repr(first.outputs[0].text))
        print("same seed, same tokens:", first.outputs[0].token_ids == again.outputs[0].token_ids)

        # A conversation, rendered through the model's chat template.
        if getattr(llm.engine.tokenizer, "chat_template", None):
            (answer,) = llm.chat([{"role": "user", "content": "Say hello."}], greedy, use_tqdm=False)
            print("chat:", repr(answer.outputs[0].text))


if __name__ == "__main__":
    main()
