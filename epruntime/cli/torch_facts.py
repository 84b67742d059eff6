"""`python -m epruntime.cli.torch_facts`: what only a process with torch can tell, as one JSON object.

`collect-env` runs it as a child, because any of this can crash or hang.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Callable
from typing import Any


def main() -> int:
    """Returns 0; a line on stderr and 1 where there is no torch to ask."""
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed: this is a client only", file=sys.stderr)
        return 1
    logging.disable(logging.WARNING)  # that kernels are absent is among the facts
    import torch

    from epruntime.ops import extension

    def isas() -> list[str] | str:
        module = extension.load()
        return "none" if module is None else list(module.supported_isas())

    def nccl() -> str:
        return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "no CUDA device"

    facts: dict[str, Callable[[], Any]] = {
        "kernel signature": extension.kernel_signature,
        "why no C++ kernels": lambda: extension.why_absent() or "they are in use",
        "instruction sets of the C++ kernels": isas,
        "torch's instruction set": torch.backends.cpu.get_cpu_capability,
        "torch threads": lambda: f"{torch.get_num_threads()} intra-op, {torch.get_num_interop_threads()} inter-op",
        "torch C++11 ABI": torch.compiled_with_cxx11_abi,
        "torch CUDA": lambda: torch.version.cuda or "built without",
        "torch HIP": lambda: torch.version.hip or "built without",
        "torch devices": lambda: (
            [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or "CPU only"
        ),
        "torch NCCL": nccl,
        "torch distributed": lambda: [
            name
            for name in ("gloo", "nccl", "mpi")
            if torch.distributed.is_available() and torch.distributed.is_backend_available(name)
        ],
        "torch build": lambda: torch.__config__.show().splitlines(),
    }
    print(json.dumps({name: _told(read) for name, read in facts.items()}))
    return 0


def _told(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:  # noqa: BLE001  whatever is broken here is what the report is about
        return f"unknown ({type(error).__name__}: {error})"


if __name__ == "__main__":
    sys.exit(main())
