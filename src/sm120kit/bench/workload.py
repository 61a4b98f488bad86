"""Workloads: TOML files with the requests to a server, their number, and the concurrencies."""

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sm120kit.bench.client import StreamRequest
from sm120kit.core import data_roots
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import NotFound, did_you_mean
from sm120kit.core.outside import file_problem
from sm120kit.recipes.load import read_toml, validate

Count = Annotated[int, Field(ge=1)]


class Workload(BaseModel):
    """The contents of a file. Its cases are ``concurrency`` x ``output_tokens`` x ``context_tokens``."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    summary: str
    endpoint: Literal["chat", "completions"] = "chat"
    thinking: Literal["on", "off", "as the server does"] = "as the server does"
    """``on`` and ``off`` are passed to the chat template as ``enable_thinking``."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    ignore_end: bool = False
    """Send ``ignore_eos``, which vLLM and SGLang support: answers are then exactly ``output_tokens`` long."""
    prompts: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    concurrency: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
    output_tokens: Annotated[tuple[Count, ...], Field(min_length=1, strict=False)]
    context_tokens: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1, strict=False)] = (0,)
    """Context depth: random tokens before each prompt, different in each request, so that no prefix cache applies."""
    requests_per_stream: Count = 1
    seconds: Annotated[float, Field(ge=0)] = 0.0
    """If not 0, each stream of requests goes on until this time has passed, and at least ``requests_per_stream``."""
    warmup_requests: Annotated[int, Field(ge=0)] = 1
    """Requests of each stream before a case, whose samples are stored separately."""
    rate: Annotated[float, Field(ge=0)] = 0.0
    """Open loop: if not 0, requests are sent at this rate per second, at exponentially distributed times."""
    extra_body: dict[str, Any] = {}
    """Further keys of the body of each request; they replace those of the workload."""


@dataclass(frozen=True)
class Case:
    """A point to measure: requests in parallel, of up to ``output_tokens``, at a context depth of ``context_tokens``."""

    concurrency: int
    output_tokens: int
    context_tokens: int


@dataclass(frozen=True)
class NamedWorkload:
    """A workload with its name and the sha256 of its file."""

    name: str
    sha256: str
    workload: Workload


def names() -> tuple[str, ...]:
    """The names of the workloads."""
    return tuple(sorted(data_roots.entries("workloads")))


def load(name: str) -> NamedWorkload:
    """Load a workload by name, or by the path of a ``.toml`` file.

    Raises:
        NotFound: no workload has this name.
        BadInput: the file is not well-formed; the message has every problem.
    """
    path = Path(name) if name.endswith(".toml") else data_roots.find("workloads", f"{name}.toml")
    if problem := file_problem(path):
        reason = f": {path} {problem}" if name.endswith(".toml") else did_you_mean(name, names())
        raise NotFound(f"no workload {name!r}{reason}", f"workloads: {', '.join(names())}, or a .toml file")
    data = read_toml(path, "see recipes/workloads/ for examples")
    workload = validate(Workload, data, path, f"keys: {', '.join(Workload.model_fields)}")
    return NamedWorkload(path.stem, file_sha256(path), workload)


def quick(named: NamedWorkload) -> NamedWorkload:
    """The smallest case of a workload, one request in each stream: a smoke run. Its sha256 stays that of the file."""
    full = named.workload
    smallest = {key: (min(getattr(full, key)),) for key in ("concurrency", "output_tokens", "context_tokens")}
    changes = {**smallest, "requests_per_stream": 1, "seconds": 0.0}
    return NamedWorkload(named.name, named.sha256, full.model_copy(update=changes))


def changed(named: NamedWorkload, **changes: Any) -> NamedWorkload:
    """A workload with other values, whose sha256 is that of the file and the changes.

    Other numbers in parallel do not change it: a case is compared with those of the same number.

    Raises:
        BadInput: a value is not valid; the message lists every problem.
    """
    if not changes:
        return named
    data = {**named.workload.model_dump(), **changes}
    workload = validate(Workload, data, Path(f"workload {named.name}"), f"keys: {', '.join(Workload.model_fields)}")
    contents = {key: value for key, value in changes.items() if key != "concurrency"}
    return NamedWorkload(named.name, digest_of([named.sha256, contents]) if contents else named.sha256, workload)


