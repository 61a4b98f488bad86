"""Debian packages: resolve what a base requires by apt itself, and fetch packages by sha256.

apt reads the package sources of this machine, or the given mirrors, and writes to a directory of its own: neither the system's
lists nor its packages change, and no root is needed. It verifies the signatures of indexes, which have the sha256 of packages.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from sm120kit.core import reporting
from sm120kit.core.errors import FetchFailed, NotFound, NotTrusted, OfflineMiss, RequirementMissing, ResolutionFailed
from sm120kit.core.outside import file_problem
from sm120kit.core.parallel import in_parallel
from sm120kit.core.process import Completed, find_program, run
from sm120kit.core.urls import redacted
from sm120kit.core.workspace import Workspace
from sm120kit.sources import _download
from sm120kit.sources.index import Location, Locations, local_directory
from sm120kit.sources.origin import DEFAULT, Origin
from sm120kit.sources.source_records import DebianPackage

if TYPE_CHECKING:
    from unearth.fetchers import PyPIClient

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
"""Debian's name of an architecture by that of the kernel."""

KEYRINGS = tuple(Path("/usr/share/keyrings", f"debian-archive-keyring.{suffix}") for suffix in ("gpg", "pgp"))
"""The keyring of the package debian-archive-keyring."""

_POCKETS = ("", "-updates", "-security")
"""Releases of a suite by the suffix of their names: the suite, its updates, and those of the security team."""

_HINT = "name archives with --debian-mirror URL (repeatable; they contain dists/ and pool/)"
_LINE = re.compile(r"'(?P<uri>[^']+)' (?P<file>\S+) (?P<size>\d+) SHA256:(?P<sha256>[0-9a-f]{64})")


def resolve(
    suite: str, names: Iterable[str], architecture: str, workspace: Workspace, origin: Origin = DEFAULT
) -> tuple[DebianPackage, ...]:
    """Resolve packages of a suite such as ``bookworm`` and all that they depend on, sorted by name, not what they recommend.

    Raises:
        RequirementMissing: this machine has no sources of Debian packages, and no mirror is given.
        RequirementMissing: it has no apt.
        NotTrusted: the signature of an index is missing or not of a key in the keyring.
        FetchFailed: an index could not be fetched.
        ResolutionFailed: a package does not exist, or the packages contradict each other.
        OfflineMiss: ``origin`` is offline.
    """
    if origin.offline:
        raise OfflineMiss("the versions of Debian packages are in the archive's index, and --offline is given", "leave it out")
    if not find_program("apt-get"):
        raise RequirementMissing(
            "Debian packages are resolved by apt, and this machine has no apt-get",
            "lock bases on Debian or Ubuntu; to build from a lockfile, apt is not needed",
        )
    releases = _releases(suite, origin)
    with workspace.scratch() as directory, reporting.step(f"resolving {architecture} packages of Debian {suite}"):
        apt = _PrivateApt(directory, architecture, _keyring(origin))
        apt.update(releases)
        return apt.closure(sorted(names), [uri for uri, _ in releases])


def fetch(packages: Sequence[DebianPackage], workspace: Workspace, origin: Origin = DEFAULT) -> tuple[Path, ...]:
    """The file of every package, in the order of ``packages``. Those not in ``downloads/`` are fetched to it, several at once.

    Raises:
        NotFound: no archive has the locked version of a package any longer.
        FetchFailed, NotTrusted: no archive delivered a package, or only with other content.
        RequirementMissing: this machine has no sources of Debian packages, and no mirror is given.
        OfflineMiss: ``origin`` is offline and some packages are not cached.
        ResourceUnavailable, SystemRefused: a package cannot be stored.
    """
    return _download.fetch_all(packages, "deb", workspace, lambda absent: _fetch_all(absent, workspace, origin))


def _fetch_all(absent: Sequence[DebianPackage], workspace: Workspace, origin: Origin) -> dict[DebianPackage, Path]:
    names = [package.name for package in absent]
    origin.require_reachable(f"{len(absent)} Debian packages", names, workspace.downloads)
    from sm120kit.sources.index_client import connect

    roots = [origin.mirror] if origin.mirror else _archives(origin)
    largest_first = sorted(absent, key=lambda package: -package.size)
    label = f"fetching {len(absent)} Debian packages"
    with (
        contextlib.closing(connect(origin.settings())) as client,
        reporting.task(label, sum(package.size for package in absent), transfer=True) as advance,
    ):

        def fetch_one(package: DebianPackage) -> Path:
            locations = _locations(package, roots, client)
            try:
                return _download.fetch(package, workspace.downloads, f"deb-{package.name}", locations, advance)
            except _download.NowhereListed as error:
                raise NotFound(
                    f"{package.name} {package.version} ({package.architecture}) left the archive: {error.message}",
                    "a newer version has replaced it: name a snapshot archive that has it with --debian-mirror, or lock the"
                    " present versions: sm120kit recipe lock BASE --upgrade",
                ) from error
            except FetchFailed as error:
                hint = "check the network, or name another archive with --debian-mirror"
                raise FetchFailed(error.message, hint) from error

        jobs = [functools.partial(fetch_one, package) for package in largest_first]
        return dict(zip(largest_first, in_parallel(jobs, _download.PARALLEL), strict=True))


