"""The life of a rank process, whatever launched it.

bootstrap -> threads, environment -> connect -> heartbeats -> RankLoop -> close
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading

import torch

from epruntime import envs
from epruntime.comm.control import ControlClient, RankBootstrap
from epruntime.comm.progress import Stamps
from epruntime.ops.extension import kernel_signature
from epruntime.worker.generation import Generation
from epruntime.worker.progress import publish
from epruntime.worker.rank import RankLoop

logger = logging.getLogger("epruntime.worker.main")


def run_rank(bootstrap: RankBootstrap) -> int:
    """Serves as a rank until the coordinator ends it. Returns the process's exit code.

    Raises:
        HandshakeError: the coordinator was not reached, or refused this rank.
    """
    configure_logging()
    prepare_process(bootstrap.threads)
    if bootstrap.device == "cuda":
        # Ranks of a host see the same GPUs in the same order (launchers/ray_actor.py says why): each takes its own.
        torch.cuda.set_device(bootstrap.device_index)
    with ControlClient.connect(bootstrap, signature=kernel_signature()) as control:
        control.exit_on_hangup()
        stamps = Stamps()
        heartbeats = publish(bootstrap, stamps)
        loop = RankLoop(
            control,
            stamps=stamps,
            threads=bootstrap.threads,
            open_generation=lambda config: Generation(config, stamps=stamps, device=bootstrap.device),
        )
        try:
            return loop.run()
        finally:
            heartbeats.stop()


def prepare_process(threads: int) -> None:
    """Settings of a process that is a rank and nothing else: garbage collection, threads, no model hub, signals."""
    # Of what libraries make when they are imported (360,000 objects) nothing is ever garbage, and a full collection
    # took 200 ms. A model is no more than 25,000 objects, which take 2 ms (DeepSeek-V3, 61 layers).
    gc.freeze()
    gc.enable()
    # Checkpoints are local directories. Nothing a rank imports may ask the network for one.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        torch.set_num_interop_threads(1)  # ranks share their host's cores; a rank runs one operation at a time
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C in a terminal reaches the whole process group: the coordinator decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The default action ends the process also while it waits inside native code, where no Python handler runs.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def configure_logging() -> None:
    """Log lines on standard error; the launcher, or Ray, reads them. A process that has a handler already keeps it."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("epruntime").setLevel(str(envs.get("EPRUNTIME_LOG_LEVEL")))
