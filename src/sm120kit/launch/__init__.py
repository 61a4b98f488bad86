"""``(Configuration, VerifiedImage, model folder) -> Run``: what is started, whether it fits, and a server from start to stop.

``fit`` refuses what cannot work and says why; ``service`` decides what is started; ``render`` writes it as a docker command, a
compose file or a manifest; ``serving`` runs any command line until it is told to stop.
"""

from __future__ import annotations

from sm120kit.launch.fit import Device, Fit, judge
from sm120kit.launch.render import compose, docker_run, kubernetes
from sm120kit.launch.service import Service, arguments, make
from sm120kit.launch.serving import Ending, Outcome, port_is_free, serve

__all__ = [
    "Device",
    "Ending",
    "Fit",
    "Outcome",
    "Service",
    "arguments",
    "compose",
    "docker_run",
    "judge",
    "kubernetes",
    "make",
    "port_is_free",
    "serve",
]
