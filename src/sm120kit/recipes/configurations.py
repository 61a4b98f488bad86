"""Configurations: how one model is served on given hardware, with the published figures for it."""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

from pydantic import AliasChoices, Field, StringConstraints

from sm120kit import engines
from sm120kit.core import data_roots, reporting
from sm120kit.core.errors import BadInput, NotFound, did_you_mean, nearest
from sm120kit.core.outside import file_problem
from sm120kit.engines import parser
from sm120kit.recipes.load import other_name, read_toml, validate
from sm120kit.recipes.schema import Name, Strict, Strings, VersionText

KIND = "configurations"
"""The kind of these files, for :mod:`sm120kit.core.data_roots`."""

UNPINNED = "unpinned"

HISTORICAL_AFTER = 2
"""Releases after which an engine is old."""

DEFAULT_CACHES = ("/root/.cache/vllm", "/root/.cache/flashinfer", "/root/.triton")
"""Directories in which engines keep what they compile (vLLM, FlashInfer, Triton)."""

MAX_WORDS = 1000
"""Limit for the arguments of a server."""

Text = Annotated[str, StringConstraints(min_length=1)]
Absolute = Annotated[str, StringConstraints(pattern=r"^/[^:,]*[^:,/]$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[!-<>-~]+$")]
HostPath = Annotated[str, StringConstraints(pattern=r"^(/|~/)[^:,]+$")]
Count = Annotated[int, Field(ge=1, le=9999)]
ReproducibilityClass = Literal["pinned", "partially-pinned", "withdrawn", "not-found"]


class Model(Strict):
    """The checkpoint. ``revision`` is a commit of its repository, or ``unpinned``, for the reason ``why_unpinned``.

    ``gigabytes`` (10^9 bytes) is the size of its weights, None if it is not published, and ``host_gigabytes`` the part that the
    engine keeps in the host's memory, such as tables of n-grams. ``needs_mtp``: the configuration uses the checkpoint's own
    multi-token-prediction tensors for speculative decoding.
    """

    repository: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{40}|unpinned)$")] = "unpinned"
    why_unpinned: str = ""
    quantization: str = ""
    gigabytes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    host_gigabytes: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    needs_mtp: bool = False


class Hardware(Strict):
    """The GPUs: ``gpus`` of one model, each with ``memory_gb`` (10^9 bytes). ``unified`` memory is shared with the host.

    ``nodes`` is the number of machines, which have equally many of the GPUs. Without ``memory_gb``, only the memory of present
    GPUs is known.
    """

    gpu: Text = "SM12x GPU"
    gpus: Count
    memory_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    unified: bool = False
    nodes: Count = 1

    @property
    def gpus_per_node(self) -> int:
        """GPUs of each machine."""
        return self.gpus // self.nodes


class Container(Strict):
    """Settings of the container: shared memory in GiB, ulimits, and persistent caches (paths in the container).

    ``ipc_host`` uses the host's shared memory instead, and ``writable_root`` leaves the root file system writable. ``serve``
    prints both with the reason in ``deviations``. ``mounts`` are paths of the host by paths in the container, read-only.
    """

    shm_gib: Annotated[int, Field(ge=0)] = 16
    ipc_host: bool = False
    writable_root: bool = False
    ulimits: Annotated[dict[str, int], Field(default_factory=dict)]
    caches: Strings = DEFAULT_CACHES
    mounts: Annotated[dict[Absolute, HostPath], Field(default_factory=dict)]


class Deviation(Strict):
    """A field that the publication leaves open, with the reason for the value in this configuration."""

    field: Text
    reason: Text


class Speculation(Strict):
    """Speculative decoding: ``draft_tokens`` is the most tokens that are drafted in a step.

    ``gigabytes`` (10^9 bytes) are the weights of a draft model of its own, and ``kv_bytes`` what it keeps of a token, of all
    GPUs together.
    """

    method: Text
    draft_tokens: Count
    gigabytes: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    kv_bytes: Annotated[int, Field(ge=0)] = 0


class NoSpeculation(Strict):
    """Why a configuration drafts no tokens: the checkpoint has neither MTP layers nor a drafter, the engine does not load them,
    they do not fit, a report stands against them, or nobody has tried."""

    because: Literal["checkpoint", "engine", "memory", "report", "untried"]
    reason: Text


class BadVersion(Strict):
    """A version with which this configuration is known to be wrong or slow."""

    distribution: Name
    version: VersionText
    reason: Text
    source: Text


