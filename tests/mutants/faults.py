"""Fault: one line of the code made wrong on purpose, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        id: short name. words: what goes wrong, for people.
        file: the file it is put into, from the root of the repository.
        old: text that occurs there exactly once; new: what takes its place.
        test: node id of the test that must fail with it; without parameters in brackets, one of them must.
    """

    id: str
    words: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        """Puts the fault into a copy of the repository.

        Raises:
            ValueError: `old` does not occur exactly once: the code has changed, and the fault must follow.
        """
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ValueError(f"{self.id}: its text occurs {source.count(self.old)} times in {self.file}, not once")
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")

    def revert(self, root: Path, original: Path = ROOT) -> None:
        (root / self.file).write_bytes((original / self.file).read_bytes())
