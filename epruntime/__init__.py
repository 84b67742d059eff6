"""epruntime: a distributed expert-parallel runtime for Mixture-of-Experts language models.

Names load on first use, so that `from epruntime import Client` needs neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from epruntime.version import __version__

if TYPE_CHECKING:
    from epruntime.client import AsyncClient, Client
    from epruntime.engine.async_llm import AsyncLLM
    from epruntime.engine.llm import LLM
    from epruntime.outputs import CompletionOutput, RequestOutput
    from epruntime.sampling_params import SamplingParams

_WHERE = {
    "LLM": "epruntime.engine.llm",
    "AsyncLLM": "epruntime.engine.async_llm",
    "SamplingParams": "epruntime.sampling_params",
    "RequestOutput": "epruntime.outputs",
    "CompletionOutput": "epruntime.outputs",
    "Client": "epruntime.client",
    "AsyncClient": "epruntime.client",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'epruntime' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_WHERE[name]), name)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "epruntime"):
            raise
        raise ModuleNotFoundError(
            f"epruntime.{name} needs {package}, which is not installed; this needs more than the client: "
            "pip install 'epruntime[serve]'",
            name=error.name,
        ) from error
