"""MirroredKVCache: the KV cache's books kept twice, in Python and in C++, and compared after every call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from epruntime.engine.kv_reference import ReferenceKVCache


def native_kv_cache() -> Callable[..., Any] | None:
    """The C++ class, or None where the extension is not built."""
    try:
        native: Callable[..., Any] = importlib.import_module("epruntime._kv").NativeKVCache
    except ImportError:
        return None
    return native


class MirroredKVCache:
    """A KVCache that answers as the reference does, and asserts that C++ does too (where it is built)."""

    def __init__(self, **geometry: Any) -> None:
        self.reference = ReferenceKVCache(**geometry)
        native = native_kv_cache()
        self._native = None if native is None else native(**geometry)

    def __getattr__(self, name: str) -> Any:
        expected = getattr(self.reference, name)
        native = self._native
        if native is None:
            return expected
        found = getattr(native, name)
        if not callable(expected):
            assert found == expected, f"{name} is {found} in C++ and {expected} in Python"
            return expected

        def call(*args: Any) -> Any:
            theirs, ours = _outcome(found, args), _outcome(expected, args)
            assert theirs == ours, f"{name}{args} is {theirs} in C++ and {ours} in Python"
            assert native.num_free_blocks == self.reference.num_free_blocks, f"free blocks after {name}{args}"
            if isinstance(ours, Exception):
                raise ours
            return ours

        return call


class _Raised(Exception):
    """An exception as a value: equal if type and text are."""

    def __init__(self, error: Exception) -> None:
        super().__init__(type(error).__name__, str(error))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Raised) and other.args == self.args

    __hash__ = Exception.__hash__


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        return function(*args)
    except (ValueError, KeyError) as error:
        return _Raised(error)
