"""Probe a running server for answers that are wrong without an error.

``server_verification`` runs the probes. Each is a module with ``ask``, which sends requests, and ``judge``, which concludes
from the recorded answers alone.
"""

from sm120kit.probes.probe_records import FORMAT, ProbeResult, ProbeVerdict, ServerVerification, schema
from sm120kit.probes.probe_session import ServerProbe
from sm120kit.probes.server_verification import PROBES, QUICK, VerifiedServer, selected, verify

__all__ = [
    "FORMAT",
    "PROBES",
    "QUICK",
    "ProbeResult",
    "ProbeVerdict",
    "ServerProbe",
    "ServerVerification",
    "VerifiedServer",
    "schema",
    "selected",
    "verify",
]
