"""Started by torchrun on two hosts: one preflight for each file `go-N` that comes up in a folder, N = 0, 1, ..., with
its verdict as a line of JSON; ends when the file is not empty."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from pathlib import Path

from epruntime.config import EngineConfig
from epruntime.errors import PreflightError
from epruntime.launchers.torchrun import run_coordinator

LIMIT_S = 200.0


async def serve(model: str, folder: Path) -> None:
    from epruntime.engine.membership import form
    from epruntime.engine.preflight import Preflight
    from epruntime.engine.start_ranks import start_ranks
    from epruntime.models.loader import inspect_model

    config = EngineConfig.from_kwargs(model=model, expert_parallel_size=2, launcher="torchrun")
    info = inspect_model(model)
    pool = await start_ranks(config)
    print("ranks are up", flush=True)
    number = 0
    deadline = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline:
            file = folder / f"go-{number}"
            if not file.exists():
                await asyncio.sleep(0.02)
                continue
            if file.read_text():
                return
            preflight = Preflight(config, info)
            began = time.monotonic()
            with contextlib.suppress(PreflightError):
                await form(config, pool, preflight)
            seconds = time.monotonic() - began
            print(f"verdict {number} {json.dumps({'took_s': seconds, **preflight.verdict.to_dict()})}", flush=True)
            number += 1
    finally:
        await pool.stop()


if __name__ == "__main__":
    run_coordinator(lambda: asyncio.run(serve(sys.argv[1], Path(sys.argv[2]))))
