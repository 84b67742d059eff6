"""Offline generation on the workers that torchrun starts, one host or many.

    torchrun --standalone --nproc-per-node 2 examples/multi_node/torchrun_generate.py MODEL

    # two hosts: the same on both, but for --node-rank
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr HOST-0 --master-port 29500 \
        examples/multi_node/torchrun_generate.py MODEL

torchrun starts this program once per worker. `main` runs in one more process, the coordinator, on the host of worker 0;
the workers wait there for orders, and become ranks.
"""

from __future__ import annotations

import argparse

from epruntime.launchers.torchrun import num_workers, run_coordinator

PROMPTS = ["The capital of France is", "Mixture-of-experts models are", "Once upon a time"]


def main() -> None:
    from epruntime import LLM, SamplingParams  # not above: workers need neither

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompt", nargs="*", default=PROMPTS)
    parser.add_argument("--token-ids", action="store_true", help="prompts are token ids with commas between")
    parser.add_argument("--expert-parallel-size", type=int, default=num_workers())
    parser.add_argument("--max-tokens", type=int, default=32)
    options = parser.parse_intermixed_args()
    prompts = [[int(i) for i in text.split(",")] for text in options.prompt] if options.token_ids else options.prompt

    with LLM(
        options.model, launcher="torchrun", expert_parallel_size=options.expert_parallel_size, max_model_len=512
    ) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=options.max_tokens)
        for prompt, output in zip(prompts, llm.generate(prompts, greedy, use_tqdm=False), strict=True):
            completion = output.outputs[0]
            print(f"{prompt!r} -> {completion.token_ids if options.token_ids else completion.text!r}")


if __name__ == "__main__":
    run_coordinator(main)
