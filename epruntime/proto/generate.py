"""Generates the *_pb2*.py modules beside the .proto files; with --check, says whether they are current.

    python -m epruntime.proto.generate [--check]

The modules are committed, so that installing needs no compiler of protocol buffers. They name the
version of grpcio-tools that made them, which is the oldest grpcio they run with: use that version.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

#: The version that the committed modules are made with.
GRPCIO_TOOLS = "1.85.1"

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(out: Path) -> list[Path]:
    """Compiles every .proto file of this folder into `out` (a source root) and returns the modules' paths."""
    protos = sorted(HERE.glob("*.proto"))
    command = [
        sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--python_out={out}", f"--pyi_out={out}",
        f"--grpc_python_out={out}", *(str(p.relative_to(ROOT)) for p in protos),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT)
    folder = out / HERE.relative_to(ROOT)
    return [folder / f"{proto.stem}{suffix}" for proto in protos for suffix in SUFFIXES]


def main(argv: list[str] | None = None) -> int:
    """Returns 0 if the modules are (now) current, 1 if `--check` found a difference."""
    parser = argparse.ArgumentParser(prog="python -m epruntime.proto.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 on a difference")
    args = parser.parse_args(argv)
    try:
        installed = importlib.metadata.version("grpcio-tools")
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed != GRPCIO_TOOLS:
        print(f"grpcio-tools {GRPCIO_TOOLS} is needed, found {installed}: pip install grpcio-tools=={GRPCIO_TOOLS}")
        return 1
    if not args.check:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        stale = [
            fresh.name
            for fresh in generate(Path(folder))
            if not (HERE / fresh.name).exists() or (HERE / fresh.name).read_text() != fresh.read_text()
        ]
    if stale:
        print(f"{', '.join(stale)}: not what the .proto files give; run python -m epruntime.proto.generate")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
