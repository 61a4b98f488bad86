"""``sm120kit explain``: what known errors in an engine's log mean."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from sm120kit.cli.options import Json


def explain_(
    log: Annotated[
        Path, typer.Argument(metavar="LOG|-", help="A log of vLLM, SGLang, docker or the kernel; - is standard input.")
    ],
    as_json: Json = False,
) -> None:
    """Find known errors in a log: cause, way out and source of each, the most specific first.

    Exit code 0: something is explained; 1: nothing here is known, or only lines that are expected.
    """
    from dataclasses import asdict

    from sm120kit import console, explain
    from sm120kit.errors import LogUnreadable

    if str(log) == "-":
        told = explain.read(sys.stdin.buffer)
    else:
        try:
            with log.open("rb") as stream:
                told = explain.read(stream)
        except OSError as error:
            raise LogUnreadable(f"cannot read {log}: {error.strerror}", "name a log file, or - for standard input") from error
    if as_json:
        console.json_data({"known": told.known, **asdict(told)})
        raise typer.Exit(0 if told.known else 1)
    for one in told.found:
        kind = "expected" if one.rule.harmless else one.rule.id
        console.data(f"{kind}: line {one.number}{f', {one.count} times' if one.count > 1 else ''}")
        for name, text in (("line", one.line), ("cause", one.rule.cause), ("fix", one.rule.fix), ("source", one.rule.source)):
            console.data(f"  {name + ':':<8}{text}")
        console.data("")
    if not told.known:
        console.data(f"unknown: nothing {'else ' if told.found else ''}in these {told.lines} lines is known")
        for line in told.errors:
            console.data(f"  looks like an error: {line}")
    raise typer.Exit(0 if told.known else 1)
