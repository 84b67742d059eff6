"""verify(): the invariance contract, run on a model and the ranks that would serve it.

checkpoint -> Setting -> ranks -> baseline -> cases (a load for each setting of theirs) -> negative control
           -> [transformers] -> VerifyReport
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from epruntime.config import EngineConfig
from epruntime.config.verify import VerifyConfig
from epruntime.engine.loop_thread import LoopThread
from epruntime.engine.preflight import Preflight
from epruntime.engine.ranks import Ranks
from epruntime.engine.start_ranks import heartbeat_timeout_s, start_ranks
from epruntime.engine.tokenizer import load_tokenizer
from epruntime.errors import ConfigError
from epruntime.launchers.pool import RankPool
from epruntime.models.info import ModelInfo
from epruntime.models.loader import inspect_model
from epruntime.verify.against import check_room, compare_with_transformers
from epruntime.verify.case import Case, Setting, most_rows
from epruntime.verify.cases import BATCH, LARGE_BYTES, baseline, control_runs, make_cases
from epruntime.verify.compare import Comparison, compare, digest
from epruntime.verify.facts import VerifyFacts, collect_facts
from epruntime.verify.outputs import Output
from epruntime.verify.report import (
    BASELINE,
    CAUGHT,
    DIFFERENT,
    IDENTICAL,
    NOT_CAUGHT,
    NOT_EXERCISED,
    SKIPPED,
    CaseReport,
    VerifyReport,
)
from epruntime.verify.requests import Shape, VerifyRequest, make_requests, random_prompts, shape_of
from epruntime.verify.row_counts import ROWS
from epruntime.verify.session import RunFacts, Session, Trace
from epruntime.words import counted

logger = logging.getLogger("epruntime.verify.run")

#: above it sizes are powers of two, and the configured one.
_ALL_SIZES = 8

Progress = Callable[[str], None]


def verify(
    model: str | Path | EngineConfig,
    options: VerifyConfig | None = None,
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
    **engine: Any,
) -> VerifyReport:
    """Runs every request alone, and again in other company and under other settings, and compares bit for bit.

    Args:
        model: checkpoint directory, with fields of EngineConfig as further keywords; or an EngineConfig.
        options: what to vary, on which prompts.
        ranks: running ranks, at least as many as the largest expert-parallel size; None: started, and stopped at
            the end.
        progress: called with a line of text as each part begins or ends.

    Raises:
        ConfigError: settings that cannot work.
        UnsupportedModelError, CheckpointError: the model is refused, or damaged.
        LaunchError, PreflightError, RankLostError, EngineDeadError: ranks did not start, or could not go on.
    """
    if isinstance(model, EngineConfig):
        if engine:
            raise TypeError(f"with an EngineConfig there are no further options; {', '.join(engine)} given")
        config = model
    else:
        config = EngineConfig.from_kwargs(model=str(model), **engine)
    verification = _Verification(config, options or VerifyConfig(), progress or (lambda line: None))
    if ranks is not None:
        ranks.loop_thread.run(verification.run(ranks.pool))
    else:
        loop_thread = LoopThread("epruntime-verify")
        try:
            loop_thread.run(verification.run_on_own_ranks())
        finally:
            loop_thread.close()
    return verification.conclude()


@dataclass(frozen=True, kw_only=True)
class _Baseline:
    """What all cases are compared with. `outputs`: by request index; stats: of its ranks."""

    outputs: dict[int, Output]
    trace: Trace
    stats: list[dict[str, Any]]
    layers: tuple[str, ...]


class _Verification:
    def __init__(self, config: EngineConfig, options: VerifyConfig, progress: Progress) -> None:
        self._options, self._say = options, progress
        self._began = time.monotonic()
        self._info: ModelInfo = inspect_model(config.model.model, dtype=config.model.dtype)
        self._seed = secrets.randbelow(2**31) if options.seed is None else options.seed
        if options.against is not None:
            check_room(self._info)  # now, and not after hours
        prompts = _prompts_of(config, options)
        self._shape = _shape(config, options, self._info, prompts)
        self._requests = self._make_requests(prompts)
        self._config = _fitted(config, self._shape, self._requests)
        self._sizes = options.sizes() or _default_sizes(config, self._info)
        self._reports: list[CaseReport] = []
        self._facts: VerifyFacts | None = None
        self._control: CaseReport | None = None
        self._base: _Baseline | None = None

    @property
    def num_ranks(self) -> int:
        return max(*self._sizes, self._config.parallel.expert_parallel_size)

    async def run_on_own_ranks(self) -> None:
        self._say(f"starting {counted(self.num_ranks, 'rank')}")
        parallel = replace(self._config.parallel, expert_parallel_size=self.num_ranks)
        pool = await start_ranks(replace(self._config, parallel=parallel))
        try:
            await self.run(pool)
        finally:
            await pool.stop()

    async def run(self, pool: RankPool) -> None:
        """Everything that needs ranks."""
        pool.heartbeat_timeout_s = heartbeat_timeout_s(self._config.parallel)
        if self.num_ranks > len(pool.ranks):
            raise ConfigError(
                f"expert-parallel size {self.num_ranks} is to be run, but the pool has "
                f"{counted(len(pool.ranks), 'rank')}: give more ranks, or smaller expert_parallel_sizes"
            )
        threads = self._config.parallel.threads_per_rank or pool.ranks[0].seat.threads
        setting = Setting(
            config=self._config,
            info=self._info,
            shape=self._shape,
            requests=self._requests,
            sizes=self._sizes,
            threads=threads,
        )
        made = make_cases(setting, self._options.case_names())
        loads: list[dict[str, Any]] = [{}]
        loads += [dict(case.parallel) for case in made if case.runs and case.parallel]
        for parallel in [load for i, load in enumerate(loads) if load not in loads[:i]]:
            session = await self._open(pool, parallel)
            try:
                if not parallel:
                    await self._run_baseline(setting, session, pool)
                for case in made:
                    if case.runs and dict(case.parallel) == parallel:
                        await self._run_case(case, session)
            finally:
                await _close(session)
        self._reports += [_skipped(case) for case in made if not case.runs]
        await self._run_control(setting, pool)

    def conclude(self) -> VerifyReport:
        """Everything that needs none, and the report."""
        against, refused = None, ""
        if self._options.against is not None:
            self._say("transformers: running the whole model in this process")
            assert self._base is not None
            try:
                against = compare_with_transformers(
                    self._config.model.model, self._info, self._requests, self._base.outputs, say=self._say
                )
            except ConfigError as error:  # what the cases have given is worth hours
                refused = str(error)
        assert self._facts is not None
        assert self._control is not None
        return VerifyReport(
            facts=self._facts,
            cases=tuple(self._reports),
            control=self._control,
            against=against,
            against_refused=refused,
            seconds=time.monotonic() - self._began,
        )

    # ---- parts of run

    async def _open(self, pool: RankPool, parallel: dict[str, Any], *, batch_dependent: bool = False) -> Session:
        changed = {**parallel, "batch_dependent": True} if batch_dependent else parallel
        self._say("loading" + (f" with {', '.join(f'{k}={v}' for k, v in changed.items())}" if changed else ""))
        scheduler = self._config.scheduler
        most = most_rows(scheduler, self._shape)
        config = replace(
            self._config,
            parallel=replace(self._config.parallel, **parallel),
            scheduler=replace(scheduler, max_num_batched_tokens=most),
        )
        first = self._base is None and not batch_dependent
        with silent_about_replicas(parallel):
            return await Session.open(
                config,
                pool,
                trace_layers=self._options.trace_layers,
                batch_dependent=batch_dependent,
                preflight=Preflight(config, self._info) if first and config.parallel.preflight else None,
            )

    async def _run_baseline(self, setting: Setting, session: Session, pool: RankPool) -> None:
        began = time.monotonic()
        run = await session.run(baseline(setting))
        outputs = {output.index: output for output in run.outputs}
        self._base = _Baseline(outputs=outputs, trace=run.trace, stats=await session.group.stats(), layers=run.layers)
        self._facts = collect_facts(
            self._config, self._info, self._options, session.group, pool, shape=self._shape, seed=self._seed,
            requests=self._requests, threads=setting.threads, sizes=setting.sizes,
        )  # fmt: skip
        num_tokens, failed = self._shape.max_tokens, [o for o in run.outputs if o.error]
        # where a model wants it, a sequence that passes a length leaves its rank to be computed anew, also alone
        alone = self._info.rope.recompute or not run.counters["preemptions"]
        whole = not run.counters["chunks"] and alone
        report = CaseReport(
            name="alone",
            varied="every request alone, its prompt in one piece",
            status=BASELINE if whole and not failed else NOT_EXERCISED,
            counters={"requests": len(run.outputs), "steps": run.counters["steps"]},
            num_compared=len(run.outputs),
            num_tokens=num_tokens,
            digest=digest(run.outputs, num_tokens=num_tokens),
            reason=f"request {failed[0].index} failed: {failed[0].error}" if failed else "" if whole else "not whole",
            seconds=time.monotonic() - began,
        )
        self._add(report)

    async def _run_case(self, case: Case, session: Session) -> None:
        assert self._base is not None
        began = time.monotonic()
        done: list[RunFacts] = []
        for settings in case.runs:
            done.append(await session.run(settings, self._base.outputs))
        proof = case.prove(done, await session.group.stats(), self._base.stats)
        comparison = self._compare(self._base.outputs, self._base.trace, done, case.num_tokens)
        if comparison.first is not None:
            status = DIFFERENT
        else:
            status = NOT_EXERCISED if proof.missing else IDENTICAL
        self._add(_report(case.name, case.varied, status, proof.counters, comparison, case.num_tokens, began,
                          reason=proof.missing))  # fmt: skip

    async def _run_control(self, setting: Setting, pool: RankPool) -> None:
        """The comparison must see that a layer depends on the batch, where one does."""
        session = await self._open(pool, {}, batch_dependent=True)
        began = time.monotonic()
        alone_run, crowd_run = control_runs(setting)
        try:
            alone, crowd = await session.run(alone_run), await session.run(crowd_run)
        finally:
            await _close(session)
        num_tokens = self._shape.max_tokens
        comparison = self._compare({o.index: o for o in alone.outputs}, alone.trace, [crowd], num_tokens)
        self._control = _report(
            "control", "negative control: a layer made to depend on the batch must be seen",
            NOT_CAUGHT if comparison.first is None else CAUGHT, {"largest step": max(crowd.rows)}, comparison,
            num_tokens, began,
        )  # fmt: skip
        self._say(f"control: {self._control.status}, {self._control.seconds:.1f} s")

    def _compare(
        self, expected: dict[int, Output], expected_trace: Trace, runs: Sequence[RunFacts], num_tokens: int
    ) -> Comparison:
        trace: Trace = {}
        for run in runs:
            for place, rows in run.trace.items():
                trace.setdefault(place, []).extend(rows)
        return compare(
            expected,
            [output for run in runs for output in run.outputs],
            num_tokens=num_tokens,
            expected_trace=expected_trace,
            trace=trace,
            layers=runs[0].layers,
            all_computed=not any(run.counters["prefix_hit_tokens"] for run in runs),
        )

    def _add(self, report: CaseReport) -> None:
        self._reports.append(report)
        self._say(f"{report.name}: {report.status}, {report.seconds:.1f} s")

    def _make_requests(self, prompts: Sequence[Sequence[int]] | None) -> list[VerifyRequest]:
        shape, vocab_size = self._shape, self._info.vocab_size
        if prompts is None:
            prompts = random_prompts(self._options.num_prompts, shape, vocab_size=vocab_size, seed=self._seed)
        fitting = [prompt[: shape.longest_prompt] for prompt in prompts]
        return make_requests(fitting, shape, vocab_size=vocab_size, seed=self._seed)


def _shape(
    config: EngineConfig, options: VerifyConfig, info: ModelInfo, prompts: Sequence[Sequence[int]] | None
) -> Shape:
    longest = options.max_prompt_tokens
    return shape_of(
        max_model_len=min(config.model.max_model_len or info.max_position_embeddings, info.max_position_embeddings),
        max_tokens=options.max_tokens,
        max_prompt_tokens=longest if prompts is None else min(longest, max(map(len, prompts))),
        block_size=config.cache.block_size,
    )


def _fitted(config: EngineConfig, shape: Shape, requests: Sequence[VerifyRequest]) -> EngineConfig:
    """The configuration with lengths, and a KV cache, that hold what is to be run; budgets of the user's are kept."""
    cache = replace(config.cache, block_size=shape.block_size)
    if cache.num_kv_blocks is None and cache.kv_cache_memory_gb is None:
        most = max(shape.blocks_of(len(request.token_ids)) for request in requests)
        cache = replace(cache, num_kv_blocks=most * (BATCH + ROWS))
    return replace(
        config,
        model=replace(config.model, max_model_len=shape.max_model_len),
        cache=cache,
    )


