"""Histogram: a value costs one binary search, where prometheus_client's own takes a lock and scans the buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

#: The buckets of vLLM's histograms (vllm/v1/metrics/loggers.py), so that boards and alerts carry over.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SEQUENCES = (1, 2, 5, 10, 20)


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    values = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(value for value in values if value <= most)


class Histogram:
    """Values counted in buckets.

    Args:
        buckets: upper bounds, inclusive, ascending; one without a bound is added.
    """

    def __init__(self, name: str, documentation: str, buckets: Sequence[float]) -> None:
        self._name, self._documentation = name, documentation
        self._bounds = tuple(buckets)
        self._labels = (*map(floatToGoString, buckets), "+Inf")
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        for value in values:
            self.observe(value)

    def family(self, model_name: str) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        family.add_metric([model_name], list(zip(self._labels, accumulate(self._counts), strict=True)), self._sum)
        return family
