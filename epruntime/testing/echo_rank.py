"""A rank without a model, for tests and benchmarks of the control channel and the launchers. Needs no torch.

It answers `echo`, and misbehaves on request: see `_act`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from epruntime.comm.beats import publish
from epruntime.comm.control import ControlClient, RankBootstrap, failed, receive_bootstrap
from epruntime.comm.lifeline import EXIT_ORPHANED
from epruntime.comm.progress import Phase, Stamps
from epruntime.errors import ConnectionClosedError, UnsupportedModelError

#: the kernel signature it shows; with `:SLOT` in front only on that slot.
SIGNATURE_VARIABLE = "ECHO_RANK_SIGNATURE"
#: "SLOT": that rank ends before it joins; "SLOT:wait": it never joins.
ABSENT_VARIABLE = "ECHO_RANK_ABSENT"


def run_rank(bootstrap: RankBootstrap) -> int:
    """Joins, then answers messages until `shutdown`; returns the exit code, as a real rank."""
    absent = os.environ.get(ABSENT_VARIABLE, "")
    if absent == str(bootstrap.slot):
        print("ERROR this rank was told not to join", flush=True)
        sys.exit(3)
    if absent == f"{bootstrap.slot}:wait":
        time.sleep(600)
    signature, stamps = _signature(bootstrap.slot), Stamps()
    with ControlClient.connect(bootstrap, signature=signature) as client:
        client.exit_on_hangup()
        heartbeats = publish(bootstrap, stamps, signature=signature)
        while True:
            try:
                message = client.recv()
            except ConnectionClosedError:
                return EXIT_ORPHANED
            if message["type"] == "shutdown":
                heartbeats.stop()
                return 0
            stamps.enter(Phase.FORWARD, step=message["id"], note=message["type"])
            _act(client, bootstrap, message)
            stamps.enter(Phase.IDLE)


def _act(client: ControlClient, bootstrap: RankBootstrap, message: dict[str, Any]) -> None:
    reply: dict[str, Any] = {"type": "done", "id": message["id"]}
    match message["type"]:
        case "echo":
            reply["data"] = message.get("data")
        case "configure":
            reply["type"] = "configured"
        case "whoami":
            reply |= {
                "pid": os.getpid(),
                "sid": os.getsid(0),
                "threads": bootstrap.threads,
                "device_index": bootstrap.device_index,
                "argv": sys.orig_argv,
                "environment": dict(os.environ),
            }
        case "progress":
            for done in range(message["total"]):
                client.send(
                    {"type": "progress", "id": message["id"], "what": "tests", "done": done, "total": message["total"]}
                )
        case "fail":
            error: Exception = UnsupportedModelError("dense") if message["kind"] == "refused" else ValueError("oops")
            reply = failed(message["id"], error, where="test")
        case "print":
            print(message["text"], flush=True)
        case "sleep":
            time.sleep(message["seconds"])
        case "exit":
            print("last words", flush=True)
            os._exit(message["code"])
        case "hang up":
            client.close()
            time.sleep(600)
        case "be stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            client.send(reply)
            time.sleep(600)
        case "have a child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            reply["pid"] = child.pid
        case "answer late":  # a reply of the generation before
            reply["generation"] = client.generation - 1
    client.send(reply)


def _signature(slot: int) -> dict[str, str]:
    text = os.environ.get(SIGNATURE_VARIABLE, "same")
    only, _, value = text.rpartition(":")
    return {"extension": value if only in ("", str(slot)) else "same"}


if __name__ == "__main__":
    sys.exit(run_rank(receive_bootstrap()))
