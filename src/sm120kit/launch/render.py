"""A service as a docker command line, a compose file or a Kubernetes manifest. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from sm120kit.launch.service import PORT, Service

PATIENCE_SECONDS = 30
"""How long a server has between SIGTERM and SIGKILL."""
START_SECONDS = 3600
"""How long a pod may take to load its weights and compile."""


def docker_run(service: Service, *, values: bool = True) -> tuple[str, ...]:
    """The command line; without ``values`` docker takes those of variables from its own environment."""
    argv = ["docker", "run", "--rm", "--init", "--name", service.name]
    argv += ["--gpus", f'"device={",".join(map(str, service.gpus))}"']
    argv += ["--ipc=host"] if service.ipc_host else [f"--shm-size={service.shm_gib}g"]
    for name, limit in service.ulimits.items():
        argv += ["--ulimit", f"{name}={limit}"]
    for name, value in service.labels.items():
        argv += ["--label", f"{name}={value}"]
    for name, value in service.environment.items():
        argv += ["--env", f"{name}={value}" if values else name]
    for mount in service.mounts:
        fields = ["type=bind", f"source={mount.source}", f"target={mount.target}", *["readonly"] * mount.read_only]
        argv += ["--mount", ",".join(map(_field, fields))]
    argv += ["--publish", f"127.0.0.1:{service.port}:{PORT}", "--entrypoint", service.argv[0]]
    return (*argv, service.image, *service.argv[1:])


def _field(text: str) -> str:
    """A field of comma-separated values, as docker reads them."""
    return '"' + text.replace('"', '""') + '"' if any(sign in text for sign in ',"') else text


def compose(service: Service) -> str:
    """A compose file with the same container."""
    shared: dict[str, Any] = {"ipc": "host"} if service.ipc_host else {"shm_size": f"{service.shm_gib}g"}
    devices = [{"driver": "nvidia", "device_ids": [str(number) for number in service.gpus], "capabilities": ["gpu"]}]
    container = {
        "image": service.image,
        "init": True,
        **shared,
        "entrypoint": [service.argv[0]],
        "command": [word.replace("$", "$$") for word in service.argv[1:]],
        "environment": {name: value.replace("$", "$$") for name, value in service.environment.items()},
        "ulimits": service.ulimits,
        "volumes": [
            {"type": "bind", "source": str(mount.source), "target": mount.target, "read_only": mount.read_only}
            for mount in service.mounts
        ],
        "ports": [f"127.0.0.1:{service.port}:{PORT}"],
        "stop_grace_period": f"{PATIENCE_SECONDS}s",
        "deploy": {"resources": {"reservations": {"devices": devices}}},
    }
    return yaml({"services": {service.name: {key: value for key, value in container.items() if value != {}}}})


def kubernetes(service: Service) -> str:
    """A Deployment on one node and a Service. Limits such as memlock are the container runtime's and cannot be asked for."""
    label = {"app.kubernetes.io/name": service.name}
    probe = {"httpGet": {"path": "/health", "port": PORT}}
    volumes = [
        {
            "name": f"mount-{number}",
            "hostPath": {"path": str(mount.source), "type": "Directory" if mount.read_only else "DirectoryOrCreate"},
        }
        for number, mount in enumerate(service.mounts)
    ]
    mounted = [
        {"name": f"mount-{number}", "mountPath": mount.target, "readOnly": mount.read_only}
        for number, mount in enumerate(service.mounts)
    ]
    container = {
        "name": "server",
        "image": service.image,
        "command": [_kept(word) for word in service.argv],
        "env": [{"name": name, "value": _kept(value)} for name, value in service.environment.items()],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": len(service.gpus)}},
        "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": START_SECONDS // 10},
        "readinessProbe": {**probe, "periodSeconds": 10},
        "volumeMounts": [*mounted, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    written = [mount for mount, item in zip(mounted, service.mounts, strict=True) if not item.read_only]
    opened = {
        "name": "caches",
        "image": service.image,
        "command": ["chmod", "777", *(mount["mountPath"] for mount in written)],
        "securityContext": {"runAsUser": 0},  # a folder that the node makes is root's
        "volumeMounts": written,
    }
    pod = {
        "terminationGracePeriodSeconds": PATIENCE_SECONDS,
        "initContainers": [opened] if written else [],
        "containers": [container],
        "volumes": [*volumes, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{service.shm_gib}Gi"}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": service.name, "labels": label},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # a second one would wait for the GPUs of the first
            "selector": {"matchLabels": label},
            "template": {"metadata": {"labels": label}, "spec": pod},
        },
    }
    entry = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": service.name, "labels": label},
        "spec": {"selector": label, "ports": [{"port": PORT, "targetPort": PORT}]},
    }
    return f"{yaml(deployment)}---\n{yaml(entry)}"


def yaml(value: dict[str, Any]) -> str:
    """Nested tables and lists as YAML; every string that is more than a word is quoted as in JSON, which YAML reads."""
    return "".join(f"{line}\n" for line in _lines(value))


def _lines(value: Any) -> Iterator[str]:
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for key, item in pairs:
        lead = "-" if key is None else f"{_scalar(key)}:"
        if not isinstance(item, dict | list) or not item:
            yield f"{lead} {_scalar(item)}"
            continue
        nested = _lines(item)
        if key is None:
            yield f"- {next(nested)}"
        else:
            yield lead
        yield from (f"  {line}" for line in nested)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value):
        words = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")
        return json.dumps(value) if value.lower() in words else value
    return json.dumps(value)


def _kept(text: str) -> str:
    """Kubernetes replaces ``$(NAME)``; ``$$`` keeps it."""
    return text.replace("$(", "$$(")
