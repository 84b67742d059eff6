"""TokenBound: how many tokens a text has at least, known from its length alone.

A text that is megabytes too long is refused without the seconds that tokenising it would take on the one thread that
does so for all requests. The bound is only given where it is certain: for byte-pair encodings that cover every byte (or
every character) of the text by exactly one token. A tokenizer that drops or joins anything before (a normalizer that
composes characters, a pre-tokenizer that removes spaces, special tokens that swallow the spaces beside them, one
unknown token for many characters) gets none. Bytes that a byte-level vocabulary lacks are not counted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


def _byte_letters() -> list[str]:
    """The byte-level alphabet of GPT-2: the letter of each byte; those that do not print follow from 256 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return [chr(byte if byte in printing else 256 + others.index(byte)) for byte in range(256)]


_LETTERS = _byte_letters()


@dataclass(frozen=True, kw_only=True)
class TokenBound:
    """No token covers more than `longest` bytes (UTF-8) or characters of a text.

    Attributes:
        dropped: bytes that no token covers, and that vanish or become unknown; counts as nothing.
    """

    longest: int
    in_bytes: bool
    dropped: bytes = b""

    def tokens_at_least(self, text: str) -> int:
        """Tokens that `text` has at least, without special tokens that are added."""
        length = len(text.encode("utf-8", "surrogatepass").translate(None, self.dropped) if self.in_bytes else text)
        return -(-length // self.longest)


def bound_of(hf: Any) -> TokenBound | None:
    """The bound of a transformers tokenizer, or None where nothing is certain."""
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = json.loads(backend.to_str())
    model, added = parts["model"], parts.get("added_tokens") or []
    if model.get("type") != "BPE" or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    normalizers = _sequence(parts.get("normalizer"), "normalizers")
    if not all(map(_keeps_length, normalizers)):
        return None
    steps = _sequence(parts.get("pre_tokenizer"), "pretokenizers")
    if not all(map(_removes_nothing, steps)):
        return None
    vocabulary = model["vocab"]
    in_bytes = any(step["type"] == "ByteLevel" for step in steps)
    if in_bytes and normalizers:
        return None  # lengths below are in characters
    if not in_bytes and not (model.get("byte_fallback") and _has_byte_tokens(vocabulary)):
        return None
    longest = max(map(len, vocabulary))
    prepended = sum(len(step["prepend"]) for step in normalizers if step["type"] == "Prepend")
    for token in added:  # they are found in the text before or after normalizers
        content = token["content"]
        longest = max(longest, len(content.encode()) if in_bytes else len(content) + prepended)
    dropped = bytes(byte for byte, letter in enumerate(_LETTERS) if letter not in vocabulary) if in_bytes else b""
    return TokenBound(longest=longest, in_bytes=in_bytes, dropped=dropped)


def _sequence(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """A step, or a sequence of steps (perhaps nested), as a flat list."""
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [step for inner in part[name] for step in _sequence(inner, name)]
    return [part]


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    """It puts one text in front, or one in the place of another with as many characters."""
    if normalizer["type"] == "Prepend":
        return True
    pattern = normalizer.get("pattern", {}).get("String", "")
    return normalizer["type"] == "Replace" and 0 < len(pattern) == len(normalizer["content"])


def _removes_nothing(step: dict[str, Any]) -> bool:
    if step["type"] in ("ByteLevel", "Digits", "Metaspace"):
        return True
    return step["type"] in ("Split", "Punctuation") and step["behavior"] != "Removed"


def _has_byte_tokens(vocabulary: dict[str, int]) -> bool:
    return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
