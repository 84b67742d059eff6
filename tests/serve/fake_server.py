"""A server process on a FakeLLM: python fake_server.py MODE GRPC_PORT HTTP_PORT DELAY_S DRAIN_S.

An HTTP_PORT below 0: no HTTP.

Modes: serve; load (start-up takes 60 s, and says when it was cleaned up); refuse and crash (start-up fails); dies (the
engine dies 0.5 s after it is ready).
"""

import asyncio
import sys

from fake_llm import FakeLLM

from epruntime.config import EngineConfig, ServeConfig
from epruntime.errors import RankLostError, UnsupportedModelError
from epruntime.serve import server


def main() -> int:
    mode, (grpc_port, http_port), (delay_s, drain_s) = sys.argv[1], map(int, sys.argv[2:4]), map(float, sys.argv[4:])
    server.DEAD_LINGER_S = 1.0

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
            error = RankLostError(slot=1, host="b", detail="step 3")
            asyncio.get_running_loop().call_later(0.5, llm.die, error)
        return llm

    config = ServeConfig(port=max(http_port, 0), grpc_port=grpc_port, http=http_port >= 0, drain_timeout_s=drain_s)
    return server.run_server(EngineConfig.from_kwargs(model="x"), config, create_engine=create)


if __name__ == "__main__":
    sys.exit(main())
