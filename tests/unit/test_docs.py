"""The documentation is in step with the code, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from epruntime.cli.main import make_parser
from epruntime.models.conformance import COVERED, PARTLY, SINCE
from epruntime.testing.reference_docs import expected

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_generated_parts_are_in_step() -> None:
    for path, text in expected().items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is out of step: run python -m epruntime.testing.reference_docs"
        )


def test_every_flag_in_the_table_of_options_is_there() -> None:
    commands = next(action for action in make_parser()._actions if action.dest == "command").choices
    known = {flag for name in ("serve", "verify") for flag in commands[name]._option_string_actions}
    options, _, _ = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8").partition("## Sampling")
    named = re.findall(r"^\| `\w+` \| `(--[\w-]+)` \|", options, re.MULTILINE)
    assert len(named) > 30
    assert set(named) <= known


def test_every_served_architecture_is_in_both_readmes() -> None:
    for file in ("README.md", "README.zh-CN.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"| `{model_type}` |" in text for model_type in COVERED)
        for model_type, (major, minor) in SINCE.items():
            assert re.search(rf"^\| `{model_type}` \|.*\| {major}\.{minor} [^|]+ \|$", text, re.MULTILINE), model_type


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    # paths named in code spans
    for path in re.findall(r"`((?:epruntime|csrc|tests|examples|benchmarks|docs|launch)/[\w./-]+?)/?`", text):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


@pytest.mark.parametrize(("file", "heading"), [("README.md", "## Limits"), ("README.zh-CN.md", "## 局限")])
def test_what_is_served_in_part_is_a_limit(file: str, heading: str) -> None:
    _, _, after = (ROOT / file).read_text(encoding="utf-8").partition(f"\n{heading}\n")
    limits, _, _ = after.partition("\n## ")
    assert all(f"`{model_type}`" in limits for model_type in PARTLY)


def test_the_two_readmes_have_the_same_shape() -> None:
    """Same headings in number and level, same commands."""
    english, chinese = ((ROOT / file).read_text(encoding="utf-8") for file in ("README.md", "README.zh-CN.md"))

    def shape(text: str) -> list[str]:
        return re.findall(r"^(#+) ", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)

    def commands(text: str) -> list[str]:
        return [
            re.sub(r"\s*#.*", "", line)
            for block in re.findall(r"```(?:bash|python)\n(.*?)```", text, re.DOTALL)
            for line in block.splitlines()
        ]

    assert shape(english) == shape(chinese)
    assert commands(english) == commands(chinese)
