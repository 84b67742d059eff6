"""`epruntime models`: every Mixture-of-Experts architecture of the installed transformers, served or not, and why."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

_DESCRIPTION = """Lists every Mixture-of-Experts architecture of the installed transformers that generates text, and
says of each whether a checkpoint of it is served. The list is computed: a small model of each is built without weights
and asked what it does, which takes some seconds."""
_LEGEND = """SERVED: "hooked" - its experts go through the experts interface of transformers, where epruntime registers
itself; "adapted" - an adapter of epruntime's puts them there; "no" - a checkpoint of it is refused. Both kinds compute
the same (docs/models.md). FEATURES of its checkpoints, which some layers may have: dense (no experts), latent (MLA),
sparse (attention to keys that an indexer selects), shared (latents of another layer), sinks, window, chunk; where
none is named, attention is full."""
_WIDTH = 120


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "models", help="list architectures, served or not, with reasons", description=_DESCRIPTION
    )
    parser.add_argument(
        "types", nargs="*", metavar="TYPE", help="model_type of config.json, or name of a class: list these alone"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    import transformers

    from epruntime.models.survey import candidates, survey
    from epruntime.models.type_names import type_of

    known = candidates() if args.types else []
    named = {name: type_of(name, known) for name in args.types}
    if unknown := [name for name, model_type in named.items() if model_type is None]:
        args.parser.error(_unknown(unknown, known, transformers.__version__))
    found = survey([model_type for model_type in named.values() if model_type is not None])
    listed = {verdict.model_type for verdict in found}
    if absent := [name for name, model_type in named.items() if model_type not in listed]:
        args.parser.error(_unknown(absent, known, transformers.__version__))
    served = sum(verdict.served for verdict in found)
    if args.json:
        facts = {
            "transformers": transformers.__version__,
            "served": served,
            "models": [verdict.to_dict() for verdict in found],
        }
        print(json.dumps(facts, indent=2))
        return 0
    print(table([verdict.to_dict() for verdict in found]))
    print("\n" + textwrap.fill(" ".join(_LEGEND.split()), _WIDTH))
    if args.types:
        return 0
    version = transformers.__version__
    print(f"\n{served} of {len(found)} Mixture-of-Experts architectures of transformers {version} are served.")
    return 0


def _unknown(names: list[str], known: list[str], version: str) -> str:
    from epruntime.models.type_names import help_with

    words = [f"{name} ({told})" if (told := help_with(name, known)) else name for name in names]
    return f"no Mixture-of-Experts architecture that generates text in transformers {version}: {', '.join(words)}"


def table(models: list[dict[str, Any]]) -> str:
    """Rows of `survey`, served ones first, reasons wrapped."""
    rows = [("MODEL TYPE", "SERVED", "FEATURES, OR WHY NOT")]
    for model in sorted(models, key=lambda m: (not m["served"], m["model_type"])):
        features = ", ".join(model["features"]) if model["served"] else ""
        told = not model["since"] or "needs transformers" in model["reason"]
        needs = "" if told else f"needs transformers {model['since']} or newer"
        text = "; ".join(part for part in (features, model["reason"], needs) if part)
        rows.append((model["model_type"], model["how"] or "no", text))
    widths = [max(len(row[column]) for row in rows) + 2 for column in (0, 1)]
    lines = []
    for row in rows:
        first, *more = textwrap.wrap(row[2], _WIDTH - sum(widths)) or [""]
        lines.append((row[0].ljust(widths[0]) + row[1].ljust(widths[1]) + first).rstrip())
        lines += [" " * sum(widths) + line for line in more]
    return "\n".join(lines)
