"""Resolving and fetching Debian packages from a small signed archive, by the real apt."""

from __future__ import annotations

import dataclasses
import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest
from debian_archive import Signer, archive, control, member, package

from sm120kit.core import errors
from sm120kit.core.workspace import Workspace
from sm120kit.recipes import bases, lockfile
from sm120kit.sources import Origin, debian
from sm120kit.sources.source_records import DebianArchives, DebianPackage

pytestmark = pytest.mark.skipif(not shutil.which("apt-get") or not shutil.which("gpg"), reason="needs apt and gpg")

PACKAGES = {
    "shell": {"version": "1:2.0-1+b1", "Depends": "library (>= 1)", "Recommends": "manual"},
    "library": {},
    "manual": {},
    "other": {"Conflicts": "library"},
}


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory, signer: Signer) -> Path:
    root = tmp_path_factory.mktemp("an archive")
    debs = {}
    for name, fields in PACKAGES.items():
        path = package(root / "pool" / "main", name, [member(f"./usr/share/{name}", name.encode())], **fields)
        debs[path] = control(name, **fields)
    return archive(root, debs, signer)


@pytest.fixture
def origin(mirror: Path, signer: Signer) -> Origin:
    return Origin(debian=DebianArchives((str(mirror),), signer.keyring))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace.open(tmp_path / "a state")


def resolve(workspace: Workspace, origin: Origin, *names: str) -> tuple[DebianPackage, ...]:
    return debian.resolve("bookworm", names or ("shell",), "amd64", workspace, origin)


def test_closure_has_dependencies_and_no_recommended_packages(workspace: Workspace, origin: Origin) -> None:
    library, shell = resolve(workspace, origin)
    assert (library.name, shell.name) == ("library", "shell")
    assert (shell.version, shell.architecture) == ("1:2.0-1+b1", "amd64")
    assert shell.filename == "pool/main/shell_2.0-1+b1_amd64.deb"


def test_system_lists_are_not_changed(workspace: Workspace, origin: Origin) -> None:
    places = [Path("/var/lib/apt/lists"), Path("/var/cache/apt"), Path("/var/lib/dpkg/status")]
    before = [(path, path.stat().st_mtime_ns) for place in places for path in (place, *place.rglob("*"))]
    resolve(workspace, origin)
    assert [(path, path.stat().st_mtime_ns) for place in places for path in (place, *place.rglob("*"))] == before
    assert not list((workspace.root / "scratch").iterdir())


def test_fetched_packages_stay_in_downloads(workspace: Workspace, origin: Origin) -> None:
    locked = resolve(workspace, origin)
    paths = debian.fetch(locked, workspace, origin)
    assert [path.name for path in paths] == ["library_1.0_amd64.deb", "shell_2.0-1+b1_amd64.deb"]
    assert all(path.parent.name == one.sha256 for path, one in zip(paths, locked, strict=True))
    assert debian.fetch(locked, workspace, Origin(offline=True)) == paths
    again = Workspace.open(workspace.root.with_name("other"))
    assert [path.name for path in debian.fetch(locked, again, Origin(str(workspace.downloads), offline=True))] == [
        path.name for path in paths
    ]


