"""Thread settings of a rank: its share of the cores, and idle threads that sleep unless the user says otherwise."""

from __future__ import annotations

import pytest

from epruntime.launchers.cores import THREAD_VARIABLES, thread_environment


def test_idle_threads_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert thread_environment(3) == {**dict.fromkeys(THREAD_VARIABLES, "3"), "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_a_wait_policy_of_the_user_is_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "ACTIVE")
    assert thread_environment(2) == dict.fromkeys(THREAD_VARIABLES, "2")
