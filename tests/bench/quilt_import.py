"""Patches of Debian source packages through ``patch import``: ``python tests/bench/quilt_import.py DIRECTORY [PACKAGE...]``.

Each package is a quilt series, which ``dpkg-source`` applies with GNU patch without fuzz. The tree before and after each of its
patches is stored in git; the file of the patch is imported as it is into a source with the tree before. Prints how many were
imported, and the reason of each refusal. Exits with status 1 if an imported patch gives another tree than GNU patch.

Needs apt, dpkg-dev, GNU patch and the machine's package sources, which a private configuration below DIRECTORY uses as sources
of source packages. Downloads are kept in ``DIRECTORY/downloads``.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sm120kit import patches
from sm120kit.core.errors import Sm120kitError
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, GitPin

PACKAGES = """\
acl ant apache2 arj attr audiofile bash bzip2 cdparanoia cowsay cpio cron cups curl cyrus-sasl2 dante dnsmasq e2fsprogs exim4
fontconfig freeimage freetype gawk giflib glew glib2.0 gnupg2 gnutls28 groff id3lib3.8.3 inetutils iproute2 iptables irrlicht
jbigkit jq junit4 krb5 less libgcrypt20 libgd2 libpng1.6 libtool libxml2 libxslt lua5.1 lua5.3 nano ncompress net-tools
netpbm-free nettle openjpeg2 openldap openssh p7zip pam popt ppp procmail rsync screen sed sendmail shadow splint strace
subversion sudo tar tcl8.6 tiff tinyxml tmux unixodbc unzip util-linux wget xterm zsh
""".split()  # noqa: SIM905 - a list of words
"""Source packages of Debian 12 with format ``3.0 (quilt)`` and patches."""

PATCH = "patch -t -F 0 -N -p1 -u -V never -E --no-backup-if-mismatch --reject-file=-".split()  # noqa: SIM905 - reads as on a command line
"""GNU patch as ``dpkg-source`` calls it (Dpkg::Source::Quilt), without its backups."""


PIN = GitPin("debian", "file:///nowhere", "0" * 40, "1")


@dataclass(frozen=True)
class QuiltPatch:
    """A patch of a quilt series, and the git tree ids before and after it."""

    name: str
    content: bytes
    before: str
    after: str


class Apt:
    """apt with a private configuration: the machine's package sources as sources of source packages."""

    def __init__(self, directory: Path) -> None:
        self.downloads = directory / "downloads"
        sources = directory / "apt/sources"
        for path in (self.downloads, sources, directory / "apt/state/lists/partial", directory / "apt/cache/archives/partial"):
            path.mkdir(parents=True, exist_ok=True)
        for file in (Path("/etc/apt/sources.list"), *Path("/etc/apt/sources.list.d").glob("*")):
            if file.is_file() and file.suffix in (".list", ".sources"):
                form = r"^deb(?=\s)" if file.suffix == ".list" else r"(?<=^Types:).*"
                (sources / file.name).write_text(re.sub(form, " deb-src", file.read_text(), flags=re.MULTILINE))
        settings = {
            "Dir::Etc::SourceList": "/dev/null",
            "Dir::Etc::SourceParts": sources,
            "Dir::State": directory / "apt/state",
            "Dir::State::status": "/var/lib/dpkg/status",
            "Dir::Cache": directory / "apt/cache",
            "APT::Sandbox::User": "root",
        }
        self.options = [argument for name, value in settings.items() for argument in ("-o", f"{name}={value}")]
        if not any((directory / "apt/state/lists").glob("*Sources*")):
            self.run("update")

    def run(self, *arguments: str, cwd: Path | None = None) -> None:
        """Run ``apt-get -q ARGUMENTS``."""
        subprocess.run(["apt-get", "-q", *self.options, *arguments], cwd=cwd, check=True, capture_output=True, text=True)

    def source(self, package: str) -> Path | None:
        """Download a source package; returns its ``.dsc`` file, or None if a file of it cannot be downloaded."""
        target = self.downloads / package
        release = platform.freedesktop_os_release()["VERSION_CODENAME"]
        for name in (package, f"{package}/{release}"):  # an index may list an update that is not there
            if target.is_dir():
                break
            with tempfile.TemporaryDirectory(dir=self.downloads) as temporary, suppress(subprocess.CalledProcessError):
                self.run("source", "--download-only", "--only-source", name, cwd=Path(temporary))
                shutil.copytree(temporary, target)
        return next(target.glob("*.dsc"), None)


