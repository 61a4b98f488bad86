"""Options of ``bench run`` on what is requested from the server, and the progress of its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sm120kit.bench import RequestEnded, workload
from sm120kit.bench.workload import Case, NamedWorkload
from sm120kit.cli.options import option
from sm120kit.core import console
from sm120kit.core.outside import integer, parse_json, read_input

Given = Annotated[
    list[str] | None, option("--given NAME=VALUE", "A fact that cannot be detected, such as gpu='2x ...'; repeatable.")
]


@contextmanager
def case_progress(cases: int) -> Iterator[Callable[[Case, int], RequestEnded]]:
    """A live display of a run on a terminal: of all ``cases`` to measure, and of the requests of the running one.

    The function is that of :class:`sm120kit.bench.Measurement`.
    """
    begun = 0
    with console.progress(remaining=True) as display:
        run = display.add_task("cases", total=cases)

        def case_begins(case: Case, requests: int) -> RequestEnded:
            nonlocal begun
            display.update(run, completed=begun)
            begun += 1
            for task in display.tasks[1:]:  # a case that runs for a time has no total; it is over when the next one begins
                display.update(task.id, total=task.completed, visible=False)
            name = f"concurrency {case.concurrency}, {case.output_tokens} tokens"
            key = display.add_task(name, total=requests or None)
            return lambda: display.update(key, advance=1)

        yield case_begins


@dataclass(frozen=True)
class WorkloadChoice:
    """A workload, and values that replace its own."""

    workload: Annotated[
        str, option("--workload -w WORKLOAD", "A workload by name, or a .toml file; default: published or quick.")
    ] = ""
    quick: Annotated[
        bool, option("--quick", "A smoke run: the workload's smallest case, one request for each in parallel.")
    ] = False
    concurrency: Annotated[str, option("--concurrency N,N", "Numbers of requests in parallel.")] = ""
    output_tokens: Annotated[str, option("--output-tokens N,N", "Max output tokens.")] = ""
    context_tokens: Annotated[str, option("--context-tokens N,N", "Context depth: random tokens before each prompt.")] = ""
    requests: Annotated[int, option("--requests N", "Requests one after another, for each of those in parallel.", min=0)] = 0
    rate: Annotated[float, option("--rate PER_SECOND", "Open loop: send requests at this rate.", min=0)] = 0.0
    extra_body: Annotated[str, option("--extra-body JSON|@FILE", "Further keys of each request's body.")] = ""

    def load(self, published: Sequence[NamedWorkload] = ()) -> list[NamedWorkload]:
        """The workload with its values replaced, or those that are ``published`` if none and no value is named.

        With ``--quick`` reduced to their smallest case.

        Raises:
            typer.BadParameter: a list of numbers or a JSON object is none.
            Sm120kitError: see :func:`sm120kit.bench.workload.load`.
        """
        changes = dict(self._changes())
        if changes or self.workload or not published:
            published = [workload.changed(workload.load(self.workload or "quick"), **changes)]
        return [workload.quick(named) if self.quick else named for named in published]

    def _changes(self) -> Iterator[tuple[str, Any]]:
        for name, text in (
            ("concurrency", self.concurrency),
            ("output_tokens", self.output_tokens),
            ("context_tokens", self.context_tokens),
        ):
            if text:
                yield name, _numbers(text, f"--{name.replace('_', '-')}")
        if self.requests:
            yield "requests_per_stream", self.requests
            yield "seconds", 0.0
        if self.rate:
            yield "rate", self.rate
        if self.extra_body:
            yield "extra_body", _json_object(self.extra_body)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        numbers = tuple(integer(part.strip()) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is not a list of numbers: 1,2,4", param_hint=option) from error
    if len(set(numbers)) != len(numbers):
        raise typer.BadParameter(f"{text!r} has a number twice", param_hint=option)
    return numbers


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = parse_json(read_input(Path(text[1:])) if text.startswith("@") else text)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{text}: {error}", param_hint="--extra-body") from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"{text!r} is not a JSON object", param_hint="--extra-body")
    return value
