"""`epruntime collect-env`: what a bug report needs to know about this machine, as text or JSON.

Each fact is read by itself: one that cannot be read becomes "unknown (why)", and the others are still told. What
needs torch is asked in a child process, which may crash or hang (a CPU without an instruction, a stuck driver).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any

from epruntime.cli import machine_facts, software_facts

Facts = Mapping[str, Callable[[], Any]]

SECTIONS: dict[str, Facts] = {
    "epruntime": software_facts.PACKAGE,
    "versions": software_facts.VERSIONS,
    "kernels and torch": software_facts.TORCH,
    "system": machine_facts.SYSTEM,
    "cpu": machine_facts.CPU,
    "memory": machine_facts.MEMORY,
    "gpu": machine_facts.GPU,
    "network": machine_facts.NETWORK,
    "limits": machine_facts.LIMITS,
    "environment variables": software_facts.ENVIRONMENT,
}

_DESCRIPTION = """Prints what a bug report needs: versions, kernels, CPU, memory, GPUs, network, limits, environment
variables. Values that look like secrets are not shown. Works without torch, too."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("collect-env", help="describe this machine for a bug report", description=_DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    found = collect()
    print(json.dumps(found, indent=2, ensure_ascii=False) if args.json else as_text(found))
    return 0


def collect(sections: Mapping[str, Facts] = SECTIONS) -> dict[str, dict[str, Any]]:
    """Section -> name -> value: text, number, list or dict, ready for JSON. A fact that is a dict of facts whose name
    starts with "*" is spread over its section."""
    found: dict[str, dict[str, Any]] = {}
    for section, facts in sections.items():
        values = found.setdefault(section, {})
        for name, read in facts.items():
            value = _value(read)
            if name.startswith("*") and isinstance(value, dict):
                values.update(value)
            else:
                values[name.removeprefix("*")] = value
    return found


def as_text(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Sections with one line per value."""
    lines = []
    for section, values in found.items():
        lines.append(f"{section}:")
        for name, value in values.items():
            if isinstance(value, bool):
                value = "yes" if value else "no"
            if isinstance(value, dict):
                value = [f"{key}: {item}" for key, item in value.items()] or "none"
            if isinstance(value, list):
                lines.append(f"  {name}:{'' if value else ' none'}")
                lines += [f"    {item}" for item in value]
            else:
                lines.append(f"  {name}: {value}")
        lines.append("")
    return "\n".join(lines[:-1])


def _value(read: Callable[[], Any]) -> Any:
    try:
        value = read()
    except Exception as error:  # noqa: BLE001  whatever is broken here is what the report is about
        return f"unknown ({type(error).__name__}: {error})"
    return value
