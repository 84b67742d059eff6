"""Which Ray cluster, and the way in: an existing one, joined by address; or a private one on this machine.

address -> where it points to -> does anybody listen? -> is it Ray, and does it take our token? -> ray.init
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services

from epruntime.errors import LaunchError
from epruntime.launchers import ray_job
from epruntime.launchers.ray_environment import auth_hint, is_own_address, own_sigterm, private_environment, probe
from epruntime.launchers.ray_package import package_to_ship
from epruntime.launchers.ray_seats import Node

logger = logging.getLogger("epruntime.launchers.ray_cluster")

#: bytes of the private cluster's object store; rows never pass through it, and Ray takes no less.
_OBJECT_STORE_BYTES = 80 * 2**20
_LOOPBACK = "127.0.0.1"
_ANSWER_S = 5.0


def find(address: str) -> str:
    """HOST:PORT of the cluster that `address` means, after a look whether Ray answers there; takes seconds.

    Ray's own attempt takes 20 s for a wrong token and minutes for some wrong addresses, and tells neither from the
    other.

    Raises:
        LaunchError: none is meant, or nobody, or something else, or a cluster with another token is there.
    """
    found, source = _resolve(address)
    probe(found, source)
    _check_answer(found, source)
    return found


def join(found: str) -> None:
    """Connects this process to the cluster at HOST:PORT. Blocking; on the thread that stays.

    Raises:
        LaunchError: it did not come about.
    """
    shipped = _shipped()
    try:
        with own_sigterm():
            ray.init(address=found, logging_level=logging.ERROR, log_to_driver=wants_output(), runtime_env=shipped)
    except (Exception, SystemExit) as error:  # Ray's core ends the process by SystemExit
        raise LaunchError(
            f"the Ray cluster at {found} could not be joined: {error}. Its ranks are started from one of its nodes: "
            f"if this machine is none, `ray start --address={found}` makes it one. {auth_hint()}"
        ) from error


def _shipped() -> dict[str, Any] | None:
    """The runtime environment that brings this process's package to all ranks; None if they have it."""
    package, given = package_to_ship(), ray_job.runtime_env()
    if package is None:
        return None
    if "py_modules" in given:
        logger.warning("the job brings py_modules of its own: ranks run the epruntime of those, or of their nodes")
        return None
    logger.info("every rank gets this process's own epruntime (%s)", package)
    # The directory itself, which has no .gitignore: Ray leaves out what one names that lies in what it uploads.
    modules = {"py_modules": [str(package)]}
    return modules if "excludes" in given else {**modules, "excludes": ["__pycache__"]}


def start_private(num_cpus: int) -> tempfile.TemporaryDirectory[str]:
    """Starts a cluster that only this process uses. Blocking; on the thread that stays: Ray ends it with that thread
    (parent-death signal).

    Args:
        num_cpus: in Ray's own accounting.

    Returns:
        the folder with its files; to be removed when it has ended.

    Raises:
        LaunchError: it did not start.
    """
    # Mode 0700: Ray opens its own directory to everybody.
    home = tempfile.TemporaryDirectory(prefix="epruntime-", ignore_cleanup_errors=True)
    try:
        with private_environment(ray_constants, Path(home.name)), own_sigterm():
            forget_token()
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=wants_output(),
                _temp_dir=str(Path(home.name) / "ray"),
                _node_ip_address=_LOOPBACK,
            )
    except (Exception, SystemExit) as error:
        home.cleanup()
        raise LaunchError(f"Ray could not be started on this machine: {error}") from error
    return home


