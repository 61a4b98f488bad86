"""The whole base debian-12: what it can do, and that its layer is the same everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from sm120kit.core.errors import RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import _base, _loader_cache, _rootfs
from sm120kit.images.oci import Descriptor, Layout
from sm120kit.recipes import bases
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options

NAME = "debian-12"
PROGRAM = """
#include <iostream>
#include <numeric>
#include <vector>
int main() { std::vector<int> v{1, 2, 3}; std::cout << std::accumulate(v.begin(), v.end(), 0) << std::endl; }
"""


class Made(NamedTuple):
    """The layer of a base, and its files."""

    layer: Descriptor
    root: Path


def make(state: Path, origin: Origin, machine: str = "x86_64") -> Made:
    options = Options(Workspace.open(state), origin)
    layout = Layout(options.workspace.root / "oci")
    layer = _base.base_layer(bases.load(NAME), machine, layout, options)
    return Made(layer, _rootfs.tree_of(layer, layout, options.workspace))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("base") / "state"


@pytest.fixture(scope="module")
def made(state: Path) -> Made:
    try:
        return make(state, Origin())
    except RequirementMissing as error:
        pytest.skip(error.message)


def inside(root: Path, script: str, *options: str) -> str:
    argv = ["bwrap", "--ro-bind", root, "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/tmp", "--unshare-all", *options]
    done = subprocess.run([*argv, "/bin/sh", "-ec", script], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def root(made: Made) -> Path:
    if not shutil.which("bwrap") or subprocess.run(["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"]).returncode:
        pytest.skip("needs bubblewrap and user namespaces")
    return made.root


def test_python_without_namespaces(made: Made) -> None:
    program = "import ssl, sqlite3, lzma, sys, json; print(sys.version_info[:2], json.__cached__)"
    done = subprocess.run([*_base.python(made.root), "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("(3, 11) "), done.stderr
    assert "__pycache__" in done.stdout


def test_compiler_python_and_shell(root: Path) -> None:
    script = (
        f"cat > /tmp/a.cpp <<'E'\n{PROGRAM}\nE\nc++ -O2 /tmp/a.cpp -o /tmp/a; /tmp/a; which awk; awk 'BEGIN {{ print 6 * 7 }}'"
    )
    assert inside(root, script).split() == ["6", "/usr/bin/awk", "42"]
    headers = "printf '#include <Python.h>\\nint main() { return Py_IsInitialized(); }' > /tmp/a.c; cc -c /tmp/a.c -o /tmp/a.o"
    inside(root, f'{headers} $(python3 -c \'import sysconfig; print("-I" + sysconfig.get_paths()["include"])\')')
    libraries = (
        "import ctypes.util, ssl; print(ctypes.util.find_library('numa'), len(ssl.create_default_context().get_ca_certs()))"
    )
    name, certificates = inside(root, f'python3 -c "{libraries}"').split()
    assert name == "libnuma.so.1" and int(certificates) > 100
    assert inside(root, "id -un; sh -c 'echo $0'", "--uid", "0").split() == ["root", "sh"]


def test_packages_and_links(root: Path) -> None:
    packages = {package.name for package in bases.read_lock(NAME, "x86_64")}
    assert set(inside(root, "dpkg-query -W -f '${Package}\\n'").split()) == packages
    assert inside(root, "dpkg-query -S /usr/bin/python3.11").startswith("python3.11-minimal:")
    # tar has a link to an alternative, rmt, which is not among those of the base.
    assert inside(root, "find / -xdev -xtype l ! -path '/proc/*' ! -path '/dev/*'").split() == ["/etc/rmt"]


def test_loader_cache_of_the_whole_base(made: Made, tmp_path: Path) -> None:
    copy = tmp_path / "root"
    shutil.copytree(made.root, copy, symlinks=True)
    (tmp_path / "ours").write_bytes(_loader_cache.loader_cache(copy, "x86_64"))
    subprocess.run(["/sbin/ldconfig", "-r", copy, "-X"], check=True, capture_output=True)

    def listed(cache: Path) -> list[str]:
        done = subprocess.run(["/sbin/ldconfig", "-p", "-C", cache], capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if line.startswith("\t")]

    assert listed(tmp_path / "ours") == listed(copy / "etc/ld.so.cache")


@pytest.mark.root
def test_same_digest_for_another_user_in_another_directory(made: Made, state: Path) -> None:
    place = Path("/tmp", f"sm120kit-base-{os.getpid()}")
    other = place / "another state"
    other.mkdir(parents=True)
    try:
        shutil.copytree(state / "downloads", place / "downloads")
        subprocess.run(["chmod", "-R", "a+rX", place], check=True)
        os.chown(other, 65534, 65534)
        child = os.fork()
        if child == 0:
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                os.umask(0o077)
                code = 0 if make(other, Origin(str(place / "downloads"), offline=True)).layer == made.layer else 3
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 4
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        shutil.rmtree(place)


def test_base_for_another_machine_is_assembled_here(made: Made, state: Path) -> None:
    other = make(state, Origin(), "aarch64")
    assert (other.root / "usr/lib/aarch64-linux-gnu/libnuma.so.1").exists()
    assert list((other.root / "usr/lib/python3.11/json/__pycache__").glob("*.cpython-311.pyc"))
    options = Options(Workspace.open(state))
    image = _base.image_base(bases.load(NAME), "aarch64", Layout(state / "oci"), options)
    assert image.config["architecture"] == "arm64" and image.python == _base.python(made.root)


def test_removed_layer_is_written_again(made: Made, state: Path) -> None:
    Layout(state / "oci").path(made.layer.digest).unlink()
    assert make(state, Origin(offline=True)).layer == made.layer