class Reference(Strict):
    """A published figure. ``concurrency`` counts requests in parallel, ``spread`` is the published standard deviation.

    ``reproducibility`` is ``pinned`` (everything it depends on is known), ``partially-pinned``, ``withdrawn`` (by its author)
    or ``not-found`` (the claim exists, its origin was not found). ``workload`` is the workload that measures by ``method``,
    None if there is none; ``figure`` is the matching number of a result: decoding alone, or tokens over wall time.
    ``differs`` lists what the figure was measured with and this configuration does not have.
    """

    value: Annotated[float, Field(gt=0)]
    highest: Annotated[float, Field(gt=0)] | None = None
    spread: Annotated[float, Field(ge=0)] | None = None
    unit: Literal["tok/s"]
    concurrency: Annotated[int, Field(ge=1, validation_alias=AliasChoices("concurrency", "users"))] = 1
    method: Text
    conditions: Text
    source: Text
    reproducibility: ReproducibilityClass
    workload: Name | None = None
    figure: Literal["decode", "wall"] = "decode"
    differs: str = ""


class Configuration(Strict):
    """A file of ``recipes/configurations/``, of which only ``engine``, ``model.repository`` and ``arguments`` are required.

    ``engine`` is the name of an engine recipe and ``original`` what a publication ran. ``arguments`` are those of the
    engine's server, ``environment`` its variables. ``host`` names checks of ``sm120kit doctor`` that must find no problem.
    ``deviations`` and ``reference`` are those from a publication and its figures. What is not stated follows from the
    arguments: numbers of GPUs, and speculation. Files of the first edition, which users have, call ``deviations`` ``ours`` and
    ``concurrency`` ``users``.
    """

    edition: Literal[1] = 1
    name: Name
    summary: str = ""
    engine: Name
    original: str = ""
    model: Model
    hardware: Hardware
    tensor_parallel: Count = 1
    pipeline_parallel: Count = 1
    expert_parallel: Count = 1
    speculation: Speculation | None = None
    no_speculation: NoSpeculation | None = None
    arguments: Annotated[Strings, Field(max_length=MAX_WORDS)]
    environment: Annotated[dict[Variable, str], Field(default_factory=dict)]
    container: Annotated[Container, Field(default_factory=lambda: Container.model_validate({}))]
    host: Strings = ()
    deviations: Annotated[tuple[Deviation, ...], Field(strict=False, validation_alias=AliasChoices("deviations", "ours"))] = ()
    known_bad: Annotated[tuple[BadVersion, ...], Field(strict=False)] = ()
    reference: Annotated[tuple[Reference, ...], Field(strict=False)] = ()

    @property
    def served_by(self) -> engines.Engine:
        """The engine.

        Raises:
            NotFound: there is none of that name.
        """
        return engines.of_recipe(self.engine)

    @property
    def historical(self) -> bool:
        """Whether its engine is more than two releases older than the newest with a recipe: kept for its published figures."""
        engine = self.engine.partition("-")[0]
        releases = [_release(name) for name in data_roots.entries("engines") if name.partition("-")[0] == engine]
        newest, own = max(releases, default=()), _release(self.engine)
        behind = next((new - old for new, old in zip(newest, own, strict=False) if new != old), 0)
        return behind > HISTORICAL_AFTER

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments as the engine reads them. See :func:`sm120kit.engines.parser.words`."""
        return parser.words(self.engine, self.arguments)

    def option(self, *names: str) -> str | None:
        """The value of the last of the options with these names in the arguments; None without one."""
        values = [value for name, value in pairwise([*self.words, ""]) if name in names]
        return values[-1] if values else None

    def option_for(self, meaning: str) -> str | None:
        """The value of the option of the engine with a meaning. See :attr:`sm120kit.engines.Engine.options`."""
        return self.option(*self.served_by.options.get(meaning, ()))


def _release(recipe: str) -> tuple[int, ...]:
    """The numbers of the version in the name of a recipe."""
    return tuple(int(number) for number in recipe.partition("-")[2].partition("-")[0].split(".") if number.isdecimal())


def names() -> tuple[str, ...]:
    """Names of the configurations: the user's and the built-in."""
    return tuple(sorted(data_roots.entries(KIND)))


def readable() -> Iterator[Configuration]:
    """Every configuration but the user's that are not well-formed or of an unknown engine, which are reported and left out."""
    for name in names():
        try:
            configuration = load(name)
            engines.of_recipe(configuration.engine)
        except (BadInput, NotFound) as error:
            reporting.warn(f"configuration {name} is left out: {error.message}")
            continue
        yield configuration


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


Problems = Callable[[dict[str, Any]], Iterable[str]]
"""Finds problems in the content of a configuration's file, which may be malformed."""


