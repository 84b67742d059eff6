"""RankPreflight: a rank's part in preflight, one `preflight` message after the other.

before `configure`: clock, facts (and listens), calls to the other ranks, close      after it: exchange, times
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from epruntime.comm.frames import Message
from epruntime.comm.progress import Stamps
from epruntime.comm.transport import Transport
from epruntime.errors import ProtocolError
from epruntime.preflight.exchange import check_exchange, time_pairs
from epruntime.preflight.pairs import rounds_from_wire
from epruntime.worker.machine import machine_facts
from epruntime.worker.peer_calls import Listener, Peer, call_all


class RankPreflight:
    """Answers `preflight` messages. `stamps`: where this rank says what it does."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        self._listener: Listener | None = None

    def answer(self, message: Message, transport: Transport | None) -> Message:
        """The body of the reply.

        Args:
            transport: of the generation; None before there is one.

        Raises:
            ProtocolError: an unknown part, or one that needs a transport comes before there is one.
            RankLostError, EngineDeadError: the exchange broke.
        """
        part = message.get("part")
        self._stamps.note(str(part))
        before: dict[Any, Callable[[Message], Message]] = {
            "clock": self._clock, "facts": self._facts, "calls": self._calls, "close": self._close,
        }  # fmt: skip
        after: dict[Any, Callable[[Message, Transport], Message]] = {"exchange": self._exchange, "times": self._times}
        if part in before:
            return before[part](message)
        if part not in after:
            raise ProtocolError(f"preflight part {part!r}: unknown; known: {', '.join([*before, *after])}")
        if transport is None:
            raise ProtocolError(f"preflight part {part!r} needs a configured generation")
        return after[part](message, transport)

    def close(self) -> None:
        """Calls are not answered any more. Safe to call again."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()

    def _clock(self, message: Message) -> Message:
        return {"time": time.time()}

    def _facts(self, message: Message) -> Message:
        self.close()
        facts = machine_facts(
            model=message["model"],
            several=message["several"],
            store_host=message["store_host"],
            store_port=message["store_port"],
            threads=message["threads"],
        )
        port = 0
        if facts["address"]:
            try:
                self._listener = Listener(facts["address"], nonce=message["nonce"], slot=message["slot"])
                port = self._listener.port
            except OSError as error:
                facts |= {"address": "", "address_by": f"nothing can listen at {facts['address']}: {error}"}
        return {"facts": {**facts, "port": port}}

    def _calls(self, message: Message) -> Message:
        peers = [Peer(slot=slot, host=host, port=port) for slot, host, port in message["peers"]]
        answers = call_all(peers, nonce=message["nonce"], timeout_s=message["limit_s"])
        return {"answers": [asdict(answer) for answer in answers]}

    def _close(self, message: Message) -> Message:
        self.close()
        return {}

    def _exchange(self, message: Message, transport: Transport) -> Message:
        found = check_exchange(transport, self._stamps, seed=message["seed"])
        return {"mismatches": [asdict(mismatch) for mismatch in found]}

    def _times(self, message: Message, transport: Transport) -> Message:
        times = time_pairs(transport, self._stamps, rounds_from_wire(message["rounds"]))
        return {"times": [asdict(time) for time in times]}
