"""Debian's own packages, from the package sources of this machine."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from debian_archive import written_base

from sm120kit.core.errors import RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images._loader_cache import loader_cache
from sm120kit.recipes.bases import Base
from sm120kit.sources import debian


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tarfile.TarInfo], Path]:
    """The layer of a shell, libnuma and what they need, 16 MB, and its files."""
    directory = tmp_path_factory.mktemp("system")
    workspace = Workspace.open(directory / "state")
    names = {"dash": "a shell", "libnuma1": "a library", "base-passwd": "users"}
    base = Base(edition=1, name="small", summary="s", suite="bookworm", python="3.11", machines=("x86_64",), packages=names)
    try:
        locked = debian.resolve(base.suite, base.packages, "amd64", workspace)
    except RequirementMissing as error:
        pytest.skip(error.message)
    debs = debian.fetch(locked, workspace)
    _, layout, layer = written_base(directory, base, debs)
    with tarfile.open(layout.path(layer)) as archive:
        return {entry.name: entry for entry in archive}, directory / "root"


def test_shell_runs_with_its_own_libraries(system: tuple[dict[str, tarfile.TarInfo], Path]) -> None:
    libraries = system[1] / "usr/lib/x86_64-linux-gnu"
    argv = [
        libraries / "ld-linux-x86-64.so.2",
        "--library-path",
        libraries,
        system[1] / "usr/bin/dash",
        "-c",
        "echo $((6 * 7))",
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr


def test_files_are_those_that_dpkg_unpacks(system: tuple[dict[str, tarfile.TarInfo], Path], tmp_path: Path) -> None:
    """Types, modes, owners, link targets and contents, by the tar stream of dpkg-deb."""
    debs = sorted(system[1].parent.glob("state/downloads/*/*.deb"))
    assert len(debs) >= 8
    for deb in debs:
        stream = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], capture_output=True, check=True).stdout
        (tmp_path / "tar").write_bytes(stream)
        with tarfile.open(tmp_path / "tar") as archive:
            for member in archive:
                path = member.name.removeprefix("./").rstrip("/")
                path = f"usr/{path}" if path.split("/")[0] in ("bin", "lib", "lib64", "sbin") else path
                if path in ("", "."):
                    continue
                entry = system[0][path]
                assert (entry.uid, entry.gid) == (member.uid, member.gid)
                assert entry.mode == member.mode & 0o7777
                if member.isreg():
                    content = archive.extractfile(member)
                    assert content is not None and (system[1] / path).read_bytes() == content.read(), path
                elif member.issym():
                    assert entry.issym() and entry.linkname == member.linkname


def test_loader_cache_is_that_of_ldconfig(system: tuple[dict[str, tarfile.TarInfo], Path], tmp_path: Path) -> None:
    ldconfig = shutil.which("ldconfig", path="/sbin:/usr/sbin")
    if ldconfig is None:
        pytest.skip("needs ldconfig")
    root = tmp_path / "root"
    shutil.copytree(system[1], root, symlinks=True)
    for name in ("lib", "lib64"):
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    (root / "etc/ld.so.conf").write_text("include /etc/ld.so.conf.d/*.conf\n")
    subprocess.run([ldconfig, "-r", root, "-X"], check=True, capture_output=True)
    (tmp_path / "ours").write_bytes(loader_cache(root, "x86_64"))

    def listed(cache: Path) -> list[str]:
        done = subprocess.run([ldconfig, "-p", "-C", cache], capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("\t")]

    assert listed(tmp_path / "ours") == listed(root / "etc/ld.so.cache")
    assert any("libnuma.so.1" in line for line in listed(tmp_path / "ours"))


def test_generated_files_are_in_the_layer(system: tuple[dict[str, tarfile.TarInfo], Path]) -> None:
    names, root = system
    assert {"etc/ld.so.cache", "var/lib/dpkg/status", "bin", "usr/bin/dash"} <= {*names}
    done = subprocess.run(["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W"], capture_output=True, text=True, check=True)
    assert "libnuma1:amd64" in done.stdout and done.stderr == ""
    done = subprocess.run(["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-L", "dash"], capture_output=True, text=True)
    assert "/bin/dash\n" in done.stdout
