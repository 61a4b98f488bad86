"""``sm120kit explain``: explain known errors in an engine's log."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from sm120kit.cli.options import Json, argument
from sm120kit.core import console
from sm120kit.hosts.log_rules import Explanation, RuleMatch, inputs, issue_text, search_address


def explain_(
    logs: Annotated[list[Path], argument("LOG|-", "Logs of vLLM, SGLang, Docker or the Linux kernel; - for standard input.")],
    as_json: Json = False,
) -> None:
    """Explain known errors in a log.

    Prints cause, fixes and sources of each known error, the first failure first, then its consequences. For an unknown failure:
    the lines most likely to matter, a search in the engine's tracker, and the text of an issue without secrets, home
    directories and addresses. Exit code 0: a failure is explained, or the server started and answers; 1: no cause is known.
    """
    results = []
    for log in logs:
        results.append(inputs.of_file(log))
        if not as_json:
            if len(logs) > 1:
                console.data(f"== {log}")
            _print(results[-1])
    if as_json:
        console.json_data({"logs": [_table(str(log), result) for log, result in zip(logs, results, strict=True)]})
    raise typer.Exit(0 if any(result.known or result.healthy for result in results) else 1)


def _table(name: str, result: Explanation) -> dict[str, Any]:
    """An explanation as JSON has it; ``issue`` and ``search`` are for unknown failures."""
    unknown = not (result.known or result.healthy)
    table = {"log": name, "known": result.known, "healthy": result.healthy, **asdict(result)}
    return table | {"issue": issue_text(result) if unknown else "", "search": search_address(result) if unknown else ""}


def _print(explanation: Explanation) -> None:
    for match in explanation.found:
        _print_match(match)
    if explanation.healthy:
        console.data("no failure found: the server started and answered requests")
    elif not explanation.lines:
        console.data("unknown: the log is empty")
    elif not explanation.known:
        _print_unknown(explanation)


def _print_unknown(explanation: Explanation) -> None:
    console.data(f"unknown: no known failure in {explanation.lines} line{'s' * (explanation.lines != 1)}")
    if not explanation.errors:
        console.data("  no other line looks like an error: give the log from its start, and those of the other ranks")
    for error in explanation.errors:
        console.data(f"  line {error.number}: {error.line}")
    if address := search_address(explanation):
        console.data(f"search: {address}")
    console.data(f"\ntext for an issue (review it before you post it):\n\n{issue_text(explanation)}")


def _print_match(match: RuleMatch) -> None:
    rule = match.rule
    console.data(f"{rule.id} ({match.kind}): line {match.number}{f', {match.count} times' if match.count > 1 else ''}")
    console.data(f"  line:   {match.line}")
    console.data(f"  cause:  {match.cause}{f' ({rule.confidence})' if match.kind is rule.kind else ''}")
    for text in match.fixes:
        console.data(f"  fix:    {text}")
    console.data(f"  source: {', '.join(rule.sources)} (checked {rule.checked})")
    console.data("")
