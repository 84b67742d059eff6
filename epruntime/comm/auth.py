"""Mutual proof of a shared secret on the control channel. The secret itself never travels.

rank: knock(slot, incarnation, rank nonce) -> coordinator: challenge(coordinator nonce, coordinator proof)
     -> rank: hello(identity bytes, rank proof) -> coordinator: welcome, or refused with the reason

A proof is HMAC-SHA256 under the secret over a label, both nonces and what is claimed. Labels differ by direction,
so that no proof can be played back to its maker; nonces are fresh on both sides, so that no recorded run helps.
The proof covers the handshake, not what follows: between hosts the network must be trusted, or the channel wrapped.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

#: counts up when the handshake or the frames change; both sides must have the same.
PROTOCOL_VERSION = 2

SECRET_BYTES = 32
NONCE_BYTES = 32

_LABELS = {"coordinator": b"epruntime control 1: coordinator", "rank": b"epruntime control 1: rank"}


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def proof(
    secret: bytes,
    side: str,
    *,
    rank_nonce: bytes,
    coordinator_nonce: bytes,
    slot: int,
    incarnation: int,
    claims: bytes = b"",
) -> bytes:
    """HMAC-SHA256, 32 bytes, of one side's proof.

    Args:
        side: "coordinator" or "rank", whose proof it is.
        claims: further bytes that the proof vouches for (the rank's packed identity).
    """
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    parts = (_LABELS[side], rank_nonce, coordinator_nonce, b"%d" % slot, b"%d" % incarnation, claims)
    for part in parts:  # each with its length, so that no two lists of parts give the same bytes
        mac.update(len(part).to_bytes(8, "big") + part)
    return mac.digest()


def masked(secret: bytes, nonce: bytes, data: bytes) -> bytes:
    """32 bytes, made unreadable to whoever does not know the secret; applied again it gives them back.

    Args:
        nonce: fresh for each `data`; travels with the result.
    """
    assert len(data) == SECRET_BYTES, len(data)
    pad = hmac.digest(secret, b"epruntime control 1: mask" + nonce, "sha256")
    return bytes(a ^ b for a, b in zip(data, pad, strict=True))


def matches(expected: bytes, given: object) -> bool:
    """Constant-time comparison; False for anything that is not bytes."""
    return isinstance(given, bytes) and hmac.compare_digest(expected, given)
