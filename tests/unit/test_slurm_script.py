"""launch/slurm.sbatch: the torchrun command line of each node, secrets, drain, exit status; with stand-ins for Slurm.

(The stand-ins are tests/unit/slurm_stand_in.py. By hand the script was run by Slurm 22.05 on two stand-in hosts.)
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_stand_in import Job, StandInSlurm

from epruntime.cli.launch import make_parser
from epruntime.config import ServeConfig

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch/slurm.sbatch"
TEXT = SCRIPT.read_text(encoding="utf-8")
PROGRAM = [
    str(ROOT / "launch/torchrun_serve.py"), "/shared/models/M", "--expert-parallel-size", "8", "--host", "0.0.0.0",
    "--port", "8000", "--grpc-port", "50051", "--drain-timeout-s", "30", "--max-model-len", "4096",
]  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path) -> StandInSlurm:
    return StandInSlurm(tmp_path)


def serve(slurm: StandInSlurm, **variables: str) -> Job:
    given = {"MODEL": "/shared/models/M", "EPRUNTIME_DIR": str(ROOT), "RANKS_PER_NODE": "4", **variables}
    return slurm.run(SCRIPT, "--max-model-len", "4096", **given)


def test_static_rendezvous(slurm: StandInSlurm) -> None:
    job = serve(slurm)
    assert job.code == 0, job.output
    for node in (0, 1):
        assert job.command(node) == [
            "--nnodes", "2", "--nproc-per-node", "4", "--node-rank", str(node), "--master-addr", "n1",
            "--master-port", "24711", *PROGRAM,
        ]  # fmt: skip
    assert "HTTP on port 8000 and gRPC on port 50051 of n1" in job.output


def test_c10d_rendezvous(slurm: StandInSlurm) -> None:
    job = serve(slurm, RENDEZVOUS="c10d", SLURM_RESTART_COUNT="3", MASTER_PORT="29500")
    assert job.code == 0, job.output
    for node, (name, hosts_store) in enumerate((("n1", 1), ("n2", 0))):
        assert job.command(node) == [
            "--nnodes", "2", "--nproc-per-node", "4", "--rdzv-backend", "c10d", "--rdzv-id", "4711.3",
            "--rdzv-endpoint", "n1:29500", "--rdzv-conf", f"is_host={hosts_store}", "--local-addr", name, *PROGRAM,
        ]  # fmt: skip


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_torchrun_and_the_program_take_these_flags(slurm: StandInSlurm, rendezvous: str) -> None:
    torchrun = pytest.importorskip("torch.distributed.run")
    args = torchrun.parse_args(serve(slurm, RENDEZVOUS=rendezvous).command(1))
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "4", rendezvous)
    assert args.training_script == PROGRAM[0]
    program = make_parser(launcher="torchrun", description="", skip=("ray_address",))
    served = program.parse_args(args.training_script_args)
    assert (served.model, served.expert_parallel_size, served.max_model_len) == ("/shared/models/M", 8, 4096)


def test_one_torchrun_per_node_and_a_log_of_each(slurm: StandInSlurm) -> None:
    job = serve(slurm)
    own = job.srun()[: job.srun().index("bash")]
    assert own == [
        "--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=16", "--kill-on-bad-exit=1",
        f"--output={job.logs}/%N.log", "--open-mode=append",
    ]  # fmt: skip
    assert sorted(path.name for path in job.logs.glob("*.log")) == ["n1.log", "n2.log"]


def test_a_secret_per_start_that_no_command_line_shows(slurm: StandInSlurm) -> None:
    first, second = serve(slurm), serve(slurm)
    secret = first.environment(0)["EPRUNTIME_JOB_SECRET"]
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert first.environment(1)["EPRUNTIME_JOB_SECRET"] == secret
    assert second.environment(0)["EPRUNTIME_JOB_SECRET"] != secret
    assert secret not in " ".join([*first.command(0), *first.srun(), first.output])


def test_gpus_per_node_decide_where_ranks_per_node_is_not_given(slurm: StandInSlurm) -> None:
    gpus = serve(slurm, RANKS_PER_NODE="", SLURM_GPUS_ON_NODE="8").command(0)
    assert gpus[gpus.index("--nproc-per-node") + 1] == "8"
    assert gpus[gpus.index("--expert-parallel-size") + 1] == "16"
    cpus = serve(slurm, RANKS_PER_NODE="").command(0)
    assert cpus[cpus.index("--nproc-per-node") + 1] == "1"


def test_sigterm_reaches_torchrun_of_the_first_node_only_and_the_job_waits(slurm: StandInSlurm) -> None:
    given = {"MODEL": "/m", "EPRUNTIME_DIR": str(ROOT), "TORCHRUN": "serve", "DRAIN_S": "20"}
    job = slurm.run(SCRIPT, terminate_when_up=True, **given)
    assert job.code == 0, job.output
    assert (job.noted("signals.0"), job.noted("signals.1")) == ("TERM\n", "")
    assert "draining: running requests get 20 s" in job.output
    assert "drained (srun ended with 1)" in job.output
    assert job.command(0)[-2:] == ["--drain-timeout-s", "20"]
    assert int(job.environment(0)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) > 20
    assert job.noted("scontrol") == ""
    again = slurm.run(SCRIPT, terminate_when_up=True, **given, REQUEUE_AT_END="1")
    assert (again.code, again.noted("scontrol")) == (0, "scontrol requeue 4711\n")


def test_a_failure_is_one(slurm: StandInSlurm) -> None:
    assert serve(slurm, CODE="7").code == 7


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MODEL": ""}, "MODEL is not set"),
        ({"SLURM_JOB_ID": ""}, "not inside a Slurm job"),
        ({"EPRUNTIME_DIR": "/nowhere"}, "EPRUNTIME_DIR=/nowhere: there is no launch/torchrun_serve.py"),
    ],
)
def test_refused_with_words(slurm: StandInSlurm, variables: dict[str, str], words: str) -> None:
    job = serve(slurm, **variables)
    assert job.code == 2
    assert words in job.output
    assert job.noted("srun") == ""


def test_a_wrong_rendezvous_is_refused_with_words(slurm: StandInSlurm) -> None:
    job = serve(slurm, RENDEZVOUS="tcp")
    assert job.code == 2
    assert "RENDEZVOUS=tcp: must be static or c10d" in (job.logs / "n1.log").read_text()


def test_directives() -> None:
    """Slurm's signal comes early enough for the drain, and everything below needs one task per node."""
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", TEXT, re.MULTILINE))
    assert directives["ntasks-per-node"] == "1"
    signal = re.fullmatch(r"B:TERM@(\d+)", directives["signal"])
    assert signal is not None
    assert int(signal[1]) >= 2 * (ServeConfig.drain_timeout_s + 15)
    assert "requeue" in directives
    assert "gpus-per-node" not in directives
    assert re.search(r"^##SBATCH --gpus-per-node=\d+$", TEXT, re.MULTILINE)
    assert "untested on a live cluster" in TEXT


def test_every_setting_is_described_with_its_default() -> None:
    described = set(re.findall(r"^#   ([A-Z_]{4,}(?:, [A-Z_]{4,})*) ", TEXT, re.MULTILINE))
    names = {name for group in described for name in group.split(", ")}
    read = set(re.findall(r"^([A-Z_]{4,})=\$\{\1:-", TEXT, re.MULTILINE)) | {"MODEL", "REQUEUE_AT_END"}
    assert names == read


def test_shell_syntax() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=30)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(SCRIPT)], check=True, timeout=60)
