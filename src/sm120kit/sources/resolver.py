"""Resolve pinned requirements to wheels for one platform, with uv and the user's package index.

Only one index is queried, not all that pip is set to: a lockfile must not depend on the private copies that a machine can
reach. A mirror replaces the index; find-links are used only where an option names them.
"""

import os
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from sm120kit.core import process, reporting
from sm120kit.core.errors import BadInput, CommandFailed, FetchFailed, OfflineMiss, ResolutionFailed, Sm120kitError
from sm120kit.core.urls import redacted
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.sources.origin import DEFAULT, Origin
from sm120kit.sources.source_records import LockedWheel

MAX_RESOLVER_BYTES = 4 * 2**30
"""Limit for the memory of uv, which reads a page of an index to its end; for vLLM it needs 0.1 GB."""

_LIMITED = 'ulimit -d "$0" 2>/dev/null; exec "$@"'
"""Where the limit cannot be set, a lower one holds."""


@dataclass(frozen=True)
class Requirements:
    """Pinned requirements, and the Python and platform for which they are resolved.

    ``requires`` are of the form ``name==version``, ``platform`` is a wheel tag such as ``manylinux_2_35_x86_64``. ``overrides``
    are versions by name that replace what distributions require; ``constraints`` (``name>=version``) apply to the result;
    ``preferred`` are versions that are chosen where they fit. Of distributions that neither ``requires`` nor ``overrides``
    names, nothing that was uploaded on the day ``as_of`` (YYYY-MM-DD) or later is considered.
    """

    requires: tuple[str, ...]
    python: str
    platform: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    constraints: tuple[str, ...] = ()
    as_of: str = ""
    preferred: tuple[LockedWheel, ...] = ()