def forget_token() -> None:
    """Makes Ray look at the environment again: it keeps mode and token of the first cluster that a process has."""
    try:
        from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
    except ImportError:  # a version without authentication
        return
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def alive_nodes() -> list[Node]:
    """Nodes of the cluster that this process is connected to."""
    free = ray._private.state.available_resources_per_node()
    return [
        Node(
            node_id=node["NodeID"],
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            free=free.get(node["NodeID"]),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def wants_output() -> bool:
    """Ray prints the ranks' output on this process's standard error; only where information is wanted."""
    return logging.getLogger("epruntime").isEnabledFor(logging.INFO)


def _resolve(address: str) -> tuple[str, str]:
    """HOST:PORT, and how it was found, in words that follow the address."""
    variable = os.environ.get(ray_constants.RAY_ADDRESS_ENVIRONMENT_VARIABLE)
    meant, by = (variable or "", " ('auto', by RAY_ADDRESS)") if address == "auto" else (address, "")
    if "://" in meant:
        raise LaunchError(
            f"ray_address={meant!r}{by} is not where a cluster's head takes nodes, but of its dashboard: give "
            "HOST:6379, the port of `ray start --head`"
        )
    if address != "auto":
        return address, ""
    try:
        found = services.canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError, OSError) as error:
        where = f"RAY_ADDRESS={variable!r}" if variable else "this machine runs no Ray, and RAY_ADDRESS is not set"
        raise LaunchError(
            f"ray_address='auto' finds no Ray cluster ({where}): {error}. Start one with `ray start --head`, join one "
            "with `ray start --address=HOST:6379`, or give HOST:6379 as ray_address"
        ) from error
    if found is None:
        raise LaunchError("ray_address='auto' finds no Ray cluster: start one with `ray start --head`")
    if variable:
        return found, by
    return found, " ('auto', as the last `ray start` on this machine left it in ray_current_cluster)"


def _check_answer(found: str, source: str) -> None:
    """Ray answers there, takes this process's token, and has a node on this machine."""
    try:
        stub, messages = _gcs(found)
        check_alive, all_nodes = stub.CheckAlive, stub.GetAllNodeInfo
        requests = messages.CheckAliveRequest(), messages.GetAllNodeInfoRequest()
    except (ImportError, AttributeError) as error:  # Ray's own modules, which may change
        logger.debug("Ray cannot be asked in advance (%s); ray.init decides alone", error)
        return
    try:
        check_alive(requests[0], timeout=_ANSWER_S)
        nodes = all_nodes(requests[1], timeout=_ANSWER_S).node_info_list
    except Exception as error:
        code = getattr(getattr(error, "code", lambda: None)(), "name", "")
        if not code:  # no status of an RPC: for example a token file that cannot be read
            raise LaunchError(
                f"the Ray cluster at {found}{source} could not be asked: {error}. {auth_hint()}"
            ) from error
        if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            raise LaunchError(f"the Ray cluster at {found}{source} refuses this process. {auth_hint()}") from error
        raise LaunchError(
            f"what listens at {found}{source} does not answer as a Ray cluster does: {code}: {_details(error)}. The "
            "port is the one of `ray start --head --port`, 6379 by default; 8265 is the dashboard's"
        ) from error
    addresses = [node.node_manager_address for node in nodes if node.state == 0]
    if not any(map(is_own_address, addresses)) and found not in services.find_gcs_addresses():
        raise LaunchError(
            f"this machine is no node of the Ray cluster at {found}{source}, whose nodes are "
            f"{', '.join(sorted(addresses)) or 'gone'}: ranks are started from a node. Submit a job (ray job submit), "
            f"or make this machine a node: ray start --address={found}"
        )


def _gcs(found: str) -> tuple[Any, Any]:
    """Ray's service of node facts, over a channel that carries this process's token; and its messages."""
    channel = importlib.import_module("ray._private.grpc_utils").init_grpc_channel(found)
    stubs = importlib.import_module("ray.core.generated.gcs_service_pb2_grpc")
    return stubs.NodeInfoGcsServiceStub(channel), importlib.import_module("ray.core.generated.gcs_service_pb2")


def _details(error: Any) -> str:
    lines = str(error.details()).strip().splitlines()
    return lines[0] if lines else "no details"
