"""Ranks: rank processes that stay up while models come and go."""

from __future__ import annotations

from types import TracebackType

from epruntime.engine.loop_thread import LoopThread, call_at_end
from epruntime.launchers.base import Launcher
from epruntime.launchers.caller_group import callers_group
from epruntime.launchers.pool import RankPool


class Ranks:
    """Started once, used by one LLM after another, at any expert-parallel size up to their number.

        with Ranks(4) as ranks:
            for model in models:
                with LLM(model, expert_parallel_size=4, ranks=ranks) as llm:
                    ...

    Args:
        num_ranks: rank processes to start.
        launcher: "local", "ray", or a launcher object.
        ray_address: an existing cluster; None starts one on this machine, unless this process is connected to one.
        placement_group: with "ray", the caller's own group to start the ranks in; it is not removed.
        threads_per_rank: compute threads; None divides this host's cores.
        start_timeout_s: seconds within which all must have started.

    Raises:
        LaunchError: they did not start in time.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        launcher: str | Launcher = "local",
        ray_address: str | None = None,
        placement_group: object | None = None,
        threads_per_rank: int | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        group = callers_group(launcher, placement_group)
        self.loop_thread = LoopThread("epruntime-ranks")
        try:
            self.pool: RankPool = self.loop_thread.run(
                RankPool.start(
                    num_ranks,
                    launcher=launcher,
                    ray_address=ray_address,
                    placement_group=group,
                    threads_per_rank=threads_per_rank,
                    start_timeout_s=start_timeout_s,
                )
            )
        except BaseException:
            self.loop_thread.close()
            raise
        self._stop = call_at_end(self, self.loop_thread, _stop, self.loop_thread, self.pool)

    def shutdown(self) -> None:
        """Stops the ranks, and with them every engine that uses them. Safe to call again."""
        self._stop()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _stop(loop_thread: LoopThread, pool: RankPool) -> None:
    try:
        loop_thread.run(pool.stop())
    finally:
        loop_thread.close()
