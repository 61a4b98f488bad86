"""Serve a model as a configuration describes: ``(Configuration, VerifiedImage, model folder) -> Run``.

:mod:`.launch` checks everything before a start and runs the container; :mod:`.checkpoint` reads the model folder, which
:mod:`.model_download` fetches; :mod:`.fit` compares it with image and GPUs; :mod:`._container` decides image, command and
mounts; :mod:`._render` writes them as a docker command or a compose file, :mod:`.nodes` those of several machines;
:mod:`._supervise` runs any server process from start to stop; :mod:`.answer` sends a first request, and
:mod:`.server_containers` lists and stops what was started.
"""

from sm120kit.serving._container import Placement, Service, api_key, make_service, risks
from sm120kit.serving._render import compose, docker_run
from sm120kit.serving._supervise import Ending, Outcome, Run, ServerProcess, free_port, port_is_free, serve
from sm120kit.serving.fit import Device, Fit, check_fit, choose_gpus, require_architecture, require_image, select_gpus

__all__ = [
    "Device",
    "Ending",
    "Fit",
    "Outcome",
    "Placement",
    "Run",
    "ServerProcess",
    "Service",
    "api_key",
    "check_fit",
    "choose_gpus",
    "compose",
    "docker_run",
    "free_port",
    "make_service",
    "port_is_free",
    "require_architecture",
    "require_image",
    "risks",
    "select_gpus",
    "serve",
]
