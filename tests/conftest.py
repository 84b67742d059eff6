"""Settings of the whole suite, made before torch or transformers is imported; and which tests run beside which."""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

# Nothing is downloaded, and each process computes on one thread: tests that want more ask for it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

# The collector would go through all that is imported again and again; from the first test on it passes it over.
gc.disable()

# A shell's background jobs ignore Ctrl-C, and so would the programs that tests start and send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Never two of these at once: they make networks or Ray clusters, and Ray looks for clusters on the whole machine.
APART = (
    "tests/hosts/",
    "tests/distributed/test_death_ray.py",
    "tests/distributed/test_invariance_launchers.py",
    "tests/distributed/test_launchers_ray.py",
    "tests/distributed/test_ray_in_program.py",
    "tests/e2e/test_demo.py",
    "tests/e2e/test_llm_exit.py",
)
#: Long, and their tests share nothing but the ranks of the session: workers take one test at a time.
SINGLY = ("tests/e2e/test_conformance.py", "tests/e2e/test_conformance_list.py", "tests/e2e/test_invariance.py")
#: What takes longest, which several workers begin with, so that none is left with it alone at the end.
FIRST = (*APART, "tests/e2e/", "tests/distributed/", "tests/serve/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped where there is none; a worker (pytest -n) takes what is long first."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: next((i for i, path in enumerate(FIRST) if item.nodeid.startswith(path)), len(FIRST))
        )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A worker gets a file at a time: its tests share servers and ranks; and one worker gets all that runs APART."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            if nodeid.startswith(SINGLY):
                return nodeid
            return "apart" if nodeid.startswith(APART) else nodeid.partition("::")[0]

        def remove_node(self, node: Any) -> str | None:
            """A worker is gone: the test that it was at has failed, and is not given to the next one."""
            units = self.assigned_work[node].values()
            unit, lost = next(((u, test) for u in units for test, done in u.items() if not done), ({}, None))
            unit[lost] = True
            super().remove_node(node)
            return lost

    config.option.loadscopereorder = False
    return Files(config, log)
