"""The case `preempted`: requests that must go when another one needs a KV block, and what proves that they did."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from epruntime.verify.case import Case, Proof, Setting, most_rows, skipped_case
from epruntime.verify.preemption import PreemptionSearch
from epruntime.verify.requests import KINDS, kinds_of
from epruntime.verify.session import RunFacts
from epruntime.words import counted


def preempted_cases(s: Setting) -> list[Case]:
    """One case, skipped where no output is longer than a token."""
    if s.shape.max_tokens == 1:
        return [skipped_case(s, "preempted", "outputs of one token: no request that runs needs another KV block")]
    search = PreemptionSearch(
        s.requests,
        s.shape,
        s.config.scheduler,
        s.info.rope,
        num_kv_blocks=s.num_kv_blocks,
        max_num_batched_tokens=most_rows(s.config.scheduler, s.shape),
    )
    whole, in_pieces, amid_prompts = search.whole(), search.in_pieces(), search.amid_prompts()
    if not whole:
        crowd = s.crowd()
        most = max(s.shape.blocks_of(len(submission.request.token_ids)) for submission in crowd)
        whole = [replace(s.at_once(crowd), num_kv_blocks=most)]

    def prove(done: Sequence[RunFacts], *_: Any) -> Proof:
        total = {
            name: sum(run.counters[name] for run in done)
            for name in ("preemptions", "recomputed_in_pieces", "amid_prompt_logprobs", "prefix_hit_tokens")
        }
        amid = [s.requests[output.index] for run in done for output in run.outputs if output.preempted_amid]
        counters: dict[str, int] = {"preemptions": total["preemptions"], "of requests that had sampled": len(amid)}
        for words, kinds in KINDS.items():
            counters[words] = sum(not set(kinds).isdisjoint(request.kinds) for request in amid)
        counters |= {
            "recomputed in pieces": total["recomputed_in_pieces"],
            "amid the log-probabilities of a prompt": total["amid_prompt_logprobs"],
            "tokens found in the cache": total["prefix_hit_tokens"],
        }
        found = {kind for request in amid for kind in request.kinds}
        lost = [kind for kind in kinds_of(s.requests) if kind not in found]
        missing = ""
        if not total["preemptions"]:
            missing = "no request was preempted; a larger --max-tokens lets outputs go on into another KV block"
        elif not amid:
            missing = "no request was preempted after it had sampled"
        elif lost:
            missing = f"no request with {', '.join(lost)} was preempted after it had sampled"
        elif in_pieces and not any(run.counters["preemptions"] for run in done[len(whole) :][: len(in_pieces)]):
            missing = "no request was preempted where prompts are prefilled in pieces"
        elif amid_prompts and not total["amid_prompt_logprobs"]:
            missing = "no request was preempted when it had some of the log-probabilities of its prompt"
        return Proof(counters=counters, missing=missing)

    def numbers(values: Iterable[int | None]) -> str:
        return " and ".join(str(value) for value in dict.fromkeys(values))

    varied = f"{numbers(run.num_kv_blocks for run in whole)} KV blocks of {counted(s.shape.block_size, 'token')}"
    small = (*in_pieces, *amid_prompts)
    if small:
        varied += (
            f"; {numbers(run.num_kv_blocks for run in small)} with the prefix cache and at most "
            f"{numbers(run.scheduler.max_num_batched_tokens for run in small)} tokens in a step"
        )
    runs = (*whole, *small)
    return [Case(name="preempted", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]
