"""Cases: what is varied, how, and which counters prove that it happened. Pure data; runs on no rank.

VerifyConfig, model, ranks -> Setting -> baseline (every request alone) and one Case per variation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from epruntime.moe.placement import placement_for
from epruntime.verify.case import Case, Proof, Prove, Setting, most_rows, skipped_case
from epruntime.verify.preempted import preempted_cases
from epruntime.verify.requests import VerifyRequest
from epruntime.verify.row_counts import ROWS, ranges, small_waves, tail_waves
from epruntime.verify.session import RunFacts, RunSettings, Submission, moe_totals
from epruntime.words import counted

#: largest batch.
BATCH = 64
#: submissions of the negative control.
_CONTROL = 4
_BUDGET_ROWS = 5
_NUM_SHIFTS = 3
#: weights above which nothing is tried unasked that takes much more memory per rank.
LARGE_BYTES = 8 * 2**30


def baseline(setting: Setting) -> RunSettings:
    """Every request alone, its prompt in one piece."""
    scheduler = setting.config.scheduler
    # in one piece, also where a history is computed anew when it passes the length of short sequences
    tokens = max(scheduler.max_num_batched_tokens, setting.shape.max_model_len)
    return RunSettings(
        waves=tuple((submission,) for submission in setting.submissions()),
        scheduler=replace(scheduler, max_num_batched_tokens=tokens),
    )


def make_cases(setting: Setting, names: Sequence[str]) -> list[Case]:
    """Cases of these names, those that need no new load first."""
    made = {
        "batch": _batch, "rows": _rows, "chunks": _chunks, "preempted": preempted_cases, "prefix": _prefix,
        "pipeline": _pipeline, "ranks": _ranks, "rounds": _rounds, "threads": _threads, "placement": _placement,
        "replicas": _replicas, "sizes": _sizes,
    }  # fmt: skip
    return [case for name in names for case in made[name](setting)]


def control_runs(setting: Setting) -> tuple[RunSettings, RunSettings]:
    """Of the negative control: some requests alone, and the same ones at once, on the first rank."""
    chosen = [replace(submission, rank=0) for submission in setting.submissions(_CONTROL)]
    alone = baseline(setting)
    together = setting.at_once(
        chosen,
        # whatever the user's budgets, or nobody has company
        max_num_batched_tokens=most_rows(setting.config.scheduler, setting.shape),
        max_num_seqs=max(_CONTROL, setting.config.scheduler.max_num_seqs),
    )
    return replace(alone, waves=tuple((submission,) for submission in chosen[: len(setting.requests)])), together


def _batch(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        largest, decodes = max(runs[0].rows), max(runs[0].decode_rows, default=0)
        # what all ranks together computed; one request alone has no more rows than its prompt, and none that decode
        # beside others that are prefilled
        met = decodes > s.size or runs[0].counters["mixed_steps"] > 0 or largest > s.size * s.shape.longest_prompt
        counters = {"requests": len(runs[0].outputs), "largest step": largest, "largest decode step": decodes}
        return Proof(counters=counters, missing="" if met else "no step had rows of several requests")

    if s.config.scheduler.max_num_seqs == 1:
        return [skipped_case(s, "batch", "max_num_seqs=1: no request has company")]
    run = s.at_once(s.submissions(BATCH))
    return [
        Case(name="batch", varied=f"{BATCH} requests at once", prove=prove, runs=(run,), num_tokens=s.shape.max_tokens)
    ]


def _rows(s: Setting) -> list[Case]:
    if s.shape.max_tokens == 1:
        return [skipped_case(s, "rows", "outputs of one token: no step decodes")]
    most = ROWS * s.shape.longest_prompt
    tails, tail_counts = tail_waves(s.requests, s.shape, most_rows=most, num_kv_blocks=s.num_kv_blocks)
    counts = [*range(1, ROWS + 1), *tail_counts]

    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        missing = [n for n in counts if not runs[0].decode_rows[n]]
        words = f"no step had exactly {ranges(missing)} rows that decode" if missing else ""
        seen = {"row counts": len(counts) - len(missing), "of": len(counts), "steps": runs[0].counters["steps"]}
        return Proof(counters=seen, missing=words)

    waves = [*small_waves(s.requests, s.shape), *tails]
    run = RunSettings(
        waves=tuple(tuple(Submission(request=request, rank=len(wave) % s.size) for request in wave) for wave in waves),
        scheduler=replace(s.config.scheduler, max_num_seqs=min(max(counts), most), max_num_batched_tokens=most),
    )
    tokens = max(request.spec.max_tokens for wave in waves for request in wave)
    return [Case(name="rows", varied=f"steps of {ranges(counts)} rows", prove=prove, runs=(run,), num_tokens=tokens)]


def _chunks(s: Setting) -> list[Case]:
    longest = s.shape.longest_prompt
    if longest == 1:
        return [skipped_case(s, "chunks", "prompts of one token")]
    if s.shape.max_tokens == 1:
        return [skipped_case(s, "chunks", "outputs of one token: no prompt is prefilled beside a request that decodes")]
    small = max(2, min(5, longest // 2))
    sizes = [small] + [size for size in (min(33, longest - 1),) if size > small]

    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        counters = {name: sum(run.counters[name] for run in runs) for name in ("chunks", "mixed_steps")}
        missing = [name for name, value in counters.items() if not value]
        return Proof(counters=_words(counters), missing=f"no {' and no '.join(missing)}" if missing else "")

    runs = tuple(s.at_once(s.crowd(), max_num_batched_tokens=size, max_num_seqs=max(2, size - 1)) for size in sizes)
    varied = f"at most {' and '.join(map(str, sizes))} tokens in a step"
    return [Case(name="chunks", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]


def _prefix(s: Setting) -> list[Case]:
    ending = [(request, k) for request in s.requests if (k := _end_of_block(s, request)) is not None]
    # with one or two tokens behind the block: where all but one are found, that one is prefilled as if it decoded
    both = ending * 2 if len(ending) == 1 else ending
    continued = [(request, k + 1 + i % 2) for i, (request, k) in enumerate(both)]

    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        hits = runs[0].counters["prefix_hit_tokens"]
        counters = {
            "tokens found": hits,
            "all but one of a history": runs[0].counters["found_but_one"],
            "outputs continued": sum(output.start > 0 for output in runs[0].outputs),
        }
        return Proof(counters=counters, missing="" if hits else "nothing was found in the prefix cache")

    if s.shape.longest_prompt <= s.shape.block_size:
        return [skipped_case(s, "prefix", "no prompt is longer than a KV block")]
    once = s.submissions()
    # another one first: alone each has the blocks that the first of a crowd has, where its own keys may still be
    others = [submission for submission in once if submission.request not in [request for request, _ in ending]]
    lead = sorted(others, key=lambda submission: len(submission.request.token_ids))[-1:]
    rest = [submission for submission in once if submission not in lead]
    # outputs that end with a KV block, whose last token has never been computed; then that and more of it in a prompt
    first = [Submission(request=request.shortened(k), rank=request.index % s.size) for request, k in ending]
    again = [
        (Submission(request=request, rank=request.index % s.size, num_done=num_done),)
        for request, num_done in continued
    ]
    run = RunSettings(
        waves=((*lead, *first, *rest), once[::-1], *again), scheduler=s.config.scheduler, prefix_caching=True
    )
    varied = "prompts found in the prefix cache"
    return [Case(name="prefix", varied=varied, prove=prove, runs=(run,), num_tokens=s.shape.max_tokens)]


def _end_of_block(s: Setting, request: VerifyRequest) -> int | None:
    """Output tokens after which a KV block of a greedy request ends and three more are to come; None: none does."""
    if not request.greedy or s.info.rope.longest_original:  # there a longer prompt may be another thing than an output
        return None
    block = s.shape.block_size
    number = -len(request.token_ids) % block or block
    return number if number <= request.spec.max_tokens - 3 else None


def _pipeline(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        one, two = (run.counters["overlapped_steps"] for run in runs)
        met = not one and two
        counters = {"overlapped steps of depth 1": one, "of depth 2": two}
        return Proof(counters=counters, missing="" if met else "the plans in flight were not those that were asked for")

    if s.shape.max_tokens == 1:
        return [skipped_case(s, "pipeline", "outputs of one token: no step follows another")]
    runs = tuple(s.at_once(s.submissions(), pipeline_depth=depth) for depth in (1, 2))
    varied = "1 and 2 plans in flight"
    return [Case(name="pipeline", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]


def _ranks(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        moved = sum(output.rank != output.index % s.size for run in runs for output in run.outputs)
        return Proof(counters={"requests moved": moved}, missing="" if moved else "no request was on another rank")

    if s.size == 1:
        return [skipped_case(s, "ranks", "there is one rank")]
    runs = tuple(s.at_once(s.submissions(shift=n)[::-1]) for n in range(1, min(s.size, _NUM_SHIFTS + 1)))
    varied = "requests on other ranks, last one first"
    return [Case(name="ranks", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]


def _rounds(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], _: Any, before: Sequence[dict[str, Any]]) -> Proof:
        rounds, exchanges = runs[0].counters["rounds"], runs[0].counters["layer_steps"]
        alone = moe_totals(before)
        missing = ""
        if rounds <= exchanges:
            missing = "no exchange took several rounds"
        elif rounds * alone["layer_steps"] == alone["rounds"] * exchanges:
            missing = "exchanges took as many rounds as before"
        counters = {
            "exchange rounds": rounds,
            "exchanges": exchanges,
            "alone": alone["rounds"],
            "in": alone["layer_steps"],
        }
        return Proof(counters=counters, missing=missing)

    configured = s.config.parallel.exchange_budget_tokens
    number = min(_BUDGET_ROWS, max(1, s.shape.longest_prompt - 1))
    if number == configured:
        number = number - 1 or 2
    varied = f"at most {counted(number, 'row')} in an exchange round, instead of {configured}"
    return [_reloaded(s, "rounds", varied, prove, {"exchange_budget_tokens": number})]


def _threads(s: Setting) -> list[Case]:
    def case(threads: int) -> Case:
        def prove(_: Any, ranks: Sequence[dict[str, Any]], __: Any) -> Proof:
            found = {rank["threads"] for rank in ranks}
            missing = "" if found == {threads} else f"ranks ran {sorted(found)} threads"
            return Proof(counters={"threads per rank": max(found), "instead of": s.threads}, missing=missing)

        varied = f"{counted(threads, 'compute thread')} per rank"
        return _reloaded(s, f"threads-{threads}", varied, prove, {"threads_per_rank": threads})

    return [case(threads) for threads in (1, 2) if threads != s.threads]


def _placement(s: Setting) -> list[Case]:
    parallel = s.config.parallel
    other = "round_robin" if parallel.expert_placement == "linear" else "linear"

    def prove(_: Any, ranks: Sequence[dict[str, Any]], before: Sequence[dict[str, Any]]) -> Proof:
        moved = _num_moved(before, ranks)
        return Proof(counters={"experts moved": moved}, missing="" if moved else "no expert was on another rank")

    case = _reloaded(s, "placement", f"expert_placement={other}", prove, {"expert_placement": other})
    counts = {experts for experts, _ in s.info.expert_bytes}
    redundant = parallel.num_redundant_experts
    if all(
        placement_for(n, s.size, "linear", redundant) == placement_for(n, s.size, "round_robin", redundant)
        for n in counts
    ):
        words = "there is one rank" if s.size == 1 else "all placements of so few experts are the same"
        return [skipped_case(s, "placement", words)]
    return [case]


def _replicas(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        pairs = runs[0].counters["replica_pairs"]
        counters = {"tokens of replicas": pairs, "of": runs[0].counters["pairs"]}
        return Proof(counters=counters, missing="" if pairs else "no token went to a replica")

    experts = s.info.num_experts
    large = s.info.checkpoint_bytes > LARGE_BYTES
    number = min(experts, s.size if large else max(s.size, experts // 4))
    redundant = s.config.parallel.num_redundant_experts + number
    varied = f"num_redundant_experts={redundant}"
    return [_reloaded(s, "replicas", varied, prove, {"num_redundant_experts": redundant})]


def _sizes(s: Setting) -> list[Case]:
    def case(size: int) -> Case:
        def prove(runs: Sequence[RunFacts], ranks: Sequence[dict[str, Any]], _: Any) -> Proof:
            busy = sum(runs[0].counters[f"pairs_of_rank_{rank}"] > 0 for rank in range(len(ranks)))
            met = len(ranks) == size and busy >= min(size, 2)
            counters = {"ranks": len(ranks), "with expert load": busy}
            return Proof(counters=counters, missing="" if met else "experts of one rank alone had work")

        return Case(
            name=f"size-{size}",
            varied=f"expert_parallel_size={size}",
            prove=prove,
            runs=(s.at_once(s.submissions(num_ranks=size)),),
            parallel={"expert_parallel_size": size},
            num_tokens=s.shape.max_tokens,
        )

    if s.info.num_experts == 1:
        return [skipped_case(s, "sizes", "there is one expert")]
    others = [case(size) for size in s.sizes if size != s.size]
    return others or [skipped_case(s, "sizes", "none was asked for: see --expert-parallel-size(s)")]


def _reloaded(s: Setting, name: str, varied: str, prove: Prove, parallel: Mapping[str, Any]) -> Case:
    """All requests at once, after a load with other settings."""
    return Case(
        name=name, varied=varied, prove=prove, runs=(s.at_once(s.submissions()),), parallel=parallel,
        num_tokens=s.shape.max_tokens,
    )  # fmt: skip


def _num_moved(before: Sequence[dict[str, Any]], after: Sequence[dict[str, Any]]) -> int:
    """Experts, of all layers, that a rank has and had not."""
    moved = 0
    for was, now in zip(before, after, strict=True):
        for layer, stats in now["moe"]["layers"].items():
            moved += len(set(stats["local_experts"]) - set(was["moe"]["layers"][layer]["local_experts"]))
    return moved


def _words(counters: Mapping[str, int]) -> dict[str, int]:
    return {name.replace("_", " "): value for name, value in counters.items()}