def resolve_wheels(requirements: Requirements, workspace: Workspace, origin: Origin = DEFAULT) -> tuple[LockedWheel, ...]:
    """Resolve requirements to one wheel for each distribution, dependencies included, sorted by name.

    Raises:
        ResolutionFailed: the requirements contradict each other, or a wheel for the platform does not exist.
        FetchFailed: the index or the mirror did not answer.
        OfflineMiss: ``origin`` is offline and the cache lacks something.
        BadInput: the resolver does not support the platform.
    """
    directory = origin.directory
    if directory is not None and not directory.is_dir():
        raise FetchFailed(f"the mirror {directory} is not a directory", "name an existing one with --mirror")
    python, platform = requirements.python, requirements.platform
    with workspace.scratch() as scratch:
        _write_inputs(requirements, scratch)
        limited = ["/bin/sh", "-c", _LIMITED, str(MAX_RESOLVER_BYTES // 2**10)]
        argv = [*limited, *_arguments(requirements, workspace, origin)]
        env = dict.fromkeys(variable for variable in os.environ if variable.startswith("UV_")) | _environment(origin)
        with reporting.step(f"resolving wheels for {platform}, Python {python}"):
            done = process.run(argv, cwd=scratch, env=env, check=False)
            mark_used(workspace.cache / "uv")
        if done.returncode != 0:
            query = f"{', '.join(requirements.requires)} for {platform}, Python {python}"
            raise _error(done.stderr, query, platform, origin.offline)
        packages = tomllib.loads((scratch / "pylock.toml").read_text())["packages"]
    ranks = {tag: rank for rank, tag in enumerate(_tags(python, platform))}
    return tuple(sorted((_best_wheel(package, ranks, platform) for package in packages), key=lambda wheel: wheel.name))


def uv_program() -> str:
    """Path of the uv in this environment's wheel."""
    from uv import find_uv_bin

    return find_uv_bin()


def install(python: Path, arguments: Sequence[str | Path], workspace: Workspace, origin: Origin) -> None:
    """Install distributions, which ``arguments`` of ``uv pip install`` name, into the environment of ``python``.

    Raises:
        CommandFailed: one does not exist, or cannot be installed.
    """
    argv: list[str | Path] = [uv_program(), "pip", "install", "--quiet", "--python", python, "--no-config"]
    argv += ["--cache-dir", workspace.cache / "uv", "--index-strategy", "unsafe-best-match"]
    argv += [word for index in origin.settings().extra_index for word in ("--extra-index-url", index)]
    env = dict.fromkeys(variable for variable in os.environ if variable.startswith("UV_")) | _environment(origin)
    process.run([*argv, *arguments], env=env)
    mark_used(workspace.cache / "uv")


def _write_inputs(requirements: Requirements, scratch: Path) -> None:
    """Write the files that uv reads."""
    overrides = [f"{name}=={version}" for name, version in requirements.overrides.items()]
    for name, lines in (
        ("requires.in", requirements.requires),
        ("overrides.in", overrides),
        ("constraints.in", requirements.constraints),
    ):
        (scratch / name).write_text("".join(f"{line}\n" for line in lines))
    if requirements.preferred:
        (scratch / "pylock.toml").write_text(_preferences(requirements.preferred))


def _arguments(requirements: Requirements, workspace: Workspace, origin: Origin) -> list[str | Path]:
    """The command line of uv."""
    family, machine = _split(requirements.platform)
    argv: list[str | Path] = [uv_program(), "pip", "compile", "requires.in", "--format", "pylock.toml"]
    argv += ["--output-file", "pylock.toml", "--overrides", "overrides.in", "--constraints", "constraints.in"]
    argv += ["--python", sys.executable, "--python-version", requirements.python, "--python-platform", f"{machine}-{family}"]
    argv += ["--only-binary", ":all:", "--no-config", "--no-header", "--no-progress", "--color", "never", "--quiet"]
    argv += ["--no-python-downloads", "--cache-dir", workspace.cache / "uv"]
    argv += ["--no-index", "--find-links", origin.directory] if origin.directory else []
    argv += ["--offline"] if origin.offline else []
    if requirements.as_of:
        argv += ["--exclude-newer", f"{requirements.as_of}T00:00:00Z"]
        pinned = [*(re.split(r"[\[=]", line)[0] for line in requirements.requires), *requirements.overrides]
        argv += [word for name in pinned for word in ("--exclude-newer-package", f"{name}=false")]
    return argv


def _split(platform: str) -> tuple[str, str]:
    """``manylinux_2_35_x86_64`` as ``manylinux_2_35`` and ``x86_64``."""
    match = re.fullmatch(r"(manylinux_2_\d+)_(x86_64|aarch64)", platform)
    if match is None:
        raise BadInput(f"unknown platform {platform!r}", "write manylinux_2_<glibc>_x86_64 or manylinux_2_<glibc>_aarch64")
    return match[1], match[2]


def _preferences(wheels: Sequence[LockedWheel]) -> str:
    """A lockfile in uv's format with versions only, which uv keeps where they fit."""
    lines = ['lock-version = "1.0"', 'created-by = "sm120kit"']
    lines += [f'\n[[packages]]\nname = "{wheel.name}"\nversion = "{wheel.version}"' for wheel in wheels]
    return "\n".join(lines) + "\n"


def _environment(origin: Origin) -> dict[str, str]:
    """Variables for the index and the connection to it: a URL may hold a password, and arguments are public."""
    settings = origin.settings()
    env = {}
    if origin.mirror and origin.directory is None:
        env["UV_DEFAULT_INDEX"] = origin.mirror
    elif settings.index:
        env["UV_DEFAULT_INDEX"] = settings.index[0]
    if origin.links and not origin.mirror:
        env["UV_FIND_LINKS"] = ",".join(origin.links)
    if settings.certificates:
        env["SSL_CERT_FILE"] = settings.certificates
    if settings.trusted_hosts:
        env["UV_INSECURE_HOST"] = " ".join(settings.trusted_hosts)
    return env


def _tags(python: str, platform: str) -> Iterable[Tag]:
    """Compatible wheel tags, best first."""
    major, minor = (int(part) for part in python.split("."))
    family, machine = _split(platform)
    glibc = int(family.rpartition("_")[2])
    aliases = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    platforms = []
    for version in range(glibc, 4, -1):
        platforms.append(f"manylinux_2_{version}_{machine}")
        if version in aliases:
            platforms.append(f"{aliases[version]}_{machine}")
    platforms.append(f"linux_{machine}")
    yield from cpython_tags((major, minor), platforms=platforms)
    yield from compatible_tags((major, minor), f"cp{major}{minor}", platforms)


def compatible_rank(tags: Iterable[Tag], python: str, platform: str) -> int | None:
    """The rank of a wheel with ``tags`` for a Python and platform, 0 for the best; None if it does not fit."""
    ranks = {tag: rank for rank, tag in enumerate(_tags(python, platform))}
    return min((ranks[tag] for tag in tags if tag in ranks), default=None)


def _best_wheel(package: Mapping[str, Any], ranks: Mapping[Tag, int], platform: str) -> LockedWheel:
    """The wheel of a package that an installer would choose."""
    offered = []
    for wheel in package.get("wheels", ()):
        file = wheel.get("name") or unquote(urlsplit(wheel.get("url") or wheel["path"]).path).rpartition("/")[2]
        _, _, build, tags = parse_wheel_filename(file)
        fits = [ranks[tag] for tag in tags if tag in ranks]
        if fits and "sha256" in wheel.get("hashes", {}):
            offered.append(
                (min(fits), tuple(-part if isinstance(part, int) else 0 for part in build), file, wheel["hashes"]["sha256"])
            )
    if not offered:
        raise ResolutionFailed(
            f"{package['name']} {package.get('version')} has no wheel with a sha256 for {platform}",
            "pin another version in the recipe's environment",
        )
    _, _, file, sha256 = min(offered)
    return LockedWheel(package["name"], package["version"], file, sha256)


def _error(output: str, query: str, platform: str, offline: bool) -> Sm120kitError:
    """The error for uv's message."""
    reason = re.sub(r"^warning: .*\n?", "", redacted(output), flags=re.MULTILINE).strip()
    if "invalid value" in reason and "--python-platform" in reason:
        return BadInput(f"uv does not support platform {platform!r}", "name another glibc in the recipe's environment")
    if offline and ("network was disabled" in reason or "network connectivity is disabled" in reason):
        return OfflineMiss(
            f"{query}: not all of it is cached, and --offline is given\n{reason}",
            "resolve once with the network, or name a directory that holds the wheels with --mirror",
        )
    if "memory allocation of" in reason:
        problem = f"{query} could not be resolved: uv needs more than {MAX_RESOLVER_BYTES / 2**30:g} GiB"
        return FetchFailed(problem, "does the index send pages without end? Name another, or use --mirror")
    if "No solution found" in reason:
        return ResolutionFailed(
            f"{query} cannot be resolved\n{reason}", "change the recipe's environment; a version may be overridden there"
        )
    if re.search(r"Failed to fetch|Request failed|error sending request", reason):
        return FetchFailed(f"{query} could not be resolved\n{reason}", "check the network, pip's settings or --mirror")
    return CommandFailed(f"uv failed on {query}\n{reason}", "the recipe's environment names the requirements")