def _default_sizes(config: EngineConfig, info: ModelInfo) -> tuple[int, ...]:
    size = config.parallel.expert_parallel_size
    if info.checkpoint_bytes > LARGE_BYTES:
        return (size,)
    if size > _ALL_SIZES:
        return (*(n for n in (1, 2, 4, 8, 16, 32, 64) if n < size), size)
    return tuple(range(1, size + 1))


def _prompts_of(config: EngineConfig, options: VerifyConfig) -> list[list[int]] | None:
    """The first lines of the prompts file as token ids; None: there is no such file.

    Raises:
        ConfigError: the file cannot be read or has no line, or there is no tokenizer.
    """
    if options.prompts_file is None:
        return None
    try:
        text = Path(options.prompts_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts_file={options.prompts_file!r} cannot be read: {error}") from error
    lines = [line for line in text.splitlines() if line.strip()][: options.num_prompts]
    tokenizer = load_tokenizer(config.model.tokenizer or config.model.model, required=True, chat_template=None)
    prompts = [tokenizer.encode(line) for line in lines] if tokenizer is not None else []
    if not prompts or not all(prompts):
        raise ConfigError(f"prompts_file={options.prompts_file!r}: it needs lines that have tokens")
    return prompts


@contextlib.contextmanager
def silent_about_replicas(parallel: Mapping[str, Any]) -> Iterator[None]:
    """While a case loads more copies of experts than make sense: the user has not asked for them."""

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno != logging.WARNING or not str(record.msg).startswith("num_redundant_experts=")

    if "num_redundant_experts" not in parallel:
        yield
        return
    log = logging.getLogger("epruntime.engine.model_group")
    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)


async def _close(session: Session) -> None:
    """Unloads, unless the ranks are gone: what ended them is the error to report."""
    if all(rank.lost is None for rank in session.group.ranks):
        await session.close()


def _skipped(case: Case) -> CaseReport:
    return CaseReport(name=case.name, varied=case.varied, status=SKIPPED, reason=case.skipped)


def _report(
    name: str, varied: str, status: str, counters: dict[str, int], comparison: Comparison, num_tokens: int,
    began: float, *, reason: str = "",
) -> CaseReport:  # fmt: skip
    return CaseReport(
        name=name,
        varied=varied,
        status=status,
        counters=counters,
        num_compared=comparison.num_compared,
        num_different=comparison.num_different,
        num_tokens=num_tokens,
        digest=comparison.digest,
        difference=comparison.first,
        reason=reason,
        seconds=time.monotonic() - began,
    )
