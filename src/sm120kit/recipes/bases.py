"""Bases of images: locked Debian packages.

``recipes/bases/<name>.toml`` lists what is requested, each with a reason. The lockfile beside it has every package of each
machine by version and sha256; :func:`lock` writes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from sm120kit.core import data_roots
from sm120kit.core.atomic_writes import write_atomic
from sm120kit.core.data_roots import require_writable
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadInput, Mismatch, NotFound, did_you_mean
from sm120kit.core.record_files import record_json
from sm120kit.recipes.load import other_name, read_locked, read_toml, validate
from sm120kit.recipes.schema import Name, RelativePath, Strict
from sm120kit.sources import debian
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import DebianPackage

FORMAT = 1
"""Raised when the form of a lockfile changes; older lockfiles must then be created again."""

Text = Annotated[str, StringConstraints(min_length=1)]
PackageName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
Program = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+._-]+$")]
Mode = Annotated[str, StringConstraints(pattern=r"^[0-7]{4}$")]


class Base(Strict):
    """A file of ``recipes/bases/``: the packages of a Debian suite that an image starts from.

    A base that is ``like`` another one has its keys and the entries of its tables, beside those of its own file.
    ``python`` is the version of its Python, empty if it has tools only and no image starts from it; ``machines`` are names of
    ``uname -m``. ``packages`` and ``left_out`` (shell-style patterns of paths) have reasons as values. The others are what
    maintainer scripts would do: ``alternatives`` are links in ``/usr/bin`` to programs there, ``copies`` paths of files with
    the paths of their contents, ``links`` paths with their targets, and ``directories`` paths with their modes.
    """

    edition: Literal[1]
    name: Name
    summary: Text
    suite: Name
    python: Annotated[str, StringConstraints(pattern=r"^(3\.[0-9]+)?$"), Field(default="")]
    machines: Annotated[tuple[Literal["x86_64", "aarch64"], ...], Field(strict=False, min_length=1)]
    packages: Annotated[dict[PackageName, Text], Field(min_length=1)]
    alternatives: Annotated[dict[Program, Program], Field(default_factory=dict)]
    copies: Annotated[dict[RelativePath, RelativePath], Field(default_factory=dict)]
    links: Annotated[dict[RelativePath, Text], Field(default_factory=dict)]
    directories: Annotated[dict[RelativePath, Mode], Field(default_factory=dict)]
    left_out: Annotated[dict[RelativePath, Text], Field(default_factory=dict)]

    def inputs(self) -> dict[str, Any]:
        """The fields that decide the result, without prose, as in a lockfile."""
        fields = self.model_dump(mode="json", exclude={"summary": True})
        return fields | {"packages": sorted(self.packages), "left_out": sorted(self.left_out)}


@dataclass(frozen=True)
class BaseClosure:
    """Every package of a base on one machine, sorted by name; ``sha256`` is the digest of the list, which detects edits."""

    machine: str
    packages: tuple[DebianPackage, ...]
    sha256: str


@dataclass(frozen=True)
class BaseLock:
    """The contents of a base's lockfile. ``base`` is the base without its prose."""

    format: int
    base: Mapping[str, Any]
    closures: tuple[BaseClosure, ...]


def names() -> tuple[str, ...]:
    """Names of the bases, those with tools only included."""
    return tuple(sorted(data_roots.entries("bases")))


def of_images() -> tuple[str, ...]:
    """Names of the bases that images can start from."""
    return tuple(name for name in names() if load(name).python)


