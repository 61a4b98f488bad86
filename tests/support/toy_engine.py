"""An engine of another distribution: its file, as the entry point ``toy = toy_engine:TOY`` names it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sm120kit.engines import ApiKey, Engine, LogSigns, Metrics


@dataclass(frozen=True, kw_only=True, eq=False)
class Toy(Engine):
    """A server that sends tokens at known times, see ``schedule_server.py``."""

    def model_arguments(self, model: str) -> tuple[str, ...]:
        return ("--weights", model)


def parser(stand_in: Callable[..., None]) -> tuple[argparse.ArgumentParser, Callable[[list[str]], object]]:
    from toy import parser

    return parser, parser.parse_args


TOY = Toy(
    name="toy",
    title="Toy",
    port=1234,
    log=LogSigns(words=("toy server",), texts=("toy server",), version=r"toy server "),
    parser=parser,
    api_key=ApiKey("TOY_KEY"),
    host_variable="TOY_HOST",
    options={"tensor_parallel": ("--slices",), "context": ("--longest",)},
    metrics=Metrics(prompt_tokens="toy:prompts_total", cached_tokens="toy:cached_total"),
    counts_tokens=True,
    size_limit_bytes=2**30,
    suite=Path(__file__).parent / "toy_checks",
)
