"""Probes of CUTLASS's collective builder: their C++ text, and the types that compiler messages report for them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from sm120kit.core.digests import file_sha256
from sm120kit.patches.patch_records import Probe

HEADERS = Path(__file__).with_name("cpp")
_TYPES = re.compile(r"warning:.*\b(?P<what>mainloop|scale_factors)\b.*\[with int line = (?P<line>\d+); (?P<types>[^\]]*)\]")
_ASSIGNED = re.compile(r"(\w+) = ")


def own_sources() -> list[str]:
    """The sha256 of the probe's headers and of this module, which parses its reports."""
    return [file_sha256(path) for path in (*sorted(HEADERS.glob("*")), Path(__file__))]


def translation_unit(probes: Sequence[Probe], *, host: bool) -> str:
    """C++ text that instantiates each probe, numbered from 0: for the host compiler with the tiles' probe, or for nvcc."""
    lines = ['#include "collective.hpp"', "namespace sm120kit_prove {"]
    for number, probe in enumerate(probes):
        adapter = "gemm::device::GemmUniversalAdapter"
        if host:
            adapter = f"Line{number}"
            lines.append(f"template <class K> using {adapter} = sm120kit_probe::Adapter<K, {number}>;")
        grouped = "true" if probe.family == "grouped" else "false"
        arguments = f"{number}, {adapter}, {probe.dtype}, {grouped}, {probe.m}, {probe.n}, {probe.k}"
        lines.append(f"template struct Probe<{arguments}>;")
    return "\n".join([*lines, "}", ""])


def reported_types(messages: str, line: int) -> dict[str, str]:
    """The types that probe number ``line`` reported: mainloop, and shared memory layouts of the scale factors."""
    types: dict[str, str] = {}
    for match in _TYPES.finditer(messages):
        if int(match["line"]) == line:
            names = _ASSIGNED.findall(match["types"])
            values = _ASSIGNED.split(match["types"])[2::2]
            types |= {name: value.strip().rstrip(";").replace("cute::", "") for name, value in zip(names, values, strict=True)}
    return types
