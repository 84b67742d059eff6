"""SamplingDefaults: what a request's sampling parameters are where the caller leaves them out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from epruntime.errors import InvalidRequestError
from epruntime.sampling_params import SamplingParams, not_a_field

logger = logging.getLogger("epruntime.engine.defaults")


class SamplingDefaults:
    """The model's own defaults, and behind them those of SamplingParams.

    Args:
        info: a ModelInfo as a dict; what its generation_config.json says wrongly is logged, once, here.
        source: "auto" takes the checkpoint's generation_config.json, "none" only SamplingParams' defaults.

    Attributes:
        values: SamplingParams field -> the model's default.
    """

    def __init__(self, info: Mapping[str, Any], *, source: str) -> None:
        self.values: dict[str, Any] = dict(info.get("default_sampling", {})) if source == "auto" else {}
        if source == "auto":
            for name, reason in info.get("ignored_sampling", {}).items():
                logger.warning("%s in the checkpoint's generation_config.json is ignored: %s", name, reason)
            if self.values:
                logger.info(
                    "sampling defaults from the checkpoint's generation_config.json: %s "
                    "(--generation-config none turns them off)",
                    ", ".join(f"{name}={value}" for name, value in self.values.items()),
                )

    def params(self, **given: Any) -> SamplingParams:
        """SamplingParams of the fields given, and the defaults of all others.

        Raises:
            InvalidRequestError: a value that makes no sense, or an unknown field.
        """
        for name in given:
            if told := not_a_field(name):
                raise InvalidRequestError(told, field=name)
        return SamplingParams(**(self.values | given))
