"""RankLoop over a socket pair, with a model of dice: states, failures, and what the coordinator is told."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from epruntime.comm.control import ControlClient, RankBootstrap
from epruntime.comm.frames import FrameReader, Message, decode, encode
from epruntime.comm.interfaces import HostAddress
from epruntime.comm.lifeline import EXIT_ORPHANED
from epruntime.comm.progress import Stamps
from epruntime.errors import CheckpointError, RankLostError
from epruntime.plan import StepPlan, StepResult
from epruntime.worker.letters import Configure, Load
from epruntime.worker.rank import RankLoop

TIMEOUT_S = 60.0


class DiceRunner:
    def __init__(self) -> None:
        self.error: Exception | None = None

    def step(self, plan: StepPlan) -> StepResult:
        if self.error is not None:
            raise self.error
        return StepResult(
            step=plan.step,
            generation=plan.generation,
            rids=np.array([7]),
            tokens=np.array([plan.step]),
            finish=np.array([0]),
        )


class DiceModel:
    def __init__(self) -> None:
        self.runner = DiceRunner()
        self.closed = False

    def describe(self) -> dict[str, Any]:
        return {"num_kv_blocks": 5, "info": {"model_type": "dice"}}

    def stats(self) -> dict[str, Any]:
        return {"moe": {"layers": {}}}

    def close(self) -> None:
        self.closed = True


class DiceGeneration:
    """Fails to open or to load when the letters say so."""

    def __init__(self, config: Configure) -> None:
        if config.transport == "unwilling":
            raise ValueError("no such road")
        self.config, self.closed = config, 0
        self.models: list[DiceModel] = []
        self.transport_name = "dice"
        self.address = HostAddress(address="10.0.0.7", interface="eth9", chosen_by="a fake")

    def load(self, letter: Load, progress: Any) -> DiceModel:
        for done in range(1, 4):
            progress("weights", done, 3)
        if letter.model == "damaged":
            raise CheckpointError("tensor x is missing")
        self.models.append(DiceModel())
        return self.models[-1]

    def close(self) -> None:
        self.closed += 1


class Coordinator:
    """The other end: sends messages and reads what comes back."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(TIMEOUT_S)
        self.sock, self.reader, self.inbox = ours, FrameReader(), []
        self.generations: list[DiceGeneration] = []
        client = ControlClient(theirs, RankBootstrap(address="unix:none", secret=b"", slot=0, host="h"))
        self.loop = RankLoop(client, open_generation=self._open, stamps=Stamps())
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.ids = 0

    def _open(self, config: Configure) -> DiceGeneration:
        self.generations.append(DiceGeneration(config))
        return self.generations[-1]

    def _run(self) -> None:
        self.exit_code = self.loop.run()

    def send(self, type: str, **body: Any) -> int:
        self.ids += 1
        for part in encode({"type": type, "id": self.ids, **body}):
            self.sock.sendall(part)
        return self.ids

    def recv(self) -> Message:
        while not self.inbox:
            count = self.sock.recv_into(self.reader.get_buffer())
            assert count, "the rank closed the connection"
            self.inbox += [decode(payload) for payload in self.reader.payloads(count)]
        return self.inbox.pop(0)

    def call(self, type: str, **body: Any) -> Message:
        message_id = self.send(type, **body)
        while True:
            reply = self.recv()
            assert reply["id"] == message_id
            if reply["type"] != "progress":
                return reply

    def configure(self, generation: int, **changes: Any) -> Message:
        body = {
            "generation": generation,
            "ep_rank": 0,
            "world_size": 1,
            "store_host": "",
            "store_port": 0,
            "hosts": ["h"],
            "transport": "auto",
            "experts_backend": "auto",
            "invariance": "strict",
            "exchange_budget_tokens": 8,
            "step_timeout_s": 5.0,
            "threads": None,
        }
        return self.call("configure", **{**body, **changes})

    def load(self, model: str = "dice") -> Message:
        return self.call(
            "load",
            model=model,
            dtype="auto",
            max_model_len=None,
            block_size=16,
            num_kv_blocks=None,
            kv_cache_memory_bytes=None,
            max_num_seqs=2,
            max_num_batched_tokens=8,
            ranks_on_host=1,
        )

    def plan(self, step: int, generation: int) -> Message:
        return self.call("plan", plan=StepPlan(step=step, generation=generation).to_wire())

    def end(self) -> int | None:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        return self.exit_code


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    threads = torch.get_num_threads()
    c = Coordinator()
    yield c
    c.sock.close()
    c.end()
    torch.set_num_threads(threads)  # `configure` sets it for the whole process


