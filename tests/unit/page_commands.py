"""Shell commands of a documentation page, and whether the programs they call take the flags that they have."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]

#: programs of the system that pages may use; their flags are not checked
SYSTEM = {"export", "(umask", "ip", "nc", "scancel", "ss"}


def blocks(text: str, language: str) -> list[str]:
    """Code blocks of a page."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands(text: str) -> Iterator[str]:
    """Commands of a page's bash blocks, each on one line, without comments."""
    for block in blocks(text, "bash"):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            if line := re.sub(r"\s+#\s.*", "", line).strip():
                yield line


def complaint(command: str) -> str:
    """What is wrong with a command; "" if nothing is known to be."""
    words = shlex.split(command)
    check = _CHECKS.get(words[0])
    if words[0] in SYSTEM:
        return ""
    if check is None:
        return f"{words[0]}: a program that no check knows"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return check(words[1:])
    except SystemExit:  # argparse
        return errors.getvalue().strip().splitlines()[-1]


def _epruntime(words: list[str]) -> str:
    from epruntime.cli.main import make_parser

    make_parser().parse_args(words)
    return ""


def _launch(program: str, words: list[str]) -> str:
    """A program of launch/, with its arguments."""
    from epruntime.cli.launch import make_parser

    launcher = re.fullmatch(r"(?:\S*/)?launch/(ray|torchrun)_serve\.py", program)
    if launcher is None or not (ROOT / "launch" / Path(program).name).is_file():
        return f"{program}: no such program"
    skip = ("ray_address",) if launcher[1] == "torchrun" else ()
    make_parser(launcher=launcher[1], description="", skip=skip).parse_args(words)
    return ""


def _python(words: list[str]) -> str:
    return _launch(words[0], words[1:])


def _torchrun(words: list[str]) -> str:
    from torch.distributed.run import parse_args

    args = parse_args(words)
    return _launch(args.training_script, args.training_script_args)


def _ray(words: list[str]) -> str:
    from ray.dashboard.modules.job.cli import job_cli_group
    from ray.scripts.scripts import cli

    group = job_cli_group if words[0] == "job" else cli
    name, *rest = words[1:] if words[0] == "job" else words
    command = group.get_command(None, name)
    if command is None:
        return f"ray has no command {name}"
    own, _, entry = " ".join(rest).partition(" -- ")
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    unknown = [word for word in own.split() if word.startswith("--") and word.partition("=")[0] not in known]
    if unknown:
        return f"ray {name} has no {', '.join(unknown)}"
    return complaint(entry) if entry else ""


def _sbatch(words: list[str]) -> str:
    script = (ROOT / "launch/slurm.sbatch").read_text()
    at = words.index("launch/slurm.sbatch")
    exported = next(word for word in words[:at] if word.startswith("--export=ALL,"))
    names = {part.partition("=")[0] for part in exported.split(",")[1:]}
    unknown = [name for name in names if f"#   {name} " not in script]
    if unknown:
        return f"launch/slurm.sbatch reads no {', '.join(unknown)}"
    return _launch("launch/torchrun_serve.py", ["MODEL", *words[at + 1 :]])


def _kubectl(words: list[str]) -> str:
    manifests = list(yaml.safe_load_all((ROOT / "launch/kuberay.yaml").read_text(encoding="utf-8")))
    there = {f"{manifest['kind'].lower()}/{manifest['metadata']['name']}" for manifest in manifests}
    there |= {f"service/{m['metadata']['name']}-head-svc" for m in manifests if m["kind"] == "RayCluster"}
    named = [word for word in words if "/" in word and not word.startswith("-")]
    unknown = [word for word in named if word not in there and not (ROOT / word).is_file()]
    return f"launch/kuberay.yaml has no {', '.join(unknown)}" if unknown else ""


def _docker(words: list[str]) -> str:
    import dockerfile

    _, stages = dockerfile.parse((ROOT / "Dockerfile").read_text())
    if words[0] == "build":
        arguments = {instruction.text.partition("=")[0] for instruction in stages["build"].all("ARG")}
        given = {word.partition("=")[0] for flag, word in itertools.pairwise(words) if flag == "--build-arg"}
        is_known = words[words.index("--target") + 1] in stages and given <= arguments
        return "" if is_known else "the Dockerfile has no such target or argument"
    at = words.index("epruntime:cpu")
    entry = words[words.index("--entrypoint") + 1] if "--entrypoint" in words else "epruntime"
    return complaint(shlex.join([entry, *words[at + 1 :]]))


def _make(words: list[str]) -> str:
    makefile = (ROOT / "Makefile").read_text()
    names = [word.partition("=")[0] for word in words if "=" in word]
    targets = [word for word in words if "=" not in word]
    unknown = [name for name in names if not re.search(rf"^{name} \?=", makefile, re.MULTILINE)]
    unknown += [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)]
    return f"the Makefile has no {', '.join(unknown)}" if unknown else ""


_CHECKS: dict[str, Callable[[list[str]], str]] = {
    "epruntime": _epruntime, "python": _python, "torchrun": _torchrun, "ray": _ray, "sbatch": _sbatch,
    "kubectl": _kubectl, "docker": _docker, "make": _make,
}  # fmt: skip
