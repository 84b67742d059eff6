"""run_server as a process: ready line, ports, signals, exit codes."""

from __future__ import annotations

import signal
import socket
import threading
import time

import pytest
from fake_process import DEADLINE_S, Process
from serving import wait_until

from epruntime.client import Client
from epruntime.errors import RankLostError, UnavailableError
from epruntime.serve.server import ONE_WISH_S


def _stream(client: Client, **options):
    """Starts a long request and reads on in a thread; returns (chunks, errors, thread) once it runs."""
    chunks, errors = [], []

    def read() -> None:
        try:
            chunks.extend(stream)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    stream = client.stream("abc", **options)
    chunks.append(next(stream))
    thread = threading.Thread(target=read)
    thread.start()
    return chunks, errors, thread


def test_sigterm_drains():
    with Process() as server, Client(server.address(), retries=0) as client:
        assert client.health() == "serving"
        chunks, errors, thread = _stream(client, max_tokens=200)
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: client.health() == "not serving", "draining")
        with pytest.raises(UnavailableError, match="draining") as caught:
            client.generate("x")
        assert caught.value.retry_after_s == 1
        assert client.info().state == "draining"
        thread.join(DEADLINE_S)
        assert not errors
        assert (chunks[-1].finish_reason, sum(len(c.token_ids) for c in chunks)) == ("length", 200)
        assert server.end()[0] == 0


def test_what_was_imported_is_never_collected():
    """A full collection would stop all streams for as long as it takes to go through everything."""
    with Process("frozen") as server:
        server.address()
        server.popen.send_signal(signal.SIGTERM)
        code, out, _ = server.end()
        assert code == 0
        assert int(out) > 20_000


def test_drain_timeout_ends_what_still_runs():
    with Process(drain_s=0.5) as server, Client(server.address()) as client:
        _, errors, thread = _stream(client, max_tokens=100_000)
        server.popen.send_signal(signal.SIGINT)
        thread.join(DEADLINE_S)
        assert isinstance(errors[0], UnavailableError)
        assert "0.5 s" in str(errors[0])
        assert server.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_second_signal_stops_at_once(number):
    with Process() as server, Client(server.address()) as client:
        _, errors, thread = _stream(client, max_tokens=100_000)
        server.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: client.health() == "not serving", "draining")
        time.sleep(2 * ONE_WISH_S)
        began = time.monotonic()
        server.popen.send_signal(number)
        thread.join(DEADLINE_S)
        assert isinstance(errors[0], UnavailableError)
        assert server.end()[0] == 128 + number
        assert time.monotonic() - began < 25  # and not the 30 s of the drain


def test_a_signal_that_comes_twice_at_once_is_one():
    """As `timeout` and wrappers of commands send it: to the process, and to its group."""
    with Process() as server, Client(server.address(), retries=0) as client:
        chunks, errors, thread = _stream(client, max_tokens=100)
        for _ in range(3):
            server.popen.send_signal(signal.SIGTERM)
        thread.join(DEADLINE_S)
        assert not errors
        assert chunks[-1].finish_reason == "length"
        assert server.end()[0] == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_loading_cleans_up(number):
    with Process("load") as server:
        assert server.popen.stdout.readline() == "loading\n"
        server.popen.send_signal(number)
        code, out, _ = server.end()
        assert (code, out) == (128 + number, "cleaned up\n")


def test_failed_start_says_why_in_one_line():
    with Process("refuse") as server:
        assert server.end() == (1, "", "epruntime: model x is dense: give a MoE model\n")


def test_a_fault_at_start_shows_its_traceback():
    with Process("crash") as server:
        code, _, err = server.end()
        assert code == 1
        assert "Traceback" in err
        assert "a fault" in err


@pytest.mark.parametrize(("option", "flag"), [("port", "--grpc-port"), ("http_port", "--port")])
def test_busy_port(option, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Process(**{option: port}) as server:
            code, out, err = server.end()
    assert (code, out) == (1, "")
    assert err == (
        f"epruntime: cannot listen on 127.0.0.1:{port}: Address already in use; another process listens there: "
        f"stop it, or choose another {flag} (0 picks a free one)\n"
    )


def test_two_servers_cannot_share_a_port():
    with Process() as first:
        port = int(first.address().rpartition(":")[2])
        with Process(port=port) as second:
            assert second.end()[0] == 1


def test_dead_engine_is_told_and_ends_the_process():
    with Process("dies") as server, Client(server.address()) as client:
        _, errors, thread = _stream(client, max_tokens=100_000)
        thread.join(DEADLINE_S)
        assert isinstance(errors[0], RankLostError)
        wait_until(lambda: client.health() == "not serving", "not serving")
        code, _, err = server.end()
        assert code == 1
        assert "rank 1 on host b" in err
