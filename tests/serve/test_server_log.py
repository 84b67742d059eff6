"""The last line of a server's log: that it has stopped, and what became of its requests."""

from __future__ import annotations

import contextlib
import signal
import time

import pytest
from fake_process import Process
from serving import wait_until

from epruntime.client import Client
from epruntime.errors import UnavailableError
from epruntime.serve.server import ONE_WISH_S


@pytest.mark.parametrize(
    ("drain_s", "tokens", "signals", "last"),
    [
        (30.0, 60, 1, "stopped: 2 requests ended while draining, 0 were cut off"),
        (0.3, 100_000, 1, "stopped: 0 requests ended while draining, 2 were cut off"),
        (30.0, 100_000, 2, "stopped: at once, by a second signal; 0 requests ended while draining, 2 were cut off"),
    ],
    ids=["drained", "too slow", "second signal"],
)
def test_the_last_line_counts_requests(drain_s, tokens, signals, last):
    with Process("verbose", drain_s=drain_s) as server, Client(server.address(), retries=0) as client:
        streams = [client.stream("abc", max_tokens=tokens) for _ in range(2)]
        for stream in streams:
            next(stream)
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: client.health() == "not serving", "draining")
        if signals == 2:
            time.sleep(2 * ONE_WISH_S)
            server.popen.send_signal(signal.SIGTERM)
        for stream in streams:
            with contextlib.suppress(UnavailableError):  # cut off
                list(stream)
        _, _, err = server.end()
    lines = err.splitlines()
    assert lines[-1] == f"INFO epruntime.serve.server: {last}"
    assert sum("draining: 2 requests are running" in line for line in lines) == 1


def test_an_idle_server_says_so_too():
    with Process("verbose") as server:
        server.address()
        server.popen.send_signal(signal.SIGINT)
        _, _, err = server.end()
    assert err.splitlines()[-1].endswith("stopped: 0 requests ended while draining, 0 were cut off")
