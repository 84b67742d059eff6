"""Commands whose server fails: the error has a line of its own, what came before stays, the server's hint is told."""

from __future__ import annotations

import threading

import pytest
from fake_llm import FakeLLM
from serving import Serving, wait_until

from epruntime.cli.main import main
from epruntime.errors import RankLostError, RequestFailedError


def _returning(error):
    error.retry_after_s = 7.0
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RankLostError(slot=1, host="b", detail="killed by SIGKILL"), "killed by SIGKILL"),
        (_returning(RankLostError(slot=1, host="b", detail="being replaced")), "again in 7 s)"),
        (RequestFailedError("its logits are not numbers"), "its logits are not numbers"),
    ],
    ids=["final", "comes back", "of one request"],
)
@pytest.mark.parametrize("form", [[], ["--n", "2"], ["--json"]], ids=["text", "n", "json"])
def test_an_error_in_the_middle_has_its_own_line(capfd, error, said, form):
    with Serving(FakeLLM(delay_s=0.005)) as server:

        def fail() -> None:
            wait_until(lambda: any(max(live.generated) > 3 for live in server.llm.live.values()), "output")
            server.call(server.llm.fail_all, error)

        failing = threading.Thread(target=fail)
        failing.start()
        code = main(["generate", "--server", server.address, "abc", "--max-tokens", "5000", *form])
        failing.join()
    out, err = capfd.readouterr()
    assert code == 1
    assert err.startswith("epruntime generate: ")
    assert said in err
    assert err.count("\n") == 1
    assert out == "" if form == ["--json"] else "abc" in out
    assert out == "" or out.endswith("\n")
    assert out[-2:] != "\n\n"


def test_a_full_server_says_when_to_come_back(capfd):
    llm = FakeLLM(queue=0)
    with Serving(llm) as server:
        assert main(["generate", "--server", server.address, "abc", "--retries", "0"]) == 1
    out, err = capfd.readouterr()
    assert (out, err) == (
        "",
        f"epruntime generate: the queue is full (the server's hint: again in {llm.retry_after_s:g} s)\n",
    )


def test_failed_prompts_fail_alone(capfd):
    with Serving() as server:
        server.llm.errors["bad"] = RequestFailedError("its logits are not numbers")
        assert main(["generate", "--server", server.address, "bad", "abc", "--max-tokens", "3"]) == 1
    out, err = capfd.readouterr()
    assert out == ">>> bad\n>>> abc\nabc\n\n"
    assert err == "epruntime generate: its logits are not numbers\n"


def test_the_address_may_stand_alone(capsys):
    with Serving() as server:
        assert main(["health", server.address]) == 0
        assert main(["info", server.address]) == 0
        assert f"server     {server.address}" in capsys.readouterr().out
