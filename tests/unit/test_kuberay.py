"""launch/kuberay.yaml: valid by Kubernetes' schemas, coherent in itself, and in step with the code and the image.

What no test here can tell is whether a cluster does with it what we think: that is untested.
"""

from __future__ import annotations

import copy
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_checks import RAY_CLUSTER_SCHEMA, Manifest, find, pod_templates, problems

from epruntime.cli.main import make_parser
from epruntime.config import ParallelConfig, ServeConfig

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "launch/kuberay.yaml").read_text(encoding="utf-8")
KUBERNETES_VERSIONS = ("1.27", "1.33", "1.37")  # native gRPC probes are stable since 1.27

#: made by KubeRay for a cluster with token authentication: named as the cluster
RAY_TOKEN = ("epruntime", "auth_token")
GIVEN_SECRETS = {RAY_TOKEN, *re.findall(r"kubectl create secret generic (\S+) --from-literal=(\w+)=", TEXT)}


@pytest.fixture
def manifests() -> list[Manifest]:
    return list(yaml.safe_load_all(TEXT))


def container_of(manifests: list[Manifest], pod: str) -> Manifest:
    (container,) = dict(pod_templates(manifests))[pod]["spec"]["containers"]
    return container


def serve_arguments(manifests: list[Manifest]) -> list[str]:
    """The arguments of `epruntime serve`, as the server's shell reads them."""
    script = container_of(manifests, "epruntime-server")["args"][0]
    return shlex.split(script.partition("exec epruntime serve ")[2].replace("\\\n", " "))


def schema_errors(manifests: list[Manifest], version: str) -> list[str]:
    validator: Any = pytest.importorskip("kubernetes_validate", reason="not installed: pip install -e '.[dev]'")
    clusters = [manifest for manifest in manifests if manifest["kind"] == "RayCluster"]
    plain = [manifest for manifest in manifests if manifest["kind"] != "RayCluster"]
    plain += [{"apiVersion": "v1", "kind": "PodTemplate", "template": pod} for _, pod in pod_templates(clusters)]
    checks = jsonschema.Draft202012Validator(RAY_CLUSTER_SCHEMA)
    found = [error.message for cluster in clusters for error in checks.iter_errors(cluster)]
    for manifest in plain:
        try:
            validator.validate(manifest, version, strict=True)
        except validator.ValidationError as error:
            found.append(f"{manifest['kind']}: {error.message}")
    return found


def test_the_parts(manifests: list[Manifest]) -> None:
    kinds = [manifest["kind"] for manifest in manifests]
    assert kinds == ["PersistentVolumeClaim", "RayCluster", "Deployment", "Service"]
    assert "UNTESTED ON A LIVE CLUSTER" in TEXT


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_valid_by_the_schemas(manifests: list[Manifest], version: str) -> None:
    assert schema_errors(manifests, version) == []


def test_the_schemas_notice(manifests: list[Manifest]) -> None:
    server, cluster = container_of(manifests, "epruntime-server"), find(manifests, "RayCluster")
    server["readinessProbe"]["grpc"]["port"] = "grpc"  # a gRPC probe takes numbers only
    container_of(manifests, "ranks")["lifecyle"] = {}
    cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] = 0
    cluster["spec"]["workerGroupSpecs"][0]["replica"] = 2
    assert len(schema_errors(manifests, "1.33")) == 4


def test_it_hangs_together(manifests: list[Manifest]) -> None:
    assert problems(manifests, given_secrets=GIVEN_SECRETS) == []


def _edit(pod: str, change: Callable[[Manifest, Manifest], object]) -> Callable[[list[Manifest]], object]:
    def edit(manifests: list[Manifest]) -> object:
        return change(dict(pod_templates(manifests))[pod]["spec"], container_of(manifests, pod))

    return edit


