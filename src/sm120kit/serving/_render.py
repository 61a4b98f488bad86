"""Write a Service as a docker command line, a compose file or a Kubernetes manifest. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import yaml

from sm120kit.recipes.arguments import PORT
from sm120kit.serving._container import Mount, Scratch, Service

PATIENCE_SECONDS = 30
"""Time between SIGTERM and SIGKILL."""
START_SECONDS = 3600
"""Limit for loading weights and compiling in a pod."""
CACHES_GIB = 50
"""Size of the volume for compiled and tuned kernels of a pod."""


def docker_run(service: Service, *, values: bool = True, detach: bool = False) -> tuple[str, ...]:
    """The command line. Without ``values`` it has only the names of variables, and docker takes values from its environment.

    A container that is detached is not removed when it ends, so that its log can be read.
    """
    argv = ["docker", "run", "--detach" if detach else "--rm", "--init", "--name", service.name]
    argv += ["--cap-drop=ALL", "--security-opt=no-new-privileges"]
    if service.scratch:
        argv += ["--read-only", *(text for scratch in service.scratch for text in ("--tmpfs", _tmpfs(scratch)))]
    argv += ["--gpus", f'"device={",".join(map(str, service.gpus))}"']
    argv += [f"--device={device}" for device in service.devices]
    argv += ["--ipc=host"] if service.ipc_host else [f"--shm-size={service.shm_gib}g"]
    argv += [f"--memory={_mib(service)}", f"--memory-swap={_mib(service)}"] if service.memory else []
    for name, limit in service.ulimits.items():
        argv += ["--ulimit", f"{name}={limit}"]
    for name, value in service.labels.items():
        argv += ["--label", f"{name}={value}"]
    for name, value in service.variables.items():
        argv += ["--env", f"{name}={value}" if values else name]
    for mount in service.mounts:
        fields = ["type=bind", f"source={mount.source}", f"target={mount.target}", *["readonly"] * mount.read_only]
        argv += ["--mount", ",".join(map(_field, fields))]
    argv += ["--network=host"] if service.node else ["--publish", service.published]
    argv += ["--entrypoint", service.command[0]]
    return (*argv, service.image, *service.command[1:])


def _mib(service: Service) -> str:
    """The limit of memory, as docker reads it. Memory with swap has the same limit: nothing is swapped."""
    return f"{service.memory >> 20}m"


def _tmpfs(scratch: Scratch) -> str:
    """Docker's short form, the only one with ``exec``: engines execute and load files that they write there."""
    return f"{scratch.target}:rw,exec,nosuid,nodev,mode=1777,size={scratch.gib}g"


def _field(text: str) -> str:
    """Quote a field of comma-separated values as docker reads them."""
    return '"' + text.replace('"', '""') + '"' if any(character in text for character in ',"') else text


def compose(service: Service) -> str:
    """A compose file of the same container."""
    shared: dict[str, Any] = {"ipc": "host"} if service.ipc_host else {"shm_size": f"{service.shm_gib}g"}
    devices = [{"driver": "nvidia", "device_ids": [str(number) for number in service.gpus], "capabilities": ["gpu"]}]
    container = {
        "image": service.image,
        "init": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        **({"read_only": True, "tmpfs": [_tmpfs(scratch) for scratch in service.scratch]} if service.scratch else {}),
        **shared,
        **({"mem_limit": _mib(service), "memswap_limit": _mib(service)} if service.memory else {}),
        "entrypoint": [service.command[0]],
        "command": [argument.replace("$", "$$") for argument in service.command[1:]],
        "environment": {name: value.replace("$", "$$") for name, value in service.variables.items()},
        "devices": [f"{device}:{device}" for device in service.devices],
        "ulimits": service.ulimits,
        "volumes": [
            {"type": "bind", "source": str(mount.source), "target": mount.target, "read_only": mount.read_only}
            for mount in service.mounts
        ],
        **({"network_mode": "host"} if service.node else {"ports": [service.published]}),
        "stop_grace_period": f"{PATIENCE_SECONDS}s",
        "deploy": {"resources": {"reservations": {"devices": devices}}},
    }
    return written_yaml({"services": {service.name: {key: value for key, value in container.items() if value not in ({}, [])}}})


