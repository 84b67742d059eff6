"""What torchrun's summary says of a job that failed: the line of the coordinator's output that tells why."""

from __future__ import annotations

import io
import logging

import pytest

from epruntime.launchers.torchrun_cause import RememberingStream, cause_in, of_exit

TRACE = """Traceback (most recent call last):
  File "job.py", line 3, in main
    raise epruntime.errors.LaunchError("no room")
epruntime.errors.LaunchError: no room
"""


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", ""),
        ("01:49:53 INFO epruntime.x: all is well\nplain words\n", ""),
        ("01:49:53 INFO epruntime.x: well\nepruntime: model x is dense: give a MoE model\n",
         "epruntime: model x is dense: give a MoE model"),
        ("epruntime: in use\n01:49:53 INFO epruntime.serve.server: stopped: 0 requests\n", "epruntime: in use"),
        ("torchrun_serve.py: error: there is no --prot; did you mean --port?\n",
         "torchrun_serve.py: error: there is no --prot; did you mean --port?"),
        (TRACE, "epruntime.errors.LaunchError: no room"),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("01:49:53 ERROR epruntime.serve.server: the engine is dead: rank 1 on host b is lost\nstopped\n",
         "the engine is dead: rank 1 on host b is lost"),
        ("epruntime: " + "x" * 10_000, "epruntime: " + "x" * 589),
    ],
)  # fmt: skip
def test_cause(text, cause):
    assert cause_in(text) == cause


def test_the_stream_is_that_stream_and_remembers_the_end():
    inner = io.StringIO()
    stream = RememberingStream(inner)
    logging.StreamHandler(stream).emit(logging.makeLogRecord({"msg": "some words", "levelno": 20}))
    for number in range(5000):
        print("line", number, file=stream, flush=True)
    print("epruntime: in two", end=" ", file=stream)
    print("pieces", file=stream)
    assert inner.getvalue().startswith("some words\nline 0\n")
    assert inner.getvalue().endswith("epruntime: in two pieces\n")
    assert stream.cause() == "epruntime: in two pieces"
    assert len(stream._tail) <= 16_384
    assert not stream.isatty()


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (None, (0, "")),
        (0, (0, "")),
        (3, (3, "")),
        ("no such model:\n  x", (1, "no such model: x")),
        (["a"], (1, "['a']")),
        ("x" * 10_000, (1, "x" * 600)),
    ],
)
def test_what_sys_exit_is_given(code, told):
    assert of_exit(SystemExit(code)) == told
