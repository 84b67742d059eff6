"""A package without its extensions gets them: from another copy of the same sources, or from the compiler."""

from __future__ import annotations

import json
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from epruntime.launchers import ray_job, ray_package
from epruntime.launchers.ray_environment import auth_hint, is_own_address
from epruntime.launchers.ray_package import KernelsMissing, complete_package

SUFFIX = EXTENSION_SUFFIXES[0]
#: a setup.py that "compiles" by writing files that hold its hash
SETUP = """
import sys
from pathlib import Path

def csrc_hash():
    return {hash!r}

if __name__ == "__main__":
    print("compiling")
    if {fails}:
        sys.exit("error: no such header")
    library = Path(sys.argv[sys.argv.index("--build-lib") + 1]) / "epruntime"
    library.mkdir(parents=True)
    for name in ("_C", "_kv"):
        (library / f"{{name}}{suffix}").write_text("built from " + csrc_hash())
"""


def checkout(folder: Path, *, hash: str = "0123456789ab", fails: bool = False) -> Path:
    """A checkout as Ray unpacks it, without extensions; returns the package."""
    package = folder / "epruntime"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (folder / "setup.py").write_text(SETUP.format(hash=hash, fails=fails, suffix=SUFFIX))
    return package


def with_extensions(folder: Path, hash: str) -> Path:
    package = checkout(folder, hash=hash)
    for name in ray_package.EXTENSIONS:
        (package / f"{name}{SUFFIX}").write_text(f"installed, of {hash}")
    return package


def extensions(package: Path) -> list[str]:
    return [(package / f"{name}{SUFFIX}").read_text() for name in ray_package.EXTENSIONS]


@pytest.fixture(autouse=True)
def nothing_else(monkeypatch):
    """No other epruntime is importable."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not Path(entry, "epruntime").is_dir()])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in repr(finder)])


def test_a_complete_package_is_left_alone(tmp_path):
    package = with_extensions(tmp_path, "aaaaaaaaaaaa")
    assert complete_package(package) == ""
    assert extensions(package) == ["installed, of aaaaaaaaaaaa"] * 2


def test_extensions_of_the_same_sources_are_taken_from_an_installed_copy(tmp_path, monkeypatch):
    package = checkout(tmp_path / "job", fails=True)
    other = with_extensions(tmp_path / "other", "ffffffffffff")
    same = with_extensions(tmp_path / "same", "0123456789ab")
    monkeypatch.setattr(sys, "path", [*sys.path, str(package.parent), str(other.parent), str(same.parent)])
    assert str(same) in complete_package(package)
    assert extensions(package) == ["installed, of 0123456789ab"] * 2
    assert sorted(path.name for path in package.iterdir()) == sorted(
        ["__init__.py", *(f"{name}{SUFFIX}" for name in ray_package.EXTENSIONS)]
    )
    assert complete_package(package) == ""


def test_extensions_are_built_where_no_copy_is_of_the_same_sources(tmp_path, monkeypatch):
    package = checkout(tmp_path / "job")
    other = with_extensions(tmp_path / "other", "ffffffffffff")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other.parent)])
    assert complete_package(package) == "C++ kernels built on this node"
    assert extensions(package) == ["built from 0123456789ab"] * 2


def test_why_there_are_none_is_said(tmp_path, monkeypatch):
    package = checkout(tmp_path / "job", fails=True)
    other = with_extensions(tmp_path / "other", "ffffffffffff")
    plain = checkout(tmp_path / "plain")
    monkeypatch.setattr(sys, "path", [*sys.path, str(other.parent), str(plain.parent)])
    with pytest.raises(KernelsMissing) as missing:
        complete_package(package)
    for words in (f"those of {other} are of other sources", f"{plain} has none", "error: no such header"):
        assert words in str(missing.value)
    (package.parent / "setup.py").unlink()
    with pytest.raises(KernelsMissing, match=r"no setup\.py"):
        complete_package(package)


def test_kernels_that_are_switched_off_are_not_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("EPRUNTIME_DISABLE_EXTENSION", "1")
    assert complete_package(checkout(tmp_path, fails=True)) == ""


def test_this_checkout_says_what_its_extensions_were_built_from():
    setup = ray_package._source_hash(ray_package.package_directory().parent)
    assert len(setup) == 12
    int(setup, 16)


def test_a_package_that_is_installed_is_not_shipped(monkeypatch, tmp_path):
    assert ray_package.package_to_ship() == ray_package.package_directory()
    monkeypatch.setattr("site.getsitepackages", lambda: [str(ray_package.package_directory().parent)])
    assert ray_package.package_to_ship() is None


def test_the_drain_ends_before_ray_kills_a_job():
    config = json.dumps({"runtime_env": {}, "metadata": {"job_submission_id": "raysubmit_1"}})
    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": config}
    assert ray_job.longest_drain_s({}) is None
    assert ray_job.longest_drain_s({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}) is None
    assert ray_job.job_id(job) == "raysubmit_1"
    assert ray_job.runtime_env({}) == ray_job.runtime_env(job) == {}
    assert ray_job.longest_drain_s(job) == 3 - 2.5
    assert ray_job.longest_drain_s({**job, ray_job.STOP_WAIT: "35"}) == 32.5
    assert ray_job.longest_drain_s({**job, ray_job.STOP_WAIT: "1"}) == 0
    assert ray_job.longest_drain_s({**job, ray_job.STOP_WAIT: "soon"}) == 3 - 2.5


def test_the_hint_says_what_the_environment_has(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert "this process needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" in auth_hint()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert "~/.ray/auth_token" in auth_hint()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/etc/token")
    assert "RAY_AUTH_TOKEN_PATH=/etc/token" in auth_hint()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "abc")
    assert "its token from RAY_AUTH_TOKEN." in auth_hint()
    assert "abc" not in auth_hint()


def test_own_addresses():
    assert is_own_address("127.0.0.1")
    assert not is_own_address("192.0.2.200")  # of a network for documentation
