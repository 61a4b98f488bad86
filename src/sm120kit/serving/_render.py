"""Write a Service as a docker command line or a compose file. Pure."""

import re
from typing import Any

import yaml

from sm120kit.serving._container import Scratch, Service

PATIENCE_SECONDS = 30
"""Time between SIGTERM and SIGKILL."""


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
