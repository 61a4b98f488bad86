"""What the GPUs did while a server was measured: clocks, power, heat and why they were slowed, by nvidia-smi."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from sm120kit import process
from sm120kit.errors import ToolchainMissing

PERIOD_MS = 500
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
"""Bits of the reasons that lower clocks below what was set (nvml.h, nvmlClocksEventReasons). Idling is none."""


@dataclass(frozen=True)
class Clocks:
    """One GPU during one cell, looked at ``looks`` times. Clock of the SMs in MHz and power in W as lowest, median and highest.

    ``hottest`` is in degrees Celsius, ``slowed`` the share of looks at which a reason was active. None is unknown.
    """

    gpu: int
    looks: int
    sm_mhz: tuple[float, float, float] | None
    watts: tuple[float, float, float] | None
    hottest: float | None
    slowed: dict[str, float] | None


@contextmanager
def watched() -> Iterator[Callable[[], tuple[Clocks, ...] | None]]:
    """Look at the GPUs while the block runs; what is yielded says afterwards what was seen, None when nothing was."""
    seen: tuple[Clocks, ...] | None = None
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as place, ExitStack() as running:
        log = Path(place) / "clocks.csv"
        with suppress(ToolchainMissing):
            running.enter_context(process.started(ARGV, log))
        yield lambda: seen
        running.close()
        if log.exists():
            seen = understand(log.read_text(errors="replace"))


def understand(text: str) -> tuple[Clocks, ...] | None:
    """The lines of nvidia-smi, GPU by GPU. Lines that are not of its format, such as a last half one, are left out."""
    looks: dict[int, list[list[str]]] = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(FIELDS) and words[0].isdigit():
            looks.setdefault(int(words[0]), []).append(words[1:])
    return tuple(_clocks(gpu, lines) for gpu, lines in sorted(looks.items())) or None


def lines(seen: Iterable[Clocks]) -> list[str]:
    """A line for each GPU over several cells, with the worst share of each reason that slowed it."""
    by_gpu: dict[int, list[Clocks]] = {}
    for one in seen:
        by_gpu.setdefault(one.gpu, []).append(one)
    return [_line(gpu, cells) for gpu, cells in sorted(by_gpu.items())]


def _line(gpu: int, cells: list[Clocks]) -> str:
    clocks = [value for cell in cells for value in cell.sm_mhz or ()]
    watts = [value for cell in cells for value in cell.watts or ()]
    heat = [cell.hottest for cell in cells if cell.hottest is not None]
    said = [f"SM {min(clocks):.0f} to {max(clocks):.0f} MHz"] if clocks else ["clocks unknown"]
    said += [f"{min(watts):.0f} to {max(watts):.0f} W"] if watts else ["power unknown"]
    said += [f"up to {max(heat):.0f} °C"] if heat else ["heat unknown"]
    known = [cell.slowed for cell in cells if cell.slowed is not None]
    worst = {name: max(slowed.get(name, 0.0) for slowed in known) for slowed in known for name in slowed}
    slowed = ", ".join(f"{name} ({share:.0%} of a cell)" for name, share in sorted(worst.items())) or "by nothing"
    return f"GPU {gpu}: {', '.join(said)}; slowed {slowed if known else 'unknown'}"


def _clocks(gpu: int, lines: list[list[str]]) -> Clocks:
    clocks, power, heat = ([number for line in lines if (number := _number(line[at])) is not None] for at in range(3))
    masks = [int(line[3], 16) for line in lines if line[3].startswith("0x")]
    slowed = {name: share for bit, name in REASONS.items() if (share := sum(bool(m & bit) for m in masks) / len(lines))}
    return Clocks(gpu, len(lines), _range(clocks), _range(power), max(heat, default=None), slowed if masks else None)


def _range(values: list[float]) -> tuple[float, float, float] | None:
    return (min(values), median(values), max(values)) if values else None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # [N/A], [Not Supported]
        return None
