"""What pinned requirements need in turn, for one platform, as the user's index serves it. uv's resolver decides.

One index is asked, not all that pip is set to: a lock must not depend on which private copies a machine happens to see. With a
mirror, that alone.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from sm120kit import process
from sm120kit.errors import BadRecipe, CommandFailed, FetchFailed, OfflineMiss, ResolutionFailed, Sm120kitError
from sm120kit.records import LockedWheel
from sm120kit.sources.places import is_local, local_directory
from sm120kit.sources.settings import Settings, read_settings
from sm120kit.workspace import Workspace


def resolve(
    requires: Sequence[str],
    python: str,
    platform: str,
    workspace: Workspace,
    *,
    overrides: Mapping[str, str] | None = None,
    constraints: Sequence[str] = (),
    as_of: str = "",
    prefer: Sequence[LockedWheel] = (),
    mirror: str | None = None,
    offline: bool = False,
) -> tuple[LockedWheel, ...]:
    """One wheel for every distribution that ``requires`` (``name==version``) come to, sorted by name.

    ``platform`` is a wheel tag such as ``manylinux_2_35_x86_64``. ``overrides`` are versions that replace what distributions
    demand of a name; ``constraints`` (``name>=version``) hold for what comes out; ``prefer`` are versions that are kept where
    they fit. Of what is not named in ``requires`` or ``overrides``, nothing that was uploaded on the day ``as_of`` (YYYY-MM-DD)
    or later is considered.

    Raises:
        ResolutionFailed: the requirements contradict each other, or a wheel for the platform does not exist.
        FetchFailed: the index or the mirror did not answer.
        OfflineMiss: ``offline`` is set and something was not asked for before.
        BadRecipe: the platform is one that the resolver does not know.
    """
    from uv import find_uv_bin

    directory = local_directory(mirror)
    if directory is not None and not directory.is_dir():
        raise FetchFailed(f"the mirror {directory} is not a directory", "name an existing one with --mirror")
    family, machine = _split(platform)
    with tempfile.TemporaryDirectory(prefix="sm120kit-resolve-") as name:
        place = Path(name)
        (place / "requires.in").write_text("".join(f"{line}\n" for line in requires))
        (place / "overrides.in").write_text("".join(f"{n}=={version}\n" for n, version in (overrides or {}).items()))
        (place / "constraints.in").write_text("".join(f"{line}\n" for line in constraints))
        if prefer:
            (place / "pylock.toml").write_text(_preferences(prefer))
        argv: list[str | Path] = [find_uv_bin(), "pip", "compile", "requires.in", "--format", "pylock.toml"]
        argv += ["--output-file", "pylock.toml", "--overrides", "overrides.in", "--constraints", "constraints.in"]
        argv += ["--python", sys.executable, "--python-version", python, "--python-platform", f"{machine}-{family}"]
        argv += ["--only-binary", ":all:", "--no-config", "--no-header", "--no-progress", "--color", "never", "--quiet"]
        argv += ["--no-python-downloads", "--cache-dir", workspace.cache / "uv"]
        argv += ["--no-index", "--find-links", directory] if directory else []
        argv += ["--offline"] if offline else []
        if as_of:
            argv += ["--exclude-newer", f"{as_of}T00:00:00Z"]
            pinned = [*(re.split(r"[\[=]", line)[0] for line in requires), *(overrides or {})]
            argv += [word for name in pinned for word in ("--exclude-newer-package", f"{name}=false")]
        settings = Settings() if is_local(mirror) else read_settings()
        ours = [variable for variable in os.environ if variable.startswith("UV_")]
        done = process.run(argv, cwd=place, env=_surroundings(settings, mirror), drop=ours, check=False)
        if done.returncode != 0:
            raise _refusal(done.stderr, f"{', '.join(requires)} for {platform}, Python {python}", platform, offline)
        found = tomllib.loads((place / "pylock.toml").read_text())
    ranks = {tag: rank for rank, tag in enumerate(_tags(python, platform))}
    return tuple(sorted((_best(package, ranks, platform) for package in found["packages"]), key=lambda wheel: wheel.name))


def _split(platform: str) -> tuple[str, str]:
    """``manylinux_2_35_x86_64`` as ``manylinux_2_35`` and ``x86_64``."""
    found = re.fullmatch(r"(manylinux_2_\d+)_(x86_64|aarch64)", platform)
    if found is None:
        raise BadRecipe(f"unknown platform {platform!r}", "write manylinux_2_<glibc>_x86_64 or manylinux_2_<glibc>_aarch64")
    return found[1], found[2]


def _preferences(prefer: Sequence[LockedWheel]) -> str:
    """A lock in the resolver's own format that states versions only; what it states is kept where it fits."""
    lines = ['lock-version = "1.0"', 'created-by = "sm120kit"']
    lines += [f'\n[[packages]]\nname = "{wheel.name}"\nversion = "{wheel.version}"' for wheel in prefer]
    return "\n".join(lines) + "\n"


