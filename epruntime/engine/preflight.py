"""Preflight: asks ranks and network for facts before weights are read, and ends the start where it cannot work.

before_meeting: clock -> facts -> calls -> checks          (then `configure`: the ranks meet)
after_meeting:  payloads through the transport -> checks -> times of pairs -> checks -> Verdict
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from typing import Any

from epruntime.config import EngineConfig
from epruntime.engine.gather import gather
from epruntime.engine.memory_need import memory_needs
from epruntime.errors import PreflightError
from epruntime.launchers.handle import RankHandle
from epruntime.models.info import ModelInfo
from epruntime.preflight import checks_exchange, checks_hosts, checks_network, checks_software
from epruntime.preflight.checks_network import Call
from epruntime.preflight.facts import MachineFacts, RankFacts, Setting
from epruntime.preflight.findings import Finding
from epruntime.preflight.pairs import PairTime, Round, merged, rounds_again, rounds_to_wire, schedule, with_sizes
from epruntime.preflight.payload import Mismatch
from epruntime.preflight.verdict import Verdict, worst_first
from epruntime.worker.machine import versions

logger = logging.getLogger("epruntime.engine.preflight")

#: seconds within which every rank must have answered one question; a rank that has not is killed, and named.
ANSWER_S = 15.0
#: seconds that a call from rank to rank may take; a firewall that drops packets is found by it.
CALL_S = 3.0
#: seconds after which no further pairs are timed; the first pass over all pairs gets half of it.
TIMES_S = 4.0
#: bytes of probes that are timed before the clock is looked at again.
_AT_ONCE_BYTES = 256 << 10
_NUM_CLOCK_READINGS = 5
#: times that pairs which look slow are timed again.
_NUM_SECOND_LOOKS = 3
#: seconds that ranks get to stop listening; one that does not is no reason to wait.
_CLOSE_S = 1.0


class Preflight:
    """One preflight of one generation's ranks.

    Args:
        info: of the model that is about to be loaded.
        log: the result, when it is there; else whoever asked for it shows it.

    Attributes:
        verdict: as far as it has come.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, *, log: bool = True) -> None:
        self._config, self._info, self._log = config, info, log
        self._setting = Setting(
            versions=versions(),
            launcher=config.parallel.launcher,
            model=str(config.model.model),
            hidden_size=info.hidden_size,
            top_k=info.top_k,
            num_moe_layers=len(info.moe_layers),
            num_physical_experts=info.num_experts + config.parallel.num_redundant_experts,
            dtype_bytes=info.dtype_bytes,
            step_tokens=config.scheduler.max_num_batched_tokens,
            step_timeout_s=config.parallel.step_timeout_s,
        )
        self._began = time.monotonic()
        self._paused_s = 0.0  # the meeting between the two halves is not preflight's
        self.verdict = Verdict(ranks=(), findings=())

    async def before_meeting(self, ranks: Sequence[RankHandle], store_address: tuple[str, int]) -> None:
        """Everything that needs no transport.

        Args:
            ranks: by ep_rank. store_address: where they will meet.

        Raises:
            PreflightError: with errors among the findings.
            RankLostError: a rank died, or did not answer in time and was killed.
        """
        self._began = time.monotonic()
        nonce = secrets.token_bytes(16)
        clocks = await self._clocks(ranks)
        try:
            machines = await self._machines(ranks, store_address, nonce)
            calls = await self._calls(ranks, machines, store_address, nonce)
        finally:
            await asyncio.wait([rank.call("preflight", part="close") for rank in ranks], timeout=_CLOSE_S)
        needs = memory_needs(
            self._config, self._info, [rank.info.host for rank in ranks], [m.free_memory for m in machines]
        )
        facts = tuple(
            RankFacts(
                slot=rank.info.slot,
                host=rank.info.host,
                machine=machine,
                need=need,
                clock_offset_s=offset_s,
                clock_error_s=error_s,
            )
            for rank, machine, need, (offset_s, error_s) in zip(ranks, machines, needs, clocks, strict=True)
        )
        setting = self._setting
        self._conclude(
            facts,
            [
                *checks_software.check_versions(facts, setting),
                *checks_software.check_kernels(facts),
                *checks_software.check_checkpoint(facts, setting),
                *checks_hosts.check_host_names(facts),
                *checks_network.check_addresses(facts),
                *checks_network.check_interfaces(facts),
                *checks_network.check_calls(calls, facts),
                *checks_hosts.check_memory(facts),
                *checks_hosts.check_shared_memory(facts, setting),
                *checks_hosts.check_open_files(facts),
                *checks_hosts.check_locked_memory(facts, setting),
                *checks_hosts.check_cores(facts),
                *checks_hosts.check_idle_ranks(facts, self._setting),
                *checks_hosts.check_clocks(facts),
            ],
        )
        self._stop_on_errors()

    async def after_meeting(self, ranks: Sequence[RankHandle], transport: str) -> None:
        """What the transport does, and how fast; then the result is logged.

        Args:
            ranks: as before; they are configured now. transport: name of the one that was chosen.

        Raises:
            PreflightError, RankLostError: as before.
        """
        before = self.verdict
        facts, began = before.ranks, time.monotonic()
        mismatches = await self._mismatches(ranks)
        times: list[PairTime] = []
        found = checks_exchange.check_mismatches(mismatches, facts)
        if not found:
            times = await self._times(ranks, facts)
            found += checks_exchange.check_times(times, facts)
            found += checks_exchange.check_step_time(times, facts, self._setting)
            found += checks_exchange.check_measured(times, len(facts))
        self._began = began - before.seconds
        self._conclude(facts, [*before.findings, *found], times=tuple(times), transport=transport)
        self._stop_on_errors()
        if self._log:
            for finding in self.verdict.warnings:
                logger.warning("preflight: %s", finding)
            logger.info("%s", self.verdict.summary())

    def _conclude(
        self,
        facts: tuple[RankFacts, ...],
        findings: Sequence[Finding],
        *,
        times: tuple[PairTime, ...] = (),
        transport: str = "",
    ) -> None:
        self.verdict = Verdict(
            ranks=facts,
            findings=worst_first(findings),
            times=times,
            transport=transport,
            seconds=time.monotonic() - self._began,
        )

    def _stop_on_errors(self) -> None:
        if not self.verdict.ok:
            lines = [
                self.verdict.summary(),
                *(f"{f.severity}: {f}" for f in (*self.verdict.errors, *self.verdict.warnings)),
            ]
            raise PreflightError("\n  ".join(lines), verdict=self.verdict)

    async def _ask(self, ranks: Sequence[RankHandle], part: str, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        calls = [rank.call("preflight", part=part, **body) for rank, body in zip(ranks, bodies, strict=True)]
        return await gather(
            ranks, calls, what=f"preflight ({part})", limit_s=ANSWER_S, option="a fixed limit of preflight"
        )

    async def _clocks(self, ranks: Sequence[RankHandle]) -> list[tuple[float, float]]:
        """(offset, error) in seconds of each rank's wall clock, as NTP measures it (RFC 5905, section 8): the reading
        with the shortest way there and back counts, and half of that way is what it may be wrong by."""

        async def best_of(rank: RankHandle) -> tuple[float, float]:
            readings = [await self._clock_reading(rank) for _ in range(_NUM_CLOCK_READINGS)]
            return min(readings, key=lambda reading: reading[1])

        tasks = [asyncio.ensure_future(best_of(rank)) for rank in ranks]
        for task in tasks:  # of several errors one is raised; asyncio would complain of the others
            task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        try:
            return await gather(
                ranks, tasks, what="preflight (clock)", limit_s=ANSWER_S, option="a fixed limit of preflight"
            )
        finally:
            for task in tasks:
                task.cancel()

    async def _clock_reading(self, rank: RankHandle) -> tuple[float, float]:
        sent, began = time.time(), time.perf_counter()
        reply = await rank.call("preflight", part="clock")
        half_s = (time.perf_counter() - began) / 2
        return float(reply["time"]) - (sent + half_s), half_s

    async def _machines(
        self, ranks: Sequence[RankHandle], store_address: tuple[str, int], nonce: bytes
    ) -> list[MachineFacts]:
        host, port = store_address
        bodies = [
            {
                "model": self._setting.model,
                "several": len(ranks) > 1,
                "store_host": host,
                "store_port": port,
                "threads": self._config.parallel.threads_per_rank,
                "nonce": nonce,
                "slot": rank.info.slot,
            }
            for rank in ranks
        ]
        return [MachineFacts.from_wire(reply["facts"]) for reply in await self._ask(ranks, "facts", bodies)]

    async def _calls(
        self,
        ranks: Sequence[RankHandle],
        machines: Sequence[MachineFacts],
        store_address: tuple[str, int],
        nonce: bytes,
    ) -> list[Call]:
        """Every rank calls every other one that has an address, and the store."""
        if len(ranks) < 2:
            return []
        lines = [(rank.info.slot, m.address, m.port) for rank, m in zip(ranks, machines, strict=True) if m.port]
        store = (-1, *store_address)
        peers = [[line for line in (*lines, store) if line[0] != rank.info.slot] for rank in ranks]
        bodies = [{"peers": listed, "nonce": nonce, "limit_s": CALL_S} for listed in peers]
        replies = await self._ask(ranks, "calls", bodies)
        return [
            Call(
                source=rank.info.slot,
                target=slot,
                address=f"{host}:{port}",
                answered_by=answer["slot"],
                error=answer["error"],
            )
            for rank, listed, reply in zip(ranks, peers, replies, strict=True)
            for (slot, host, port), answer in zip(listed, reply["answers"], strict=True)
        ]

    async def _mismatches(self, ranks: Sequence[RankHandle]) -> list[Mismatch]:
        seed = secrets.randbits(30)  # what a faulty transport still holds of an earlier run must not pass
        replies = await self._ask(ranks, "exchange", [{"seed": seed}] * len(ranks))
        return [Mismatch(**mismatch) for reply in replies for mismatch in reply["mismatches"]]

    async def _times(self, ranks: Sequence[RankHandle], facts: Sequence[RankFacts]) -> list[PairTime]:
        """All pairs with a small probe, then those that are fast enough with larger and larger ones, then those that
        look slow again, of which the best counts."""
        end = time.monotonic() + TIMES_S
        planned = rounds = schedule([rank.host for rank in facts])
        times = last = await self._pass(ranks, rounds, end - TIMES_S / 2)
        while (rounds := with_sizes(rounds, last)) and time.monotonic() < end:
            last = await self._pass(ranks, rounds, end)
            times = merged([*times, *last])
        for _ in range(_NUM_SECOND_LOOKS):
            rounds = rounds_again(planned, times, checks_exchange.suspects(times, facts))
            if rounds and time.monotonic() < end:
                times = merged([*times, *await self._pass(ranks, rounds, end)])
        return merged(times)

    async def _pass(self, ranks: Sequence[RankHandle], rounds: Sequence[Round], end: float) -> list[PairTime]:
        """Times the pairs of all rounds, or of as many as there are before `end`, but at least of the first ones."""
        times: list[PairTime] = []
        largest = max((probe.num_bytes for probes in rounds for probe in probes), default=1)
        at_once = max(1, _AT_ONCE_BYTES // largest)
        for start in range(0, len(rounds), at_once):
            if times and time.monotonic() > end:
                break
            wire = rounds_to_wire(rounds[start : start + at_once])
            for reply in await self._ask(ranks, "times", [{"rounds": wire}] * len(ranks)):
                times += [PairTime(**measured) for measured in reply["times"]]
        return times
