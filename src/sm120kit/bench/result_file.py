"""Results: every sample of a run with its environment, as a JSON file; ``figures`` computes figures from the samples."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120kit.bench._metrics import Acceptance, PrefixCache
from sm120kit.bench.sample import Sample
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json, read_input
from sm120kit.core.record_files import read_record, write_record

FORMAT = "sm120kit.result/3"


@dataclass(frozen=True)
class Served:
    """How the server was started, by launch's record. None is unknown; without a record, everything is.

    ``image`` is the content digest of the checked image, ``lock`` its build id, ``local`` its patches that are in no series,
    ``revision`` the commit of the model's repository. ``variables`` are of its environment, with values only
    if a configuration of sm120kit sets them: others may be secret.
    """

    configuration: str | None = None
    engine: str | None = None
    image: str | None = None
    image_name: str | None = None
    lock: str | None = None
    revision: str | None = None
    tokenizer_sha256: str | None = None
    argv: tuple[str, ...] | None = None
    variables: tuple[str, ...] | None = None
    local: str | None = None


@dataclass(frozen=True)
class Machine:
    """The server's machine before the run. None is unknown; unless it is known to be the client's, everything is.

    ``cuda`` is the newest version that the driver supports; ``gpus`` are names in nvidia-smi's order, ``topology`` is its class
    of each pair.
    """

    kernel: str | None = None
    cpu: str | None = None
    governor: str | None = None
    driver: str | None = None
    cuda: str | None = None
    gpus: tuple[str, ...] | None = None
    power_limits_watts: tuple[float | None, ...] | None = None
    topology: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Environment:
    """Everything known that a figure depends on. ``given`` are values stated by the user, not detected.

    ``reported`` is the server's description of its model and its version, ``prompts_sha256`` the hash of the workload's
    prompts.
    """

    url: str
    model: str
    workload: str
    workload_sha256: str
    thinking: str
    temperature: float
    client: dict[str, str]
    given: dict[str, str]
    prompts_sha256: str | None = None
    reported: dict[str, str] = field(default_factory=dict)
    served: Served = Served()
    machine: Machine = Machine()


@dataclass(frozen=True)
class MeasuredCase:
    """A case, measured after one start of the server; ``restart`` is the number of the start, from 0.

    ``lag_seconds`` is the longest time for which the client did not read its streams. ``complete`` is false if the case was
    interrupted; ``samples`` then has the requests that had ended.
    """

    concurrency: int
    output_tokens: int
    context_tokens: int
    warmup: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    lag_seconds: float | None
    acceptance: Acceptance | None
    restart: int = 0
    complete: bool = True
    prefix_cache: PrefixCache | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Identity of the case in its workload: concurrency, output tokens, context tokens."""
        return self.concurrency, self.output_tokens, self.context_tokens


@dataclass(frozen=True)
class Result:
    """A run. ``complete`` is false if it was interrupted or the server went away; the cases until then are in it.

    ``probes`` are the verdicts of the probes before the measurement, with what they saw: ``ok``, ``wrong`` or ``cannot be
    judged``, then a colon.
    """

    format: str
    started_utc: str
    complete: bool
    environment: Environment
    cases: tuple[MeasuredCase, ...]
    probes: dict[str, str] = field(default_factory=dict)

    @property
    def wrong(self) -> list[str]:
        """What the probes found wrong."""
        return [f"{name}: {found}" for name, found in self.probes.items() if found.startswith("wrong")]

    @property
    def ordered(self) -> list[MeasuredCase]:
        """The cases by concurrency, output tokens, context tokens and start of the server."""
        return sorted(self.cases, key=lambda case: (case.key, case.restart))


def schema() -> dict[str, Any]:
    """The JSON Schema of a result; published as ``docs/result.schema.json``."""
    from pydantic import TypeAdapter

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": FORMAT, **TypeAdapter(Result).json_schema()}


def write(path: Path, result: Result) -> None:
    """Write a result atomically."""
    write_record(path, result)


def read(path: Path) -> Result:
    """Read a result.

    Raises:
        BadInput: the file is missing, not a result, or of a newer format.
    """
    hint = "name a file that `sm120kit bench run` wrote; exports of `bench show` and files of other benchmarks are not read"
    try:
        content = parse_json(read_input(path))
        version = content.get("format") if isinstance(content, dict) else None
        if not isinstance(version, str) or not re.fullmatch(r"sm120kit\.result/[0-9]{1,9}", version):
            raise ValueError("it has no format of a result")
        if version != FORMAT:
            raise BadInput(
                f"{path}: format {version}; this sm120kit reads {FORMAT}", "use the sm120kit that wrote it, or a newer one"
            )
        return read_record(Result, path)
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}", hint) from error
    except ValueError as error:
        raise BadInput(f"{path} is not a result: {error}", hint) from error
