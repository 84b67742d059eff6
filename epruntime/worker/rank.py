"""RankLoop: one rank's conversation with the coordinator, message after message.

recv -> handler by type: preflight, configure, load, plan, stats, counters, trace, unload, shutdown -> reply of the same
id, or `failed`

unconfigured --configure--> configured --load--> serving --plan fails--> failed --configure--> configured ...
A failed configure or load leaves the rank usable. A failed plan ends the generation: the transport is
closed, so that no other rank waits for this one longer than it must.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from epruntime.comm.frames import Message
from epruntime.comm.interfaces import HostAddress
from epruntime.comm.lifeline import EXIT_ORPHANED
from epruntime.comm.messages import failed
from epruntime.comm.progress import Phase, Stamps
from epruntime.comm.transport import Transport
from epruntime.errors import ConnectionClosedError, EngineDeadError, ProtocolError
from epruntime.plan import StepPlan, StepResult
from epruntime.worker.letters import Configure, Load, parse
from epruntime.worker.memory import give_back, process_memory_bytes, resident_memory_bytes
from epruntime.worker.preflight import RankPreflight

logger = logging.getLogger("epruntime.worker.rank")

_PROGRESS_INTERVAL_S = 0.1


class Control(Protocol):
    """The part of ControlClient that the loop uses."""

    def recv(self) -> Message: ...
    def send(self, message: Message) -> None: ...


class Runner(Protocol):
    def step(self, plan: StepPlan) -> StepResult: ...


class Served(Protocol):
    """A model ready to step; see epruntime.worker.generation.ServedModel."""

    @property
    def runner(self) -> Runner: ...
    def describe(self) -> dict[str, Any]: ...
    def stats(self) -> dict[str, Any]: ...
    def counters(self) -> dict[str, Any]: ...
    def take_trace(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


class Membership(Protocol):
    """A configured generation; see epruntime.worker.generation.Generation."""

    @property
    def transport_name(self) -> str: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def address(self) -> HostAddress | None: ...
    def load(self, letter: Load, progress: Callable[[str, int, int], None]) -> Served: ...
    def close(self) -> None: ...


class RankLoop:
    """Answers the coordinator until it says `shutdown` or is gone.

    Args:
        control: the connection.
        open_generation: joins the generation that a `configure` message describes.
        stamps: where this rank says what it does.
        threads: compute threads unless `configure` names a number.
    """

    def __init__(
        self, control: Control, *, open_generation: Callable[[Configure], Membership], stamps: Stamps, threads: int = 1
    ) -> None:
        self._control, self._open_generation, self._threads = control, open_generation, threads
        self._stamps = stamps
        self._generation_number = -1
        self._membership: Membership | None = None
        self._served: Served | None = None
        self._next_step: int | None = None
        self._failure = ""  # why this generation takes no more plans
        self._stopped = False
        self._preflight = RankPreflight(stamps)
        self._handlers: dict[str, Callable[[Message], Message | None]] = {
            "preflight": self._check,
            "configure": self._configure,
            "load": self._load,
            "plan": self._plan,
            "stats": self._stats,
            "counters": self._counters,
            "trace": self._trace,
            "unload": self._unload,
            "shutdown": self._shutdown,
        }

    def run(self) -> int:
        """Returns the exit code: 0 after `shutdown`, EXIT_ORPHANED if the coordinator went away."""
        try:
            while not self._stopped:
                self._answer(self._control.recv())
            return 0
        except ConnectionClosedError as error:
            logger.warning("this rank ends: %s", error)
            return EXIT_ORPHANED
        finally:
            self._preflight.close()
            self._leave()

    def _answer(self, message: Message) -> None:
        over = bool(self._failure)  # what is refused since then is no news
        try:
            handler = self._handlers.get(message["type"])
            if handler is None:
                raise ProtocolError(f"unknown message type {message['type']!r}; known: {', '.join(self._handlers)}")
            reply = handler(message)
            if reply is not None:
                self._control.send({"id": message.get("id", 0), **reply})
        except ConnectionClosedError:
            raise
        except Exception as error:  # noqa: BLE001 - the coordinator waits for an answer, whatever went wrong
            where = str(self._stamps.read())
            level = logging.DEBUG if over and self._failure else logging.ERROR
            logger.log(level, "%s failed: %s: %s", where, type(error).__name__, error)
            self._control.send(failed(message.get("id", 0), error, where=where))
        finally:
            self._stamps.enter(Phase.IDLE)

    def _check(self, message: Message) -> Message:
        self._stamps.enter(Phase.PREFLIGHT)
        transport = None if self._membership is None or self._failure else self._membership.transport
        try:
            return {"type": "preflight", **self._preflight.answer(message, transport)}
        except EngineDeadError as error:  # the exchange is broken, and with it the generation
            self._fail(f"generation {self._generation_number} ended in preflight: {error}")
            raise

    def _configure(self, message: Message) -> Message:
        self._stamps.enter(Phase.CONFIGURE)
        config = parse(Configure, message)
        if config.generation <= self._generation_number:
            raise ProtocolError(
                f"configure for generation {config.generation}, but this rank has been in {self._generation_number}: "
                "a generation's number is used once"
            )
        self._leave()
        self._generation_number = config.generation
        torch.set_num_threads(config.threads or self._threads)
        self._membership = self._open_generation(config)
        address = self._membership.address
        told = {} if address is None else {"address": address.address, "interface": address.interface}
        return {"type": "configured", "transport": self._membership.transport_name, **told}

    def _load(self, message: Message) -> Message:
        self._stamps.enter(Phase.LOAD)
        if self._membership is None or self._failure:
            raise ProtocolError(f"load needs a configured generation{self._failure and f'; {self._failure}'}")
        letter = parse(Load, message)
        self._drop_model()
        try:
            self._served = self._membership.load(letter, self._progress_sender(message.get("id", 0)))
        finally:
            if self._served is None:
                give_back()
        gc.collect()  # what the model leaves is old from now on, and no reason to collect in the middle of a step
        return {"type": "loaded", **self._served.describe()}

    def _plan(self, message: Message) -> Message:
        if self._served is None or self._failure:
            raise EngineDeadError(self._failure or "no model is loaded on this rank")
        plan = StepPlan.from_wire(message["plan"])
        if plan.generation != self._generation_number:
            raise ProtocolError(
                f"plan of step {plan.step} is of generation {plan.generation}, this rank is in "
                f"{self._generation_number}"
            )
        self._stamps.enter(Phase.FORWARD, step=plan.step)
        try:
            if self._next_step is not None and plan.step != self._next_step:
                raise ProtocolError(f"plan of step {plan.step} came where step {self._next_step} was due")
            result = self._served.runner.step(plan)
        except Exception as error:
            self._fail(f"generation {self._generation_number} ended at {self._stamps.read()}: {error}")
            raise
        self._next_step = plan.step + 1
        return {"type": "result", "result": result.to_wire()}

    def _stats(self, message: Message) -> Message:
        self._stamps.enter(Phase.STATS)
        served = {} if self._served is None else self._served.stats()
        return {"type": "stats", "memory": process_memory_bytes(), "threads": torch.get_num_threads(), **served}

    def _counters(self, message: Message) -> Message:
        """The part of `stats` that is cheap enough to be asked for every few seconds while steps run."""
        self._stamps.enter(Phase.STATS)
        served = {} if self._served is None else self._served.counters()
        return {"type": "counters", "rss": resident_memory_bytes(), **served}

    def _trace(self, message: Message) -> Message:
        self._stamps.enter(Phase.STATS)
        if self._served is None:
            raise ProtocolError("trace: no model is loaded on this rank")
        return {"type": "trace", **self._served.take_trace()}

    def _unload(self, message: Message) -> Message:
        self._stamps.enter(Phase.UNLOAD)
        self._drop_model()
        return {"type": "unloaded"}

    def _shutdown(self, message: Message) -> None:
        self._stopped = True  # the end of this process is the answer

    def _fail(self, reason: str) -> None:
        self._failure = reason
        assert self._membership is not None
        try:
            self._membership.close()
        except Exception as error:  # noqa: BLE001 - the step's own error is the one to report
            logger.warning("closing the transport after a failed step: %s: %s", type(error).__name__, error)

    def _leave(self) -> None:
        """Out of the generation: no model, no transport."""
        self._drop_model()
        membership, self._membership = self._membership, None
        closed, self._failure = bool(self._failure), ""
        if membership is not None and not closed:
            membership.close()

    def _drop_model(self) -> None:
        served, self._served, self._next_step = self._served, None, None
        if served is not None:
            served.close()
            del served
            give_back()

    def _progress_sender(self, message_id: int) -> Callable[[str, int, int], None]:
        last_sent = float("-inf")

        def send(what: str, done: int, total: int) -> None:
            nonlocal last_sent
            now = time.monotonic()
            if done < total and now - last_sent < _PROGRESS_INTERVAL_S:
                return
            last_sent = now
            self._control.send({"type": "progress", "id": message_id, "what": what, "done": done, "total": total})

        return send