def load(name: str, also: Problems = lambda data: ()) -> Configuration:
    """Load a configuration by its name, or by the path of a file: with a ``/``, or ending in ``.toml``.

    ``also`` finds problems that are reported with those of form.

    Raises:
        NotFound: no such configuration or file.
        BadInput: the file is not well-formed; the message lists every problem.
    """
    given = _is_path(name)
    path = Path(name) if given else data_roots.find(KIND, f"{name}.toml")
    if why := file_problem(path):
        if given or os.path.lexists(path):
            hint = "name a configuration that `sm120kit config list` shows, or an existing file"
            raise NotFound(f"no configuration file {path}: it {why}", hint)
        raise NotFound(
            f"no configuration {name!r}{did_you_mean(name, names())}",
            f"nearest: {nearest(name, names())}; `sm120kit config list --all` has all; or name a .toml file",
        )
    data = read_toml(path, "see the files in recipes/configurations for examples")
    hint = "correct the file and run `sm120kit config check` again"
    data = completed(data, path.stem)
    return validate(Configuration, data, path, hint, [*_contradictions(data, path.stem), *also(data)])


def completed(data: dict[str, Any], name: str) -> dict[str, Any]:
    """The content of a configuration's file with what its arguments decide and it does not state."""
    recipe, arguments = str(data.get("engine")), data.get("arguments")
    options = parser.options(recipe, arguments) if texts_only(arguments) else {}
    engine = engines.find_of_recipe(recipe)
    sizes = {field: size for field in SIZES if (size := _size(engine, options, field)) > 1}
    speculation = engine.speculation(options) if engine else None
    whole: dict[str, Any] = {"name": name, **sizes, **data}
    counts = [whole.get(field, 1) for field in SIZES]
    hardware = data.get("hardware", {})
    if isinstance(hardware, dict) and all(isinstance(count, int) for count in counts):
        whole["hardware"] = {"gpus": counts[0] * counts[1]} | hardware
    if speculation and isinstance(model := data.get("model"), dict):
        method, drafts, mtp = speculation
        whole = {"speculation": {"method": method, "draft_tokens": drafts}} | whole
        whole["model"] = {"needs_mtp": mtp, **model}
    return whole


SIZES = ("tensor_parallel", "pipeline_parallel")


def texts_only(value: object) -> TypeGuard[list[str]]:
    """Whether a value of TOML is a list of at most ``MAX_WORDS`` texts."""
    return isinstance(value, list) and len(value) <= MAX_WORDS and all(isinstance(each, str) for each in value)


def _size(engine: engines.Engine | None, options: Mapping[str, str], field: str) -> int:
    names = engine.options.get(field, ()) if engine else ()
    return next((int(options[name]) for name in names if re.fullmatch("[1-9][0-9]{0,3}", options.get(name, ""))), 1)


def _contradictions(data: dict[str, Any], stem: str) -> Iterator[str]:
    """Contradictions between fields. Reads the raw TOML, so that they are reported with problems of form."""
    yield from other_name(data, stem)
    model = data.get("model")
    if isinstance(model, dict):
        if model.get("revision", UNPINNED) != UNPINNED and model.get("why_unpinned"):
            yield "model.why_unpinned: set, but a revision is pinned"
        if model.get("needs_mtp") is True and "speculation" not in data:
            yield "model.needs_mtp: true, but there is no speculation"
    if "speculation" in data and "no_speculation" in data:
        yield "no_speculation: stated, but there is speculation"
    yield from _contradicting_arguments(data)
    hardware, tensor, pipeline = data.get("hardware"), data.get("tensor_parallel"), data.get("pipeline_parallel", 1)
    if not isinstance(hardware, dict):
        return
    gpus, nodes = hardware.get("gpus"), hardware.get("nodes", 1)
    if isinstance(tensor, int) and isinstance(pipeline, int) and tensor * pipeline != gpus:
        stages = f" x pipeline_parallel {pipeline}" if "pipeline_parallel" in data else ""
        yield f"tensor_parallel: {tensor}{stages}, but hardware.gpus is {gpus!r}"
    if isinstance(gpus, int) and isinstance(nodes, int) and nodes > 0 and gpus % nodes:
        yield f"hardware.nodes: {gpus} GPUs cannot be divided equally among {nodes}"


def _contradicting_arguments(data: dict[str, Any]) -> Iterator[str]:
    """Contradictions between the number of GPUs and the arguments, by which the engine divides the model."""
    arguments = data.get("arguments")
    if not texts_only(arguments):
        return
    recipe = str(data.get("engine"))
    engine, words = engines.find_of_recipe(recipe), parser.words(recipe, arguments)
    for field in ("tensor_parallel", "pipeline_parallel"):
        options = engine.options.get(field) if engine else None
        if options is None:
            continue
        size = data.get(field, 1)
        values = [(option, value) for option, value in pairwise([*words, ""]) if option in options]
        if not isinstance(size, int) or (values and values[-1][1] == str(size)) or (not values and size == 1):
            continue
        given = " ".join(values[-1]) if values else f"no {options[0]}, so that the engine uses 1"
        yield f"{field}: {size}, but arguments have {given}"
