"""Measure the all-reduces of an engine between the GPUs of a configuration, in its image, and keep the result for ``serve``."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from sm120kit.core import process, reporting
from sm120kit.core.data_roots import data_root
from sm120kit.core.errors import BadInput, BadRecord, NotFound, RequirementMissing
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.engines import AllReduce
from sm120kit.engines.engine import OWN_OFF
from sm120kit.recipes import load_engine
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving import docker_run, server_containers
from sm120kit.serving._container import Mount, Service
from sm120kit.serving._kv_layout import WIDTH_LIMIT
from sm120kit.serving.checkpoint import LocalFiles, language_config

DEFAULT = "default"
"""What an engine selects itself."""
PCIE_IPC_SINCE = Version("0.7.2")
"""The first FlashInfer of a recipe with ``PcieIpcAllReduceWorkspace`` (comm/pcie_ipc_ar.py); 0.6.8.post1 does not have it."""
BATCHES = (1, 2, 4, 8, 16, 32)
"""Numbers of requests that decode at once."""
PROGRAM = "allreduce.py"
TARGET = f"/sm120kit/{PROGRAM}"
SETUP_SECONDS, STEP_SECONDS = 300, 30
"""Limits of tuning, which may compile, and of each step after it."""
LIMIT_BYTES = 2**20


@dataclass(frozen=True)
class Timing:
    """An all-reduce of messages with this many rows: wrong sums over all inputs, and the time of a call in a CUDA graph."""

    rows: int
    wrong: int
    microseconds: float


@dataclass(frozen=True)
class MeasuredAllReduce:
    """What was measured of a method: ``problem`` is why it must not be used, "" if nothing was found."""

    method: str
    timings: tuple[Timing, ...]
    problem: str

    @property
    def total(self) -> float:
        """The sum of the times in microseconds."""
        return sum(timing.microseconds for timing in self.timings)


@dataclass(frozen=True)
class AllReduceRequest:
    """What the program in the image measures: messages of ``rows`` by ``hidden`` between ``world`` GPUs, and its limits."""

    world: int
    hidden: int
    rows: tuple[int, ...]
    dtype: str = "bfloat16"
    setup_seconds: int = SETUP_SECONDS
    step_seconds: int = STEP_SECONDS


@dataclass(frozen=True)
class AllReduceRecord:
    """Measurements in the image with this content, on these GPUs; ``best`` is the fastest without a problem.

    Of each GPU the number, as nvidia-smi counts, and the name: another pair of the same kind may be connected otherwise.
    """

    image: str
    gpus: tuple[str, ...]
    hidden: int
    measured: tuple[MeasuredAllReduce, ...]
    best: str


def methods(configuration: Configuration) -> Mapping[str, AllReduce]:
    """The all-reduces between the GPUs of a configuration, of which it has others than the default on several of one machine.

    PCIe-IPC comes with the FlashInfer of its engine.
    """
    several = configuration.tensor_parallel > 1 and configuration.hardware.nodes == 1
    flashinfer = load_engine(configuration.engine).flashinfer.rpartition("-")[2]
    has = {"pcie-ipc": flashinfer and Version(flashinfer) >= PCIE_IPC_SINCE, "custom": OWN_OFF[0] not in configuration.words}
    found = configuration.served_by.all_reduces if several else {}
    return {DEFAULT: AllReduce(), **{name: each for name, each in found.items() if has.get(name, True)}}


def measurable(configuration: Configuration) -> tuple[str, ...]:
    """The methods to compare: the default is one of them.

    Raises:
        RequirementMissing: there are none.
    """
    names = tuple(name for name in methods(configuration) if name != DEFAULT)
    if not names:
        raise RequirementMissing(
            f"{configuration.name} has no all-reduces to compare", "they are for several GPUs of one machine"
        )
    return names


def using(service: Service, configuration: Configuration, method: str) -> Service:
    """A server that uses a method."""
    chosen = methods(configuration)[method]
    argv = (*service.argv, *(word for word in chosen.arguments if word not in service.argv))
    return replace(service, argv=argv, environment=service.environment | dict(chosen.environment))


def rows(configuration: Configuration) -> tuple[int, ...]:
    """Rows of the messages of a decode step: the requests, each with a token and its drafts."""
    drafts = configuration.speculation.draft_tokens if configuration.speculation else 0
    return tuple(sorted({batch * (1 + each) for batch in BATCHES for each in (0, drafts)}))


def hidden_size(model: Path) -> int:
    """The hidden size in a model folder's ``config.json``.

    Raises:
        BadInput: there is no such file, or it has none.
    """
    size = language_config(LocalFiles(model)).get("hidden_size")
    if isinstance(size, int) and 0 < size < WIDTH_LIMIT:
        return size
    raise BadInput(f"{model}: config.json states no hidden_size", "this model's all-reduces cannot be measured")


def measure(
    service: Service, record: Path, method: str, variables: Mapping[str, str], request: AllReduceRequest
) -> MeasuredAllReduce:
    """Measure a method in a container like ``service``, whose label names ``record``. It is removed in any case.

    Raises:
        RequirementMissing: docker is not installed.
    """
    program = Mount(data_root() / "image_programs" / PROGRAM, TARGET, True)
    container = replace(
        service,
        argv=("python3", TARGET, json.dumps(asdict(request) | {"method": method})),
        environment=service.environment | dict(variables),
        mounts=(*(mount for mount in service.mounts if not mount.read_only), program),
        key="",
    )
    with server_containers.removed_at_end(record):
        done = process.run(docker_run(container, values=False), env=container.variables, check=False)
    return judged(method, done.stdout, done.stderr)


def judged(method: str, output: str, errors: str = "") -> MeasuredAllReduce:
    """What a run of the program in the image printed: its times, and the first problem."""
    lines = list(_objects(output))
    timings = tuple(
        Timing(line["rows"], line["wrong"] + line["graph_wrong"], line["microseconds"]) for line in lines if "rows" in line
    )
    return MeasuredAllReduce(method, timings, _problem(lines, timings, errors))


def _problem(lines: list[dict[str, Any]], timings: tuple[Timing, ...], errors: str) -> str:
    end = lines[-1] if lines and "end" in lines[-1] else {}
    where = f"in {end.get('step')!r}"
    rank = end.get("rank")
    if end.get("end") == "stalled":
        who = "the ranks have launched equally many calls" if rank is None else f"rank {rank} is behind"
        return f"stalled {where} for {end['seconds']} s: {who}"
    if end.get("end") == "died":
        return f"rank {rank} died {where}, exit code {end['exit']}{_last(errors)}"
    if wrong := [timing for timing in timings if timing.wrong]:
        return f"{sum(timing.wrong for timing in wrong):,} wrong sums, the first with {wrong[0].rows} rows"
    if wrong_in_sequence := sum(line["wrong"] for line in lines if "sequence" in line):
        return f"{wrong_in_sequence:,} wrong sums in a sequence of calls of different sizes"
    return "" if end else f"ended without a result{_last(errors)}"


def _objects(output: str) -> Iterator[dict[str, Any]]:
    for line in output[:LIMIT_BYTES].splitlines():
        if line.startswith("{"):
            try:
                yield parse_json(line)
            except ValueError:
                continue


def _last(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if "Error" in line]
    return f": {lines[-1][:300]}" if lines else ""


def best(measured: tuple[MeasuredAllReduce, ...]) -> str:
    """The fastest method that has no problem.

    Raises:
        BadInput: all have one.
    """
    usable = [each for each in measured if each.timings and not each.problem]
    if not usable:
        problems = "; ".join(f"{each.method}: {each.problem}" for each in measured)
        raise BadInput(f"no all-reduce works here: {problems}", "`sm120kit doctor --measure` checks how the GPUs are connected")
    return min(usable, key=lambda each: each.total).method


def record_file(configuration: Configuration, workspace: Workspace) -> Path:
    """Where the measurements for a configuration are kept."""
    return workspace.root / "allreduce" / f"{configuration.name}.json"


def store(record: AllReduceRecord, configuration: Configuration, workspace: Workspace) -> Path:
    """Write a record, in place of an earlier one."""
    path = record_file(configuration, workspace)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record)
    return path


def selected(choice: str, configuration: Configuration, image: str, gpus: tuple[str, ...], workspace: Workspace) -> str:
    """The method of a choice; ``auto`` is the best measured in the image with this content on these GPUs, else the default.

    Raises:
        NotFound: there is no such all-reduce between the GPUs of the configuration.
    """
    known = methods(configuration)
    if choice == "auto":
        return _tuned(configuration, image, gpus, workspace)
    if choice not in known:
        raise NotFound(f"{configuration.name} has no all-reduce {choice!r}", f"--allreduce takes auto, {', '.join(known)}")
    return choice


def _tuned(configuration: Configuration, image: str, gpus: tuple[str, ...], workspace: Workspace) -> str:
    """The best of the record, and why it is not used; nothing is reported where there is none."""
    path, again = record_file(configuration, workspace), f"`sm120kit tune {configuration.name}` measures again"
    try:
        record = read_record(AllReduceRecord, path, "a result of sm120kit tune", LIMIT_BYTES)
    except FileNotFoundError:
        return DEFAULT
    except (OSError, BadRecord) as error:
        why = error.message if isinstance(error, BadRecord) else f"{path}: {error.strerror}"
        reporting.warn(f"the engine's own all-reduce is used: {why}; {again}")
        return DEFAULT
    if (record.image, record.gpus) != (image, gpus) or record.best not in methods(configuration):
        reporting.info(
            f"the engine's own all-reduce is used: {path} is of another image, other GPUs or other arguments; {again}"
        )
        return DEFAULT
    reporting.info(f"all-reduce: {record.best}, by {path}")
    return record.best
