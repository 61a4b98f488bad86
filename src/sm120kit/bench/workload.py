"""Workloads: TOML files with the requests to a server, their number, and the numbers of concurrent users."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sm120kit.bench.client import StreamRequest
from sm120kit.core.errors import UnknownName
from sm120kit.core.state import data_root, file_problem, file_sha256
from sm120kit.recipes.load import did_you_mean, read_toml, validate

Count = Annotated[int, Field(ge=1)]


class Workload(BaseModel):
    """The contents of a file. Its cells are ``users`` x ``output_tokens`` x ``context_tokens``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    summary: str
    endpoint: Literal["chat", "completions"] = "chat"
    thinking: Literal["on", "off", "as the server does"] = "as the server does"
    """``on`` and ``off`` are passed to the chat template as ``enable_thinking``."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    ignore_end: bool = False
    """Send ``ignore_eos``, which vLLM and SGLang support: answers are then exactly ``output_tokens`` long."""
    prompts: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    users: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
    output_tokens: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
    context_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)] = (0,)
    """Approximate length of meaningless text before each prompt, different in each request: no prefix cache applies."""
    requests_per_user: Count = 1
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """If not 0, each user sends requests in sequence until this time has passed, and at least ``requests_per_user``."""
    warmup_requests: Annotated[int, Field(ge=0)] = 1
    """Requests of each user before a cell, whose samples are stored separately."""


@dataclass(frozen=True)
class Cell:
    """A point to measure: ``users`` concurrently, answers of up to ``output_tokens``, after ``context_tokens``."""

    users: int
    output_tokens: int
    context_tokens: int


@dataclass(frozen=True)
class NamedWorkload:
    """A workload with its name and the sha256 of its file."""

    name: str
    sha256: str
    workload: Workload


def names() -> tuple[str, ...]:
    """The workloads that come with sm120kit."""
    return tuple(sorted(path.stem for path in (data_root() / "recipes" / "workloads").glob("*.toml")))


def load(name: str) -> NamedWorkload:
    """Load a workload by name, or by the path of a ``.toml`` file.

    Raises:
        UnknownName: no workload has this name.
        BadRecipe: the file is not well-formed; the message has every problem.
    """
    path = Path(name) if name.endswith(".toml") else data_root() / "recipes" / "workloads" / f"{name}.toml"
    if problem := file_problem(path):
        reason = f": {path} {problem}" if name.endswith(".toml") else did_you_mean(name, names())
        raise UnknownName(f"no workload {name!r}{reason}", f"workloads: {', '.join(names())}, or a .toml file")
    data = read_toml(path, "see recipes/workloads/ for examples")
    workload = validate(Workload, data, path, f"keys: {', '.join(Workload.model_fields)}")
    return NamedWorkload(path.stem, file_sha256(path), workload)


def quick(named: NamedWorkload) -> NamedWorkload:
    """The smallest cell of a workload, one request for each user: a smoke run. Its sha256 stays that of the file."""
    full = named.workload
    smallest = {key: (min(getattr(full, key)),) for key in ("users", "output_tokens", "context_tokens")}
    changes = {**smallest, "requests_per_user": 1, "seconds": 0.0}
    return NamedWorkload(named.name, named.sha256, full.model_copy(update=changes))


def cells(workload: Workload, seed: int) -> list[Cell]:
    """Every cell once, shuffled by ``seed``: a change during the run must not look like a trend over users or lengths."""
    order = [
        Cell(users, output, context)
        for users in workload.users
        for output in workload.output_tokens
        for context in workload.context_tokens
    ]
    random.Random(seed).shuffle(order)
    return order


def requests(workload: Workload, cell: Cell, model: str, per_user: int, salt: str) -> list[list[StreamRequest]]:
    """The requests of each user of a cell. ``salt`` makes the padding of this run differ from that of any other."""
    return [
        [_request(workload, cell, model, user * per_user + turn, f"{salt}/{user}/{turn}") for turn in range(per_user)]
        for user in range(cell.users)
    ]


def requests_for(seconds: float, workload: Workload, cell: Cell, model: str, salt: str) -> list[Iterator[StreamRequest]]:
    """The requests of each user of a cell for ``seconds`` since the user's first request, at least ``requests_per_user``.

    Requests that are running after this time are not cancelled: a stream that is cut off has no count of its tokens.
    """

    def requests_of(user: int) -> Iterator[StreamRequest]:
        end = time.monotonic() + seconds
        turn = 0
        while turn < workload.requests_per_user or time.monotonic() < end:
            yield _request(workload, cell, model, user + turn, f"{salt}/{user}/{turn}")
            turn += 1

    return [requests_of(user) for user in range(cell.users)]


def _request(workload: Workload, cell: Cell, model: str, number: int, salt: str) -> StreamRequest:
    path = "/v1/chat/completions" if workload.endpoint == "chat" else "/v1/completions"
    prompt = number % len(workload.prompts)
    return StreamRequest(prompt, path, _body(workload, cell, model, prompt, salt))


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
    """Invented words of two syllables, two tokens each for most tokenizers. ``usage`` has their real number."""
    rng = random.Random(salt)
    for _ in range((tokens + 1) // 2):
        yield rng.choice(SYLLABLES) + rng.choice(SYLLABLES)