FAULTS: dict[str, tuple[Callable[[list[Manifest]], object], str]] = {
    "service": (lambda m: find(m, "Service")["spec"]["selector"].update(x="y"), "must be those of one template"),
    "target": (lambda m: find(m, "Service")["spec"]["ports"][1].update(targetPort=50052), "50052"),
    "deployment": (
        lambda m: find(m, "Deployment")["spec"]["selector"]["matchLabels"].update(x="y"), "its own pods"
    ),
    "secret": (
        _edit("epruntime-server", lambda _, c: c["env"][2]["valueFrom"]["secretKeyRef"].update(key="token")),
        "nobody makes the secret epruntime with the key token",
    ),
    "claim": (lambda m: find(m, "PersistentVolumeClaim")["metadata"].update(name="x"), "claim epruntime-models"),
    "volume": (_edit("head", lambda spec, _: spec["volumes"].clear()), "volume shared-memory is not declared"),
    "shm": (_edit("ranks", lambda spec, _: spec["volumes"][0]["emptyDir"].pop("medium")), "/dev/shm is not memory"),
    "probe port": (
        _edit("epruntime-server", lambda _, c: c["readinessProbe"]["grpc"].update(port=50052)), "readinessProbe asks"
    ),
    "no liveness": (_edit("ranks", lambda _, c: c.pop("livenessProbe")), "has no livenessProbe"),
    "no preStop": (_edit("ranks", lambda _, c: c.pop("lifecycle")), "has no preStop"),
    "memory": (_edit("head", lambda _, c: c["resources"]["limits"].pop("memory")), "resources.limits lacks"),
    "root": (_edit("ranks", lambda spec, _: spec.pop("securityContext")), "may run as root"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(manifests: list[Manifest], fault: str) -> None:
    edit, words = FAULTS[fault]
    broken = copy.deepcopy(manifests)  # also takes YAML's aliases apart
    edit(broken)
    assert any(words in problem for problem in problems(broken, given_secrets=GIVEN_SECRETS))


def test_the_server_is_started_as_the_cli_takes_it(manifests: list[Manifest]) -> None:
    """Flags parse, ports are those of the container, one rank per worker with the worker's CPUs."""
    args = make_parser().parse_args(["serve", *serve_arguments(manifests)])
    ports = {port["name"]: port["containerPort"] for port in container_of(manifests, "epruntime-server")["ports"]}
    assert (args.host, args.port, args.grpc_port) == ("0.0.0.0", ports["http"], ports["grpc"])
    assert (args.launcher, args.ray_address) == ("ray", "auto")
    workers = find(manifests, "RayCluster")["spec"]["workerGroupSpecs"][0]
    assert args.expert_parallel_size == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert container_of(manifests, "ranks")["resources"]["limits"]["cpu"] == str(args.threads_per_rank)


def test_time_to_start_and_to_drain(manifests: list[Manifest]) -> None:
    args = make_parser().parse_args(["serve", *serve_arguments(manifests)])
    server = container_of(manifests, "epruntime-server")
    probe = server["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] > args.start_timeout_s + ParallelConfig.load_timeout_s
    pods = {name: template["spec"] for name, template in pod_templates(manifests)}
    assert args.drain_timeout_s == ServeConfig.drain_timeout_s
    pause_s = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    grace_s = pods["epruntime-server"]["terminationGracePeriodSeconds"]
    assert grace_s >= pause_s + args.drain_timeout_s + 10
    # Where all is deleted at once, what the server needs for its drain outlives it.
    head = container_of(manifests, "head")["lifecycle"]["preStop"]["exec"]["command"]
    assert int(head[1]) >= grace_s
    assert all(pods[name]["terminationGracePeriodSeconds"] > grace_s for name in ("head", "ranks"))


def test_readiness_is_the_health_service_and_liveness_is_not(manifests: list[Manifest]) -> None:
    server = container_of(manifests, "epruntime-server")
    assert server["readinessProbe"]["grpc"] == server["startupProbe"]["grpc"] == {"port": 50051}  # all services
    assert server["livenessProbe"]["httpGet"]["path"] == "/version"


def test_ray_version_image_and_token(manifests: list[Manifest]) -> None:
    cluster = find(manifests, "RayCluster")
    pins = (ROOT / "requirements/constraints.txt").read_text()
    assert f"ray=={cluster['spec']['rayVersion']}\n" in pins
    assert cluster["spec"]["authOptions"] == {"mode": "token"}
    assert cluster["metadata"]["name"] == RAY_TOKEN[0]
    images = {container_of(manifests, pod)["image"] for pod, _ in pod_templates(manifests)}
    assert len(images) == 1
    assert f"-t {images.pop()} ." in (ROOT / "Dockerfile").read_text()
    env = {entry["name"]: entry.get("value") for entry in container_of(manifests, "epruntime-server")["env"]}
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_HEAD"] == f"{cluster['metadata']['name']}-head-svc:6379"  # as KubeRay names the head's service


def test_the_ranks_pods_wait_for_ranks_and_not_for_themselves(manifests: list[Manifest]) -> None:
    """The title of a rank's process is "ray::" and the class of its actor; the shell's own command line has neither."""
    pytest.importorskip("ray")
    from epruntime.launchers.ray_actor import RankActor

    command = container_of(manifests, "ranks")["lifecycle"]["preStop"]["exec"]["command"]
    pattern = re.search(r"grep -qs '([^']+)'", command[2])
    assert pattern is not None
    assert re.search(pattern[1], f"ray::{RankActor.__name__}.run")
    assert not re.search(pattern[1], " ".join(command))
    assert subprocess.run([*command[:1], "-n", "-c", command[2]], check=False, timeout=30).returncode == 0
