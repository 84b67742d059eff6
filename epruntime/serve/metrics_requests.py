"""RequestMetrics: what clients notice, counted as it happens. Names and buckets are vLLM's, the prefix is ours.

EngineObserver calls -> counters and histograms -> metric families

A request with n sequences counts once, but for `request_success` and `request_generation_tokens`, which count each of
its sequences.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, Metric

from epruntime.engine.observer import AdmittedRequest, EngineObserver, FinishedRequest, NewTokens
from epruntime.serve.metrics_histogram import (
    FIRST_TOKEN_S,
    REQUEST_S,
    SEQUENCES,
    STEP_TOKENS,
    TOKEN_S,
    Histogram,
    one_two_five,
)

#: Label values of `request_success` that are there from the start.
FINISH_REASONS = ("stop", "length", "abort", "error")


class RequestMetrics(EngineObserver):
    """Counters and histograms of one engine's requests.

    Args:
        max_model_len: bounds the buckets of histograms of token counts.
    """

    def __init__(self, *, max_model_len: int) -> None:
        self._admitted = self._prompt_tokens = self._cached_tokens = self._generation_tokens = 0
        self._refused: Counter[str] = Counter()
        self._success: Counter[str] = Counter()
        lengths = one_two_five(max_model_len)

        def histogram(name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"epruntime_{name}", documentation, buckets)

        self._iteration_tokens = histogram(
            "iteration_tokens_total", "Tokens computed per step, over all ranks.", STEP_TOKENS
        )
        self._first_token = histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first output token.", FIRST_TOKEN_S
        )
        self._inter_token = histogram(
            "inter_token_latency_seconds", "Seconds between two output tokens of a sequence.", TOKEN_S
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per output token after the first, per request.",
            TOKEN_S,
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Seconds from a request's arrival to its end.", REQUEST_S)
        self._queue = histogram(
            "request_queue_time_seconds", "Seconds from a request's arrival until a rank got it.", REQUEST_S
        )
        self._prefill = histogram(
            "request_prefill_time_seconds", "Seconds from when a rank got a request to its first token.", REQUEST_S
        )
        self._decode = histogram(
            "request_decode_time_seconds", "Seconds from a request's first token to its end.", REQUEST_S
        )
        self._inference = histogram(
            "request_inference_time_seconds", "Seconds from when a rank got a request to its end.", REQUEST_S
        )
        self._request_prompt = histogram("request_prompt_tokens", "Prompt tokens per request.", lengths)
        self._request_generation = histogram("request_generation_tokens", "Output tokens per sequence.", lengths)
        self._params_n = histogram("request_params_n", "The n of requests.", SEQUENCES)
        self._params_max_tokens = histogram(
            "request_params_max_tokens", "The max_tokens of requests that give it.", lengths
        )

    # ---- what the engine tells

    def admitted(self, request: AdmittedRequest) -> None:
        self._admitted += 1
        self._params_n.observe(request.n)
        if request.max_tokens is not None:
            self._params_max_tokens.observe(request.max_tokens)

    def refused(self, error: BaseException) -> None:
        self._refused[type(error).__name__] += 1

    def tokens(self, new: NewTokens) -> None:
        self._generation_tokens += new.num_tokens
        self._prompt_tokens += new.num_prompt_tokens
        self._first_token.observe_all(new.first_token_s)
        self._inter_token.observe_all(new.inter_token_s)

    def step(self, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        self._iteration_tokens.observe(num_prefill_tokens + num_decode_tokens)

    def finished(self, request: FinishedRequest) -> None:
        self._success.update(request.finish_reasons)
        self._cached_tokens += request.num_cached_tokens
        self._request_prompt.observe(request.num_prompt_tokens)
        self._request_generation.observe_all(request.num_output_tokens)
        times = request.metrics
        end, scheduled, first = times.finished_time, times.scheduled_time, times.first_token_time
        if end is None:
            return
        self._e2e.observe(end - times.arrival_time)
        if scheduled is None:
            return
        self._queue.observe(scheduled - times.arrival_time)
        self._inference.observe(end - scheduled)
        if first is None:
            return
        self._prefill.observe(first - scheduled)
        self._decode.observe(end - first)
        if (most := max(request.num_output_tokens)) > 1:
            self._per_token.observe((end - first) / (most - 1))

    # ---- what Prometheus gets

    def families(self, model_name: str) -> Iterator[Metric]:
        for name, documentation, value in (
            ("requests_admitted", "Requests accepted.", self._admitted),
            ("prompt_tokens", "Prompt tokens of requests that have got their first token.", self._prompt_tokens),
            (
                "prompt_tokens_cached",
                "Prompt tokens found in the prefix cache, of ended requests.",
                self._cached_tokens,
            ),
            ("generation_tokens", "Output tokens.", self._generation_tokens),
        ):
            counter = CounterMetricFamily(f"epruntime_{name}", documentation, labels=["model_name"])
            counter.add_metric([model_name], value)
            yield counter
        success = CounterMetricFamily(
            "epruntime_request_success", "Sequences that ended, by reason.", labels=["model_name", "finished_reason"]
        )
        for reason in FINISH_REASONS:
            success.add_metric([model_name, reason], self._success[reason])
        yield success
        refused = CounterMetricFamily(
            "epruntime_requests_refused", "Requests not accepted, by error.", labels=["model_name", "error"]
        )
        for error, count in sorted(self._refused.items()):
            refused.add_metric([model_name, error], count)
        yield refused
        for histogram in (
            self._iteration_tokens, self._first_token, self._inter_token, self._per_token, self._e2e, self._queue,
            self._prefill, self._decode, self._inference, self._request_prompt, self._request_generation,
            self._params_n, self._params_max_tokens,
        ):  # fmt: skip
            yield histogram.family(model_name)
