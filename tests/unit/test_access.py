"""Access tokens: the whole token or nothing, however near a guess is."""

from __future__ import annotations

import pytest

from epruntime.serve.access import AccessCheck

TOKENS = ("secret-token", "other")
NEAR = (
    "", "s", "secret", "secret-toke", "secret-token-", "secret-tokensecret-token", "secret-tokem", "Secret-Token",
    "oth", "others", "secret-token other", "secret-token,other", "\x00secret-token", "sécret-token",
)  # fmt: skip


@pytest.mark.parametrize("token", TOKENS)
def test_each_token_opens(token: str) -> None:
    assert AccessCheck(TOKENS).allows(f"Bearer {token}")


@pytest.mark.parametrize("token", NEAR)
def test_what_is_near_does_not(token: str) -> None:
    assert not AccessCheck(TOKENS).allows(f"Bearer {token}")


@pytest.mark.parametrize("header", [None, "", "Bearer", "secret-token", "Basic secret-token", "Bearersecret-token"])
def test_other_forms_do_not(header: str | None) -> None:
    assert not AccessCheck(TOKENS).allows(header)
