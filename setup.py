"""Builds the C++ extensions where torch, a C++ compiler and Python's headers are there.

`epruntime._C` has the kernels; `epruntime._kv` the scheduler's KV books, with the pybind11 that comes with torch and
nothing else of it.

Where one of them is absent the package installs without the extensions, says so, and runs on its Python paths.
A compiler that is there and fails is an error. All other metadata is in pyproject.toml.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
WARNINGS = ["-Wall", "-Wextra", "-Werror=return-type"]
#: Kernels spell out every fused multiply-add, so that a row's bits do not hang on the optimiser's choice.
KERNEL_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-ffp-contract=off", "-fno-math-errno", *WARNINGS]
BINDING_FLAGS = ["-O2", "-std=c++20", "-fPIC", *WARNINGS]
# GCC 12 warns of its own AVX-512 header, where `__m512i __Y = __Y` is how "undefined" is said.
AVX512_WARNINGS = ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", *AVX512_WARNINGS]
ISA_FLAGS = {
    "kernels_avx512_bf16.cpp": [*AVX512, "-mavx512bf16"],
    "kernels_avx512.cpp": AVX512,
    "kernels_avx2.cpp": ["-mavx2", "-mfma"],
}


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def say(message: str) -> None:
    """Setuptools hides standard error of a successful build under pip; the log file of `make` shows it all the same."""
    print(f"epruntime: {message}", flush=True)


def compiler() -> list[str]:
    """The C++ compiler's command: $CXX if set, else the one that Python was built with, or c++; [] if it is absent."""
    asked = shlex.split(os.environ.get("CXX", ""))
    if asked:  # a wrong one is said rather than replaced
        return asked if shutil.which(asked[0]) else []
    for command in (sysconfig.get_config_var("CXX") or "", "c++", "g++", "clang++"):
        words = shlex.split(command)
        if words and shutil.which(words[0]):
            return words
    return []


def compiles(cxx: list[str], code: str, *flags: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(code)
        command = [*cxx, *flags, "-c", str(source), "-o", str(Path(folder) / "probe.o")]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0


def why_not() -> str:
    """Why the extension cannot be built here; "" if it can. A compiler that works is never an excuse."""
    if os.environ.get("EPRUNTIME_SKIP_EXTENSION") == "1":
        return "EPRUNTIME_SKIP_EXTENSION=1"
    try:
        import torch  # noqa: F401
    except ImportError:
        return "torch is not importable in the build environment (with pip, pass --no-build-isolation)"
    cxx = compiler()
    if not cxx:
        if asked := os.environ.get("CXX", "").strip():
            return f"CXX={asked} was not found (unset it, or name g++ 11 or newer)"
        return "no C++ compiler was found (set CXX, or install g++ 11 or newer)"
    if not compiles(cxx, "#include <vector>\nint main() { return 0; }\n", "-std=c++20"):
        return f"the compiler {shlex.join(cxx)!r} cannot compile an empty C++20 program (g++ 11 or newer can)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return f"Python's headers are absent from {sysconfig.get_path('include')} (install python3-dev)"
    return ""


def kernel_sources() -> list[Path]:
    skip = set() if is_x86() else set(ISA_FLAGS)
    return sorted(path for path in CSRC.rglob("*.cpp") if path.name not in skip and path.parent != CSRC / "kv")


def csrc_hash() -> str:
    """What the binary was made from: every file of csrc and the flags. Ranks compare it when they meet."""
    digest = hashlib.sha256()
    for path in sorted(CSRC.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(CSRC)}\n".encode())
            digest.update(path.read_bytes())
    digest.update(repr((KERNEL_FLAGS, sorted(ISA_FLAGS.items()))).encode())
    return digest.hexdigest()[:12]


class BuildExtensions(build_ext):
    """Compiles each file with the flags that it needs, then links those of an extension into one module."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == "epruntime._kv":
            self._build_books(ext)
        else:
            self._build_kernels(ext)

    def _build_books(self, ext: Extension) -> None:
        from torch.utils.cpp_extension import include_paths

        system = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
        baked = f'-DEPRUNTIME_CSRC_HASH="{csrc_hash()}"'
        flags = [*BINDING_FLAGS, "-fvisibility=hidden", baked, *system, f"-I{CSRC}"]
        self._build(ext, dict.fromkeys(ext.sources, flags), [])

    def _build_kernels(self, ext: Extension) -> None:
        from torch.utils.cpp_extension import include_paths, library_paths

        cxx = compiler()
        includes = [str(CSRC), *include_paths(), sysconfig.get_path("include")]
        # torch's at::parallel_for is inline OpenMP: with it, our kernels share torch's thread pool. GOMP_* comes
        # from the libgomp that torch loads; linking a second one would make a second pool.
        openmp = ["-fopenmp"] if compiles(cxx, "#if !defined(__GNUC__) || defined(__clang__)\n#error\n#endif\n") else []
        if not openmp:
            say(f"{shlex.join(cxx)} is not GNU g++: kernels will run on one thread each")
        machine = ["-DEPRUNTIME_X86=1"] if is_x86() else []
        binding = [
            *BINDING_FLAGS,
            *machine,
            *openmp,
            f'-DEPRUNTIME_CSRC_HASH="{csrc_hash()}"',
            *(f"-isystem{path}" for path in includes[1:]),
            f"-I{CSRC}",
        ]
        flags = {
            source: binding
            if (ROOT / source).parent == CSRC
            else [*KERNEL_FLAGS, *machine, *ISA_FLAGS.get(Path(source).name, []), f"-I{CSRC}"]
            for source in ext.sources
        }
        libraries = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
        self._build(ext, flags, [*libraries, "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"])

    def _build(self, ext: Extension, flags: dict[str, list[str]], libraries: list[str]) -> None:
        """Compiles each source with its flags and links the objects."""
        cxx, folder = compiler(), Path(self.build_temp) / ext.name
        folder.mkdir(parents=True, exist_ok=True)

        def compile_one(source: str) -> str:
            target = folder / f"{Path(source).stem}.o"
            self.spawn([*cxx, *flags[source], "-c", str(ROOT / source), "-o", str(target)])
            return str(target)

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_one, ext.sources))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        # Linked beside its final place and renamed: a running process keeps the old file whole.
        fresh = output.with_suffix(".new")
        self.spawn([*cxx, "-shared", *objects, *libraries, "-o", str(fresh)])
        fresh.replace(output)


def arguments() -> dict[str, Any]:
    reason = why_not()
    if reason:
        say(f"built without the C++ kernels: {reason}. The plain-torch paths will be used; they are slower.")
        return {}
    depends = [str(path.relative_to(ROOT)) for path in sorted(CSRC.rglob("*.h"))]

    def extension(name: str, paths: list[Path]) -> Extension:
        return Extension(name, [str(path.relative_to(ROOT)) for path in paths], depends=depends, language="c++")

    books = sorted((CSRC / "kv").glob("*.cpp"))
    return {
        "ext_modules": [extension("epruntime._C", kernel_sources()), extension("epruntime._kv", books)],
        "cmdclass": {"build_ext": BuildExtensions},
    }


if __name__ == "__main__":  # as pip and build run it; a Ray job reads `csrc_hash` without it
    setup(**arguments())
