"""A program that prints digests of answers, for launchers that start programs themselves.

    python -m epruntime.testing.invariance_program MODEL DTYPE OPTIONS
    torchrun --standalone --nproc-per-node 2 epruntime/testing/invariance_program.py MODEL DTYPE OPTIONS

OPTIONS: fields of the engine's configuration as a JSON object; with launcher "torchrun" it must run under torchrun.
"""

from __future__ import annotations

import json
import sys

#: requests that are answered; how the line with their digests begins
COMPARED, LINE = 9, "digests "


def main() -> None:
    from epruntime import LLM
    from epruntime.testing.invariance import MAX_LENGTH, Answer, happened, mixed_requests

    path, dtype, text = sys.argv[1:]
    options = {"max_model_len": MAX_LENGTH, "num_kv_blocks": 64, **json.loads(text)}
    with LLM(path, dtype=dtype, **options) as llm:
        vocab_size = llm.info()["model"]["vocab_size"]
        requests = mixed_requests(COMPARED, vocab_size=vocab_size)
        outputs = llm.generate([list(r.prompt) for r in requests], [r.params for r in requests], use_tqdm=False)
        info = llm.info()
    facts = {
        "digests": [Answer.of(output).digest for output in outputs],
        "hosts": [rank["host"] for rank in info["ranks"]],
        "launcher": info["engine"]["launcher"],
        "transport": info["engine"]["transport"],
        "ranks_at_work": happened(info)["ranks_at_work"],
    }
    print(LINE + json.dumps(facts), flush=True)


if __name__ == "__main__":
    if json.loads(sys.argv[3]).get("launcher") == "torchrun":
        from epruntime.launchers.torchrun import run_coordinator

        run_coordinator(main)
    main()
