"""Cumulative outputs become messages with what is new in each."""

from __future__ import annotations

from dataclasses import dataclass

from epruntime.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from epruntime.proto import inference_pb2 as pb

#: Tokens in one message at most: with 20 log-probabilities each, about 1.3 MiB, under the 4 MiB that clients take.
MAX_TOKENS_PER_MESSAGE = 2048

FINISH_REASONS = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "abort": pb.FINISH_REASON_ABORT,
}


@dataclass(slots=True)
class _Sent:
    """How much of one sequence has been sent: characters and tokens."""

    text: int = 0
    tokens: int = 0
    finished: bool = False


class DeltaTracker:
    """Turns the cumulative outputs of one request into GenerateResponse messages.

    Outputs that never came by (a slow reader) only make the next message larger.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._sent: dict[int, _Sent] = {}
        self._began = False

    def responses(self, output: RequestOutput) -> list[pb.GenerateResponse]:
        """Messages for all that is new in `output`; none if nothing is. The last one of a finished output is final.

        Raises:
            AssertionError: an output shrank.
        """
        messages: list[pb.GenerateResponse] = []
        for completion in output.outputs:
            messages += self._pieces(completion)
        if output.finished:
            if not messages:
                messages.append(pb.GenerateResponse())
            self._close(messages[-1], output)
        if messages and not self._began:
            self._began = True
            messages[0].request_id = self._request_id
        return messages

    def _pieces(self, completion: CompletionOutput) -> list[pb.GenerateResponse]:
        sent = self._sent.setdefault(completion.index, _Sent())
        text, ids = completion.text[sent.text :], completion.token_ids[sent.tokens :]
        assert len(completion.text) >= sent.text, "text of a running request shrank"
        assert len(completion.token_ids) >= sent.tokens, "tokens of a running request shrank"
        ends = completion.finish_reason is not None and not sent.finished
        if not (text or ids or ends):
            return []
        pieces = []
        for start in range(0, max(len(ids), 1), MAX_TOKENS_PER_MESSAGE):
            part = ids[start : start + MAX_TOKENS_PER_MESSAGE]
            piece = pb.GenerateResponse(index=completion.index, token_ids=part)
            if completion.logprobs is not None:
                first = sent.tokens + start
                for token, entry in zip(part, completion.logprobs[first : first + len(part)], strict=True):
                    piece.logprobs.append(_logprobs(token, entry))
            pieces.append(piece)
        pieces[0].text = text
        if ends:
            _finish(pieces[-1], completion)
        sent.text, sent.tokens, sent.finished = len(completion.text), len(completion.token_ids), ends or sent.finished
        return pieces

    def _close(self, message: pb.GenerateResponse, output: RequestOutput) -> None:
        message.request_id = self._request_id
        message.final = True
        message.usage.prompt_tokens = len(output.prompt_token_ids)
        message.usage.output_tokens = sum(len(c.token_ids) for c in output.outputs)
        if output.seed is not None:
            message.seed = output.seed
        message.timing.CopyFrom(_timing(output.metrics))


def _finish(message: pb.GenerateResponse, completion: CompletionOutput) -> None:
    assert completion.finish_reason is not None
    message.finish_reason = FINISH_REASONS[completion.finish_reason]
    if isinstance(completion.stop_reason, str):
        message.stop_string = completion.stop_reason
    elif completion.stop_reason is not None:
        message.stop_token_id = completion.stop_reason


def _logprobs(token: int, entry: dict[int, Logprob]) -> pb.PositionLogprobs:
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
