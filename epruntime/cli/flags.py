"""Command-line flags made from the fields of dataclasses: name, type, default, choices and help have one source."""

from __future__ import annotations

import argparse
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Any

from epruntime.cli import vllm_flags
from epruntime.cli.parser import CommandParser
from epruntime.config import EngineConfig, ServeConfig
from epruntime.config.engine import has_default
from epruntime.sampling_params import SamplingParams

Parser = argparse.ArgumentParser

_METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}
#: field -> other words for its choices, as torch has them
_SAME_CHOICE = {"dtype": {"float": "float32"}}


def add_config(parser: Parser, kind: type, *, skip: tuple[str, ...] = ()) -> None:
    """Adds a group with one flag for each field of a config dataclass. Absent flags leave no trace in the result.

    Field metadata: `help`, `choices`, `cli` (False: no flag), `positional`.
    """
    group = parser.add_argument_group(_title(kind))
    hints = typing.get_type_hints(kind)
    for f in fields(kind):
        if not f.metadata.get("cli", True) or f.name in skip:
            continue
        if f.metadata.get("positional"):
            parser.add_argument(f.name, metavar=f.name.upper(), help=f.metadata["help"])
        else:
            help_text = f.metadata["help"] + _default_text(f)
            _add(group, f.name, hints[f.name], help_text, f.metadata.get("choices") or None)


def add_engine(parser: CommandParser, *, skip: tuple[str, ...] = (), server: bool = False) -> None:
    """Flags of every part of EngineConfig, vLLM's names for them, and words for flags that are not there.

    Args:
        skip: fields that make no sense in this command.
        server: the command starts one; else it is said of a server's flags that there is none here.
    """
    for kind in EngineConfig.SECTIONS.values():
        add_config(parser, kind, skip=skip)
    vllm_flags.add_aliases(parser, server=server)
    parser.hints = vllm_flags.words(parser, server=server)
    if not server:
        said = vllm_flags.starts_no_server(parser)
        parser.hints |= {flag: f"{flag} is a flag of `serve`: {said}" for flag in _of_serve(skip)}


def add_sampling(parser: Parser, *, defaults: Mapping[str, Any] | None = None, skip: tuple[str, ...] = ()) -> None:
    """Flags of SamplingParams; help comes from its docstring.

    Args:
        defaults: of this command, where they differ from those of SamplingParams.
        skip: fields that make no sense in this command.
    """
    group = parser.add_argument_group("sampling")
    hints, helps = typing.get_type_hints(SamplingParams), attribute_docs(SamplingParams)
    for f in fields(SamplingParams):
        if f.name in skip:
            continue
        text = helps.get(f.name, "")
        if defaults and f.name in defaults:
            text += f" (default: {defaults[f.name]})"
            group.set_defaults(**{f.name: defaults[f.name]})
        else:
            text += _default_text(f)
        _add(group, f.name, hints[f.name], text, None)


def given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of `kind` that the command line set; those that may be given again, as a tuple."""
    values = {f.name: getattr(args, f.name) for f in fields(kind) if f.name in args}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError for a value that cannot work."""
    values: dict[str, Any] = {}
    for kind in EngineConfig.SECTIONS.values():
        values.update(given(args, kind))
    return EngineConfig.from_kwargs(**values)


def serve_config(args: argparse.Namespace) -> ServeConfig:
    """Raises ConfigError for a value that cannot work."""
    return ServeConfig(**given(args, ServeConfig))


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling fields that the command line set, checked.

    Raises:
        InvalidRequestError: a value makes no sense.
    """
    values = given(args, SamplingParams)
    SamplingParams(**values)
    return values


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def attribute_docs(kind: type) -> dict[str, str]:
    """Name -> text of the "Attributes:" section of a class docstring; empty under `python -OO`."""
    section = re.search(r"\n    Attributes:\n(.*?)(?:\n\n|\Z)", kind.__doc__ or "", re.DOTALL)
    if section is None:
        return {}
    entries = re.split(r"\n {8}(?=\w+: )", "\n" + section[1])[1:]
    return {name: " ".join(text.split()) for name, text in (entry.split(": ", 1) for entry in entries)}


def _of_serve(skip: tuple[str, ...]) -> list[str]:
    """Flags of a server; `launcher` is skipped only where the program is one of a launcher."""
    parser = CommandParser(add_help=False)
    for kind in (*EngineConfig.SECTIONS.values(), ServeConfig):
        add_config(parser, kind, skip=("launcher", "ray_address") if "launcher" in skip else ())
    vllm_flags.add_aliases(parser, server=True)
    return list(parser._option_string_actions)


def _add(group: Any, name: str, hint: Any, help_text: str, choices: tuple[str, ...] | None) -> None:
    options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help_text.replace("%", "%%")}
    base, item = _base_type(hint)
    if base is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif base is Mapping:
        options |= {"action": _Biases, "metavar": "ID=VALUE"}
        options["help"] += " Give the flag again for each."
    elif base is tuple:
        options |= {"action": "append", "type": item, "metavar": _METAVARS[item]}
        options["help"] += " Give the flag again for each."
    else:
        options |= {"type": base, "choices": choices}
        if choices is None:
            options["metavar"] = _METAVARS[base]
        elif name in _SAME_CHOICE:
            options["type"] = partial(_same_choice, _SAME_CHOICE[name])
    group.add_argument(flag_of(name), **options)


def _same_choice(words: Mapping[str, str], text: str) -> str:
    return words.get(text, text)


class _Biases(argparse.Action):
    """`--logit-bias 17=-5 --logit-bias 9=1.5` -> {17: -5.0, 9: 1.5}."""

    def __call__(self, parser: Parser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        token, _, bias = str(values).partition("=")
        try:
            pair = (int(token), float(bias))
        except ValueError:
            raise argparse.ArgumentError(self, f"{values!r} is not ID=VALUE, for example 17=-5") from None
        biases = dict(getattr(namespace, self.dest, {}))
        if pair[0] in biases:
            raise argparse.ArgumentError(self, f"token {pair[0]} has a bias already")
        setattr(namespace, self.dest, {**biases, pair[0]: pair[1]})


def _base_type(hint: Any) -> tuple[Any, Any]:
    """`int | None` -> int; `tuple[int, ...]` -> tuple with items of int; `Mapping[int, float]` -> Mapping."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    origin = typing.get_origin(hint)
    if origin is tuple:
        return tuple, typing.get_args(hint)[0]
    return (Mapping, float) if origin is Mapping else (hint, hint)


def _default_text(f: Field[Any]) -> str:
    if not has_default(f) or f.default is None or f.default is MISSING or f.default == ():
        return ""
    if isinstance(f.default, bool):
        return f" (default: {'yes' if f.default else 'no'})"
    return f" (default: {f.default})"


def _title(kind: type) -> str:
    name = kind.__name__.removesuffix("Config").lower()
    words = (kind.__doc__ or "").splitlines()
    return f"{name}: {words[0].rstrip('.')}" if words else name
