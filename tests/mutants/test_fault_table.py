"""The faults of `make mutants` fit the code: each has its place and its test. The runs take minutes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from fault_table import FAULTS
from faults import ROOT, Fault
from run_mutants import Outcome, table


def test_there_are_enough_with_names_of_their_own() -> None:
    assert len(FAULTS) >= 24
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert all(re.fullmatch(r"[a-z0-9-]+", fault.id) and fault.words for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_it_can_be_put_in(fault: Fault, tmp_path: Path) -> None:
    """Its text is there, once; with it the file is still Python, and another program."""
    source = (ROOT / fault.file).read_text(encoding="utf-8")
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    copy.write_text(source, encoding="utf-8")
    fault.apply(tmp_path)
    assert ast.dump(ast.parse(copy.read_text(encoding="utf-8"))) != ast.dump(ast.parse(source))
    fault.revert(tmp_path)
    assert copy.read_text(encoding="utf-8") == source


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_its_test_is_there(fault: Fault) -> None:
    path, _, name = fault.test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_text_that_is_not_there_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("a = 1\na = 1\n")
    fault = Fault(id="x", words="w", file="x.py", old="a = 1", new="a = 2", test="t")
    with pytest.raises(ValueError, match=r"2 times in x\.py"):
        fault.apply(tmp_path)


def test_the_table_names_fault_test_and_verdict() -> None:
    outcomes = [Outcome(fault=FAULTS[0], verdict="SURVIVED", seconds=1.0, detail="it passes")]
    for words in (FAULTS[0].id, FAULTS[0].words, FAULTS[0].test, "SURVIVED", "it passes"):
        assert words in table(outcomes)
