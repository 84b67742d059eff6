"""`epruntime info`, `health`, `tokenize` and `detokenize`: short questions to a server."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from epruntime.cli import connection
from epruntime.cli.hints import SERVER, is_address
from epruntime.client import Client, ModelInfo, ServerInfo
from epruntime.errors import ConfigError
from epruntime.words import counted

TIMEOUT_S = 30.0


def add_parser(commands: Any) -> None:
    """Adds the four commands."""
    for name, takes, ask, about in (
        ("info", " [HOST:PORT]", _info, "Tells what a server serves, by which ranks, and how loaded the experts are."),
        (
            "health",
            " [HOST:PORT]",
            _health,
            "Tells whether a server takes requests now: exit code 0 if it does, 1 if not.",
        ),
        ("tokenize", " [TEXT]", _tokenize, "Tells which tokens the model gets for a text."),
        ("detokenize", " ID ...", _detokenize, "Tells which text tokens stand for."),
    ):
        parser = commands.add_parser(
            name,
            help="tell" + about.removeprefix("Tells").rstrip("."),
            description=about,
            usage=f"%(prog)s [OPTIONS]{takes}",
        )
        if name == "tokenize":
            parser.add_argument("text", metavar="TEXT", nargs="?", help="default: all of standard input")
        elif name == "detokenize":
            parser.add_argument("token_ids", metavar="ID", nargs="+", type=_token_id)
        if name != "health":
            parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
        connection.add(parser, positional=name in ("info", "health"))
        parser.set_defaults(run=run, ask=ask, parser=parser)


def run(args: argparse.Namespace) -> int:
    if "server" not in args and is_address(getattr(args, "text", None) or ""):
        args.parser.error(f"{args.text!r} looks like an address, not like a text: {SERVER} (give it to mean the text)")
    options = connection.options(args)
    options.setdefault("timeout", TIMEOUT_S)
    try:
        client = Client(**options)
    except ConfigError as error:
        args.parser.error(str(error))
    with client:
        code: int = args.ask(client, args)
        return code


def _token_id(text: str) -> int:
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no token id: {SERVER}")
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no token id: give whole numbers") from None


def _info(client: Client, args: argparse.Namespace) -> int:
    server = client.info()
    model = client.model_info() if server.state in ("ready", "stalled") else None
    if args.json:
        facts = {**dataclasses.asdict(server), "model_info": None if model is None else dataclasses.asdict(model)}
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print("\n".join([*_server_lines(server, client.address), *([] if model is None else _model_lines(model))]))
    return 0


def _server_lines(server: ServerInfo, address: str) -> list[str]:
    state = server.state + (f": {server.state_reason}" if server.state_reason else "")
    lines = [
        f"server     {address}, epruntime {server.version}, {state}, up {server.uptime_s:.0f} s, "
        f"{counted(server.running_requests, 'running request')}",
    ]
    for ep_rank, rank in enumerate(server.ranks):
        loads = [layer.tokens_per_rank[ep_rank] for layer in server.expert_load if ep_rank < len(layer.tokens_per_rank)]
        lines.append(
            f"rank {ep_rank:<5} slot {rank.slot}, host {rank.host}, pid {rank.pid}, incarnation {rank.incarnation}, "
            f"{counted(sum(loads), 'expert row')}"
        )
    return [*lines, *_placement_lines(server.raw)]


def _placement_lines(raw: dict[str, Any]) -> list[str]:
    """Where experts lie, once ranks have told it."""
    engine, ranks = raw.get("engine", {}), raw.get("ranks", [])
    if "expert_placement" not in engine or not all("load" in rank for rank in ranks):
        return []
    text = engine["expert_placement"]
    if ranks:
        text += f", {', '.join(str(rank['load']['local_experts']) for rank in ranks)} experts of each layer by rank"
    if redundant := engine["num_redundant_experts"]:
        layers = [layer for rank in ranks for layer in rank["moe"]["layers"].values()]
        on_copies = counted(sum(layer["replica_pairs"] for layer in layers), "expert row")
        text += f", {counted(redundant, 'redundant one')} per layer; {on_copies} on further copies"
    return [f"placement  {text}"]


def _model_lines(model: ModelInfo) -> list[str]:
    sampling = ", ".join(f"{name}={value}" for name, value in model.default_sampling.items()) or "none of its own"
    return [
        f"model      {model.name}: {model.architecture}, {model.num_parameters / 1e6:.1f} M parameters, {model.dtype}",
        f"experts    {model.num_experts} per layer, top-{model.top_k}, "
        f"in {len(model.moe_layers)} of {counted(model.num_layers, 'layer')}",
        f"tokens     {model.max_model_len} at most, vocabulary {model.vocab_size}, "
        f"{'a' if model.has_tokenizer else 'no'} tokenizer, {'a' if model.has_chat_template else 'no'} chat template",
        f"sampling   {sampling}",
    ]


def _health(client: Client, args: argparse.Namespace) -> int:
    state = client.health()
    print(state)
    return 0 if state == "serving" else 1


def _tokenize(client: Client, args: argparse.Namespace) -> int:
    found = client.tokenize(sys.stdin.read() if args.text is None else args.text)
    if args.json:
        print(json.dumps({"token_ids": found.token_ids, "count": len(found.token_ids), "text": found.text}))
    else:
        print(" ".join(map(str, found.token_ids)))
    return 0


def _detokenize(client: Client, args: argparse.Namespace) -> int:
    text = client.detokenize(args.token_ids)
    print(json.dumps({"text": text}, ensure_ascii=False) if args.json else text)
    return 0
