"""``sm120kit explain``: explain known errors in an engine's log."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit.cli.options import Json

if TYPE_CHECKING:
    from sm120kit.hosts.log_rules import Explanation


def explain_(
    log: Annotated[
        Path, typer.Argument(metavar="LOG|-", help="A log of vLLM, SGLang, Docker or the Linux kernel; - for standard input.")
    ],
    as_json: Json = False,
) -> None:
    """Explain known errors in a log.

    Prints cause, fix and source of each known error, the most specific first. Exit code 0: at least one failure is explained;
    1: no known error, or harmless lines only.
    """
    from dataclasses import asdict

    from sm120kit.core import console
    from sm120kit.core.errors import LogUnreadable
    from sm120kit.hosts import log_rules

    if str(log) == "-":
        explanation = log_rules.explain(sys.stdin.buffer)
    else:
        try:
            with log.open("rb") as stream:
                explanation = log_rules.explain(stream)
        except OSError as error:
            raise LogUnreadable(f"cannot read {log}: {error.strerror}", "name a log file, or - for standard input") from error
    if as_json:
        console.json_data({"known": explanation.known, **asdict(explanation)})
    else:
        _print(explanation)
    raise typer.Exit(0 if explanation.known else 1)


def _print(explanation: Explanation) -> None:
    from sm120kit.core import console

    for match in explanation.found:
        rule = match.rule
        console.data(f"{rule.id} ({rule.kind}): line {match.number}{f', {match.count} times' if match.count > 1 else ''}")
        console.data(f"  line:   {match.line}")
        console.data(f"  cause:  {rule.cause} ({rule.confidence})")
        for fix in match.fixes:
            console.data(f"  fix:    {fix}")
        console.data(f"  source: {', '.join(rule.sources)} (checked {rule.checked})")
        console.data("")
    if not explanation.known:
        console.data(f"unknown: no known failure in {explanation.lines} lines")
        for error in explanation.errors:
            console.data(f"  line {error.number}: {error.line}")
