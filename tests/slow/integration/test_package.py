"""Wheel and sdist of sm120kit: version, contents, and commands of the installed wheel outside a checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).parents[3]
PACKAGES: Mapping[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]["wheel"]["packages"]
METADATA = "from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare; prepare('metadata')"


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.invalid")
    return subprocess.run(["git", *identity, *arguments], cwd=directory, check=True, capture_output=True, text=True).stdout


def version(source: Path) -> str:
    """The version of a build of a source tree."""
    shutil.rmtree(source / "metadata", ignore_errors=True)
    (source / "metadata").mkdir()
    done = subprocess.run([sys.executable, "-c", METADATA], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (directory,) = (source / "metadata").iterdir()
    shutil.rmtree(source / "metadata")
    return directory.name.removeprefix("sm120kit-").removesuffix(".dist-info")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of this checkout, without tags."""
    if not (ROOT / ".git").exists():
        pytest.skip("this source tree is not a git checkout")
    clone = tmp_path / "clone"
    git(tmp_path, "clone", "--quiet", "--no-tags", str(ROOT), str(clone))
    # Uncommitted changes to these files are tested too.
    for name in ("pyproject.toml", ".git_archival.txt", ".gitattributes"):
        shutil.copyfile(ROOT / name, clone / name)
    git(clone, "add", "--all")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", "uncommitted changes")
    return clone


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sdist, and the wheel that was built from it."""
    directory = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed wheel, without its dependencies."""
    directory = tmp_path_factory.mktemp("installed")
    (wheel,) = dist.glob("*.whl")
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", directory, wheel]
    subprocess.run(argv, check=True, capture_output=True)
    return directory


def files(directory: str) -> set[str]:
    """The files of this repository below ``directory``, relative to it."""
    listed = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", directory).split("\0")
    return {str(Path(path).relative_to(directory)) for path in listed if path and (ROOT / path).is_file()}


class TestVersion:
    def test_untagged_commit_is_development_version_of_0_1(self, clone: Path) -> None:
        assert re.fullmatch(r"0\.1\.dev[1-9]\d*\+g[0-9a-f]{7,}", version(clone))

    def test_tagged_commit_has_version_of_tag(self, clone: Path) -> None:
        git(clone, "tag", "v9.8.7")
        assert version(clone) == "9.8.7"

    def test_tags_without_v_are_ignored(self, clone: Path) -> None:
        for tag in ("vllm-0.33.0", "release-3", "sglang-0.5.11"):
            git(clone, "tag", tag)
        assert version(clone).startswith("0.1.dev")

    def test_commit_after_tag_is_development_version_of_next(self, clone: Path) -> None:
        git(clone, "tag", "v9.8.7")
        git(clone, "commit", "--quiet", "--allow-empty", "--message", "later")
        assert re.fullmatch(r"9\.8\.8\.dev1\+g[0-9a-f]{7,}", version(clone))

    def test_shallow_clone(self, clone: Path, tmp_path: Path) -> None:
        git(tmp_path, "clone", "--quiet", "--depth", "1", clone.as_uri(), "shallow")
        assert re.fullmatch(r"0\.1\.dev1\+g[0-9a-f]{7,}", version(tmp_path / "shallow"))

    def test_git_archive_of_tag(self, clone: Path, tmp_path: Path) -> None:
        git(clone, "tag", "v9.8.7")
        git(clone, "archive", "--output", str(tmp_path / "a.tar"), "HEAD")
        (tmp_path / "archive").mkdir()
        subprocess.run(["tar", "-xf", tmp_path / "a.tar", "-C", tmp_path / "archive"], check=True)
        assert version(tmp_path / "archive") == "9.8.7"

    def test_source_without_git_has_fallback_version(self, clone: Path) -> None:
        shutil.rmtree(clone / ".git")
        assert version(clone) == "0.1.dev0"

    def test_sdist_wheel_and_installed_package_agree(self, dist: Path, installed: Path, tmp_path: Path) -> None:
        (sdist,) = dist.glob("*.tar.gz")
        (wheel,) = dist.glob("*.whl")
        version = sdist.name.removeprefix("sm120kit-").removesuffix(".tar.gz")
        assert wheel.name == f"sm120kit-{version}-py3-none-any.whl"
        shown = run(installed, tmp_path, "-c", "import sm120kit; print(sm120kit.__version__)")
        assert shown.stdout.strip() == version, shown.stderr