@pytest.mark.parametrize(
    ("names", "kind", "message"),
    [
        (("shel",), errors.ResolutionFailed, "Unable to locate package shel"),
        (("shell", "other"), errors.ResolutionFailed, "shell : Depends: library.* but it is not"),
    ],
)
def test_unresolvable(
    workspace: Workspace, origin: Origin, names: tuple[str, ...], kind: type[errors.Sm120kitError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        resolve(workspace, origin, *names)


def test_signature_of_another_key_is_refused(workspace: Workspace, origin: Origin) -> None:
    signer = Signer()
    other = dataclasses.replace(origin.debian, keyring=signer.keyring)
    with pytest.raises(errors.NotTrusted, match=r"NO_PUBKEY|couldn't be verified"):
        resolve(workspace, Origin(debian=other))


def test_changed_index_is_refused(workspace: Workspace, origin: Origin, mirror: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(mirror, tmp_path / "copy")
    with (copy / "dists/bookworm/InRelease").open("r+") as index:
        text = index.read().replace("Origin: Debian", "Origin: Debiam")
        index.seek(0)
        index.write(text)
    with pytest.raises(errors.NotTrusted, match="keys"):
        resolve(workspace, Origin(debian=DebianArchives((str(copy),), origin.debian.keyring)))


def test_vanished_package(workspace: Workspace, origin: Origin, mirror: Path, tmp_path: Path) -> None:
    locked = resolve(workspace, origin)
    copy = shutil.copytree(mirror, tmp_path / "copy")
    (copy / "pool/main/library_1.0_amd64.deb").unlink()
    with pytest.raises(errors.NotFound, match=r"library 1\.0 \(amd64\)") as caught:
        debian.fetch(locked, workspace, Origin(debian=DebianArchives((str(copy),))))
    assert "--debian-mirror" in caught.value.hint
    # An archive of snapshots after the present one.
    both = DebianArchives((str(copy), str(mirror)))
    assert len(debian.fetch(locked, workspace, Origin(debian=both))) == 2


def test_mirror_of_http(workspace: Workspace, origin: Origin, mirror: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(mirror, tmp_path / "served" / "debian")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=copy.parent)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/debian"
        served = Origin(debian=DebianArchives((url,), origin.debian.keyring))
        locked = resolve(workspace, served)
        assert locked == resolve(workspace, origin)
        (copy / locked[0].filename).rename(copy / "hidden")
        with pytest.raises(errors.NotFound, match="HTTP status 404"):
            debian.fetch(locked, workspace, served)
        (copy / "hidden").rename(copy / locked[0].filename)
        assert len(debian.fetch(locked, workspace, served)) == 2
        server.shutdown()
    with pytest.raises(errors.FetchFailed, match="refused") as caught:
        debian.fetch(locked, Workspace.open(tmp_path / "other"), served)
    assert caught.value.exit_code == 20 and "--debian-mirror" in caught.value.hint
    with pytest.raises(errors.FetchFailed, match="refused"):
        resolve(workspace, served)


def test_wrong_content_is_not_stored(workspace: Workspace, origin: Origin, mirror: Path, tmp_path: Path) -> None:
    locked = resolve(workspace, origin)
    copy = shutil.copytree(mirror, tmp_path / "copy")
    with (copy / "pool/main/library_1.0_amd64.deb").open("ab") as file:
        file.write(b"x")
    with pytest.raises(errors.NotTrusted, match=r"library 1\.0 is pinned"):
        debian.fetch(locked, workspace, Origin(debian=DebianArchives((str(copy),))))
    assert not list(workspace.downloads.glob(f"{locked[0].sha256}/*")) and not list(workspace.downloads.glob(".*"))


def test_no_apt_and_no_mirror(workspace: Workspace, origin: Origin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    locked = resolve(workspace, origin)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(errors.RequirementMissing, match="apt-get"):
        resolve(workspace, origin)
    with pytest.raises(errors.RequirementMissing) as caught:
        debian.fetch(locked, workspace)
    assert "--debian-mirror" in caught.value.hint
    assert len(debian.fetch(locked, workspace, origin)) == 2, "with a mirror, apt is not needed"


def test_offline(workspace: Workspace, origin: Origin) -> None:
    locked = resolve(workspace, origin)
    with pytest.raises(errors.OfflineMiss, match="library, shell"):
        debian.fetch(locked, workspace, Origin(offline=True))
    with pytest.raises(errors.OfflineMiss):
        resolve(workspace, Origin(offline=True))


def test_archive_without_suite_and_keyring_that_does_not_exist(workspace: Workspace, origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(errors.FetchFailed, match="dists/trixie/InRelease"):
        debian.resolve("trixie", ["shell"], "amd64", workspace, origin)
    with pytest.raises(errors.NotFound, match="does not exist"):
        resolve(workspace, Origin(debian=dataclasses.replace(origin.debian, keyring=tmp_path / "none")))


class TestBases:
    @pytest.fixture
    def directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """Data with one base, of packages of the small archive."""
        root = tmp_path / "data" / "recipes" / "bases"
        root.mkdir(parents=True)
        (root / "small.toml").write_text(
            'edition = 1\nname = "small"\nsummary = "small"\nsuite = "bookworm"\npython = "3.11"\nmachines = ["x86_64"]\n'
            '[packages]\nshell = "runs scripts"\n'
        )
        monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "data"))
        return root

    @pytest.mark.parametrize("name", ["debian-12", "debian-12-rdma", "debian-13"])
    def test_every_base_is_locked(self, name: str) -> None:
        for machine, architecture in debian.ARCHITECTURES.items():
            packages = bases.read_lock(name, machine)
            assert {package.architecture for package in packages} == {architecture, "all"}
            assert set(bases.load(name).packages) <= {package.name for package in packages}

    def test_packages_stay_until_upgrade(
        self, directory: Path, workspace: Workspace, mirror: Path, signer: Signer, tmp_path: Path
    ) -> None:
        from sm120kit.sources.run_options import Options

        root = shutil.copytree(mirror, tmp_path / "archive")
        options = Options(workspace, Origin(debian=DebianArchives((str(root),), signer.keyring)))
        bases.lock(bases.load("small"), options)
        assert [one.version for one in bases.read_lock("small", "x86_64")] == ["1.0", "1:2.0-1+b1"]
        newer = {name: fields | {"version": "3.0"} for name, fields in PACKAGES.items()}
        debs = {package(root / "pool" / "main", name, **fields): control(name, **fields) for name, fields in newer.items()}
        archive(root, debs, signer)
        with (directory / "small.toml").open("a") as file:
            file.write('[directories]\n"srv" = "0755"\n')
        with pytest.raises(errors.Mismatch, match="other values of directories"):
            bases.read_lock("small", "x86_64")
        before = bases.lock_id("small")
        bases.lock(bases.load("small"), options)
        assert [one.version for one in bases.read_lock("small", "x86_64")] == ["1.0", "1:2.0-1+b1"]
        assert bases.lock_id("small") != before
        bases.lock(bases.load("small"), options, upgrade=True)
        assert [one.version for one in bases.read_lock("small", "x86_64")] == ["3.0", "3.0"]

    def test_bad_lockfiles(self, directory: Path, workspace: Workspace, origin: Origin) -> None:
        from sm120kit.sources.run_options import Options

        with pytest.raises(errors.Mismatch, match="not locked"):
            bases.read_lock("small", "x86_64")
        bases.lock(bases.load("small"), Options(workspace, origin))
        with pytest.raises(errors.Mismatch, match="no packages for aarch64"):
            bases.read_lock("small", "aarch64")
        path = bases.lock_path("small")
        whole = path.read_text()
        for changed, message in (
            (whole.replace('"1.0"', '"1.1"'), "were edited"),
            (whole.replace("\n", " \n"), "was edited"),
            (whole[: len(whole) // 2], "is not a lockfile"),
        ):
            path.write_text(changed)
            with pytest.raises(errors.Mismatch, match=message):
                bases.read_lock("small", "x86_64")

    def test_bad_bases(self, directory: Path) -> None:
        with pytest.raises(errors.NotFound, match="did you mean 'small'"):
            bases.load("smell")
        with (directory / "small.toml").open("a") as file:
            file.write('[copies]\n"etc/x" = "../../x"\n[directories]\nsrv = "755"\n[alternatives]\nx = "/bin/x"\n')
        with pytest.raises(errors.BadInput) as caught:
            bases.load("small")
        for key in ("copies", "directories.srv", "alternatives.x"):
            assert key in caught.value.message

    def test_locks_of_engines_name_their_base(self) -> None:
        from sm120kit import recipes

        for name in recipes.names(recipes.EngineRecipe):
            path = recipes.locate(name)
            recipe = recipes.load_engine(name)
            if recipe.base:
                assert recipe.environment.python == bases.load(recipe.base).python
                assert lockfile.read(recipes.lock_path(path)).base_image == f"{recipe.base} {bases.lock_id(recipe.base)}"
