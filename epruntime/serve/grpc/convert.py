"""Requests and facts between their wire form and ours."""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any

from epruntime.engine.processor import MAX_MESSAGES
from epruntime.errors import InvalidRequestError
from epruntime.proto import inference_pb2 as pb
from epruntime.serve.expert_load import expert_load
from epruntime.serve.gate import Gate, ServerState
from epruntime.version import __version__

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
#: Fields of the SamplingParams message that are `optional`, and so can be absent.
_OPTIONAL = tuple(f.name for f in pb.SamplingParams.DESCRIPTOR.fields if f.has_presence)
_LISTS = ("stop", "stop_token_ids")
_MODEL_FACTS = tuple(f.name for f in pb.GetModelInfoResponse.DESCRIPTOR.fields if f.name != "default_sampling")
UNLIMITED_TOKENS = -1


def request_id_of(request: pb.GenerateRequest) -> str:
    """The id that the caller chose, or a new one.

    Raises:
        InvalidRequestError: it cannot be a metadata value.
    """
    if not request.request_id:
        return uuid.uuid4().hex
    if not _REQUEST_ID.fullmatch(request.request_id):
        raise InvalidRequestError(
            "use 1 to 128 printable ASCII characters without spaces", field="request_id", value=request.request_id[:200]
        )
    return request.request_id


def prompt_of(request: pb.GenerateRequest | pb.TokenizeRequest) -> str | dict[str, Any]:
    """The prompt in the form that the engine takes.

    Raises:
        InvalidRequestError: there is none, or it is empty.
    """
    kind = request.WhichOneof("prompt")
    if kind is None:
        kinds = "text, token_ids or chat" if isinstance(request, pb.GenerateRequest) else "text or chat"
        raise InvalidRequestError(f"is missing; send {kinds}", field="prompt")
    if kind == "text":
        return request.text
    if kind == "token_ids":
        if not request.token_ids.ids:
            raise InvalidRequestError("has no tokens; send at least one", field="token_ids")
        return {"prompt_token_ids": list(request.token_ids.ids)}
    if not request.chat.messages:
        raise InvalidRequestError("has no messages; send at least one", field="chat")
    num = len(request.chat.messages)
    if num > MAX_MESSAGES:
        raise InvalidRequestError(f"at most {MAX_MESSAGES} messages are taken", field="chat", value=f"{num} of them")
    for number, message in enumerate(request.chat.messages):
        if not message.role:
            raise InvalidRequestError(
                f"message {number} has no role; use 'system', 'user' or 'assistant'", field="chat"
            )
    return {"messages": [{"role": m.role, "content": m.content} for m in request.chat.messages]}


def sampling_of(message: pb.SamplingParams) -> dict[str, Any]:
    """The fields that are given, for `Engine.sampling_params`."""
    given: dict[str, Any] = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    if given.get("max_tokens") == UNLIMITED_TOKENS:
        given["max_tokens"] = None
    given.update({name: tuple(getattr(message, name)) for name in _LISTS if getattr(message, name)})
    if message.logit_bias:
        given["logit_bias"] = message.logit_bias
    return given


def model_info(facts: dict[str, Any]) -> pb.GetModelInfoResponse:
    """`Engine.model_info` as a message."""
    message = pb.GetModelInfoResponse(**{name: facts[name] for name in _MODEL_FACTS})
    for name, value in facts["default_sampling"].items():
        if name == "max_tokens" and value is None:
            value = UNLIMITED_TOKENS
        if name in _LISTS:
            getattr(message.default_sampling, name).extend(value)
        elif name == "logit_bias":
            message.default_sampling.logit_bias.update(value)
        elif value is not None:
            setattr(message.default_sampling, name, value)
    return message


def state_of(gate: Gate) -> tuple[str, str]:
    """Name of the server's state, and words where it is not READY. While the gate is open the engine's state counts."""
    if gate.state is ServerState.READY and gate.engine is not None:
        return gate.engine.status.state.name, gate.reason
    return gate.state.name, gate.reason


def server_info(gate: Gate, info: dict[str, Any]) -> pb.GetServerInfoResponse:
    """State of the server, and the engine's facts: structured where their form is settled, all of them as JSON.

    Args:
        info: what `Engine.info` returned; empty while there is no live engine.
    """
    engine = info.get("engine", {})
    state, reason = state_of(gate)
    ranks = [
        pb.Rank(
            slot=rank["slot"],
            incarnation=rank["incarnation"],
            host=rank["host"],
            local_rank=rank["local_rank"],
            pid=rank["pid"],
            ep_rank=ep_rank,
        )
        for ep_rank, rank in enumerate(info.get("ranks", ()))
    ]
    return pb.GetServerInfoResponse(
        version=__version__,
        state=pb.ServerState.Value(f"SERVER_STATE_{state}"),
        state_reason=reason,
        model=info.get("model", {}).get("name", ""),
        uptime_s=time.time() - gate.started,
        running_requests=len(gate.live),
        expert_parallel_size=engine.get("expert_parallel_size", 0),
        ranks=ranks,
        expert_load=[
            pb.LayerLoad(layer=x.layer, tokens_per_expert=x.tokens_per_expert, tokens_per_rank=x.tokens_per_rank)
            for x in expert_load(info)
        ],
        info_json=json.dumps(info, default=_plain),
    )


def _plain(value: Any) -> Any:
    """Tuples, sets and array scalars for json.dumps."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
