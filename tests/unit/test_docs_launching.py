"""docs/launching.md: its commands work as far as flags go, its settings exist, and the Chinese page says the same."""

from __future__ import annotations

import ast
import re

import pytest
from page_commands import ROOT, blocks, commands, complaint

from epruntime import envs
from epruntime.config import EngineConfig

ENGLISH, CHINESE = (
    (ROOT / f"docs/{name}").read_text(encoding="utf-8") for name in ("launching.md", "launching.zh-CN.md")
)
PAGES = pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Ray imports


def settings(page: str) -> list[str]:
    """Names of the settings table."""
    return [name for line in page.splitlines() if (name := "".join(re.findall(r"^\| `([A-Z][A-Z0-9_]+)` \|", line)))]


def tables(page: str) -> list[int]:
    """Rows of each table."""
    return [len(table.splitlines()) for table in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)]


@pytest.mark.parametrize("command", sorted(set(commands(ENGLISH))))
def test_commands_are_taken(command: str) -> None:
    if command.startswith(("ray ", "docker run")) or "torchrun" in command:
        pytest.importorskip("ray")
        pytest.importorskip("torch")
    assert complaint(command) == ""


@pytest.mark.parametrize(
    "command",
    [
        "epruntime serve /m --expert-parallel 2x",
        "python launch/ray_server.py /m",
        "python launch/ray_serve.py /m --no-such-flag",
        "torchrun --nnodes 2 --node_ranks 0 launch/torchrun_serve.py /m",
        "torchrun --nnodes 2 launch/torchrun_serve.py /m --ray-address auto",
        "ray start --heads",
        "ray job submit --working-dir . -- python launch/ray_serve.py /m --hosts x",
        "sbatch --export=ALL,MODELS=/m launch/slurm.sbatch",
        "kubectl rollout status deployment/epruntime",
        "docker build --target gpu -t x .",
        "docker run epruntime:cpu serves /m",
        "make images",
        "rm -rf /",
    ],
)
def test_wrong_commands_are_noticed(command: str) -> None:
    assert complaint(command) != ""


@PAGES
def test_programs_compile_and_their_keywords_exist(page: str) -> None:
    known = {name for kind in EngineConfig.SECTIONS.values() for name in kind.__dataclass_fields__}
    calls = 0
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "LLM":
                calls += 1
                assert {keyword.arg for keyword in node.keywords} <= known
    assert calls >= 4


@PAGES
def test_own_settings_exist_and_findings_do(page: str) -> None:
    assert {name for name in settings(page) if name.startswith("EPRUNTIME_")} <= envs.VARIABLES.keys()
    assert set(re.findall(r"\bEPRUNTIME_[A-Z_]+", page)) <= envs.VARIABLES.keys()
    named = re.findall(r"`((?:address|mtu|exchange|cpus)-[a-z]+)`", page)
    preflight = (ROOT / "docs/preflight.md").read_text()
    assert named
    assert all(f"| `{name}` |" in preflight for name in named)


@PAGES
def test_it_names_what_is_asked_for_most(page: str) -> None:
    wanted = {
        "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_DEBUG", "EPRUNTIME_HOST_IP",
        "RAY_AUTH_TOKEN_PATH", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
    }  # fmt: skip
    assert wanted <= set(settings(page))


def test_both_pages_say_the_same() -> None:
    def headings(page: str) -> list[int]:
        return [len(marks) for marks in re.findall(r"^(#+) ", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.M)]

    assert headings(ENGLISH) == headings(CHINESE)
    assert list(commands(ENGLISH)) == list(commands(CHINESE))
    assert blocks(ENGLISH, "python") == blocks(CHINESE, "python")
    assert settings(ENGLISH) == settings(CHINESE)
    assert tables(ENGLISH) == tables(CHINESE)

    def names(page: str) -> set[str]:
        """Code spans that are names of something: no words between them."""
        prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
        return {span for span in re.findall(r"`([^`\n]+)`", prose) if " " not in span}

    assert names(ENGLISH) == names(CHINESE)


def test_links_to_sections_lead_somewhere() -> None:
    for page in (ENGLISH, CHINESE):
        headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        links = re.findall(r"\]\(#([^)]+)\)", page)
        assert links
        assert set(links) <= anchors


def test_every_file_of_launch_is_described() -> None:
    for path in (ROOT / "launch").iterdir():
        if path.is_file():
            assert f"launch/{path.name}" in ENGLISH
