"""Decide which files of locked wheels an image leaves out, and change their RECORD accordingly: pure functions."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from sm120kit.core.errors import BadRecipe
from sm120kit.core.records import LeftOut
from sm120kit.recipes.schema import FilesLeftOut

_METADATA = ".dist-info/"


def left_out(rules: Sequence[FilesLeftOut], distribution: str, files: Iterable[str]) -> dict[str, str]:
    """The files of a wheel that are left out, each with the reason of the first rule that matches it.

    ``files`` are paths in the wheel. In a pattern ``*`` also matches ``/``. Rules for other distributions are ignored.

    Raises:
        BadRecipe: a pattern matches no file, a Python module, or a file of the wheel's metadata.
    """
    names = tuple(files)
    absent: dict[str, str] = {}
    for rule in rules:
        if rule.distribution != distribution:
            continue
        for pattern in rule.paths:
            matching = fnmatch.filter(names, pattern)
            forbidden = [name for name in matching if _METADATA in name or name.endswith(".py")]
            if not matching or forbidden:
                problem = f"matches {forbidden[0]}" if forbidden else "matches no file of its wheel"
                raise BadRecipe(
                    f"leave_out: the pattern {pattern!r} of {distribution} {problem}",
                    "patterns are of paths in the wheel, and must match neither metadata nor Python modules",
                )
            for name in matching:
                absent.setdefault(name, rule.reason)
    return absent


def record_without(rows: Iterable[Sequence[str]], absent: Mapping[str, str]) -> list[list[str]]:
    """The rows of a RECORD without those of absent files, so that every file it lists exists with its hash."""
    return [list(row) for row in rows if row[0] not in absent]


def summary(distribution: str, absent: Mapping[str, str], sizes: Mapping[str, int]) -> tuple[LeftOut, ...]:
    """What was left out of a wheel, one entry per reason, with the number of files and their bytes."""
    entries = []
    for reason in dict.fromkeys(absent.values()):
        files = [name for name, why in absent.items() if why == reason]
        total = sum(sizes[name] for name in files)
        entries.append(LeftOut(f"{distribution}: {len(files)} files, {total:,} bytes", reason))
    return tuple(entries)
