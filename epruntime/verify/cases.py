"""Cases: what is varied, how, and which counters prove that it happened. Pure data; runs on no rank.

VerifyConfig, model, ranks -> Setting -> baseline (every request alone) and one Case per variation
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from epruntime.config import EngineConfig, SchedulerConfig
from epruntime.config.verify import CASES
from epruntime.models.info import ModelInfo
from epruntime.moe.placement import placement_for
from epruntime.verify.preemption import PreemptionSearch
from epruntime.verify.requests import KINDS, Shape, VerifyRequest, kinds_of
from epruntime.verify.session import RunFacts, RunSettings, Submission
from epruntime.words import counted

#: largest batch, and largest number of rows of the steps of the case `rows`.
BATCH, ROWS = 64, 12
#: fewest submissions of a case that needs a crowd; few requests are submitted several times.
_CROWD = 8
_ROWS_TOKENS = 4
#: submissions of the negative control.
_CONTROL = 4
_BUDGET_ROWS = 5
_NUM_SHIFTS = 3
#: weights above which nothing is tried unasked that takes much more memory per rank.
LARGE_BYTES = 8 * 2**30


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What the counters say. `counters` are shown; `missing` says what did not happen, "" if all did."""

    counters: dict[str, int]
    missing: str = ""


#: runs of the case, statistics of its ranks, those of the baseline's ranks -> Proof
Prove = Callable[[Sequence[RunFacts], Sequence[dict[str, Any]], Sequence[dict[str, Any]]], Proof]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One variation.

    Attributes:
        name: of the kind, as in CASES, with a number where there are several. varied: in words.
        parallel: fields of ParallelConfig that differ from the configuration; the model is loaded anew for them.
        runs: made one after another.
        num_tokens: output tokens of each submission.
        skipped: why it makes no sense here; then there are no runs.
    """

    name: str
    varied: str
    prove: Prove
    runs: tuple[RunSettings, ...] = ()
    parallel: Mapping[str, Any] = field(default_factory=dict)
    num_tokens: int
    skipped: str = ""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What cases are made from.

    Attributes:
        config: of the baseline, with lengths and blocks of `shape`.
        sizes: expert-parallel sizes to compare with that of `config`.
        threads: compute threads of each rank of the baseline.
    """

    config: EngineConfig
    info: ModelInfo
    shape: Shape
    requests: Sequence[VerifyRequest]
    sizes: tuple[int, ...]
    threads: int

    @property
    def size(self) -> int:
        return self.config.parallel.expert_parallel_size

    def submissions(
        self, number: int | None = None, *, num_ranks: int | None = None, shift: int = 0
    ) -> tuple[Submission, ...]:
        """The requests in order, again from the first where `number` is larger; dealt to `num_ranks` ranks."""
        ranks = num_ranks or self.size
        return tuple(
            Submission(request=self.requests[i % len(self.requests)], rank=(i % len(self.requests) + shift) % ranks)
            for i in range(number or len(self.requests))
        )

    def at_once(self, submissions: Sequence[Submission], **scheduler: Any) -> RunSettings:
        return RunSettings(waves=(tuple(submissions),), scheduler=replace(self.config.scheduler, **scheduler))


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
        "batch": _batch, "rows": _rows, "chunks": _chunks, "preempted": _preempted, "prefix": _prefix,
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


def most_rows(scheduler: SchedulerConfig, shape: Shape) -> int:
    """Rows of the largest step of any run."""
    return max(scheduler.max_num_batched_tokens, ROWS * shape.longest_prompt, shape.max_model_len)


