"""Configurations: how one model is served on given hardware, and what has been published about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from sm120kit.errors import UnknownName
from sm120kit.recipe.reading import did_you_mean, toml, validated
from sm120kit.recipe.schema import Commit, Name, Strict, VersionText, Words
from sm120kit.workspace import data_root

UNPINNED = "unpinned"

Text = Annotated[str, StringConstraints(min_length=1)]
Count = Annotated[int, Field(ge=1)]
ReproducibilityClass = Literal["pinned", "partially-pinned", "withdrawn", "not-found"]


class Model(Strict):
    """The checkpoint. ``revision`` is a commit of its repository, or ``unpinned`` with the reason in ``why_unpinned``.

    ``gigabytes`` (10^9 bytes) is the size of its weights; None when nobody published it. ``needs_mtp`` means that the
    configuration speculates with the checkpoint's own multi-token-prediction tensors.
    """

    repository: Annotated[str, StringConstraints(pattern=r"^[\w.-]+/[\w.-]+$")]
    revision: Commit | Literal["unpinned"]
    why_unpinned: str = ""
    quantization: Text
    gigabytes: Annotated[float, Field(gt=0)] | None = None
    needs_mtp: bool


class Hardware(Strict):
    """``gpus`` of one kind, each with ``memory_gb`` (10^9 bytes). Unified memory (DGX Spark) is shared with the host."""

    gpu: Text
    gpus: Count
    memory_gb: Annotated[float, Field(gt=0)]
    unified: bool = False


class Container(Strict):
    """What the container needs: shared memory in GiB, ulimits, and the caches that outlive it (paths in the container)."""

    shm_gib: Annotated[int, Field(ge=0)]
    ipc_host: bool = False
    ulimits: Annotated[dict[str, int], Field(default_factory=dict)]
    caches: Words = ()


class Ours(Strict):
    """A field that the publication does not have, with what we chose and why."""

    field: Text
    reason: Text


class Unreleased(Strict):
    """Arguments of the publication that the engine as released refuses, as they stand in ``arguments``, and why."""

    arguments: Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]
    reason: Text


class Speculation(Strict):
    """How the engine drafts tokens; ``draft_tokens`` at most in one step."""

    method: Text
    draft_tokens: Count


class BadVersion(Strict):
    """A version with which this configuration is known to be wrong or slow."""

    distribution: Name
    version: VersionText
    reason: Text
    source: Text


class Reference(Strict):
    """One published figure. ``users`` is the concurrency, ``spread`` the standard deviation when one was published.

    The class says what is left of it: ``pinned`` (everything it depends on is known), ``partially-pinned``, ``withdrawn``
    (by its author) or ``not-found`` (claimed somewhere, its origin is not). ``workload`` measures as the method says, None when
    none does; ``figure`` is what of a receipt is meant: decoding alone, or tokens over wall time. ``differs`` says what the
    figure was measured with and this configuration does not have.
    """

    value: Annotated[float, Field(gt=0)]
    highest: Annotated[float, Field(gt=0)] | None = None
    spread: Annotated[float, Field(ge=0)] | None = None
    unit: Literal["tok/s"]
    users: Count = 1
    method: Text
    conditions: Text
    source: Text
    reproducibility: ReproducibilityClass
    workload: Name | None = None
    figure: Literal["decode", "wall"] = "decode"
    differs: str = ""


class Configuration(Strict):
    """One file of ``recipes/configurations/``.

    ``engine`` names a recipe of an engine and ``original`` what the publication ran. ``arguments`` are those of the engine's
    server, ``environment`` its variables. ``host`` names checks of ``sm120kit doctor`` that must not be problems.
    With ``unreleased`` it is a record of what was published: the engine as it is here would not start.
    """

    edition: Literal[1]
    name: Name
    summary: Text
    engine: Name
    original: Text
    model: Model
    hardware: Hardware
    tensor_parallel: Count
    expert_parallel: Count = 1
    speculation: Speculation | None = None
    arguments: Words
    environment: Annotated[dict[str, str], Field(default_factory=dict)]
    container: Container
    host: Words = ()
    ours: Annotated[tuple[Ours, ...], Field(strict=False)]
    unreleased: Unreleased | None = None
    known_bad: Annotated[tuple[BadVersion, ...], Field(strict=False)] = ()
    reference: Annotated[tuple[Reference, ...], Field(strict=False, min_length=1)]


def names() -> tuple[str, ...]:
    """The configurations that come with sm120kit."""
    return tuple(sorted(path.stem for path in _directory().glob("*.toml")))


def load(name: str) -> Configuration:
    """A configuration by name, or by the path of a file.

    Raises:
        UnknownName: there is none of this name.
        BadRecipe: the file is not well-formed; the message lists every problem.
    """
    path = Path(name) if name.endswith(".toml") else _directory() / f"{name}.toml"
    if not path.is_file():
        raise UnknownName(f"no configuration {name!r}{did_you_mean(name, names())}", f"configurations: {', '.join(names())}")
    data = toml(path, "the other configurations show how one looks")
    way_out = "correct the file; `sm120kit config check` looks again"
    return validated(Configuration, data, path, way_out, _contradictions(data, path.stem))


def _directory() -> Path:
    return data_root() / "recipes" / "configurations"


def _contradictions(data: dict[str, Any], stem: str) -> Iterator[str]:
    """What no single field shows. Looks at the raw TOML, so that it is told beside problems of form."""
    if "name" in data and data["name"] != stem:
        yield f"name: {data['name']!r} is not the file's name {stem!r}"
    model = data.get("model")
    if isinstance(model, dict):
        pinned = model.get("revision") != UNPINNED
        if not pinned and not model.get("why_unpinned"):
            yield "model.why_unpinned: missing; say why no revision is pinned"
        if pinned and model.get("why_unpinned"):
            yield "model.why_unpinned: there, but a revision is pinned"
        if model.get("needs_mtp") is True and "speculation" not in data:
            yield "model.needs_mtp: true, but there is no speculation"
    hardware, tensor = data.get("hardware"), data.get("tensor_parallel")
    if isinstance(hardware, dict) and isinstance(tensor, int) and tensor != hardware.get("gpus"):
        yield f"tensor_parallel: {tensor}, but hardware.gpus is {hardware.get('gpus')!r}"
