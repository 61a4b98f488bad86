"""Workloads: TOML that says what is asked of a server, how often, and by how many users at once."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sm120kit.bench.client import Ask
from sm120kit.errors import UnknownName
from sm120kit.recipe.reading import did_you_mean, toml, validated
from sm120kit.workspace import data_root, file_sha256

Count = Annotated[int, Field(ge=1)]


class Workload(BaseModel):
    """What one file says. A cell is one of ``users`` x ``output_tokens`` x ``context_tokens``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    summary: str
    endpoint: Literal["chat", "completions"] = "chat"
    thinking: Literal["on", "off", "as the server does"] = "as the server does"
    """``on`` and ``off`` are said to the chat template as ``enable_thinking``."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    ignore_end: bool = False
    """Ask for ``ignore_eos``, which vLLM and SGLang know: answers are then exactly ``output_tokens`` long."""
    prompts: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    users: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
    output_tokens: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
    context_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)] = (0,)
    """About so many tokens of text of no meaning come before each prompt, another one each time: no prefix cache can help."""
    requests_per_user: Count = 1
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """When not 0: every user makes one request after the other until so much time has passed, however many that are."""
    warmup_requests: Annotated[int, Field(ge=0)] = 1
    """Requests that each user makes before a cell, kept apart."""


@dataclass(frozen=True)
class Cell:
    """One point to measure: ``users`` at once, answers of up to ``output_tokens``, after ``context_tokens``."""

    users: int
    output_tokens: int
    context_tokens: int


@dataclass(frozen=True)
class Named:
    """A workload with its name and the sha256 of its file."""

    name: str
    sha256: str
    workload: Workload


def names() -> tuple[str, ...]:
    """The workloads that come with sm120kit."""
    return tuple(sorted(path.stem for path in (data_root() / "recipes" / "workloads").glob("*.toml")))


def load(name: str) -> Named:
    """A workload by name, or by the path of a file.

    Raises:
        UnknownName: there is none of this name.
        BadRecipe: the file is not well-formed; every problem is named.
    """
    path = Path(name) if name.endswith(".toml") else data_root() / "recipes" / "workloads" / f"{name}.toml"
    if not path.is_file():
        known = f"workloads: {', '.join(names())}, or a .toml file"
        raise UnknownName(f"no workload {name!r}{did_you_mean(name, names())}", known)
    data = toml(path, "the other workloads show how one looks")
    workload = validated(Workload, data, path, f"keys: {', '.join(Workload.model_fields)}")
    return Named(path.stem, file_sha256(path), workload)


def quick(named: Named) -> Named:
    """The smallest cell of a workload, one request for each user: a smoke run. Its hash stays that of the file."""
    work = named.workload
    least = {key: (min(getattr(work, key)),) for key in ("users", "output_tokens", "context_tokens")}
    once = {**least, "requests_per_user": 1, "seconds": 0.0}
    return Named(named.name, named.sha256, work.model_copy(update=once))


def cells(workload: Workload, seed: int) -> list[Cell]:
    """Every cell once, in an order that ``seed`` shuffles: what wears out during a run must not look like a trend."""
    found = [
        Cell(users, output, context)
        for users in workload.users
        for output in workload.output_tokens
        for context in workload.context_tokens
    ]
    random.Random(seed).shuffle(found)
    return found


def asks(workload: Workload, cell: Cell, model: str, per_user: int, salt: str) -> list[list[Ask]]:
    """The requests of every user of a cell. ``salt`` makes the padding of this run unlike that of any other."""
    return [
        [_ask(workload, cell, model, user * per_user + turn, f"{salt}/{user}/{turn}") for turn in range(per_user)]
        for user in range(cell.users)
    ]


def asks_for(seconds: float, workload: Workload, cell: Cell, model: str, salt: str) -> list[Iterator[Ask]]:
    """The requests of every user of a cell, as long as ``seconds`` have not passed since its first; one at least.

    What is under way when the time is over is let to end: a stream that is cut has no count of its tokens.
    """

    def of(user: int) -> Iterator[Ask]:
        end = time.monotonic() + seconds
        turn = 0
        while turn == 0 or time.monotonic() < end:
            yield _ask(workload, cell, model, user + turn, f"{salt}/{user}/{turn}")
            turn += 1

    return [of(user) for user in range(cell.users)]


def _ask(workload: Workload, cell: Cell, model: str, number: int, salt: str) -> Ask:
    path = "/v1/chat/completions" if workload.endpoint == "chat" else "/v1/completions"
    prompt = number % len(workload.prompts)
    return Ask(prompt, path, _body(workload, cell, model, prompt, salt))


def _body(workload: Workload, cell: Cell, model: str, prompt: int, salt: str) -> dict[str, Any]:
    text = workload.prompts[prompt]
    if cell.context_tokens:
        text = f"{' '.join(_padding(cell.context_tokens, salt))}\n\n{text}"
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": cell.output_tokens,
        "temperature": workload.temperature,
    }
    if workload.ignore_end:
        body["ignore_eos"] = True
    if workload.endpoint == "completions":
        return {**body, "prompt": text}
    if workload.thinking != "as the server does":
        body["chat_template_kwargs"] = {"enable_thinking": workload.thinking == "on"}
    return {**body, "messages": [{"role": "user", "content": text}]}


SYLLABLES = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu")


def _padding(tokens: int, salt: str) -> Iterator[str]:
    """Invented words of two syllables, which most tokenizers make two tokens of; how many they were, ``usage`` says."""
    rng = random.Random(salt)
    for _ in range((tokens + 1) // 2):
        yield rng.choice(SYLLABLES) + rng.choice(SYLLABLES)
