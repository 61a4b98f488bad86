"""Probes of CUTLASS's own builder: their C++ text, and what the host compiler's messages say about their types."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sm120kit.records import Probe
from sm120kit.workspace import file_sha256

HEADERS = Path(__file__).with_name("cpp")
_TYPES = re.compile(r"warning:.*\b(?P<what>mainloop|scale_factors)\b.*\[with int line = (?P<line>\d+); (?P<types>[^\]]*)\]")
_ASSIGNED = re.compile(r"(\w+) = ")


def own_sources() -> list[str]:
    """The sha256 of the probe and of how its answers are read."""
    return [file_sha256(path) for path in (*sorted(HEADERS.glob("*")), Path(__file__))]


def translation_unit(probes: Sequence[Probe], *, host: bool) -> str:
    """C++ text that instantiates each probe, numbered from 0: for the host compiler behind the tiles' probe, or for nvcc."""
    lines = ['#include "collective.hpp"', "namespace sm120kit_prove {"]
    for number, probe in enumerate(probes):
        adapter = "gemm::device::GemmUniversalAdapter"
        if host:
            adapter = f"Line{number}"
            lines.append(f"template <class K> using {adapter} = sm120kit_probe::Adapter<K, {number}>;")
        grouped = "true" if probe.family == "grouped" else "false"
        words = f"{number}, {adapter}, {probe.dtype}, {grouped}, {probe.m}, {probe.n}, {probe.k}"
        lines.append(f"template struct Probe<{words}>;")
    return "\n".join([*lines, "}", ""])


def facts_of(messages: str, line: int) -> dict[str, str]:
    """The types that probe number ``line`` reported: its mainloop's, and the shared memory layouts of its scale factors."""
    found: dict[str, str] = {}
    for match in _TYPES.finditer(messages):
        if int(match["line"]) == line:
            names = _ASSIGNED.findall(match["types"])
            values = _ASSIGNED.split(match["types"])[2::2]
            found |= {name: value.strip().rstrip(";").replace("cute::", "") for name, value in zip(names, values, strict=True)}
    return found
