"""Slurm for a dry run: scripts named scontrol, srun and torchrun, which a job script finds first on its PATH.

srun starts its command once per node, side by side; torchrun notes what it was called with, and does as $TORCHRUN says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then tr , '\\n' <<<"$3"; else echo "scontrol $*" >> "$NOTES/scontrol"; fi
"""
_SRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$NOTES/srun"
while [ "$1" != bash ]; do
    case $1 in --nodes=*) nodes=${1#*=} ;; --output=*) output=${1#*=} ;; esac
    shift
done
pids=()
for ((id = 0; id < nodes; id++)); do
    name=$(tr , '\\n' <<<"$SLURM_JOB_NODELIST" | sed -n "$((id + 1))p")
    SLURM_NODEID=$id SLURMD_NODENAME=$name "$@" > "${output//%N/$name}" 2>&1 &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit $code
"""
#: "end": at once, with $CODE. "serve": node 0 until SIGTERM, then with 1, as torchrun does; the others until then, too.
_TORCHRUN = """#!/bin/bash
printf '%s\\n' "$@" > "$NOTES/torchrun.$SLURM_NODEID"
env > "$NOTES/env.$SLURM_NODEID"
terminated() {
    echo TERM >> "$NOTES/signals.$SLURM_NODEID"
    [ "$SLURM_NODEID" != 0 ] || { sleep 0.3; touch "$NOTES/ended"; exit 1; }
}
trap terminated TERM
[ "$TORCHRUN" = serve ] || exit "${CODE:-0}"
touch "$NOTES/up.$SLURM_NODEID"
for ((i = 0; i < 400; i++)); do
    [ ! -e "$NOTES/ended" ] || exit 0
    sleep 0.05
done
exit 99
"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of a job script that has ended.

    Attributes:
        code: its exit status; output: of the script itself; notes: folder with what the stand-ins noted.
        logs: folder with one log per node.
    """

    code: int
    output: str
    notes: Path
    logs: Path

    def command(self, node: int) -> list[str]:
        """Arguments of torchrun on a node."""
        return (self.notes / f"torchrun.{node}").read_text().splitlines()

    def srun(self) -> list[str]:
        return (self.notes / "srun").read_text().splitlines()

    def environment(self, node: int) -> dict[str, str]:
        lines = (self.notes / f"env.{node}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def noted(self, name: str) -> str:
        """A note, "" if it was not made."""
        path = self.notes / name
        return path.read_text() if path.exists() else ""


class StandInSlurm:
    """Runs job scripts.

    Args:
        folder: of this object's own; holds the stand-ins and, per run, notes and logs.
        nodes: names of the job's nodes.
    """

    def __init__(self, folder: Path, nodes: tuple[str, ...] = ("n1", "n2")) -> None:
        self._folder, self._nodes, self._runs = folder, nodes, 0
        tools = folder / "bin"
        tools.mkdir()
        for name, text in {"scontrol": _SCONTROL, "srun": _SRUN, "torchrun": _TORCHRUN}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)

    def run(self, script: Path, *arguments: str, terminate_when_up: bool = False, **variables: str) -> Job:
        """Runs a job script to its end, 30 s at most.

        Args:
            terminate_when_up: sends it SIGTERM, as --signal=B:TERM does, when torchrun is up on all nodes.
            variables: environment; an empty one is taken out.
        """
        self._runs += 1
        notes = self._folder / f"notes-{self._runs}"
        notes.mkdir()
        environment = {
            "PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "NOTES": str(notes),
            "TORCHRUN": "end",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": ",".join(self._nodes),
            "SLURM_JOB_NUM_NODES": str(len(self._nodes)),
            "SLURM_CPUS_PER_TASK": "16",
            "SLURM_SUBMIT_DIR": str(self._folder),
            "VENV": str(self._folder),  # no environment: its own torchrun would come first
            "LOGS": str(notes / "logs"),
            **variables,
        }
        process = subprocess.Popen(
            ["bash", str(script), *arguments], cwd=self._folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env={name: value for name, value in environment.items() if value},
        )  # fmt: skip
        try:
            if terminate_when_up:
                deadline = time.monotonic() + 60
                while not all((notes / f"up.{node}").exists() for node in range(len(self._nodes))):
                    assert time.monotonic() < deadline, "torchrun was not started on every node"
                    time.sleep(0.02)
                process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        return Job(code=process.returncode, output=output, notes=notes, logs=Path(environment["LOGS"]))