def load(name: str, heirs: tuple[str, ...] = ()) -> Base:
    """Load a base by its name. ``heirs`` are the bases that are like it and loaded because of it.

    Raises:
        NotFound: there is no such base, or none that it is like; the hint lists them.
        BadInput: the file is not well-formed, and the message lists every problem; or the base is like itself.
    """
    if name not in names():
        raise NotFound(f"unknown base {name!r}{did_you_mean(name, names())}", f"bases: {', '.join(names()) or 'none'}")
    path = data_roots.find("bases", f"{name}.toml")
    data = read_toml(path, "see the files in recipes/bases for examples")
    if (like := data.pop("like", None)) in (name, *heirs):
        raise BadInput(
            f"{path}: like: {like!r} is the base itself, or like it", "name a base that is complete, or omit the key"
        )
    if like in names():
        inherited = load(like, (name, *heirs)).model_dump()
        tables = {
            key: {**value, **own}
            for key, value in inherited.items()
            if isinstance(value, dict) and isinstance(own := data.get(key, {}), dict)
        }
        data = inherited | data | tables
    elif like is not None:
        raise NotFound(f"{path}: like: unknown base {like!r}{did_you_mean(str(like), names())}", f"bases: {', '.join(names())}")
    return validate(
        Base, data, path, f"correct the file and lock it again: sm120kit recipe lock {name}", other_name(data, name)
    )


def lock_path(name: str) -> Path:
    """The lockfile of a base."""
    return data_roots.find("bases", f"{name}.lock.json")


def lock_id(name: str) -> str:
    """The sha256 of a base's lockfile, in hexadecimal.

    Raises:
        Mismatch: the file does not exist.
    """
    return read_locked(BaseLock, lock_path(name))[1]


def read_lock(name: str, machine: str) -> tuple[DebianPackage, ...]:
    """The locked packages of a base for a machine: ``x86_64`` or ``aarch64``.

    Raises:
        Mismatch: the lockfile is missing, edited or outdated, or has no such machine.
        NotFound: there is no such base.
    """
    lock = verify(load(name))
    closure = next((closure for closure in lock.closures if closure.machine == machine), None)
    if closure is None:
        listed = ", ".join(closure.machine for closure in lock.closures)
        raise Mismatch(f"{lock_path(name)} has no packages for {machine}, only for {listed}", "build on such a machine")
    return closure.packages


def verify(base: Base) -> BaseLock:
    """Read the lockfile of a base and compare it with the base.

    Raises:
        Mismatch: it is missing, edited or outdated.
    """
    lock, inputs = _read(base.name), base.inputs()
    if changed := sorted(key for key in {*inputs, *lock.base} if lock.base.get(key) != inputs.get(key)):
        raise Mismatch(
            f"{lock_path(base.name)} is outdated: the base has other values of {', '.join(changed)}",
            f"write it again: sm120kit recipe lock {base.name}",
        )
    return lock


def lock(base: Base, options: Options, *, upgrade: bool = False) -> BaseLock:
    """Lock a base and write the lockfile beside it.

    The packages of an existing lockfile stay while the base requests the same; with ``upgrade`` they are resolved anew.
    """
    path = data_roots.writable_folder("bases") / lock_path(base.name).name
    require_writable(path)
    closures = () if upgrade else _reusable(base)
    if not closures:
        resolved = []
        for machine in base.machines:
            architecture = debian.ARCHITECTURES[machine]
            packages = debian.resolve(base.suite, base.packages, architecture, options.workspace, options.origin)
            resolved.append(BaseClosure(machine, packages, digest_of(packages)))
        closures = tuple(resolved)
    locked = BaseLock(FORMAT, base.inputs(), closures)
    write_atomic(path, record_json(locked).encode())
    return locked


def _reusable(base: Base) -> tuple[BaseClosure, ...]:
    """The packages of the lockfile if the base requests the same; empty otherwise."""
    try:
        lock = _read(base.name)
    except Mismatch:
        return ()
    inputs = base.inputs()
    return lock.closures if all(lock.base.get(key) == inputs[key] for key in ("suite", "machines", "packages")) else ()


def _read(name: str) -> BaseLock:
    """The lockfile of a base, whose packages are those that were resolved."""
    path, hint = lock_path(name), f"write it again: sm120kit recipe lock {name}"
    lock, _ = read_locked(BaseLock, path)
    if lock.format != FORMAT:
        raise Mismatch(f"{path} was written by another version of sm120kit", hint)
    if edited := [closure.machine for closure in lock.closures if closure.sha256 != digest_of(closure.packages)]:
        raise Mismatch(f"{path}: the packages for {', '.join(edited)} were edited", hint)
    return lock