def run(installed: Path, directory: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in ``directory`` with the installed wheel first on its path.

    The module ``site`` is not imported: it would put an editable install of the checkout before PYTHONPATH.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SM120KIT_")}
    path = os.pathsep.join([str(installed), sysconfig.get_path("purelib")])
    environment |= {"PYTHONPATH": path, "SM120KIT_STATE": str(directory / "state")}
    return subprocess.run([sys.executable, "-S", *arguments], cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("target", PACKAGES)
def test_wheel_contains_every_file(target: str, dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    expected = {f"{target}/{name}" for name in files(PACKAGES[target])}
    assert expected and not expected - packed


def test_wheel_has_nothing_of_the_laboratory(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "sm12x_lab" in name]


def test_sdist_contains_sources_of_wheel(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    expected = {f"{source}/{name}" for source in PACKAGES.values() for name in files(source)}
    assert not {*expected, "pyproject.toml", "README.md", "LICENSE"} - packed


@pytest.mark.parametrize(
    "command",
    [
        ["recipe", "check"],
        ["recipe", "check", "vllm-0.33.0"],
        ["patch", "check"],
        ["config", "list"],
        ["tiles", "--help"],
        ["bench", "show", "--help"],
    ],
    ids=" ".join,
)
def test_command_works_outside_checkout(command: list[str], installed: Path, tmp_path: Path) -> None:
    done = run(installed, tmp_path, "-m", "sm120kit", *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_installed_package_is_imported(installed: Path, tmp_path: Path) -> None:
    shown = run(installed, tmp_path, "-c", "import sm120kit; print(sm120kit.__file__)").stdout.strip()
    assert Path(shown) == installed / "sm120kit" / "__init__.py"


def test_patched_tree_equals_that_of_checkout(installed: Path, downloads: Path, tmp_path: Path) -> None:
    arguments = ["-m", "sm120kit", "build", "flashinfer@0.6.6", "--to", "patch", "--mirror", downloads, "--offline", "--json"]
    trees = []
    for name, package in (("wheel", installed), ("checkout", ROOT / "src")):
        (tmp_path / name).mkdir()
        done = run(package, tmp_path / name, *arguments)
        assert done.returncode == 0, done.stderr
        trees.append(re.findall(r'"[a-z_]*tree[a-z_]*": "([0-9a-f]{40})"', done.stdout))
    assert trees[0] and trees[0] == trees[1]


def install(clone: Path, site: Path) -> None:
    """Install a clone as ``pip install`` does without ``-e``, in place of what is there."""
    shutil.rmtree(site, ignore_errors=True)
    argv = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run([*argv, "--target", site, clone], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, but what Python compiles."""
    paths = (path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


WRITES = (
    ["patch", "drop", "cutlass/single-k-block-mainloop", "--offline"],
    ["patch", "import", "absent.diff"],
    ["patch", "export", "flashinfer@0.6.6", "--from", "absent"],
    ["patch", "rebase", "flashinfer@0.6.6", "--onto", "flashinfer@0.7.2.post1", "--into", "new"],
    ["recipe", "lock", "debian-12", "--offline"],
    ["recipe", "lock", "flashinfer@0.6.6", "--offline"],
    ["recipe", "new", "flashinfer@0.9.0", "--offline"],
)


def test_nothing_of_the_user_is_lost_by_an_upgrade(clone: Path, downloads: Path, tmp_path: Path) -> None:
    """Install a clone, keep a patch in a repository of one's own, upgrade: the installation is never written to."""
    site, mine, edited, work = (tmp_path / name for name in ("site-packages", "mine", "edited", "work"))
    work.mkdir()
    install(clone, site)
    installed_files = contents(site)
    sources = ["--mirror", downloads, "--offline"]

    def sm120kit(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run(site, work, "-m", "sm120kit", *arguments)
        assert done.returncode == code, (arguments, done.stdout, done.stderr)
        return done

    for command in WRITES:
        added = ["--mirror", downloads] if "--offline" in command else []
        assert "sm120kit init" in sm120kit(*command, *added, code=42).stderr
    assert contents(site) == installed_files and not (work / "new").exists()

    sm120kit("init", mine)
    sm120kit("-C", mine, "patch", "edit", "flashinfer@0.6.6", "--into", edited, *sources)
    (edited / "setup.cfg").write_text("# mine\n")
    git(edited, "add", "setup.cfg")
    git(edited, "commit", "--quiet", "--message", "setup: own thing")
    sm120kit("-C", mine, "patch", "export", "flashinfer@0.6.6", "--from", edited)
    sm120kit("-C", mine, "recipe", "lock", "flashinfer@0.6.6", *sources)
    sm120kit("-C", mine, "recipe", "lock", "--check", "flashinfer@0.6.6", *sources)
    written = contents(mine)
    assert {"patches/flashinfer/setup-own-thing.patch", "recipes/flashinfer-0.6.6.lock.json"} <= {*written}
    assert contents(site) == installed_files

    changed = clone / "patches/cutlass/single-k-block-mainloop.patch"
    changed.write_bytes(changed.read_bytes().replace(b"\nDrop-When: ", b"\nDrop-When: released, or "))
    install(clone, site)
    assert contents(mine) == written and contents(site) != installed_files
    checked = sm120kit("-C", mine, "recipe", "check", "flashinfer@0.6.6").stdout
    assert checked.count("since it was locked") == 1 and "changed cutlass/single-k-block-mainloop" in checked
    sm120kit("-C", mine, "recipe", "lock", "--check", "flashinfer@0.6.6", *sources, code=12)
    sm120kit("-C", mine, "recipe", "lock", "flashinfer@0.6.6", *sources)
    assert contents(mine).keys() == written.keys()

    changed.write_text("garbage")
    assert run(site, clone, "-m", "sm120kit", "patch", "check").returncode != 0, "in the clone, its own series is checked"
    sm120kit("patch", "check")


def test_version_without_metadata_is_unknown(tmp_path: Path) -> None:
    argv = [sys.executable, "-S", "-c", "import sm120kit; print(sm120kit.__version__)"]
    environment = {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "0+unknown", done.stderr


def test_editable_install_adds_only_the_source_to_the_path(clone: Path, tmp_path: Path) -> None:
    build = f"from scikit_build_core.build import build_editable as build; build({str(tmp_path / 'wheels')!r})"
    (tmp_path / "wheels").mkdir()
    subprocess.run([sys.executable, "-c", build], cwd=clone, check=True, capture_output=True)
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        lines = [
            line for name in archive.namelist() if name.endswith(".pth") for line in archive.read(name).decode().splitlines()
        ]
    assert {line for line in lines if not line.startswith("import ")} == {str(clone / "src")}


class TestRelease:
    """What the workflow `release` uploads for a tag, installed from a folder as from an index."""

    @pytest.fixture
    def dist(self, clone: Path) -> Path:
        git(clone, "tag", "v0.1.0")
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        argv = ["ci/distributions.sh", "v0.1.0"]
        done = subprocess.run(argv, cwd=clone, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return clone / "dist"

    def test_uvx_runs_commands_with_the_data_of_the_wheel(self, dist: Path, tmp_path: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SM120KIT_")}
        environment |= {
            "SM120KIT_STATE": str(tmp_path / "state"),
            "HF_HUB_OFFLINE": "1",
            "UV_TOOL_DIR": str(tmp_path / "tools"),
        }
        uvx = [uv.find_uv_bin(), "tool", "run", "--quiet", "--find-links", str(dist), "--from", "sm120kit==0.1.0", "sm120kit"]

        def printed(*arguments: str) -> str:
            done = subprocess.run([*uvx, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert printed("--version") == "sm120kit 0.1.0\n"
        assert "qwen3.6-35b-a3b-nvfp4-1x-rtx-5090" in printed("config", "list", "--all")
        assert "ok vllm-0.33.0\n" in printed("recipe", "check")
        assert "--max-model-len" in printed("plan", "openai/gpt-oss-120b", "--gpu", "rtx-pro-6000")
