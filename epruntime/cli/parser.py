"""CommandParser: argparse without abbreviations, and with a hint for a flag that is not there."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from epruntime.cli.hints import SERVER, is_address


class CommandParser(argparse.ArgumentParser):
    """Flags must be written out: an abbreviation that works today would change its meaning, or fail, once another flag
    begins alike.

    Attributes:
        hints: flag that this command has not -> what is said of it.
    """

    hints: dict[str, str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self.hints = {}
        self._given: list[str] = []

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, but a flag with a hint ends it at once: what follows a flag that is not known may be its
        value or not, so that any later complaint would mislead."""
        args = self._given = sys.argv[1:] if args is None else list(args)
        for flag in _flags(args):
            if flag in self.hints and flag not in self._option_string_actions:
                self.error(self.hints[flag])
        return super().parse_known_args(args, namespace)

    def refuse(self, unknown: Sequence[str]) -> None:
        """Ends the program for arguments that nothing takes, with the nearest flag for each that looks like one."""
        told = []
        for flag in dict.fromkeys(_flags(unknown)):
            near = difflib.get_close_matches(flag.replace("_", "-"), self._option_string_actions, n=1, cutoff=0.7)
            told.append(f"there is no {flag}" + (f"; did you mean {near[0]}?" if near else ""))
        if not told:
            told = [f"unrecognized arguments: {' '.join(unknown)}"]
            if any(map(is_address, self._given)) and "--server" in self._option_string_actions:
                told.append(SERVER)
        self.error("; ".join(told))


def _flags(args: Iterable[str]) -> Iterable[str]:
    """What looks like a flag, up to "--", without its "=value"."""
    for arg in args:
        if arg == "--":
            return
        name = arg.partition("=")[0]
        if len(name) > 1 and name[0] == "-" and not name[1].isdigit():
            yield name
