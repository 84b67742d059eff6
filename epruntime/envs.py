"""Every environment variable that epruntime reads: debugging, secrets, what differs by host. A bad value raises."""

from __future__ import annotations

import os
from collections.abc import Callable

from epruntime.errors import ConfigError


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return parse


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError("must be 0 or 1")
    return text == "1"


#: name -> (parser, default, meaning)
VARIABLES: dict[str, tuple[Callable[[str], object], object, str]] = {
    "EPRUNTIME_LOG_LEVEL": (
        _choice("DEBUG", "INFO", "WARNING", "ERROR"),
        "INFO",
        "level of the epruntime logger",
    ),
    "EPRUNTIME_DISABLE_EXTENSION": (_flag, False, "1: run the plain-torch paths even if the extension is built"),
    "EPRUNTIME_CPU_ISA": (
        _choice("avx512_bf16", "avx512", "avx2", "portable"),
        "",
        "instruction set of the C++ kernels; empty: the best that this CPU has",
    ),
    "EPRUNTIME_API_KEY": (
        str,
        "",
        "a bearer token that gRPC and HTTP calls must bring, beside those of --api-key; empty: none",
    ),
    "EPRUNTIME_HOST_IP": (
        str,
        "",
        "address of this host that the other hosts reach, or a network that it is in (10.0.0.0/24); empty: the one on "
        "the route to the coordinator",
    ),
    "EPRUNTIME_JOB_SECRET": (
        str,
        "",
        "under torchrun: a secret that all processes of the job are given; empty: one is drawn, and told through "
        "torchrun's store",
    ),
    "EPRUNTIME_CACHE_DIR": (str, "", "where sample models are kept; empty: ~/.cache/epruntime"),
}


def get(name: str) -> object:
    """Value of a variable of the table.

    Raises:
        ConfigError: the value does not parse.
    """
    parse, default, _ = VARIABLES[name]
    text = os.environ.get(name)
    if text is None or text == "":
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"environment variable {name}={text!r}: {error}") from error
