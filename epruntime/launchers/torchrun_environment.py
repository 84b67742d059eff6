"""What torchrun tells its workers, and what worker 0 tells the coordinator, in the environment."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from epruntime.errors import ConfigError

#: seconds that torchrun's agent gives its workers after it was told to end, unless it is told otherwise
#: (torch/distributed/launcher/api.py).
_SHUTDOWN_TIMEOUT, _SHUTDOWN_TIMEOUT_S = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30.0
#: seconds of it that are kept for what follows a drain: ranks leave, processes end.
_AFTER_DRAIN_S = 8.0

#: set by worker 0 for the coordinator that it starts; holds no secret.
_COORDINATOR = "_EPRUNTIME_TORCHRUN_COORDINATOR"
_JOB_SECRET = "EPRUNTIME_JOB_SECRET"

#: A library that finds these would take the process for a member of a torch process group.
_OF_TORCHRUN = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TorchrunWorker:
    """One worker of torchrun.

    Attributes:
        rank: 0..world_size-1, ordered by host; local_rank: index among those of its host; group_rank: number of its
            host; num_hosts: number of agents, one per host.
        store_host, store_port: torchrun's TCPStore; agent_store: an agent hosts it (else: worker 0 has to).
        run_id, restart_count: which run, and how often torchrun has started its workers anew.
        error_file: where a worker says why it failed, for torchrun's summary; "" if nowhere.
    """

    rank: int
    local_rank: int
    group_rank: int
    world_size: int
    num_hosts: int
    store_host: str
    store_port: int
    agent_store: bool
    run_id: str
    restart_count: int
    error_file: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> TorchrunWorker | None:
        """None if torchrun did not start this process.

        Raises:
            ConfigError: its variables are incomplete, or none of torchrun's.
        """
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        try:
            return cls(
                rank=int(environment["RANK"]),
                local_rank=int(environment["LOCAL_RANK"]),
                group_rank=int(environment["GROUP_RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                num_hosts=int(environment["GROUP_WORLD_SIZE"]),
                store_host=environment["MASTER_ADDR"].strip("[]"),
                store_port=int(environment["MASTER_PORT"]),
                agent_store=environment.get("TORCHELASTIC_USE_AGENT_STORE", "True") == "True",
                run_id=environment["TORCHELASTIC_RUN_ID"],
                restart_count=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
                error_file=environment.get("TORCHELASTIC_ERROR_FILE", ""),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(f"torchrun's environment is not complete: {type(error).__name__}: {error}") from error

    @property
    def prefix(self) -> str:
        """Of keys in the store: another run, or another start of this one, has another."""
        return f"epruntime/{self.run_id}/{self.restart_count}"


@dataclass(frozen=True, kw_only=True)
class CoordinatorLetter:
    """What worker 0 tells the coordinator that it starts."""

    worker: TorchrunWorker
    parent_pid: int

    def put(self, environment: MutableMapping[str, str]) -> None:
        environment[_COORDINATOR] = json.dumps(dataclasses.asdict(self))

    @classmethod
    def take(cls, environment: MutableMapping[str, str]) -> CoordinatorLetter | None:
        """Removes it from the environment, so that no child takes itself for the coordinator."""
        text = environment.pop(_COORDINATOR, None)
        if text is None:
            return None
        fields = json.loads(text)
        return cls(worker=TorchrunWorker(**fields["worker"]), parent_pid=fields["parent_pid"])


def forget_torchrun(environment: MutableMapping[str, str]) -> None:
    """Removes torchrun's variables: what is started from here on is none of its workers."""
    for name in _OF_TORCHRUN:
        environment.pop(name, None)


def take_job_secret(environment: MutableMapping[str, str]) -> bytes | None:
    """The secret that the user gave all processes of the job, as 32 bytes; None if there is none.

    It is removed: neither ranks nor what else is started need it.
    """
    text = environment.pop(_JOB_SECRET, "")
    return hashlib.sha256(b"epruntime job secret 1\0" + text.encode()).digest() if text else None


def drain_timeout_s() -> float:
    """Seconds that running requests can get to end before torchrun's agent kills its workers.

    (Its flag --shutdown-timeout is not told to the workers; the variable is.)
    """
    text = os.environ.get(_SHUTDOWN_TIMEOUT, "")
    total_s = float(text) if text.isdigit() else _SHUTDOWN_TIMEOUT_S
    return max(0.0, total_s - _AFTER_DRAIN_S)
