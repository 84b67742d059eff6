"""Reads a Dockerfile and a .dockerignore, as far as checking ours without a builder needs it."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

#: https://docs.docker.com/reference/dockerfile/
INSTRUCTIONS = {
    "ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "ONBUILD", "RUN",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction: its name in capitals, and what follows, on one line."""

    name: str
    text: str

    def words(self) -> list[str]:
        """JSON form or shell words."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


@dataclass(kw_only=True)
class Stage:
    """A build stage.

    Attributes:
        name: as in `FROM base AS name`; base: image or stage.
    """

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.name == name]

    def last(self, name: str) -> Instruction:
        return self.all(name)[-1]

    def declared(self) -> set[str]:
        """Names of its ARGs and ENVs."""
        names = {instruction.text.partition("=")[0] for instruction in self.all("ARG")}
        return names | {word.partition("=")[0] for instruction in self.all("ENV") for word in instruction.words()}


def parse(text: str) -> tuple[list[Instruction], dict[str, Stage]]:
    """Returns what comes before the first stage, and the stages by name.

    Raises:
        ValueError: not an instruction, or a stage without a name.
    """
    joined = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    before: list[Instruction] = []
    stages: dict[str, Stage] = {}
    current = before
    for line in filter(str.strip, joined.splitlines()):
        name, _, rest = line.strip().partition(" ")
        if name not in INSTRUCTIONS:
            raise ValueError(f"{name!r} is no instruction: {line!r}")
        instruction = Instruction(name=name, text=" ".join(rest.split()))
        if name == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", instruction.text)
            if match is None:
                raise ValueError(f"a stage needs a name: {line!r}")
            stages[match[2]] = Stage(name=match[2], base=match[1])
            current = stages[match[2]].instructions
        else:
            current.append(instruction)
    return before, stages


def context(root: Path, ignore: str) -> set[str]:
    """Files below `root` that a .dockerignore leaves in the build context: of the patterns that match the last decides.

    (A pattern matches a file also by naming a folder above it.)
    """
    patterns = [line.strip() for line in ignore.splitlines() if line.strip() and not line.startswith("#")]
    tops = {line[1:].split("/")[0] for line in patterns if line.startswith("!")}
    files = [path for top in tops for path in ([root / top] if (root / top).is_file() else (root / top).rglob("*"))]
    found = set()
    for file in (path for path in files if path.is_file()):
        path = file.relative_to(root).as_posix()
        kept = True
        for pattern in patterns:
            if _matches(path, pattern.lstrip("!")):
                kept = pattern.startswith("!")
        if kept:
            found.add(path)
    return found


def _matches(path: str, pattern: str) -> bool:
    ways = [path, *map(str, PurePosixPath(path).parents)]
    if pattern.startswith("**/"):  # at any depth
        return any(fnmatch.fnmatch(PurePosixPath(way).name, pattern[3:]) for way in ways)
    return any(way.count("/") == pattern.count("/") and fnmatch.fnmatch(way, pattern) for way in ways if way != ".")
