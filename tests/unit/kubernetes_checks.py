"""What hangs together in Kubernetes manifests, and which fields of a RayCluster KubeRay takes. Over parsed YAML."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Manifest = dict[str, Any]

_TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
_POD = {"type": "object"}  # Kubernetes' own schema says the rest: see pod_templates

#: Of ray.io/v1, the fields that we use, as KubeRay's API reference has them; any other is refused. Written by hand.
RAY_CLUSTER_SCHEMA: Manifest = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "required": ["headGroupSpec"],
            "additionalProperties": False,
            "properties": {
                "rayVersion": {"type": "string"},
                "authOptions": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"mode": {"enum": ["disabled", "token"]}},
                },
                "headGroupSpec": {
                    "type": "object",
                    "required": ["template"],
                    "additionalProperties": False,
                    "properties": {"rayStartParams": _TEXTS, "template": _POD},
                },
                "workerGroupSpecs": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["groupName", "template"],
                        "additionalProperties": False,
                        "properties": {
                            "groupName": {"type": "string"},
                            "replicas": {"type": "integer", "minimum": 0},
                            "minReplicas": {"type": "integer", "minimum": 0},
                            "maxReplicas": {"type": "integer", "minimum": 0},
                            "rayStartParams": _TEXTS,
                            "template": _POD,
                        },
                    },
                },
            },
        },
    },
}


def find(manifests: list[Manifest], kind: str) -> Manifest:
    """The only one of its kind."""
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


def pod_templates(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    """Every pod template, with a name for it."""
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield manifest["metadata"]["name"], manifest["spec"]["template"]
        elif manifest["kind"] == "RayCluster":
            yield "head", manifest["spec"]["headGroupSpec"]["template"]
            for group in manifest["spec"]["workerGroupSpecs"]:
                yield group["groupName"], group["template"]


def problems(manifests: list[Manifest], *, given_secrets: set[tuple[str, str]]) -> list[str]:
    """What does not hang together.

    Args:
        given_secrets: (name, key) of secrets that exist without being declared here.
    """
    found = [*_selector_problems(manifests), *_service_problems(manifests)]
    claims = {m["metadata"]["name"] for m in manifests if m["kind"] == "PersistentVolumeClaim"}
    for name, template in pod_templates(manifests):
        found += [f"{name}: {text}" for text in _pod_problems(template["spec"], claims, given_secrets)]
    return found


def _selector_problems(manifests: list[Manifest]) -> Iterator[str]:
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            labels = manifest["spec"]["template"]["metadata"]["labels"]
            if not manifest["spec"]["selector"]["matchLabels"].items() <= labels.items():
                yield f"Deployment {manifest['metadata']['name']} does not select its own pods"


def _service_problems(manifests: list[Manifest]) -> Iterator[str]:
    for service in (manifest for manifest in manifests if manifest["kind"] == "Service"):
        name, selector = service["metadata"]["name"], service["spec"]["selector"]
        chosen = [
            (pod, template["spec"])
            for pod, template in pod_templates(manifests)
            if selector.items() <= template["metadata"]["labels"].items()
        ]
        if len(chosen) != 1:
            yield f"Service {name} selects the pods of {[pod for pod, _ in chosen]}, must be those of one template"
            continue
        ports = _ports(chosen[0][1])
        yield from (
            f"Service {name} sends {port['name']} to port {port['targetPort']}, which its pods do not have"
            for port in service["spec"]["ports"]
            if port["targetPort"] not in ports
        )


def _ports(spec: Manifest) -> dict[str | int, int]:
    """Name and number of every declared port -> number."""
    declared = [port for container in spec["containers"] for port in container.get("ports", ())]
    return {key: port["containerPort"] for port in declared for key in (port["name"], port["containerPort"])}


def _pod_problems(spec: Manifest, claims: set[str], given_secrets: set[tuple[str, str]]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in spec.get("volumes", ())}
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in claims:
            yield f"claim {claim} is not declared"
    if not spec.get("securityContext", {}).get("runAsNonRoot"):
        yield "may run as root"
    for container in spec["containers"]:
        mounts = {mount["mountPath"]: mount["name"] for mount in container.get("volumeMounts", ())}
        yield from (f"volume {name} is not declared" for name in mounts.values() if name not in volumes)
        if volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {}).get("medium") != "Memory":
            yield "/dev/shm is not memory: containers get 64 MiB of it by default"
        for entry in container.get("env", ()):
            secret = entry.get("valueFrom", {}).get("secretKeyRef")
            if secret is not None and (secret["name"], secret["key"]) not in given_secrets:
                yield f"{entry['name']}: nobody makes the secret {secret['name']} with the key {secret['key']}"
        for part in ("requests", "limits"):
            if not {"cpu", "memory"} <= container["resources"][part].keys():
                yield f"resources.{part} lacks cpu or memory"
        yield from _probe_problems(container, spec)


def _probe_problems(container: Manifest, spec: Manifest) -> Iterator[str]:
    ports = _ports(spec)
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind)
        if probe is None:
            if kind != "startupProbe":
                yield f"has no {kind}"
            continue
        port = (probe.get("grpc") or probe.get("httpGet") or probe["tcpSocket"])["port"]
        if port not in ports and port != RAY_AGENT_PORT:
            yield f"{kind} asks port {port}, which the pod does not have"
    if "preStop" not in container.get("lifecycle", {}):
        yield "has no preStop"


#: where a Ray node's agent answers to health checks (`ray start --dashboard-agent-listen-port`), declared by nobody
RAY_AGENT_PORT = 52365
