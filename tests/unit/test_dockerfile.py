"""The Dockerfile, without a builder: instructions, sources of copies, arguments, user, commands.

(`make image` builds it where there is a builder.)
"""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import dockerfile
import pytest

from epruntime.cli.main import make_parser
from epruntime.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
BEFORE, STAGES = dockerfile.parse(TEXT)
CONTEXT = dockerfile.context(ROOT, (ROOT / ".dockerignore").read_text())


def test_stages() -> None:
    assert {name: stage.base for name, stage in STAGES.items()} == {
        "build": "${BASE}", "runtime": "${BASE}", "cpu": "runtime", "cuda": "runtime",
    }  # fmt: skip
    assert [instruction.text.partition("=")[0] for instruction in BEFORE] == ["BASE"]


def test_what_is_copied_is_in_the_context() -> None:
    for stage in STAGES.values():
        for copy in stage.all("COPY"):
            *sources, target = copy.words()
            if sources[0].startswith("--from="):
                assert sources[0].removeprefix("--from=") in STAGES
                continue
            for source in sources:
                found = [path for path in CONTEXT if fnmatch.fnmatch(path, source) or path.startswith(f"{source}/")]
                assert found, f"COPY {source}: nothing of it is in the context"
            assert len(sources) == 1 or target.endswith("/")


def test_the_context_has_sources_only() -> None:
    copied = [word for copy in STAGES["build"].all("COPY") for word in copy.words()[:-1]]
    for path in CONTEXT:
        assert any(fnmatch.fnmatch(path, source) or path.startswith(f"{source}/") for source in copied), path
        assert not path.endswith((".so", ".pyc"))
    assert {"epruntime/proto/inference.proto", "csrc/bindings.cpp", "launch/ray_serve.py"} <= CONTEXT
    assert "launch/slurm.sbatch" not in CONTEXT


def test_dockerignore_patterns() -> None:
    assert dockerfile.context(ROOT, "*\n!csrc\ncsrc/kv\n**/*.h\n") == {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "csrc").rglob("*")
        if path.is_file() and path.suffix != ".h" and path.parent.name != "kv"
    }


def test_arguments_are_declared_and_used() -> None:
    for stage in STAGES.values():
        used = set()
        for instruction in stage.instructions:
            if instruction.name not in ("CMD", "ENTRYPOINT"):
                used |= set(re.findall(r"\$\{?(\w+)", instruction.text))
        assert used - {"PATH"} <= stage.declared(), stage.name
        arguments = {instruction.text.partition("=")[0] for instruction in stage.all("ARG")}
        assert arguments <= used, stage.name


def test_torch_is_the_makefiles() -> None:
    makefile = (ROOT / "Makefile").read_text()
    default = re.search(r"^TORCH \?= (\S+)$", makefile, re.MULTILINE)
    assert default is not None
    assert f"ARG TORCH={default[1]}\n" in TEXT
    assert "\nARG TORCH_INDEX_URL=\n" in TEXT  # no host of a registry is written down


def test_no_compiler_in_what_is_shipped() -> None:
    packages = [word for run in STAGES["runtime"].all("RUN") for word in run.words()]
    assert "python3" in packages
    assert not [
        word for word in packages if re.fullmatch(r"(g\+\+|gcc|clang|make|build-essential|.*-dev)(-\d+)?", word)
    ]
    for name in ("cpu", "cuda"):
        assert not any("install" in run.text for run in STAGES[name].all("RUN"))


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_the_user_has_no_rights(name: str) -> None:
    runtime = STAGES["runtime"]
    assert runtime.last("USER").text == "1000:1000"
    assert not STAGES[name].all("USER")
    assert "useradd --uid 1000" in " ".join(run.text for run in runtime.all("RUN"))


def test_commands_are_the_clis() -> None:
    runtime, parser = STAGES["runtime"], make_parser()
    assert runtime.last("ENTRYPOINT").words() == ["/usr/bin/tini", "--", "epruntime"]
    check = runtime.last("HEALTHCHECK").text
    command = dockerfile.Instruction(name="CMD", text=check[check.index("[") :]).words()
    args = parser.parse_args(command[1:])
    assert (command[0], args.command, args.retries) == ("epruntime", "health", 0)
    timeout = re.search(r"--timeout=(\d+)s", check)
    assert timeout is not None
    assert args.timeout < int(timeout[1])
    assert set(runtime.last("EXPOSE").words()) == {str(ServeConfig.port), str(ServeConfig.grpc_port)}


def test_the_commands_in_its_head_parse() -> None:
    (served,) = re.findall(r"epruntime:cpu (serve .*)$", TEXT, re.MULTILINE)
    args = make_parser().parse_args(served.split())
    assert args.host == "0.0.0.0"
    stop = re.search(r"--stop-timeout (\d+)", TEXT)
    assert stop is not None
    assert int(stop[1]) > ServeConfig.drain_timeout_s
    targets = re.findall(r"docker build --target (\w+)", TEXT)
    assert targets == ["cpu", "cuda"]


def test_unknown_instructions_are_noticed() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        dockerfile.parse("FROM x AS y\nRUM true\n")


def test_a_source_distribution_has_what_kernels_are_built_from(tmp_path: Path) -> None:
    """Made where kernels cannot be built, as by `python -m build`, whose environment has no torch."""
    copy = tmp_path / "project"
    copy.mkdir()
    for path in CONTEXT | {"MANIFEST.in"}:
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy / path)
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=copy, env={"EPRUNTIME_SKIP_EXTENSION": "1"}, check=True, timeout=120)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert {path for path in CONTEXT if path.startswith("csrc/")} <= names
    assert {"setup.py", "pyproject.toml", "LICENSE", "epruntime/proto/inference.proto", "epruntime/py.typed"} <= names
