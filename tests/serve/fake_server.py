"""A server process on a FakeLLM: python fake_server.py MODE GRPC_PORT HTTP_PORT DELAY_S DRAIN_S.

An HTTP_PORT below 0: no HTTP.

Modes: serve; frozen (the same, and says at its end how many objects the collector passes over); verbose (with its log
on stderr); load (start-up takes 60 s, and says when it was cleaned up); refuse and crash (start-up fails); dies (the
engine dies when its first request is at work).
"""

import asyncio
import gc
import logging
import sys

from fake_llm import FakeLLM

from epruntime.config import EngineConfig, ServeConfig
from epruntime.errors import RankLostError, UnsupportedModelError
from epruntime.serve import server


def main() -> int:
    mode, (grpc_port, http_port), (delay_s, drain_s) = sys.argv[1], map(int, sys.argv[2:4]), map(float, sys.argv[4:])
    server.DEAD_LINGER_S = 3.0
    if mode == "verbose":
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logging.getLogger("epruntime").setLevel("INFO")

    async def die(llm):
        while not any(sum(live.generated) > 5 for live in llm.live.values()):
            await asyncio.sleep(0.01)
        llm.die(RankLostError(slot=1, host="b", detail="step 3"))

    async def create(config, progress):
        if mode == "load":
            print("loading", flush=True)
            try:
                await asyncio.sleep(60)
            finally:
                print("cleaned up", flush=True)
        if mode == "refuse":
            raise UnsupportedModelError("model x is dense: give a MoE model")
        if mode == "crash":
            raise KeyError("a fault")
        llm = FakeLLM(delay_s=delay_s)
        if mode == "dies":
            llm.end = asyncio.create_task(die(llm))
        return llm

    config = ServeConfig(port=max(http_port, 0), grpc_port=grpc_port, http=http_port >= 0, drain_timeout_s=drain_s)
    code = server.run_server(EngineConfig.from_kwargs(model="x"), config, create_engine=create)
    if mode == "frozen":
        print(gc.get_freeze_count(), flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