def _surroundings(settings: Settings, mirror: str | None) -> dict[str, str]:
    """The index and how to talk to it. In the environment, because a URL may hold a password and arguments are public."""
    env = {}
    if mirror and not is_local(mirror):
        env["UV_DEFAULT_INDEX"] = mirror
    elif settings.index:
        env["UV_DEFAULT_INDEX"] = settings.index[0]
    if settings.certificates:
        env["SSL_CERT_FILE"] = settings.certificates
    if settings.trusted_hosts:
        env["UV_INSECURE_HOST"] = " ".join(settings.trusted_hosts)
    return env


def _tags(python: str, platform: str) -> Iterable[Tag]:
    """The wheel tags that fit, best first."""
    major, minor = (int(part) for part in python.split("."))
    family, machine = _split(platform)
    glibc = int(family.rpartition("_")[2])
    old = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
    platforms = []
    for version in range(glibc, 4, -1):
        platforms.append(f"manylinux_2_{version}_{machine}")
        if version in old:
            platforms.append(f"{old[version]}_{machine}")
    platforms.append(f"linux_{machine}")
    yield from cpython_tags((major, minor), platforms=platforms)
    yield from compatible_tags((major, minor), f"cp{major}{minor}", platforms)


def _best(package: Mapping[str, Any], ranks: Mapping[Tag, int], platform: str) -> LockedWheel:
    """The wheel of a package that an installer would take."""
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
            "pin another version of it in the recipe's environment",
        )
    _, _, file, sha256 = min(offered)
    return LockedWheel(package["name"], package["version"], file, sha256)


def _refusal(said: str, what: str, platform: str, offline: bool) -> Sm120kitError:
    """Why the resolver gave up, as the error it is."""
    reason = re.sub(r"^warning: .*\n?", "", re.sub(r"//[^/@\s]+@", "//", said), flags=re.MULTILINE).strip()
    if "invalid value" in reason and "--python-platform" in reason:
        return BadRecipe(f"the resolver knows no platform {platform!r}", "name another glibc in the recipe's environment")
    if offline and ("network was disabled" in reason or "network connectivity is disabled" in reason):
        return OfflineMiss(
            f"{what}: not all of it was asked for before, and --offline is given\n{reason}",
            "resolve once with the network, or name a directory that holds the wheels with --mirror",
        )
    if "No solution found" in reason:
        return ResolutionFailed(
            f"{what} cannot be resolved\n{reason}", "change the recipe's environment; a version may be overridden there"
        )
    if re.search(r"Failed to fetch|Request failed|error sending request", reason):
        return FetchFailed(f"{what} could not be resolved\n{reason}", "check the network, pip's settings or --mirror")
    return CommandFailed(f"uv failed on {what}\n{reason}", "the recipe's environment names what it was asked for")
