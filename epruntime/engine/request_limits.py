"""RequestLimits: how long a request may be that a scheduler takes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from epruntime.errors import InvalidRequestError
from epruntime.plan import SamplingSpec
from epruntime.words import counted


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """In tokens, prompt and output together.

    Attributes:
        max_model_len: where every output ends. max_request_tokens: what the whole KV cache can serve.
    """

    max_model_len: int
    max_request_tokens: int

    def capped(self, num_prompt: int, spec: SamplingSpec) -> SamplingSpec:
        """`spec` with max_tokens such that a prompt of `num_prompt` tokens ends at max_model_len at the latest.

        Raises:
            InvalidRequestError: the prompt is empty, leaves no room for output, or could never fit in the KV cache.
        """
        if not 0 < num_prompt < self.max_model_len:
            raise InvalidRequestError(
                f"must have 1 to {self.max_model_len - 1} tokens (max_model_len="
                f"{self.max_model_len}, at least one for output)",
                field="prompt",
                value=counted(num_prompt, "token"),
            )
        max_tokens = min(spec.max_tokens, self.max_model_len - num_prompt)
        if max_tokens < 1:
            raise InvalidRequestError("must be at least 1", field="max_tokens", value=spec.max_tokens)
        if num_prompt + max_tokens > self.max_request_tokens:
            raise InvalidRequestError(
                f"with a prompt of {counted(num_prompt, 'token')} the request needs {num_prompt + max_tokens} "
                f"tokens and the KV cache holds {self.max_request_tokens}: shorten either, or enlarge the KV cache",
                field="max_tokens",
                value=spec.max_tokens,
            )
        return spec if max_tokens == spec.max_tokens else replace(spec, max_tokens=max_tokens)