def _locations(package: DebianPackage, roots: Iterable[str], client: PyPIClient) -> Locations:
    """The file of a package below archives, or in a directory such as ``downloads/`` of a state directory."""
    locations = Locations(client)
    name = package.filename.rpartition("/")[2]
    # A miss costs a request: packages below pool/updates are those of the security team's archive.
    in_updates = package.filename.startswith("pool/updates/")
    for root in sorted(roots, key=lambda root: ("security" in root) != in_updates):
        if (directory := local_directory(root)) is not None:
            paths = [directory / path for path in (package.filename, name, f"{package.sha256}/{name}")]
            here = [path for path in paths if path.is_file()]
            locations.candidates += [Location(str(path), path) for path in here or paths[:1]]
        else:
            url = f"{root.rstrip('/')}/{quote(package.filename)}"
            locations.candidates.append(Location(redacted(url), url=url))
    return locations


def _archives(origin: Origin) -> list[str]:
    """The archives to fetch from: the given mirrors, else those of this machine's apt sources."""
    if origin.debian.mirrors:
        return list(origin.debian.mirrors)
    archives: list[str] = []
    for uri, _ in _host_releases():
        listed = uri.rstrip("/").removeprefix("mirror+file:")
        if listed == uri.rstrip("/"):
            archives.append(uri)
        else:
            archives += [line.split()[0] for line in Path(listed).read_text().splitlines() if line and not line.startswith("#")]
    usable = [uri for uri in dict.fromkeys(archives) if uri.startswith(("http://", "https://", "file:"))]
    if not usable:
        shown = ", ".join(map(redacted, archives))
        raise RequirementMissing(f"the apt sources of this machine are of kinds that only apt reads: {shown}", _HINT)
    return usable


def _releases(suite: str, origin: Origin) -> list[tuple[str, str]]:
    """URI and release (``bookworm-updates``) of every index of a suite."""
    if origin.debian.mirrors:
        releases = _mirror_releases(suite, origin)
        if f"{suite}" not in {release for _, release in releases}:
            shown = ", ".join(map(redacted, origin.debian.mirrors))
            raise FetchFailed(f"none of these archives has a signed index dists/{suite}/InRelease: {shown}", _HINT)
        return releases
    codename = _os_release().get("VERSION_CODENAME", "")
    return [(uri, suite + release.removeprefix(codename)) for uri, release in _host_releases()]


def _mirror_releases(suite: str, origin: Origin) -> list[tuple[str, str]]:
    from sm120kit.sources.index_client import connect

    releases = []
    with contextlib.closing(connect(origin.settings())) as client:
        for mirror in origin.debian.mirrors:
            directory = local_directory(mirror)
            for release in (f"{suite}{pocket}" for pocket in _POCKETS):
                index = f"dists/{release}/InRelease"
                if directory is not None:
                    if (directory / index).is_file():
                        releases.append((directory.as_uri(), release))
                elif _exists(client, f"{mirror.rstrip('/')}/{index}"):
                    releases.append((mirror, release))
    return releases


def _exists(client: PyPIClient, url: str) -> bool:
    import httpx2

    try:
        status = client.head(url).status_code
    except httpx2.HTTPError as error:
        message = f"{redacted(url)} could not be fetched: {error}"
        raise FetchFailed(message, "check the network and --debian-mirror") from error
    return status < 400


def _host_releases() -> list[tuple[str, str]]:
    """URI and release of the package sources of this machine that are Debian's own."""
    system = _os_release()
    if system.get("ID") != "debian" or not find_program("apt-get"):
        name = system.get("PRETTY_NAME", "this system")
        problem = "no apt" if system.get("ID") == "debian" else "no sources of Debian packages"
        raise RequirementMissing(f"{name} has {problem}", _HINT)
    codename = system.get("VERSION_CODENAME", "")
    listed = run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI)\t$(RELEASE)\t$(COMPONENT)", "Created-By: Packages"],
        env={"LC_ALL": "C", "APT_CONFIG": None},
    )
    targets = [line.split("\t") for line in listed.stdout.splitlines() if line.count("\t") == 2]
    releases = [
        (uri, release)
        for uri, release, component in targets
        if component == "main" and release in [f"{codename}{pocket}" for pocket in _POCKETS]
    ]
    if not releases:
        raise RequirementMissing(f"the apt sources of this machine have no component main of {codename}", _HINT)
    return list(dict.fromkeys(releases))


def _os_release() -> dict[str, str]:
    with contextlib.suppress(OSError):
        return platform.freedesktop_os_release()
    return {}