def test_the_whole_life(coordinator):
    configured = coordinator.configure(4)
    assert configured["transport"] == "dice"
    assert (configured["address"], configured["interface"]) == ("10.0.0.7", "eth9")
    loaded = coordinator.load()
    assert loaded["type"] == "loaded"
    assert loaded["num_kv_blocks"] == 5
    for step in (10, 11):
        result = StepResult.from_wire(coordinator.plan(step, 4)["result"])
        assert (result.step, result.generation, result.tokens.tolist()) == (step, 4, [step])
    stats = coordinator.call("stats")
    assert stats["moe"] == {"layers": {}}
    assert stats["memory"]["pss"] > 0
    assert coordinator.call("unload")["type"] == "unloaded"
    assert coordinator.generations[0].models[0].closed
    assert coordinator.load()["type"] == "loaded", "another model in the same generation, and steps count anew"
    assert coordinator.plan(0, 4)["type"] == "result"
    coordinator.send("shutdown")
    assert coordinator.end() == 0
    assert coordinator.generations[0].closed == 1
    assert coordinator.generations[0].models[1].closed


def test_progress_comes_before_the_reply(coordinator):
    coordinator.configure(1)
    message_id = coordinator.send(
        "load",
        model="dice",
        dtype="auto",
        max_model_len=None,
        block_size=16,
        num_kv_blocks=None,
        kv_cache_memory_bytes=None,
        max_num_seqs=2,
        max_num_batched_tokens=8,
    )
    messages = [coordinator.recv() for _ in range(3)]
    assert [m["type"] for m in messages] == ["progress", "progress", "loaded"]
    assert {m["id"] for m in messages} == {message_id}
    assert (messages[1]["what"], messages[1]["done"], messages[1]["total"]) == ("weights", 3, 3), "the last is sent"


def test_a_new_generation_closes_the_old_model_and_transport_first(coordinator):
    coordinator.configure(1)
    coordinator.load()
    coordinator.configure(2)
    old = coordinator.generations[0]
    assert old.closed == 1
    assert old.models[0].closed
    assert coordinator.plan(0, 2)["kind"] == "EngineDeadError"  # nothing is loaded in the new one
    coordinator.load()
    refused = coordinator.plan(0, 1)
    assert refused["kind"] == "ProtocolError"
    assert "generation 1" in refused["message"]
    assert coordinator.plan(0, 2)["type"] == "result", "a stale plan does no harm"


def test_a_generation_number_is_used_once(coordinator):
    coordinator.configure(3)
    coordinator.load()
    assert coordinator.configure(3)["kind"] == "ProtocolError"
    assert coordinator.plan(0, 3)["type"] == "result", "and the refused message changes nothing"


def test_failed_configure_and_load_leave_the_rank_usable(coordinator):
    failed = coordinator.configure(1, transport="unwilling")
    assert failed["type"] == "failed"
    assert failed["where"] == "configure"
    assert "no such road" in failed["message"]
    assert coordinator.load()["kind"] == "ProtocolError"
    coordinator.configure(2)
    failed = coordinator.load("damaged")
    assert (failed["kind"], failed["where"]) == ("CheckpointError", "load")
    assert "tensor x" in failed["message"]
    assert "Traceback" in failed["traceback"]
    assert coordinator.load()["type"] == "loaded"
    assert coordinator.plan(0, 2)["type"] == "result"


def test_a_failed_plan_ends_the_generation_and_names_the_step(coordinator):
    coordinator.configure(1)
    coordinator.load()
    generation = coordinator.generations[0]
    coordinator.plan(8, 1)
    generation.models[0].runner.error = RankLostError(slot=1, host="other", detail="connection reset in layer 3")
    failed = coordinator.plan(9, 1)
    assert (failed["kind"], failed["where"]) == ("RankLostError", "step 9")
    assert failed["lost"] == {"slot": 1, "host": "other", "detail": "connection reset in layer 3"}
    assert generation.closed == 1, "nobody waits for this rank any longer"
    generation.models[0].runner.error = None
    late = coordinator.plan(10, 1)
    assert late["kind"] == "EngineDeadError"
    assert "step 9" in late["message"]
    assert coordinator.load()["kind"] == "ProtocolError"
    coordinator.configure(2)
    assert generation.closed == 1, "closed once"
    coordinator.load()
    assert coordinator.plan(0, 2)["type"] == "result"


def test_a_missing_step_is_noticed(coordinator):
    coordinator.configure(1)
    coordinator.load()
    coordinator.plan(0, 1)
    failed = coordinator.plan(2, 1)
    assert failed["kind"] == "ProtocolError"
    assert "step 2" in failed["message"]
    assert "step 1" in failed["message"]


def test_foreign_errors_and_unknown_messages_are_answered(coordinator):
    assert coordinator.call("dance")["kind"] == "ProtocolError"
    assert coordinator.call("plan", plan=[1, 2])["kind"] == "EngineDeadError"
    assert coordinator.call("unload")["type"] == "unloaded", "nothing to unload is not an error"
    assert coordinator.call("load", model="dice")["kind"] == "ProtocolError"


def test_a_coordinator_that_goes_away_ends_the_rank(coordinator):
    coordinator.configure(1)
    coordinator.load()
    coordinator.sock.close()
    assert coordinator.end() == EXIT_ORPHANED
    assert coordinator.generations[0].closed == 1
    assert coordinator.generations[0].models[0].closed
