"""SupervisorLink: a supervisor's connection to the coordinator, on an asyncio loop that it never blocks.

coordinator: spawn(id, bootstrap, nonce), terminate(id), kill(id), end(code, stopped, cause)
supervisor: here(facts), spawned(id, pid), failed(id, reason), line(id, text), exited(id, how), signal(number, count)

Frames and proofs are those of the control channel (epruntime/comm); a supervisor's slot is its torchrun rank, and its
incarnation torchrun's restart count.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable

from epruntime.comm.control import ControlClient
from epruntime.comm.frames import Message
from epruntime.errors import ConnectionClosedError, ProtocolError

#: messages waiting to be sent, beyond which lines of output are left out.
_MAX_WAITING = 1000


class SupervisorLink:
    """Two threads, one per direction.

    Args:
        client: connected; taken over.
        on_message: called on the loop with each message; on_closed: once, with the reason, when there will be none.
    """

    def __init__(
        self, client: ControlClient, *, on_message: Callable[[Message], None], on_closed: Callable[[str], None]
    ) -> None:
        self._client, self._on_message, self._on_closed = client, on_message, on_closed
        self._loop = asyncio.get_running_loop()
        self._outbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="epruntime-link-send", daemon=True)
        self._sender.start()
        threading.Thread(target=self._receive, name="epruntime-link-receive", daemon=True).start()

    def send(self, message: Message, *, droppable: bool = False) -> None:
        """Sends it in its turn. One that is `droppable` is left out while the coordinator does not read."""
        if not (droppable and self._outbox.qsize() > _MAX_WAITING):
            self._outbox.put(message)

    def end_soon(self) -> None:
        """Ends the connection as soon as what waits is sent."""
        self._outbox.put(None)

    def close(self, timeout_s: float) -> None:
        """Sends what waits, for up to `timeout_s` seconds, and ends the connection."""
        self.end_soon()
        self._sender.join(timeout_s)
        self._client.close()

    def _send(self) -> None:
        with contextlib.suppress(ConnectionClosedError, ProtocolError):  # the receiver tells that it is gone
            while (message := self._outbox.get()) is not None:
                self._client.send(message)
            self._client.close()

    def _receive(self) -> None:
        try:
            while True:
                self._call(self._on_message, self._client.recv())
        except (ConnectionClosedError, ProtocolError) as error:
            self._call(self._on_closed, str(error))

    def _call(self, function: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
            self._loop.call_soon_threadsafe(function, argument)