def kubernetes(service: Service) -> str:
    """A Deployment on one node, a claim for its caches, and a Service; the API key comes from the Secret ``secret_name``.

    The model folder is a path on the node. Limits such as memlock are set in the container runtime, not in a manifest.
    """
    label = {"app.kubernetes.io/name": service.name}
    metadata = {"name": service.name, "labels": label}
    models = [mount for mount in service.mounts if mount.read_only]
    caches = [mount for mount in service.mounts if not mount.read_only]
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # a second pod would wait for the GPUs of the first
            "selector": {"matchLabels": label},
            "template": {"metadata": {"labels": label}, "spec": _pod(service, models, caches)},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": f"{CACHES_GIB}Gi"}}},
    }
    network = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": label, "ports": [{"port": PORT, "targetPort": PORT}]},
    }
    return "---\n".join(written_yaml(document) for document in (*([claim] if caches else []), deployment, network))


def secret_name(service: Service) -> str:
    """Name of the Secret whose entry ``api-key`` is the server's API key."""
    return f"{service.name}-api-key"


def _pod(service: Service, models: Sequence[Mount], caches: Sequence[Mount]) -> dict[str, Any]:
    """A pod of the Pod Security Standard "restricted", except that the model is a path on the node."""
    probe = {"httpGet": {"path": "/health", "port": PORT}}  # both engines answer it without the API key
    user, _, group = service.user.partition(":")
    ids = (
        {
            "runAsUser": int(user),
            "runAsGroup": int(group or user),
            "fsGroup": int(group or user),
            "fsGroupChangePolicy": "OnRootMismatch",
        }
        if user
        else {}
    )
    mounts = [
        *({"name": f"model-{number}", "mountPath": mount.target, "readOnly": True} for number, mount in enumerate(models)),
        *({"name": f"scratch-{number}", "mountPath": scratch.target} for number, scratch in enumerate(service.scratch)),
        # One volume for all caches; the kubelet changes its group to that of the pod.
        *({"name": "caches", "mountPath": mount.target, "subPath": mount.source.name} for mount in caches),
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    memory = {"memory": f"{service.memory >> 20}Mi"} if service.memory else {}
    container = {
        "name": "server",
        "image": service.image,
        "command": [*map(_literal, service.argv), *service.api_key.arguments],
        "env": [
            *(
                {"name": name, "value": _literal(value)}
                for name, value in service.environment.items()
                if name != service.api_key.variable
            ),
            {
                "name": service.api_key.variable,
                "valueFrom": {"secretKeyRef": {"name": secret_name(service), "key": "api-key"}},
            },
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"limits": {"nvidia.com/gpu": len(service.gpus), **memory}},
        "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": START_SECONDS // 10},
        "readinessProbe": {**probe, "periodSeconds": 10},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": bool(service.scratch),
        },
        "volumeMounts": mounts,
    }
    volumes = [
        *(
            {"name": f"model-{number}", "hostPath": {"path": str(mount.source), "type": "Directory"}}
            for number, mount in enumerate(models)
        ),
        *(
            {"name": f"scratch-{number}", "emptyDir": {"sizeLimit": f"{scratch.gib}Gi"}}
            for number, scratch in enumerate(service.scratch)
        ),
        *([{"name": "caches", "persistentVolumeClaim": {"claimName": service.name}}] if caches else []),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{service.shm_gib}Gi"}},
    ]
    return {
        "terminationGracePeriodSeconds": PATIENCE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {"runAsNonRoot": True, **ids, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": volumes,
    }


class _Yaml(yaml.SafeDumper):  # type: ignore[misc]
    """Strings other than plain words are quoted: readers of YAML 1.2 take some for numbers that PyYAML writes plain."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: _Yaml, text: str) -> yaml.ScalarNode:
    tag = "tag:yaml.org,2002:str"
    word = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text) and text.lower() not in ("y", "n")
    plain = word and dumper.resolve(yaml.ScalarNode, text, (True, False)) == tag
    return dumper.represent_scalar(tag, text, None if plain else '"')


_Yaml.add_representer(str, _string)


def written_yaml(value: dict[str, Any]) -> str:
    """Nested tables and lists as YAML."""
    return str(yaml.dump(value, Dumper=_Yaml, sort_keys=False, width=1 << 20))


def _literal(text: str) -> str:
    """Escape ``$(NAME)``, which Kubernetes would expand."""
    return text.replace("$(", "$$(")
