"""`epruntime completion SHELL`: the script that lets a shell complete commands and flags; argcomplete does the work.

<TAB> -> the shell runs `epruntime` with _ARGCOMPLETE=1 -> main makes the parser -> `complete` answers and exits
"""

from __future__ import annotations

import argparse
import os
from typing import Any

_SHELLS = ("bash", "zsh", "fish")
_DESCRIPTION = """Prints a script that makes SHELL complete the commands and flags of epruntime. For this shell only:
eval "$(epruntime completion bash)" (the same with zsh), or epruntime completion fish | source. For good: put that line
into ~/.bashrc, ~/.zshrc (after compinit) or ~/.config/fish/config.fish."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("completion", help="let a shell complete commands and flags", description=_DESCRIPTION)
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    print(shellcode(["epruntime"], shell=args.shell))
    return 0


def complete(parser: argparse.ArgumentParser) -> None:
    """Answers a shell that asks for completions, and exits; returns at once where none asks."""
    if "_ARGCOMPLETE" not in os.environ:
        return
    import argcomplete

    argcomplete.autocomplete(parser)
