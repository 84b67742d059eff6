"""AccessCheck: who may call. One check for gRPC and HTTP."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from epruntime import envs
from epruntime.config import ServeConfig
from epruntime.errors import ConfigError

_SCHEME = "bearer"


class AccessCheck:
    """Bearer tokens (RFC 6750). With none, everyone may call. Tokens are kept as bytes and never shown.

    Raises:
        ConfigError: a token is empty, or holds what no header can carry.
    """

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self._tokens = tuple(dict.fromkeys(_bytes(token) for token in tokens))

    @classmethod
    def of(cls, config: ServeConfig) -> AccessCheck:
        """The tokens of the command line and of EPRUNTIME_API_KEY."""
        key = str(envs.get("EPRUNTIME_API_KEY"))
        return cls((*config.api_key, *((key,) if key else ())))

    def __bool__(self) -> bool:
        """Whether a token is needed."""
        return bool(self._tokens)

    def __repr__(self) -> str:
        return f"AccessCheck({len(self._tokens)} tokens)"

    def allows(self, authorization: str | None) -> bool:
        """Whether a call may go on.

        Args:
            authorization: its `Authorization` header or `authorization` metadata; None if it brought none.
        """
        if not self._tokens:
            return True
        scheme, _, brought = (authorization or "").strip().partition(" ")
        offered = brought.strip().encode("utf-8", "surrogateescape")
        # all are compared, each in constant time, so that the time says nothing about which one was near
        matches = [hmac.compare_digest(offered, token) for token in self._tokens]
        return scheme.lower() == _SCHEME and any(matches)


def _bytes(token: str) -> bytes:
    if not token or not all("!" <= c <= "~" for c in token):
        raise ConfigError("api_key: a token must be of printable ASCII characters without spaces, and not empty")
    return token.encode("ascii")
