"""Receipts: every sample of a run with its circumstances, as a JSON file; ``figures`` computes figures from the samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120kit.bench.clocks import Clocks
from sm120kit.bench.energy import Energy
from sm120kit.bench.metrics import Acceptance, PrefixCache
from sm120kit.bench.sample import Sample
from sm120kit.core.errors import BadReceipt
from sm120kit.core.outside import parse_json, read_input
from sm120kit.core.state import read_record, write_record

FORMAT = "sm120kit.receipt/2"


@dataclass(frozen=True)
class Served:
    """How the server was started, by launch's record. None is unknown; without a record, everything is.

    ``image`` is the content digest of the verified image, ``lock`` its build id, ``revision`` the commit of the model's
    repository. ``environment`` has variables, with values only if a configuration of sm120kit sets them: others may be secret.
    """

    configuration: str | None = None
    engine: str | None = None
    image: str | None = None
    image_name: str | None = None
    lock: str | None = None
    revision: str | None = None
    tokenizer_sha256: str | None = None
    argv: tuple[str, ...] | None = None
    environment: tuple[str, ...] | None = None


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
class Circumstances:
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
    order_seed: int
    client: dict[str, str]
    given: dict[str, str]
    prompts_sha256: str | None = None
    reported: dict[str, str] = field(default_factory=dict)
    served: Served = Served()
    machine: Machine = Machine()


@dataclass(frozen=True)
class MeasuredCell:
    """A cell, measured after one start of the server; ``restart`` is the number of the start, from 0.

    ``lag_seconds`` is the longest time for which the client did not read its streams; ``clocks`` are samples of the GPUs, None
    if there were none; ``energy`` is that of the GPUs from the first request to the end of the last. ``complete`` is false if
    the cell was interrupted; ``samples`` then has the requests that had ended.
    """

    users: int
    output_tokens: int
    context_tokens: int
    warmup: tuple[Sample, ...]
    samples: tuple[Sample, ...]
    lag_seconds: float | None
    acceptance: Acceptance | None
    restart: int = 0
    clocks: tuple[Clocks, ...] | None = None
    complete: bool = True
    prefix_cache: PrefixCache | None = None
    energy: Energy | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Identity of the cell in its workload: users, output tokens, context tokens."""
        return self.users, self.output_tokens, self.context_tokens


@dataclass(frozen=True)
class Receipt:
    """A run. ``complete`` is false if it was interrupted or the server went away; the cells until then are in it."""

    format: str
    started_utc: str
    complete: bool
    circumstances: Circumstances
    cells: tuple[MeasuredCell, ...]

    @property
    def ordered(self) -> list[MeasuredCell]:
        """The cells by users, output tokens, context tokens and start of the server."""
        return sorted(self.cells, key=lambda cell: (cell.key, cell.restart))


def schema() -> dict[str, Any]:
    """The JSON Schema of a receipt; published as ``docs/receipt.schema.json``."""
    from pydantic import TypeAdapter

    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": FORMAT, **TypeAdapter(Receipt).json_schema()}


def write(path: Path, receipt: Receipt) -> None:
    """Write a receipt atomically."""
    write_record(path, receipt)


def read(path: Path) -> Receipt:
    """Read a receipt.

    Raises:
        BadReceipt: the file is missing, not a receipt, or of a newer format.
    """
    try:
        content = parse_json(read_input(path))
        version = content.get("format") if isinstance(content, dict) else None
        if version != FORMAT:
            raise BadReceipt(
                f"{path}: format {version!r}; this sm120kit reads {FORMAT}", "use the sm120kit that wrote it, or a newer one"
            )
        return read_record(Receipt, path)
    except OSError as error:
        raise BadReceipt(f"{path}: {error.strerror}", "name a file that bench run wrote") from error
    except ValueError as error:
        raise BadReceipt(f"{path} is not a receipt: {error}", "name a file that bench run wrote") from error
