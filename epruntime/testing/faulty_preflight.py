"""A rank that is found wanting in preflight: `python -m epruntime.testing.faulty_preflight`.

The environment variable EPRUNTIME_TEST_PREFLIGHT names a file with "FAULT" or "FAULT SLOT" in it, which is read anew
for each `preflight` message, so that one pool serves many tests. An absent or empty file is no fault.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from epruntime.worker.process import rank_process

FAULT_FILE = "EPRUNTIME_TEST_PREFLIGHT"


def _fault(slot: int) -> str:
    """What is wrong with this rank now; "" for nothing."""
    try:
        words = Path(os.environ[FAULT_FILE]).read_text().split()
    except FileNotFoundError:
        return ""
    return words[0] if words and (len(words) == 1 or int(words[1]) == slot) else ""


def _changed_facts(facts: dict[str, Any], fault: str) -> dict[str, Any]:
    changes: dict[str, Callable[[], dict[str, Any]]] = {
        "old-transformers": lambda: {"versions": {**facts["versions"], "transformers": "5.0.0"}},
        "little-memory": lambda: {"free_memory": 1 << 20},
        "few-files": lambda: {"open_files": 10},
        "other-checkpoint": lambda: {"checkpoint": "0" * 64},
        "docker-address": lambda: {"address": "172.17.0.1", "interface": "docker0"},
        "closed-port": lambda: {"port": 1},
    }
    return {**facts, **changes[fault]()} if fault in changes else facts


def make_faulty(slot: int) -> None:
    """Puts the faults into this process, the rank of `slot`."""
    from epruntime.testing import faulty_transport
    from epruntime.worker.preflight import RankPreflight

    transports = {
        "order": faulty_transport.WrongOrder, "bits": faulty_transport.FlippedBit,
        "counts": faulty_transport.WrongCounts,
    }  # fmt: skip
    true = RankPreflight.answer

    def answer(self: RankPreflight, message: Any, transport: Any) -> Any:
        fault, part = _fault(slot), message["part"]
        if transport is not None and fault in transports:
            transport = transports[fault](transport)
        if part == "exchange" and fault == "stuck":
            time.sleep(600)
        if part == "exchange" and fault == "dies":
            os._exit(9)
        reply = true(self, message, transport)
        if part == "facts":
            reply = {"facts": _changed_facts(reply["facts"], fault)}
        if part == "clock" and fault == "clock":
            reply = {"time": reply["time"] + 100.0}
        return reply

    RankPreflight.answer = answer  # type: ignore[method-assign]


if __name__ == "__main__":
    rank_process(make_faulty)
