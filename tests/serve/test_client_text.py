"""What clients are told of a lost rank: one line with who, where and why; nothing that a rank has printed."""

from __future__ import annotations

import json
import threading

import httpx2
import pytest
from fake_llm import FakeLLM
from http_serving import HttpServing
from serving import Serving, wait_until

from epruntime.client import Client
from epruntime.engine.status import EngineState
from epruntime.errors import EngineDeadError, EPRuntimeError, RankLostError, RequestFailedError, UnavailableError
from epruntime.launchers.rank_end import LAST_WORDS
from epruntime.serve.client_text import client_text, one_line

CAUSE = "killed by SIGKILL; last progress 0.1 s ago: step 22, layer 1, waiting in dispatch 204"
TOLD = f"rank 1 on host b is lost: {CAUSE}"
PRINTED = f"{LAST_WORDS}\n  /home/user/secret.py\n  prompt of somebody else"
LOST = RankLostError(slot=1, host="b", detail=CAUSE + PRINTED)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (LOST, TOLD),
        (RankLostError(slot=1, host="b", detail=CAUSE), TOLD),
        (EngineDeadError(f"the restart failed: it did not join{PRINTED}"), "the restart failed: it did not join"),
        (UnavailableError(f"ranks are being replaced: {LOST}"), f"ranks are being replaced: {TOLD}"),
        (EngineDeadError("rank 0:\n  two\n  lines"), "rank 0: two lines"),
        (RequestFailedError("its logits\n are not numbers"), "its logits\n are not numbers"),
    ],
)  # fmt: skip
def test_client_text(error, told):
    assert client_text(error) == told
    assert one_line(told) == " ".join(told.split())


@pytest.mark.parametrize("when", ["before", "in the middle"])
@pytest.mark.parametrize("way", ["grpc", "http"])
def test_no_front_end_tells_what_a_rank_printed(way, when):
    llm = FakeLLM(delay_s=0.005)
    kind = HttpServing if way == "http" else Serving
    with kind(llm) as server:
        if when == "before":
            server.call(server.llm.die, LOST)
        else:

            def die() -> None:
                wait_until(lambda: any(sum(live.generated) > 3 for live in llm.live.values()), "output")
                server.call(server.llm.die, LOST)

            threading.Thread(target=die).start()
        if way == "grpc":
            with Client(server.address, retries=0) as client:
                with pytest.raises(EPRuntimeError) as caught:
                    client.generate("abc", max_tokens=5000)
                told = [str(caught.value)]
                if when == "before":
                    told.append(client.info().state_reason)
        else:
            with httpx2.Client(base_url=server.url) as http:
                body = {"prompt": "abc", "max_tokens": 5000, "stream": when != "before"}
                text = http.post("/v1/completions", json=body).text
                last = text.strip().splitlines()[-1].removeprefix("data: ")
                told = [json.loads(last)["error"]["message"], http.get("/health").json()["error"]["message"]]
    assert told == [TOLD] * len(told)


def test_neither_does_one_that_is_being_replaced():
    with Serving() as server, Client(server.address, retries=0) as client:
        server.call(server.llm.become, EngineState.RESTARTING, str(LOST))
        with pytest.raises(UnavailableError, match="ranks are being replaced") as caught:
            client.generate("abc")
        assert TOLD in str(caught.value)
        assert "secret" not in str(caught.value)
        assert client.info().state_reason == TOLD
