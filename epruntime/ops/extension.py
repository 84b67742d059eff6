"""The compiled kernels, `epruntime._C`: loaded once, or absent with a reason that is kept.

Every op has a plain-torch reference beside it, so that the package also runs where it was built without a compiler.
"""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType

import torch

from epruntime import envs
from epruntime.errors import ConfigError
from epruntime.version import __version__

logger = logging.getLogger("epruntime.ops.extension")


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    if envs.get("EPRUNTIME_DISABLE_EXTENSION"):
        return None, "EPRUNTIME_DISABLE_EXTENSION=1"
    try:
        module = importlib.import_module("epruntime._C")
    except ModuleNotFoundError:
        return None, "the package was installed without its C++ kernels (see the build's output for the reason)"
    except ImportError as error:
        return None, (
            f"epruntime._C cannot be loaded beside torch {torch.__version__}: {error}. "
            "Build it again: pip install --no-build-isolation -e ."
        )
    wanted = str(envs.get("EPRUNTIME_CPU_ISA"))
    if wanted:
        if wanted not in module.supported_isas():
            raise ConfigError(
                f"EPRUNTIME_CPU_ISA={wanted}: this CPU and build can run {', '.join(module.supported_isas())}"
            )
        module.select_isa(wanted)
    return module, ""


def load() -> ModuleType | None:
    """The extension, or None where it is absent or switched off; the first call decides and logs."""
    first = _load.cache_info().currsize == 0
    module, reason = _load()
    if first:
        if module is None:
            logger.warning("plain-torch kernels in use: %s", reason)
        else:
            logger.debug("C++ kernels in use: %s, %s", module.csrc_hash(), module.isa())
    return module


def why_absent() -> str:
    """Why `load` returns None; "" if it does not."""
    return _load()[1]


def kernel_signature() -> dict[str, str]:
    """What this process computes with. Ranks with equal signatures give equal bits; others must not be mixed.

    Returns:
        epruntime: package version. torch: its version, with the build suffix. extension: "native:<hash of the C++
        sources and flags>" or "plain". isa: instruction set of our kernels, then that of torch's own.
    """
    module = load()
    torch_isa = torch.backends.cpu.get_cpu_capability()
    return {
        "epruntime": __version__,
        "torch": str(torch.__version__),
        "extension": "plain" if module is None else f"native:{module.csrc_hash()}",
        "isa": f"{'none' if module is None else module.isa()}, torch {torch_isa}",
    }
