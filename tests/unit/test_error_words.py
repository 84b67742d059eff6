"""Texts of others in our errors and log lines: their place in foreign sources, advice and levels are left out."""

from __future__ import annotations

import pytest

from epruntime.comm.gloo import cause
from epruntime.comm.messages import error_of, failed
from epruntime.launchers.local import _without_level

ADVICE = (
    ". This is typically caused by a remote worker hanging or bugs in the application. Check the logs of the remote "
    "worker before reporting an error. GLHF! \N{BEACH WITH UMBRELLA}\ufe0f"
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[/__w/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2442: Connection "
            "reset by peer" + ADVICE,
            "Read error [127.0.0.1]:2442: Connection reset by peer",
        ),
        (
            "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:36024" + ADVICE,
            "Connection closed by peer [10.0.0.2]:36024",
        ),
        (
            "[/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation to complete",
            "Timed out waiting 2000ms for recv operation to complete",
        ),
        ("Application timeout caused pair closure\nmore", "Application timeout caused pair closure"),
        ("Wait timeout after 2000ms for keys: /a", "Wait timeout after 2000ms for keys: /a"),
        ("", "RuntimeError"),
    ],
)  # fmt: skip
def test_what_gloo_says(text, said):
    assert cause(RuntimeError(text)) == said


@pytest.mark.parametrize(
    ("line", "forwarded"),
    [
        ("WARNING epruntime.worker: careful", "epruntime.worker: careful"),
        ("INFO epruntime.ops.extension: C++", "epruntime.ops.extension: C++"),
        ("ERROR this rank was told not to join", "ERROR this rank was told not to join"),
        ("plain", "plain"),
        ("an INFO epruntime.a: b", "an INFO epruntime.a: b"),
    ],
)
def test_a_forwarded_line_has_one_level(line, forwarded):
    assert _without_level(line) == forwarded


def test_a_foreign_error_of_a_rank_is_one_line():
    text = "index out of bounds\nException raised from at ../c10:1\nframe #0: c10::Error"
    error = error_of(failed(1, RuntimeError(text), where="step 3"), slot=2, host="b")
    assert str(error) == "rank 2 on host b, step 3: RuntimeError: index out of bounds"
    assert "frame #0" in "".join(error.__notes__)
