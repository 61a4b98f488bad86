"""What a probe is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sm120kit.probes.probe_records import ProbeJudgement, Recorded
from sm120kit.probes.probe_session import ProbeSession


@dataclass(frozen=True)
class ServerProbe:
    """A probe: ``ask`` sends requests, ``judge`` concludes from their answers alone.

    Both may raise ``CannotBeJudged``. ``cannot_see`` is a sentence on the faults that the probe does not find.
    """

    name: str
    ask: Callable[[ProbeSession], None]
    judge: Callable[[Recorded], ProbeJudgement]
    cannot_see: str
