"""What is new in a request becomes messages of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from epruntime.outputs import CompletionDelta, Logprob, RequestDelta, RequestMetrics
from epruntime.proto import inference_pb2 as pb

#: A message is closed when it holds as much, so that none reaches the 4 MiB that clients take by default.
MAX_BYTES = 2**20
#: Characters of text in one message at most: 1 MiB where each takes four bytes.
_MAX_CHARACTERS = 2**18
#: What an entry costs beside its own bytes: the field's tag and the length of the entry.
_ENTRY_BYTES = 6

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


class Pieces:
    """Turns the deltas of one request into GenerateResponse messages, one by one, as they are asked for.

    Args:
        tell_prompt: the ids of the prompt's tokens go into the first messages.
    """

    def __init__(self, request_id: str, *, tell_prompt: bool = False) -> None:
        self._request_id = request_id
        self._tell_prompt = tell_prompt
        self._began = False

    def of(self, delta: RequestDelta) -> Iterator[pb.GenerateResponse]:
        """Messages for `delta`; none if nothing is new. The last one of a finished request is final.

        Messages hold at most about MAX_BYTES of log-probabilities and as much of text.
        """
        held: pb.GenerateResponse | None = None
        for message in self._messages(delta):
            if held is not None:
                yield self._begun(held)
            held = message
        if delta.finished:
            held = pb.GenerateResponse() if held is None else held
            self._close(held, delta)
        if held is not None:
            yield self._begun(held)

    def _messages(self, delta: RequestDelta) -> Iterator[pb.GenerateResponse]:
        if self._tell_prompt:
            self._tell_prompt = False
            for part in _parts(delta.prompt_token_ids, MAX_BYTES // _ENTRY_BYTES):
                yield pb.GenerateResponse(prompt_token_ids=part)
        if delta.prompt_logprobs is not None:
            positions = zip(delta.prompt_token_ids, delta.prompt_logprobs, strict=True)
            for group in _sized(_position(token, entry) for token, entry in positions):
                yield pb.GenerateResponse(prompt_logprobs=group)
        for completion in delta.outputs:
            yield from _of_sequence(completion)

    def _begun(self, message: pb.GenerateResponse) -> pb.GenerateResponse:
        if not self._began:
            self._began = True
            message.request_id = self._request_id
        return message

    def _close(self, message: pb.GenerateResponse, delta: RequestDelta) -> None:
        message.request_id = self._request_id
        message.final = True
        message.usage.prompt_tokens = len(delta.prompt_token_ids)
        message.usage.output_tokens = delta.num_output_tokens
        message.usage.cached_tokens = delta.num_cached_tokens
        message.seed = delta.seed
        message.timing.CopyFrom(_timing(delta.metrics))


def _of_sequence(completion: CompletionDelta) -> Iterator[pb.GenerateResponse]:
    text = completion.text
    if not (text or completion.token_ids or completion.finish_reason):
        return
    message = pb.GenerateResponse(index=completion.index, text=text[:_MAX_CHARACTERS])
    for number, (ids, logprobs) in enumerate(_tokens(completion)):
        if number:
            yield message
            message = pb.GenerateResponse(index=completion.index)
        message.token_ids.extend(ids)
        message.logprobs.extend(logprobs)
    for start in range(_MAX_CHARACTERS, len(text), _MAX_CHARACTERS):
        yield message
        message = pb.GenerateResponse(index=completion.index, text=text[start : start + _MAX_CHARACTERS])
    if completion.finish_reason is not None:
        _finish(message, completion.finish_reason, completion.stop_reason)
    yield message


def _tokens(completion: CompletionDelta) -> Iterator[tuple[Sequence[int], Sequence[pb.PositionLogprobs]]]:
    """Ids and log-probabilities, in groups that a message can take."""
    ids = completion.token_ids
    if completion.logprobs is None:
        for part in _parts(ids, MAX_BYTES // _ENTRY_BYTES):
            yield part, ()
        return
    start = 0
    for group in _sized(_position(*pair) for pair in zip(ids, completion.logprobs, strict=True)):
        yield ids[start : start + len(group)], group
        start += len(group)


def _finish(message: pb.GenerateResponse, reason: str, stop: int | str | None) -> None:
    message.finish_reason = FINISH_REASONS[reason]
    if isinstance(stop, str):
        message.stop_string = stop
    elif stop is not None:
        message.stop_token_id = stop


def _parts(items: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _sized(entries: Iterable[pb.PositionLogprobs]) -> Iterator[list[pb.PositionLogprobs]]:
    """Groups of entries, each of about MAX_BYTES (over it by one entry at most)."""
    group: list[pb.PositionLogprobs] = []
    size = 0
    for entry in entries:
        group.append(entry)
        size += entry.ByteSize() + _ENTRY_BYTES
        if size >= MAX_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _position(token: int, entry: dict[int, Logprob] | None) -> pb.PositionLogprobs:
    """`entry` is None where nothing predicts the token: at the start of a prompt."""
    if entry is None:
        return pb.PositionLogprobs()
    others = [_token_logprob(i, logprob) for i, logprob in entry.items() if i != token]
    return pb.PositionLogprobs(chosen=_token_logprob(token, entry[token]), others=others)


def _token_logprob(token: int, entry: Logprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=token, logprob=entry.logprob, token=entry.decoded_token)


def _timing(metrics: RequestMetrics) -> pb.Timing:
    timing = pb.Timing(num_preemptions=metrics.num_preemptions)
    for name, moment in (
        ("queue_s", metrics.scheduled_time),
        ("ttft_s", metrics.first_token_time),
        ("e2e_s", metrics.finished_time),
    ):
        if moment is not None:
            setattr(timing, name, moment - metrics.arrival_time)
    return timing