def unpack(dsc: Path, directory: Path, *options: str) -> None:
    """Unpack a source package with ``dpkg-source``, which verifies the sums of its files."""
    command = ["dpkg-source", "--no-check", *options, "-x", dsc, directory]
    subprocess.run(command, cwd=directory.parent, check=True, capture_output=True)
    shutil.rmtree(directory / ".pc", ignore_errors=True)


def stored(repository: Repository, directory: Path, index: Path) -> str:
    """Store the files of a directory as a tree, byte by byte; ``index`` is kept between calls."""
    env = {"GIT_INDEX_FILE": str(index)}
    repository.git(f"--work-tree={directory}", "add", "--all", "--force", env=env)
    return repository.git("write-tree", env=env).stdout.strip()


def series(source: Path) -> list[list[str]]:
    """Name and options of the patches of an unpacked package; ``dpkg-source`` ignores options such as ``-p0``."""
    directory = source / "debian/patches"
    file = next((directory / name for name in ("debian.series", "series") if (directory / name).is_file()), None)
    lines = file.read_text().splitlines() if file else []
    return [words for words in (re.sub(r"(^|\s+)#.*", "", line).split() for line in lines) if words]


def quilt_patches(repository: Repository, source: Path, index: Path) -> Iterator[QuiltPatch]:
    """Apply the series of an unpacked package with GNU patch, and store the tree after each patch."""
    before = stored(repository, source, index)
    env = {**os.environ, "LC_ALL": "C", "PATCH_GET": "0"}
    env.pop("POSIXLY_CORRECT", None)
    for name, *_ in series(source):
        content = (source / "debian/patches" / name).read_bytes()
        subprocess.run(PATCH, cwd=source, env=env, input=content, check=True, capture_output=True)
        after = stored(repository, source, index)
        if after != before:  # a file without a diff is a comment
            yield QuiltPatch(name, content, before, after)
        before = after


def imported_tree(repository: Repository, patch: QuiltPatch, scratch: Path) -> str:
    """Import a patch into a source with the tree before it; returns the tree id of the source with the new series."""
    commit = repository.commit_tree(patch.before, None, "before")
    checkout = Checkout(PIN, repository.path, commit, patch.before)
    tree = PatchedTree(checkout, (), commit, patch.before, ())
    root = scratch / "patches"
    (scratch / "x.patch").write_bytes(patch.content)
    patches.import_patches(patches.read_diffs(scratch / "x.patch"), tree, patches.ImportTarget(slug="x"), root)
    return patches.apply(checkout, (), root, scratch / "overrides").tree


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("packages", nargs="*", default=PACKAGES)
    parser.add_argument("--most", type=int, default=10**6, metavar="N", help="stop after N patches")
    arguments = parser.parse_args()
    apt, counts, wrong = Apt(arguments.directory.resolve()), Counter[str](), list[str]()
    for package in arguments.packages:
        dsc = apt.source(package)
        if dsc is None or counts.total() >= arguments.most:
            continue
        with tempfile.TemporaryDirectory(dir=arguments.directory) as temporary:
            work = Path(temporary).resolve()
            unpack(dsc, work / "source", "--skip-patches")
            repository = Repository.init(work / "repository")
            for patch in quilt_patches(repository, work / "source", work / "index"):
                with tempfile.TemporaryDirectory(dir=work) as scratch:
                    try:
                        same = imported_tree(repository, patch, Path(scratch)) == patch.after
                    except Sm120kitError as error:
                        reason = " ".join(error.message.replace(scratch, "").split())[:160]
                        print(f"{package} {patch.name}: {type(error).__name__} {reason}", flush=True)
                        counts["refused"] += 1
                        continue
                counts["imported, the tree of GNU patch" if same else "imported, another tree"] += 1
                wrong += [] if same else [f"{package} {patch.name}"]
    print(dict(counts), *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