def _crowd(setting: Setting) -> tuple[Submission, ...]:
    """Enough submissions on each rank that has any."""
    number = max(_CROWD, len(setting.requests))
    return setting.submissions(number, num_ranks=max(1, min(setting.size, number // _CROWD)))


def _batch(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        largest, decodes = max(runs[0].rows), max(runs[0].decode_rows, default=0)
        together = decodes > s.size or runs[0].counters["mixed_steps"] > 0 or s.shape.max_tokens == 1
        met = largest > s.shape.longest_prompt and together
        counters = {"requests": len(runs[0].outputs), "largest step": largest, "largest decode step": decodes}
        return Proof(counters=counters, missing="" if met else "no step had rows of several requests")

    run = s.at_once(s.submissions(BATCH))
    return [
        Case(name="batch", varied=f"{BATCH} requests at once", prove=prove, runs=(run,), num_tokens=s.shape.max_tokens)
    ]


def _rows(s: Setting) -> list[Case]:
    tokens = min(_ROWS_TOKENS, s.shape.max_tokens)

    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        seen = [n for n in range(1, ROWS + 1) if runs[0].decode_rows[n]]
        missing = [str(n) for n in range(1, ROWS + 1) if n not in seen]
        words = f"no step had exactly {', '.join(missing)} rows that decode" if missing else ""
        return Proof(counters={"row counts": len(seen), "steps": runs[0].counters["steps"]}, missing=words)

    if tokens == 1:
        return [_skipped(s, "rows", "outputs of one token: no step decodes")]
    waves = []
    for n in range(1, ROWS + 1):
        chosen = [s.requests[(n + i) % len(s.requests)].shortened(tokens) for i in range(n)]
        waves.append(tuple(Submission(request=request, rank=n % s.size) for request in chosen))
    scheduler = replace(
        s.config.scheduler, max_num_seqs=ROWS, max_num_batched_tokens=max(ROWS, ROWS * s.shape.longest_prompt)
    )
    run = RunSettings(waves=tuple(waves), scheduler=scheduler)
    return [Case(name="rows", varied=f"steps of 1 to {ROWS} rows", prove=prove, runs=(run,), num_tokens=tokens)]


def _chunks(s: Setting) -> list[Case]:
    longest = s.shape.longest_prompt
    if longest == 1:
        return [_skipped(s, "chunks", "prompts of one token")]
    if s.shape.max_tokens == 1:
        return [_skipped(s, "chunks", "outputs of one token: no prompt is prefilled beside a request that decodes")]
    small = max(2, min(5, longest // 2))
    sizes = [small] + [size for size in (min(33, longest - 1),) if size > small]

    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        counters = {name: sum(run.counters[name] for run in runs) for name in ("chunks", "mixed_steps")}
        missing = [name for name, value in counters.items() if not value]
        return Proof(counters=_words(counters), missing=f"no {' and no '.join(missing)}" if missing else "")

    runs = tuple(s.at_once(_crowd(s), max_num_batched_tokens=size, max_num_seqs=max(2, size - 1)) for size in sizes)
    varied = f"at most {' and '.join(map(str, sizes))} tokens in a step"
    return [Case(name="chunks", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]


def _preempted(s: Setting) -> list[Case]:
    if s.shape.max_tokens == 1:
        return [_skipped(s, "preempted", "outputs of one token: no request that runs needs another KV block")]
    search = PreemptionSearch(
        s.requests,
        s.shape,
        s.config.scheduler,
        s.info.rope,
        num_kv_blocks=s.config.cache.num_kv_blocks,
        max_num_batched_tokens=most_rows(s.config.scheduler, s.shape),
    )
    whole, in_pieces = search.whole(), search.in_pieces()
    if not whole:
        crowd = _crowd(s)
        most = max(s.shape.blocks_of(len(submission.request.token_ids)) for submission in crowd)
        whole = [replace(s.at_once(crowd), num_kv_blocks=most)]

    def prove(done: Sequence[RunFacts], *_: Any) -> Proof:
        total = {
            name: sum(run.counters[name] for run in done)
            for name in ("preemptions", "recomputed_in_pieces", "prefix_hit_tokens")
        }
        amid = [s.requests[output.index] for run in done for output in run.outputs if output.preempted_amid]
        counters: dict[str, int] = {"preemptions": total["preemptions"], "of requests that had sampled": len(amid)}
        for words, kinds in KINDS.items():
            counters[words] = sum(not set(kinds).isdisjoint(request.kinds) for request in amid)
        counters |= {
            "recomputed in pieces": total["recomputed_in_pieces"],
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
        elif in_pieces and not any(run.counters["preemptions"] for run in done[len(whole) :]):
            missing = "no request was preempted where prompts are prefilled in pieces"
        return Proof(counters=counters, missing=missing)

    def numbers(values: Iterable[int | None]) -> str:
        return " and ".join(str(value) for value in dict.fromkeys(values))

    varied = f"{numbers(run.num_kv_blocks for run in whole)} KV blocks of {counted(s.shape.block_size, 'token')}"
    if in_pieces:
        varied += (
            f"; {numbers(run.num_kv_blocks for run in in_pieces)} with the prefix cache and at most "
            f"{numbers(run.scheduler.max_num_batched_tokens for run in in_pieces)} tokens in a step"
        )
    runs = (*whole, *in_pieces)
    return [Case(name="preempted", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]


def _prefix(s: Setting) -> list[Case]:
    continued = [(request, k) for request in s.requests if (k := _end_of_block(s, request)) is not None]

    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        hits = runs[0].counters["prefix_hit_tokens"]
        counters = {"tokens found": hits, "outputs continued": sum(output.start > 0 for output in runs[0].outputs)}
        return Proof(counters=counters, missing="" if hits else "nothing was found in the prefix cache")

    if s.shape.longest_prompt <= s.shape.block_size:
        return [_skipped(s, "prefix", "no prompt is longer than a KV block")]
    once = s.submissions()
    # another one first: alone each has the blocks that the first of a crowd has, where its own keys may still be
    others = [submission for submission in once if submission.request not in [request for request, _ in continued]]
    lead = sorted(others, key=lambda submission: len(submission.request.token_ids))[-1:]
    rest = [submission for submission in once if submission not in lead]
    # outputs that end with a KV block, whose last token has never been computed; then that and two more in a prompt
    first = [Submission(request=request.shortened(k), rank=request.index % s.size) for request, k in continued]
    again = [(Submission(request=request, rank=request.index % s.size, num_done=k + 2),) for request, k in continued]
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
        return [_skipped(s, "pipeline", "outputs of one token: no step follows another")]
    runs = tuple(s.at_once(s.submissions(), pipeline_depth=depth) for depth in (1, 2))
    varied = "1 and 2 plans in flight"
    return [Case(name="pipeline", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]


def _ranks(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        moved = sum(output.rank != output.index % s.size for run in runs for output in run.outputs)
        return Proof(counters={"requests moved": moved}, missing="" if moved else "no request was on another rank")

    if s.size == 1:
        return [_skipped(s, "ranks", "there is one rank")]
    runs = tuple(s.at_once(s.submissions(shift=n)[::-1]) for n in range(1, min(s.size, _NUM_SHIFTS + 1)))
    varied = "requests on other ranks, last one first"
    return [Case(name="ranks", varied=varied, prove=prove, runs=runs, num_tokens=s.shape.max_tokens)]


def _rounds(s: Setting) -> list[Case]:
    def prove(runs: Sequence[RunFacts], *_: Any) -> Proof:
        counters = {"exchange rounds": runs[0].counters["rounds"], "exchanges": runs[0].counters["layer_steps"]}
        met = counters["exchange rounds"] > counters["exchanges"]
        return Proof(counters=counters, missing="" if met else "no exchange took several rounds")

    parallel = {"exchange_budget_tokens": min(_BUDGET_ROWS, max(1, s.shape.longest_prompt - 1))}
    varied = f"at most {parallel['exchange_budget_tokens']} rows in an exchange round"
    return [_reloaded(s, "rounds", varied, prove, parallel)]


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
        return [_skipped(s, "placement", words)]
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
        return [_skipped(s, "sizes", "there is one expert")]
    others = [case(size) for size in s.sizes if size != s.size]
    return others or [_skipped(s, "sizes", "none was asked for: see --expert-parallel-size(s)")]


def _skipped(s: Setting, name: str, reason: str) -> Case:
    return Case(
        name=name, varied=CASES[name], prove=lambda *_: Proof(counters={}), num_tokens=s.shape.max_tokens,
        skipped=reason,
    )  # fmt: skip


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
