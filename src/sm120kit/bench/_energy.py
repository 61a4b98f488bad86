"""Energy of the GPUs while a server is measured, from the counters of NVIDIA's driver."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sm120kit.core import process
from sm120kit.core.outside import parse_json

ARGV = (sys.executable, "-P", str(Path(__file__).with_name("_energy_sampler.py")))
PATIENCE_SECONDS = 10.0
REMOTE = "the server was not detected on this machine"


@dataclass(frozen=True)
class Energy:
    """Energy in J that ``gpus``, by their numbers, took during a case: those on which processes compute, else all.

    ``unknown`` is the reason why it is not known.
    """

    gpus: tuple[int, ...] = ()
    joules: tuple[float, ...] = ()
    unknown: str = ""

    @property
    def total(self) -> float | None:
        """The energy of all these GPUs, None if unknown."""
        return None if self.unknown else sum(self.joules)


@dataclass(frozen=True)
class EnergySample:
    """The counters of all GPUs in J ``at`` a time of ``time.perf_counter``, and the ``busy`` GPUs."""

    at: float
    joules: tuple[float | None, ...]
    busy: tuple[int, ...]


@contextmanager
def sampled() -> Iterator[Callable[[], Energy]]:
    """Sample the counters while the block runs. The yielded function returns the energy of the block afterwards.

    The block starts after the first sample, or after ``PATIENCE_SECONDS``.
    """
    from sm120kit.bench._energy_sampler import PERIOD

    result = Energy(unknown="the case was interrupted")
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as directory, ExitStack() as running:
        log = Path(directory) / "energy.jsonl"
        child = running.enter_context(process.background(ARGV, log))
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not log.stat().st_size and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        begin = time.perf_counter()
        yield lambda: result
        end = time.perf_counter()
        while child.poll() is None and time.perf_counter() < end + 2 * PERIOD:  # for a sample after the end
            time.sleep(0.01)
        running.close()
        result = between(begin, end, log.read_text(errors="replace"))


def between(begin: float, end: float, text: str) -> Energy:
    """The energy from ``begin`` to ``end`` by the lines of the sampler, interpolated between its samples."""
    samples = [sample for line in text.splitlines() if (sample := _sample(line))]
    if not samples:
        return Energy(
            unknown=next((line for line in text.splitlines() if line.startswith("NVML: ")), "no GPU counter was read")
        )
    last = samples[-1]
    gpus = last.busy or tuple(range(len(last.joules)))
    if samples[0].at > begin or last.at < end:
        return Energy(unknown="the counters were not read for the whole case")
    taken = []
    for gpu in gpus:
        counters = [(sample.at, joules) for sample in samples if (joules := sample.joules[gpu]) is not None]
        if len(counters) < len(samples):
            return Energy(unknown=f"GPU {gpu} has no energy counter")
        taken.append(_counter(counters, end) - _counter(counters, begin))
    return Energy(gpus, tuple(taken)) if taken else Energy(unknown="the driver lists no GPU")


def _sample(line: str) -> EnergySample | None:
    """A sample of a line; None for another line, such as a truncated last one."""
    try:
        values = parse_json(line)
        return EnergySample(values["at"], tuple(values["joules"]), tuple(values["busy"]))
    except (ValueError, KeyError, TypeError):
        return None


def _counter(counters: Sequence[tuple[float, float]], at: float) -> float:
    """The value of a counter at a time between two samples."""
    (since, before), (until, after) = next(pair for pair in pairwise(counters) if pair[1][0] >= at)
    return before + (after - before) * (at - since) / (until - since)
