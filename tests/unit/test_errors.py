"""Errors travel between processes and keep what they know."""

from __future__ import annotations

import copy
import inspect
import pickle

from epruntime import errors
from epruntime.errors import EPRuntimeError, InvalidRequestError, RankLostError, status_of


def test_errors_survive_a_copy_and_a_pickle() -> None:
    lost = RankLostError(slot=3, host="h", detail="killed by SIGKILL")
    invalid = InvalidRequestError("too hot", field="temperature", value=9)
    for error in (lost, invalid):
        for other in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301 - made one line above
            assert type(other) is type(error)
            assert str(other) == str(error)
            assert vars(other) == vars(error)


def test_every_error_has_a_status_and_foreign_ones_are_internal() -> None:
    kinds = [k for k in vars(errors).values() if inspect.isclass(k) and issubclass(k, EPRuntimeError)]
    assert len(kinds) > 10
    for kind in kinds:
        code, http = status_of(kind.__new__(kind))
        assert code.isupper()
        assert 400 <= http < 600
    assert status_of(RankLostError(slot=0, host="h", detail="d")) == ("UNAVAILABLE", 503)
    assert status_of(KeyError()) == ("INTERNAL", 500)
