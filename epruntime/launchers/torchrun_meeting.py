"""Where the processes of a torchrun job meet: torchrun's own TCPStore, in which the coordinator leaves a letter.

coordinator: post(letter) -> store <- messenger (a child of each supervisor) -> letter, as a line -> supervisor
             post(last letter), if it ends before all supervisors have joined -> ... those that have not end, too

The messenger is a process of its own: reaching the store takes torch, which takes a second and 200 MB, and a supervisor
lives for as long as the job. The store has no authentication: whoever reaches it can read the letter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack

from epruntime.comm.lifeline import die_with_parent
from epruntime.errors import LaunchError, ProtocolError
from epruntime.launchers.torchrun_environment import TorchrunWorker

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

MODULE = "epruntime.launchers.torchrun_meeting"
#: begin lines of the messenger that hold a letter, and why it ends; others are torch's.
LETTER, REASON = "letter: ", "reason: "

#: seconds to reach the store, and between looks for another letter.
_STORE_TIMEOUT_S, _LOOK_S = 30.0, 0.5
_KEY = "coordinator"


@dataclass(frozen=True, kw_only=True)
class MeetingLetter:
    """Where the coordinator is.

    Attributes:
        address: control address on which it takes supervisors.
        host: its host name, for errors.
        secret: proves each side to the other; empty where the user gave all processes one.
    """

    address: str
    host: str
    secret: bytes

    def __repr__(self) -> str:
        return f"MeetingLetter({self.address}, {self.host})"


@dataclass(frozen=True, kw_only=True)
class LastLetter:
    """How the job has ended: in place of the other one, for supervisors that come when the coordinator has left.

    Attributes:
        code: exit code; cause: why, "" if that is not known; host: of the coordinator.
    """

    code: int
    cause: str
    host: str


Letter = MeetingLetter | LastLetter


def write_letter(letter: Letter) -> bytes:
    return bytes(msgpack.packb(dataclasses.asdict(letter)))


def read_letter(data: bytes) -> Letter:
    """Raises ProtocolError: not a letter."""
    try:
        fields: dict[str, Any] = msgpack.unpackb(data)
        return LastLetter(**fields) if "code" in fields else MeetingLetter(**fields)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the letter in torchrun's store, {len(data)} bytes, is unreadable") from error


class MeetingPoint:
    """The job's part of torchrun's store. Imports torch; blocking.

    Args:
        hosts_it: this process has to be the store's server, for as long as this object lives.

    Raises:
        LaunchError: the store was not reached.
    """

    def __init__(self, host: str, port: int, prefix: str, *, hosts_it: bool = False) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=_STORE_TIMEOUT_S)
        try:
            self._server: TCPStore = TCPStore(
                host, port, None, is_master=hosts_it, wait_for_workers=False, timeout=timeout
            )
        except RuntimeError as error:
            words = str(error).splitlines()[0].rstrip(".")
            raise LaunchError(
                f"torchrun's store at {host}:{port} was not reached: {words}. It ends with torchrun on the host of "
                "worker 0: look there first. torchrun names that host as it names itself; where another one does not "
                "reach it by that name, give torchrun there --local-addr with an address that does"
            ) from error
        self._store = PrefixStore(prefix, self._server)

    @classmethod
    def of(cls, worker: TorchrunWorker, *, hosts_it: bool = False) -> MeetingPoint:
        return cls(worker.store_host, worker.store_port, worker.prefix, hosts_it=hosts_it)

    def post(self, letter: Letter) -> None:
        """Raises RuntimeError: the store is gone."""
        self._store.set(_KEY, write_letter(letter).hex())

    def remove(self) -> None:
        """Takes the letter away; nothing to do if there is none, or no store any more."""
        with contextlib.suppress(RuntimeError):
            self._store.delete_key(_KEY)

    def look(self, timeout_s: float) -> bytes | None:
        """The letter, waited for; None if there is none after `timeout_s` seconds."""
        if not self._store.check([_KEY]):
            try:
                self._store.wait([_KEY], timedelta(seconds=timeout_s))
            except RuntimeError as error:
                if "timeout" not in str(error).lower():
                    raise LaunchError(f"torchrun's store is gone: {str(error).splitlines()[0]}") from error
                return None
        return bytes.fromhex(bytes(self._store.get(_KEY)).decode())


def messenger_input(worker: TorchrunWorker) -> bytes:
    """What a supervisor writes to its messenger's standard input, which it then leaves open."""
    where = {"host": worker.store_host, "port": worker.store_port, "prefix": worker.prefix, "parent": os.getpid()}
    return json.dumps(where).encode() + b"\n"


def main() -> int:
    """The messenger: prints each letter that is new, until its standard input ends."""
    where = json.loads(sys.stdin.readline())
    die_with_parent(where["parent"])
    last = b""
    try:
        meeting = MeetingPoint(where["host"], where["port"], where["prefix"])
        while not select.select([sys.stdin], [], [], _LOOK_S if last else 0.0)[0]:
            letter = meeting.look(_LOOK_S)
            if letter is not None and letter != last:
                last = letter
                print(f"{LETTER}{letter.hex()}", flush=True)
    except LaunchError as error:
        print(f"{REASON}{error}", flush=True)
        return 1
    except RuntimeError as error:
        print(f"{REASON}torchrun's store is gone: {str(error).splitlines()[0]}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # what it took from the store needs no farewell, and torch takes a second for its own
