"""`epruntime generate` and `epruntime chat` as processes, against a real server."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_llm import FakeLLM
from serving import Serving, wait_until

from epruntime.sampling_params import SamplingParams

ROOT = Path(__file__).parent.parent.parent
DEADLINE_S = 60


@pytest.fixture(scope="module")
def server():
    with Serving() as running:
        yield running


def _start(*args: str, **options) -> subprocess.Popen:
    defaults = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [sys.executable, "-m", "epruntime.cli", *args], env={**os.environ, "PYTHONPATH": str(ROOT)},
        **{**defaults, **options},
    )  # fmt: skip


def _cli(*args: str, stdin: str = "") -> tuple[int, str, str]:
    process = _start(*args)
    out, err = process.communicate(stdin, timeout=DEADLINE_S)
    return process.returncode, out, err


def test_generate_one_prompt(server):
    assert _cli("generate", "--server", server.address, "abc", "--max-tokens", "6") == (0, "abcabc\n", "")
    params = list(server.llm.params.values())[-1]
    assert params == SamplingParams(max_tokens=6)


def test_generate_lines_of_stdin_in_order_with_sampling_flags(server):
    flags = [
        "--temperature",
        "0",
        "--stop",
        "c",
        "--stop",
        "zz",
        "--stop-token-ids",
        "5",
        "--ignore-eos",
        "--seed",
        "3",
    ]
    code, out, err = _cli("generate", "--server", server.address, *flags, stdin="xy\n\nbc\n")
    assert (code, err) == (0, "")
    assert out == f">>> xy\n{('xy' * 64)}\n\n>>> bc\nb\n\n"
    params = list(server.llm.params.values())[-1]
    assert params == SamplingParams(
        temperature=0.0, stop=("c", "zz"), stop_token_ids=(5,), ignore_eos=True, seed=3, max_tokens=128
    )


def test_generate_json(server):
    code, out, _ = _cli(
        "generate", "--server", server.address, "--json", "é", "b", "--max-tokens", "2", "--logprobs", "0"
    )
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    (output,) = first["outputs"]
    assert (first["prompt"], output["text"], output["finish_reason"], first["output_tokens"]) == (
        "é",
        "éé",
        "length",
        2,
    )
    assert output["logprobs"] == [[{"token_id": 233, "token": "é", "logprob": -0.5}]] * 2
    assert second["outputs"][0]["text"] == "bb"


def test_a_refused_prompt_fails_alone(server):
    from epruntime.errors import InvalidRequestError

    server.llm.errors["bad"] = InvalidRequestError("too long", field="prompt", value="bad")
    code, out, err = _cli("generate", "--server", server.address, "bad", "abc", "--max-tokens", "3")
    assert code == 1
    assert out == ">>> bad\n>>> abc\nabc\n\n"
    assert err == "epruntime generate: prompt='bad': too long\n"


@pytest.mark.parametrize("command", [["generate", "abc"], ["chat"]])
def test_no_server(command):
    code, out, err = _cli(*command, "--server", "127.0.0.1:1")
    assert (code, out) == (1, "")
    assert err.startswith(f"epruntime {command[0]}: no epruntime server answers at 127.0.0.1:1")
    assert err.count("\n") == 1


def test_generate_ctrl_c_ends_the_request_with_130():
    with Serving(FakeLLM(delay_s=0.02)) as server:
        process = _start("generate", "--server", server.address, "abc", "--max-tokens", "100000")
        assert process.stdout.read(5) == "abcab"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, err) == (130, "")
        wait_until(lambda: not server.llm.live, "the request ended")


def test_a_closed_pipe_is_no_traceback(server):
    process = _start("generate", "--server", server.address, "abc", "--max-tokens", "200000")
    process.stdout.read(3)
    process.stdout.close()
    process.stdin.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(DEADLINE_S), err) == (1, "")


def test_chat_from_a_pipe_remembers_and_clears(server):
    code, out, err = _cli(
        "chat", "--server", server.address, "--system", "be brief", "--max-tokens", "3",
        stdin="one\ntwo\n/clear\nsix\n/exit\nnever\n",
    )  # fmt: skip
    assert (code, out, err) == (0, "one\ntwo\nsix\n", "")
    first, second, third = [p["messages"] for p in server.llm.prompts.values() if isinstance(p, dict)][-3:]
    system, one = {"role": "system", "content": "be brief"}, {"role": "user", "content": "one"}
    assert first == [system, one]
    assert second == [system, one, {"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}]
    assert third == [system, {"role": "user", "content": "six"}]


def test_chat_on_a_terminal_survives_ctrl_c():
    with Serving(FakeLLM(delay_s=0.02)) as server:
        master, terminal = pty.openpty()
        process = _start("chat", "--server", server.address, "--max-tokens", "100000", stdin=terminal, stdout=terminal,
                         stderr=terminal)  # fmt: skip
        os.close(terminal)
        seen = ""

        def came(text: str, deadline_s: float) -> bool:
            nonlocal seen
            deadline = time.monotonic() + deadline_s
            while text not in seen:
                ready, _, _ = select.select([master], [], [], max(deadline - time.monotonic(), 0))
                if not ready:
                    return False
                seen += os.read(master, 1000).decode()
            seen = seen.partition(text)[2]
            return True

        def see(text: str) -> None:
            assert came(text, DEADLINE_S), f"{text!r} did not come, but {seen!r}"

        def see_prompt() -> None:
            see("> ")
            time.sleep(0.5)

        try:
            see_prompt()
            for _ in range(10):  # the line editor misses a signal between showing the prompt and waiting for a key
                process.send_signal(signal.SIGINT)  # at the prompt: nothing is lost
                if came("(Ctrl-D or /exit leaves)", 2):
                    break
            see_prompt()
            os.write(master, b"hello\n")
            see("hellohello")
            process.send_signal(signal.SIGINT)
            see("[stopped]")
            wait_until(lambda: not server.llm.live, "the request ended on the server")
            see_prompt()
            os.write(master, b"again\n")
            see("againagain")
            process.send_signal(signal.SIGINT)
            see_prompt()
            messages = list(server.llm.prompts.values())[-1]["messages"]
            assert [m["role"] for m in messages] == ["user", "assistant", "user"]
            assert messages[1]["content"].startswith("hellohello")
            os.write(master, b"\x04")  # Ctrl-D
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.wait()
            os.close(master)