def cases(workload: Workload, seed: int) -> list[Case]:
    """Every case once, shuffled by ``seed``: a change during the run must not look like a trend over concurrency or lengths."""
    order = [
        Case(concurrency, output, context)
        for concurrency in workload.concurrency
        for output in workload.output_tokens
        for context in workload.context_tokens
    ]
    random.Random(seed).shuffle(order)
    return order


def request_count(workload: Workload, case: Case) -> int:
    """The number of requests of a case with its warm-up, 0 if it runs for a time."""
    if workload.seconds and not workload.rate:
        return 0
    return case.concurrency * (workload.requests_per_stream + workload.warmup_requests)


def all_requests(workload: Workload, case: Case, model: str, salt: str) -> Sequence[Iterable[StreamRequest]]:
    """The requests of each stream of a case. Requests with a time of arrival have one each and wait for no other."""
    per_stream, seconds = workload.requests_per_stream, 0.0 if workload.rate else workload.seconds
    streams = requests(workload, case, model, per_stream, salt, seconds)
    if not workload.rate:
        return streams
    rng, at, arriving = random.Random(salt), 0.0, []
    for request in (request for stream in streams for request in stream):
        arriving.append([replace(request, at=at)])
        at += rng.expovariate(workload.rate)
    return arriving


def requests(
    workload: Workload, case: Case, model: str, per_stream: int, salt: str, seconds: float = 0.0
) -> Sequence[Sequence[StreamRequest]] | Sequence[Iterator[StreamRequest]]:
    """The requests of each stream of a case: ``per_stream``, and more until ``seconds`` have passed since its first one.

    ``salt`` makes the padding of this run differ from that of any other. Requests that are running after this time are not
    cancelled: a stream that is cut off has no count of its tokens.
    """

    def requests_of(stream: int) -> Iterator[StreamRequest]:
        end, first = time.monotonic() + seconds, stream if seconds else stream * per_stream
        for turn in count():
            if turn >= per_stream and time.monotonic() >= end:
                return
            yield _request(workload, case, model, first + turn, f"{salt}/{stream}/{turn}")

    streams = [requests_of(stream) for stream in range(case.concurrency)]
    return streams if seconds else [list(stream) for stream in streams]


def _request(workload: Workload, case: Case, model: str, number: int, salt: str) -> StreamRequest:
    path = "/v1/chat/completions" if workload.endpoint == "chat" else "/v1/completions"
    prompt = number % len(workload.prompts)
    return StreamRequest(prompt, path, _body(workload, case, model, prompt, salt))


def _body(workload: Workload, case: Case, model: str, prompt: int, salt: str) -> dict[str, Any]:
    text = workload.prompts[prompt]
    if case.context_tokens:
        text = f"{' '.join(_padding(case.context_tokens, salt))}\n\n{text}"
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": case.output_tokens,
        "temperature": workload.temperature,
    }
    if workload.ignore_end:
        body["ignore_eos"] = True
    if workload.endpoint == "completions":
        return {**body, "prompt": text, **workload.extra_body}
    if workload.thinking != "as the server does":
        body["chat_template_kwargs"] = {"enable_thinking": workload.thinking == "on"}
    return {**body, "messages": [{"role": "user", "content": text}], **workload.extra_body}


SYLLABLES = ("ba", "ke", "li", "mo", "nu", "ra", "se", "ti", "vo", "zu")


def _padding(tokens: int, salt: str) -> Iterator[str]:
    """Invented words of two syllables, two tokens each for most tokenizers. ``usage`` has their real number."""
    rng = random.Random(salt)
    for _ in range((tokens + 1) // 2):
        yield rng.choice(SYLLABLES) + rng.choice(SYLLABLES)
