"""Answers about a server and its model, from their wire form; and tokens and text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from epruntime.client import wire
from epruntime.client.types import LayerLoad, ModelInfo, Rank, ServerInfo, TokenizeResult
from epruntime.errors import InvalidRequestError
from epruntime.proto import inference_pb2 as pb


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        state=pb.ServerState.Name(message.state).removeprefix("SERVER_STATE_").lower(),
        state_reason=message.state_reason,
        model=message.model,
        uptime_s=message.uptime_s,
        running_requests=message.running_requests,
        expert_parallel_size=message.expert_parallel_size,
        ranks=tuple(
            Rank(slot=r.slot, incarnation=r.incarnation, host=r.host, local_rank=r.local_rank, pid=r.pid)
            for r in message.ranks
        ),
        expert_load=tuple(
            LayerLoad(
                layer=layer.layer,
                tokens_per_expert=tuple(layer.tokens_per_expert),
                tokens_per_rank=tuple(layer.tokens_per_rank),
            )
            for layer in message.expert_load
        ),
        raw=json.loads(message.info_json or "{}"),
    )


def model_info(message: pb.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        model_type=message.model_type,
        dtype=message.dtype,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        hidden_size=message.hidden_size,
        num_layers=message.num_layers,
        num_experts=message.num_experts,
        top_k=message.top_k,
        moe_layers=tuple(message.moe_layers),
        eos_token_ids=tuple(message.eos_token_ids),
        num_parameters=message.num_parameters,
        checkpoint_bytes=message.checkpoint_bytes,
        has_tokenizer=message.has_tokenizer,
        has_chat_template=message.has_chat_template,
        default_sampling=_sampling(message.default_sampling),
        created=message.created,
    )


def _sampling(message: pb.SamplingParams) -> dict[str, Any]:
    """The fields that are set, as keywords of SamplingParams."""
    found: dict[str, Any] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        if name == "logit_bias":
            found[name] = dict(value)
        elif name in ("stop", "stop_token_ids"):
            found[name] = tuple(value)
        else:
            found[name] = None if (name, value) == ("max_tokens", wire.UNLIMITED_TOKENS) else value
    return found


def tokenize_request(prompt: str | Mapping[str, Any] | Sequence[Mapping[str, str]]) -> pb.TokenizeRequest:
    """Raises InvalidRequestError: neither text nor messages."""
    message = pb.TokenizeRequest()
    if isinstance(prompt, str):
        wire.set_text(message, prompt)
    elif not isinstance(prompt, Mapping):
        wire.set_chat(message, prompt)
    elif prompt.keys() == {"messages"}:
        wire.set_chat(message, prompt["messages"])
    else:
        raise InvalidRequestError(
            "a prompt dict has one key here: 'messages'", field="prompt", value=sorted(map(str, prompt))
        )
    return message


def tokenize_result(message: pb.TokenizeResponse, request: pb.TokenizeRequest) -> TokenizeResult:
    return TokenizeResult(token_ids=list(message.token_ids), text=request.text or message.text)


def detokenize_request(token_ids: Sequence[int], skip_special_tokens: bool) -> pb.DetokenizeRequest:
    """Raises InvalidRequestError: not a list of token ids."""
    try:
        return pb.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"must be a list of token ids: {error}", field="token_ids") from error
