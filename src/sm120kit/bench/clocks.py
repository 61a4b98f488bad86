"""Sample the GPUs with nvidia-smi while a server is measured: clocks, power, temperature, and why they were slowed."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sm120kit.core import process
from sm120kit.core.errors import RequirementMissing
from sm120kit.core.outside import number

PERIOD_MS = 500
PATIENCE_SECONDS = 10
FIELDS = ("index", "clocks.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
ARGV = ("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", f"--loop-ms={PERIOD_MS}")
REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
}
"""Bits of the reasons for clocks below the set ones (nvml.h, nvmlClocksEventReasons). Idle is not among them."""


@dataclass(frozen=True)
class Clocks:
    """One GPU during a case, sampled ``looks`` times. SM clock in MHz and power in W are lowest, median and highest.

    ``hottest`` is in degrees Celsius; ``slowed`` is the share of samples in which each reason was active. None is unknown.
    """

    gpu: int
    looks: int
    sm_mhz: tuple[float, float, float] | None
    watts: tuple[float, float, float] | None
    hottest: float | None
    slowed: dict[str, float] | None


@contextmanager
def sampled() -> Iterator[Callable[[], tuple[Clocks, ...] | None]]:
    """Sample the GPUs while the block runs. The yielded function returns the result afterwards, None without samples.

    The block starts after the first sample, or after ``PATIENCE_SECONDS``: starting nvidia-smi takes up to seconds and disturbs
    the measurement. The first sample shows idle GPUs and is left out.
    """
    clocks: tuple[Clocks, ...] | None = None
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as directory, ExitStack() as running:
        log = Path(directory) / "clocks.csv"
        with suppress(RequirementMissing):
            child = running.enter_context(process.background(ARGV, log))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not log.stat().st_size and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.01)
        yield lambda: clocks
        running.close()
        if log.exists():
            clocks = parse(log.read_text(errors="replace"))


def parse(text: str) -> tuple[Clocks, ...] | None:
    """Parse the lines of nvidia-smi by GPU, without the first line of each.

    Lines of another format, such as a truncated last line, are left out.
    """
    samples: dict[int, list[list[str]]] = {}
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(FIELDS) and re.fullmatch("[0-9]{1,4}", values[0]):
            samples.setdefault(int(values[0]), []).append(values[1:])
    return tuple(_clocks(gpu, lines[1:]) for gpu, lines in sorted(samples.items()) if lines[1:]) or None


def lines(cases: Iterable[Clocks]) -> list[str]:
    """A line for each GPU over several cases, with the largest share of each reason that slowed it."""
    by_gpu: dict[int, list[Clocks]] = {}
    for clocks in cases:
        by_gpu.setdefault(clocks.gpu, []).append(clocks)
    return [_line(gpu, cases) for gpu, cases in sorted(by_gpu.items())]


def _line(gpu: int, cases: list[Clocks]) -> str:
    clocks = [value for case in cases for value in case.sm_mhz or ()]
    watts = [value for case in cases for value in case.watts or ()]
    temperatures = [case.hottest for case in cases if case.hottest is not None]
    parts = [f"SM {min(clocks):.0f} to {max(clocks):.0f} MHz"] if clocks else ["clocks unknown"]
    parts += [f"{min(watts):.0f} to {max(watts):.0f} W"] if watts else ["power unknown"]
    parts += [f"up to {max(temperatures):.0f} °C"] if temperatures else ["temperature unknown"]
    known = [case.slowed for case in cases if case.slowed is not None]
    worst = {name: max(slowed.get(name, 0.0) for slowed in known) for slowed in known for name in slowed}
    slowed = ", ".join(f"{name} ({share:.0%} of a case)" for name, share in sorted(worst.items())) or "by nothing"
    return f"GPU {gpu}: {', '.join(parts)}; slowed {slowed if known else 'unknown'}"


def _clocks(gpu: int, lines: list[list[str]]) -> Clocks:
    clocks, power, temperatures = (
        [value for line in lines if (value := _number(line[column])) is not None] for column in range(3)
    )
    masks = [int(line[3], 16) for line in lines if re.fullmatch("0x[0-9a-fA-F]{1,16}", line[3])]
    slowed = {name: share for bit, name in REASONS.items() if (share := sum(bool(m & bit) for m in masks) / len(lines))}
    return Clocks(gpu, len(lines), _range(clocks), _range(power), max(temperatures, default=None), slowed if masks else None)


def _range(values: list[float]) -> tuple[float, float, float] | None:
    return (min(values), median(values), max(values)) if values else None


def _number(text: str) -> float | None:
    try:
        return number(text)
    except ValueError:  # [N/A], [Not Supported]
        return None
