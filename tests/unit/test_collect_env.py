"""collect-env: tells what it can, says why where it cannot, and shows no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from epruntime.cli import machine_facts, software_facts
from epruntime.cli.collect_env import SECTIONS, as_text, collect
from epruntime.version import __version__

ROOT = Path(__file__).parents[2]


def _run(*command: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True,
        timeout=120, cwd="/",
    )  # fmt: skip


def test_json_and_text_tell_the_same():
    pytest.importorskip("torch")
    done = _run("-m", "epruntime.cli", "collect-env", "--json", EPRUNTIME_LOG_LEVEL="INFO", HF_TOKEN="hf_secret12345")
    assert done.returncode == 0, done.stderr
    assert "hf_secret12345" not in done.stdout
    found = json.loads(done.stdout)
    assert set(found) == set(SECTIONS)
    assert found["epruntime"]["version"] == __version__
    assert found["kernels and torch"]["kernel signature"]["epruntime"] == __version__
    assert found["environment variables"]["EPRUNTIME_LOG_LEVEL"] == "INFO"
    assert found["environment variables"]["HF_TOKEN"] == "(set; not shown)"
    assert found["cpu"]["cores"] == os.cpu_count()
    text = as_text(found)
    for section, values in found.items():
        assert f"{section}:" in text
        for name in values:
            assert f"  {name}:" in text


def test_why_the_kernels_are_absent():
    pytest.importorskip("torch")
    done = _run("-m", "epruntime.cli.torch_facts", EPRUNTIME_DISABLE_EXTENSION="1")
    facts = json.loads(done.stdout)
    assert facts["why no C++ kernels"] == "EPRUNTIME_DISABLE_EXTENSION=1"
    assert facts["kernel signature"]["extension"] == "plain"


def test_a_client_only_install(tmp_path):
    """No package of an extra, neither here nor in the child process."""
    hidden = (
        "import sys\nfor name in ('torch', 'transformers', 'ray', 'msgpack', 'numpy'):\n    sys.modules[name] = None\n"
    )
    (tmp_path / "sitecustomize.py").write_text(hidden)
    done = _run("-m", "epruntime.cli", "collect-env", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert "  torch: unknown (RuntimeError: torch is not installed: this is a client only)" in done.stdout
    assert f"  version: {__version__}" in done.stdout


def test_one_broken_fact_hurts_no_other():
    def broken() -> str:
        raise OSError("the disk is on fire")

    found = collect({"a": {"x": broken, "y": lambda: 3, "*z": broken, "*more": lambda: {"p": [1, 2], "q": True}}})
    unknown = "unknown (OSError: the disk is on fire)"
    assert found == {"a": {"x": unknown, "y": 3, "z": unknown, "p": [1, 2], "q": True}}
    assert as_text(found) == f"a:\n  x: {unknown}\n  y: 3\n  z: {unknown}\n  p:\n    1\n    2\n  q: yes"


@pytest.mark.parametrize(
    ("end", "words"),
    [("import os; os.kill(os.getpid(), 11)", "SIGSEGV"), ("print(1); import sys; sys.exit('no')", "no")],
)
def test_a_torch_that_crashes_is_one_fact(monkeypatch, end, words):
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: run([sys.executable, "-c", end], **options))
    software_facts._torch_facts.cache_clear()
    found = collect({"kernels": software_facts.TORCH})
    software_facts._torch_facts.cache_clear()
    assert words in found["kernels"]["torch"]
    assert found["kernels"]["torch"].startswith("unknown (")


def test_secrets():
    variables = {
        "HF_TOKEN": "abc", "EPRUNTIME_API_KEY": "abc", "RAY_REDIS_PASSWORD": "abc", "HF_HOME": "/data",
        "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", "MY_TOKEN": "abc",
        "HOME": "/r", "https_proxy": "http://me:abc@proxy:3128", "EPRUNTIME_X": "Bearer abc",
        "HF_Y": "hf_abcabcabcabc", "HF_AUTH": "",
    }  # fmt: skip
    shown = software_facts.environment(variables)
    assert "abc" not in " ".join(shown.values())
    assert shown["https_proxy"] == "http://(not shown)@proxy:3128"
    assert {name: shown[name] for name in ("HF_HOME", "NCCL_DEBUG", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM")} == {
        "HF_HOME": "/data", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    assert "MY_TOKEN" not in shown
    assert "HOME" not in shown
    assert shown["HF_AUTH"] == ""


def test_ranges():
    assert machine_facts.ranges({0, 1, 2, 3, 5, 8, 9}) == "0-3,5,8-9"
    assert machine_facts.ranges({4}) == "4"