def _keyring(origin: Origin) -> Path:
    """The keys whose signatures are accepted."""
    if origin.debian.keyring is not None:
        if why := file_problem(origin.debian.keyring):
            raise NotFound(f"no keyring {origin.debian.keyring}: it {why}", "name a file of OpenPGP keys")
        return origin.debian.keyring
    keyring = next((path for path in KEYRINGS if path.is_file()), None)
    if keyring is None:
        raise NotTrusted(
            f"the signatures of Debian's indexes cannot be verified: there is no {KEYRINGS[0]}",
            "install debian-archive-keyring, or name a file of keys with --debian-keyring",
        )
    return keyring


class _PrivateApt:
    """apt with configuration, lists, and an empty set of installed packages in a directory of its own."""

    def __init__(self, directory: Path, architecture: str, keyring: Path) -> None:
        self._directory = directory
        self._keyring = keyring
        for name in ("state/lists/partial", "cache/archives/partial", "trusted", "log"):
            (directory / name).mkdir(parents=True)
        (directory / "status").touch()
        keys = keyring.read_bytes()
        (directory / "trusted" / ("keys.asc" if keys.startswith(b"-----BEGIN PGP") else "keys.gpg")).write_bytes(keys)
        nothing = dict.fromkeys(("main", "parts", "preferences", "preferencesparts", "sourceparts", "trusted"), "/dev/null")
        settings = {
            **{f"Dir::Etc::{name}": path for name, path in nothing.items()},
            "Dir::Etc::sourcelist": directory / "sources.list",
            "Dir::Etc::trustedparts": directory / "trusted",
            "Dir::State": directory / "state",
            "Dir::State::status": directory / "status",
            "Dir::Cache": directory / "cache",
            "Dir::Log": directory / "log",
            "APT::Architecture": architecture,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",  # apt's own user cannot read a private directory
            "APT::Update::Error-Mode": "any",
            "Acquire::Languages": "none",
            "Acquire::ForceHash": "SHA256",
        }
        lines = [f'{name} "{value}";' for name, value in settings.items()] + [f'APT::Architectures {{ "{architecture}"; }};']
        (directory / "apt.conf").write_text("\n".join([*self._acquire(), *lines, ""]))

    @staticmethod
    def _acquire() -> list[str]:
        """This machine's settings of transfers, such as proxies; its hooks are not among them."""
        dumped = run(["apt-config", "dump"], env={"LC_ALL": "C", "APT_CONFIG": None}).stdout.splitlines()
        return [line for line in dumped if re.match(r"Acquire::(http|https|ftp|Retries|Queue-Mode)\b", line)]

    def _run(self, *arguments: str) -> Completed:
        return run(
            ["apt-get", *arguments],
            env={"LC_ALL": "C", "APT_CONFIG": str(self._directory / "apt.conf"), "DEBIAN_FRONTEND": "noninteractive"},
            check=False,
        )

    def update(self, releases: Iterable[tuple[str, str]]) -> None:
        """Fetch the indexes of releases and verify their signatures."""
        # A snapshot archive has indexes whose validity has ended.
        lines = [f"deb [check-valid-until=no] {uri} {release} main\n" for uri, release in releases]
        (self._directory / "sources.list").write_text("".join(lines))
        done = self._run("-q", "update")
        if done.returncode == 0:
            return
        problems = redacted("\n  ".join(line for line in done.stderr.splitlines() if line.startswith(("E:", "W:"))))
        if re.search(r"GPG error|is not signed|NO_PUBKEY|couldn't be verified|not authenticated", problems):
            raise NotTrusted(
                f"a Debian index has no signature of a key in {self._keyring}:\n  {problems}",
                "name a file with the keys of the archive with --debian-keyring",
            )
        raise FetchFailed(
            f"the indexes of Debian packages could not be fetched:\n  {problems}", "check the network and proxies"
        )

    def closure(self, names: Sequence[str], archives: Iterable[str]) -> tuple[DebianPackage, ...]:
        """The packages that an installation of ``names`` on an empty system would fetch."""
        done = self._run("install", "--print-uris", "-q", "--yes", *names)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).splitlines()
            output = "\n  ".join(line for line in lines if line.strip() and not line.endswith("..."))
            raise ResolutionFailed(f"apt cannot resolve these packages:\n  {output}", "correct the packages of the base")
        roots = [f"{_plain(uri).rstrip('/')}/" for uri in archives]
        packages = []
        for line in done.stdout.splitlines():
            if match := _LINE.fullmatch(line):
                name, version, architecture = unquote(match["file"]).removesuffix(".deb").split("_")
                uri = _plain(match["uri"])
                filename = uri.removeprefix(next(root for root in roots if uri.startswith(root)))
                packages.append(DebianPackage(name, version, architecture, filename, int(match["size"]), match["sha256"]))
        return tuple(sorted(packages, key=lambda package: package.name))


def _plain(uri: str) -> str:
    """A URI as text to compare: apt prints it with fewer quoted characters and slashes."""
    return re.sub("^file:/+", "file:/", unquote(uri))
