"""Completion as a shell asks for it: argcomplete's protocol, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from epruntime.cli.main import main

pytest.importorskip("argcomplete")

ROOT = Path(__file__).parents[2]
#: the command line, where nothing slow can be imported
_PROGRAM = """
import sys
for name in ("torch", "transformers", "ray", "numpy", "fastapi", "uvicorn"):
    sys.modules[name] = None
from epruntime.cli.main import main
main()
"""


def _complete(line: str, answers: Path) -> list[str]:
    """Candidates for a command line whose end the cursor is at."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "63", "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answers),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [text.strip() for text in answers.read_text().split("\n") if text.strip()]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("epruntime se", {"serve"}),
        ("epruntime co", {"collect-env", "completion"}),
        ("epruntime serve --max-num-", {"--max-num-seqs", "--max-num-batched-tokens"}),
        ("epruntime serve --launcher ", {"local", "ray", "torchrun"}),
        ("epruntime serve --no-enable-p", {"--no-enable-prefix-caching"}),
        ("epruntime generate --logit", {"--logit-bias"}),
        ("epruntime completion ", {"bash", "zsh", "fish"}),
    ],
)
def test_tab(tmp_path, line, expected):
    found = set(_complete(line, tmp_path / "answers"))
    assert found - {"-h", "--help"} == expected


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete "), ("zsh", "compdef "), ("fish", "complete --command")]
)
def test_the_script_of_each_shell(capsys, shell, word):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert word in script
    assert "epruntime" in script


def test_bash_takes_the_script(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p epruntime"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "-F _python_argcomplete" in done.stdout


def test_without_argcomplete_the_extra_is_named(capsys, monkeypatch):
    for name in ("argcomplete", "argcomplete.shell_integration"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delenv("_ARGCOMPLETE", raising=False)
    assert main(["completion", "bash"]) == 1
    assert "pip install 'epruntime[cli]'" in capsys.readouterr().err
