"""StatsLog: one log line per interval about load and speed; none while nothing happens, after the first that says so.

EngineObserver.tokens, EngineStats, EngineStats of the line before -> line
"""

from __future__ import annotations

import asyncio
import logging

from epruntime.engine.observer import EngineObserver, NewTokens
from epruntime.engine.stats import EngineStats, balancedness
from epruntime.serve.engine import Engine

logger = logging.getLogger("epruntime.serve.stats_log")


class StatsLog(EngineObserver):
    """Logs about one engine until it is stopped. Make it on the engine's loop.

    Args:
        interval_s: seconds between lines.
    """

    def __init__(self, engine: Engine, interval_s: float) -> None:
        self._engine = engine
        self._prompt_tokens = self._generation_tokens = 0
        self._before = engine.stats_snapshot()
        self._was_idle = False
        self._forget = engine.add_observer(self)
        self._task = asyncio.create_task(self._run(interval_s), name="epruntime-stats-log")

    def stop(self) -> None:
        self._forget()
        self._task.cancel()

    def tokens(self, new: NewTokens) -> None:
        self._prompt_tokens += new.num_prompt_tokens
        self._generation_tokens += new.num_tokens

    def line(self) -> str | None:
        """What has happened since the last call; None if that is nothing again."""
        before, now = self._before, self._engine.stats_snapshot()
        self._before = now
        prompt, generation = self._prompt_tokens, self._generation_tokens
        self._prompt_tokens = self._generation_tokens = 0
        running = sum(rank.num_running for rank in now.ranks)
        waiting = sum(rank.num_waiting for rank in now.ranks)
        idle = not (prompt or generation or running or waiting)
        if idle and self._was_idle:
            return None
        self._was_idle = idle
        seconds = max(now.time - before.time, 1e-9)
        parts = [
            f"prompt {prompt / seconds:.1f} tokens/s, generation {generation / seconds:.1f} tokens/s",
            f"running {running}, waiting {waiting}",
            f"KV cache {100 * max((rank.kv_usage for rank in now.ranks), default=0):.1f} %",
            f"prefix hits {_percent(*(_grown(before, now, f'prefix_{kind}_tokens') for kind in ('hit', 'query')))}",
            f"balancedness {_least_balanced(before, now)}",
            f"preemptions {_grown(before, now, 'preemptions')}",
        ]
        return ", ".join(parts)

    async def _run(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            try:
                line = self.line()
            except Exception:  # a log line is not worth its server
                logger.exception("no line about load and speed")
                return
            if line is not None:
                logger.info("%s", line)


def _grown(before: EngineStats, now: EngineStats, counter: str) -> int:
    return now.total(counter) - before.total(counter)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _least_balanced(before: EngineStats, now: EngineStats) -> str:
    """The layer whose experts' work was spread worst over the ranks since `before`."""
    earlier = {load.layer: load.rank_tokens for load in before.layers}
    found = []
    for load in now.layers:
        start = earlier.get(load.layer, (0,) * len(load.rank_tokens))
        balance = balancedness([b - a for a, b in zip(start, load.rank_tokens, strict=True)])
        if balance is not None:
            found.append((balance, load.layer))
    return "{:.2f} (layer {})".format(*min(found)) if found else "-"
