"""Facts of this rank's machine and process for preflight. Linux first; what a system does not tell is 0 or empty."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import socket
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from epruntime.comm.interfaces import rank_address
from epruntime.errors import ConfigError
from epruntime.ops.extension import kernel_signature
from epruntime.version import __version__
from epruntime.worker.cores import usable_cores
from epruntime.worker.memory import free_memory_bytes

_SYS_NET = Path("/sys/class/net")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_SHM = Path("/dev/shm")


def versions() -> dict[str, str]:
    """Of what must be equal everywhere; transformers is not imported for it."""
    try:
        transformers = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        transformers = "none"
    return {
        "epruntime": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers,
        "python": platform.python_version(),
    }


def machine_facts(
    *, model: str, several: bool, store_host: str, store_port: int, threads: int | None
) -> dict[str, Any]:
    """The fields of epruntime.preflight.facts.MachineFacts, but for the port.

    Args:
        model: path of the checkpoint. several: there are other ranks, and so an address for them.
        store_host, store_port, threads: as in `configure`.
    """
    address, interface, address_by = "", "", "the only rank"
    if several:
        try:
            chosen = rank_address(store_host, store_port)
            address, interface, address_by = chosen.address, chosen.interface, chosen.chosen_by
        except ConfigError as error:  # a finding among others
            address_by = str(error)
    digest, files, why = checkpoint_digest(Path(model))
    return {
        "host_name": socket.gethostname(),
        "boot_id": _text(_BOOT_ID),
        "pid": os.getpid(),
        "versions": versions(),
        "signature": kernel_signature(),
        "address": address,
        "interface": interface,
        "address_by": address_by,
        "mtu": _number(_SYS_NET / interface / "mtu") if interface else 0,
        "link_mbit": _number(_SYS_NET / interface / "speed") if interface else 0,
        "open_files": _soft_limit(resource.RLIMIT_NOFILE),
        "locked_memory": _soft_limit(resource.RLIMIT_MEMLOCK),
        "free_memory": free_memory_bytes(),
        "free_shm": _free_bytes(_SHM),
        "cores": usable_cores(),
        "threads": threads or torch.get_num_threads(),
        "checkpoint": digest,
        "checkpoint_error": why,
        "checkpoint_files": files,
    }


def checkpoint_digest(path: Path) -> tuple[str, int, str]:
    """Digest of a checkpoint's configuration, and of names and sizes of its weight files; no weight is read.

    Returns:
        (digest, number of weight files, ""), or ("", 0, why there is none).
    """
    hasher = hashlib.sha256()
    try:
        hasher.update((path / "config.json").read_bytes())
        weights = sorted(path.glob("*.safetensors"))
        for file in weights:
            hasher.update(f"\n{file.name} {file.stat().st_size}".encode())
    except OSError as error:
        return "", 0, f"{error.filename or path}: {error.strerror or error}"
    if not weights:
        return "", 0, f"{path} holds no *.safetensors file"
    return hasher.hexdigest(), len(weights), ""


def _soft_limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""  # not on this system, or not shown in this container


def _number(path: Path) -> int:
    text = _text(path)  # the speed of an interface that is down, or of a virtual one, cannot be read, or is -1
    return int(text) if text.isdigit() else 0


def _free_bytes(path: Path) -> int:
    try:
        stat = os.statvfs(path)
    except OSError:
        return 0
    return stat.f_bavail * stat.f_frsize
