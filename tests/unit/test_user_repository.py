"""The user's own repository: read before the built-in data, the only place that is written to, and untouched by upgrades."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from patch_series import (
    BASE,
    BUILDER,
    KEY,
    LAUNCHER,
    RECIPE,
    PatchDirectory,
    changed,
    checkout_of,
    export_edits,
    git_in,
    inside,
    patch_text,
    text_at,
    two_projects,
)
from typer.testing import CliRunner, Result

from sm120kit import patches, recipes
from sm120kit.cli import app
from sm120kit.core import data_roots
from sm120kit.core.atomic_writes import write_atomic, write_together
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import AlreadyExists, BadInput, NotTrusted, RequirementMissing, Sm120kitError, SystemRefused
from sm120kit.patches.patch_records import PatchedTree
from sm120kit.recipes import architectures, configurations, lockfile, new_repository
from sm120kit.recipes.recipe_records import Lock, LockedFile, LockedSource
from sm120kit.serving import fit

ROOT = Path(__file__).resolve().parents[2]


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PatchDirectory:
    """The data of an installation, with a small series."""
    directory = PatchDirectory(tmp_path / "lib/site-packages/sm120kit/data")
    two_projects(directory)
    shutil.copytree(ROOT / "recipes", directory.path / "recipes")
    monkeypatch.setenv("SM120KIT_DATA", str(directory.path))
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return directory


@pytest.fixture
def own(built_in: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new repository, in which commands run."""
    made = new_repository.make(tmp_path / "mine")
    (made / "below").mkdir()
    monkeypatch.chdir(made / "below")
    return made


def sm120kit(*arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments])


def succeeds(*arguments: str) -> str:
    result = sm120kit(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def put(root: Path, slug: str, content: bytes, project: str = "cutlass") -> Path:
    return PatchDirectory(root).put(slug, content, project)


def applied(root: Path, tmp_path: Path) -> PatchedTree:
    checkout = checkout_of(tmp_path / "r", BASE)
    return patches.apply(checkout, inside(), root / "patches", data_roots.data_root() / "cutlass_overrides")


def own_patch(tmp_path: Path, line: int = 20) -> bytes:
    return patch_text(PatchDirectory(tmp_path / "diffs").edit(BUILDER, line, "own\n"), subject="builder: own")


# ---- init


def test_init_makes_a_git_repository(built_in: PatchDirectory, tmp_path: Path) -> None:
    succeeds("init", str(tmp_path / "mine"))
    made = tmp_path / "mine"
    names = {path.name for path in made.iterdir()}
    assert names == {".git", ".gitignore", "README.md", "sm120kit.toml", "recipes", "patches", "configurations", "files"}
    assert (made / "README.md").read_text().count("\n    sm120kit ") == 3
    status = subprocess.run(["git", "-C", made, "status", "--short"], check=True, capture_output=True, text=True)
    assert {"?? recipes/", "?? sm120kit.toml"} <= {*status.stdout.splitlines()}
    succeeds("-C", str(made), "patch", "check")


def test_git_ignores_files_that_a_killed_command_leaves(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = functools.partial(subprocess.check_output, ["git", "status", "--porcelain", "--untracked-files=all"], cwd=own)
    before, meanwhile = listed(), list[object]()

    def killed(*_: object) -> None:
        meanwhile.append(listed())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    for write in (lambda file: write_together({file: b""}), lambda file: write_atomic(file, b"")):
        with pytest.raises(KeyboardInterrupt):
            write(own / "patches/cutlass/x.patch")
    assert meanwhile == [before, before]


def test_init_in_a_git_repository_makes_no_second_one(built_in: PatchDirectory, tmp_path: Path) -> None:
    subprocess.run(["git", "init", "--quiet", tmp_path / "home"], check=True)
    made = new_repository.make(tmp_path / "home/mine")
    assert (made / "sm120kit.toml").is_file() and not (made / ".git").exists()


def test_init_refuses_what_is_there(built_in: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    made = new_repository.make(tmp_path / "mine")
    cases: list[tuple[Path, type[Sm120kitError]]] = [
        (tmp_path / "full", AlreadyExists),
        (tmp_path / "file", SystemRefused),
        (tmp_path / "file/below", SystemRefused),
        (Path("/proc/mine"), SystemRefused),
        (made, AlreadyExists),
        (made / "files/nested", AlreadyExists),
        (built_in.path / "recipes/mine", AlreadyExists),
    ]
    before = files(tmp_path)
    for directory, error in cases:
        with pytest.raises(error):
            new_repository.make(directory)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(RequirementMissing):
        new_repository.make(tmp_path / "other")
    assert files(tmp_path) == before and not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("edition = ", "not TOML"),
        ("", "edition: missing"),
        ("edition = 2", "edition: 2"),
        ("edition = true", "edition: True"),
        ("edition = 1\neditio = 1", "editio"),
        ("edition = 1\n[patches]\n", "patches"),
    ],
)
def test_malformed_file_of_a_repository(content: str, named: str, own: Path) -> None:
    (own / "sm120kit.toml").write_text(content)
    result = sm120kit("patch", "list")
    assert isinstance(result.exception, BadInput)
    assert str(own / "sm120kit.toml") in result.exception.message and named in result.exception.message


def test_file_of_a_repository_that_is_no_file(own: Path) -> None:
    (own / "sm120kit.toml").unlink()
    (own / "sm120kit.toml").symlink_to("/dev/zero")
    with pytest.raises(BadInput):
        data_roots.user_repository()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_repository_of_another_user_is_not_read(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its patches would run in builds; anybody can write to /tmp."""
    os.chown(own / "sm120kit.toml", 12345, 12345)
    with pytest.raises(NotTrusted):
        data_roots.user_repository()


def test_nearest_repository_is_used(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_roots.user_repository() == own
    (own / "files/sub").mkdir()
    (own / "files/sub/sm120kit.toml").write_text("edition = 1\n")
    monkeypatch.chdir(own / "files/sub")
    assert data_roots.user_repository() == own / "files/sub"


def test_option_names_the_repository(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(own, "local", own_patch(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert "cutlass/local" not in succeeds("patch", "list", "--json")
    assert "cutlass/local" not in succeeds("-C", str(tmp_path), "patch", "list", "--json")
    monkeypatch.chdir(tmp_path)
    assert '"local"' in succeeds("-C", "mine", "patch", "list", "--json")
    assert sm120kit("-C", str(tmp_path / "absent"), "patch", "list").exit_code == 2


# ---- override by name


def test_recipe_overrides_the_built_in(own: Path, built_in: PatchDirectory) -> None:
    text = (built_in.path / "recipes/engines/flashinfer-0.6.6.toml").read_text()
    (own / "recipes/flashinfer-0.6.6.toml").write_text(text.replace('summary = "', 'summary = "Mine: '))
    (own / "recipes/flashinfer-0.6.6-mine.toml").write_text(
        text.replace('name = "flashinfer-0.6.6"', 'name = "flashinfer-0.6.6-mine"')
    )
    listed = {row["name"]: row for row in json.loads(succeeds("recipe", "list", "--json"))}
    assert listed["flashinfer-0.6.6"]["summary"].startswith("Mine: ")
    assert listed["flashinfer-0.6.6"]["from"] == "own, overrides the built-in"
    assert listed["flashinfer-0.6.6-mine"]["from"] == "own" and listed["vllm-0.33.0"]["from"] == "built-in"
    assert recipes.locate("flashinfer-0.6.6-mine") == own / "recipes/flashinfer-0.6.6-mine.toml"
    assert "own, overrides the built-in" in succeeds("recipe", "list")


def test_configuration_overrides_the_built_in(own: Path, built_in: PatchDirectory) -> None:
    name = configurations.names()[0]
    text = (built_in.path / f"recipes/configurations/{name}.toml").read_text()
    (own / f"configurations/{name}.toml").write_text(text.replace('summary = "', 'summary = "Mine: '))
    assert configurations.load(name).summary.startswith("Mine: ")
    origins = {row["name"]: row["from"] for row in json.loads(succeeds("config", "list", "--json"))}
    assert origins.pop(name) == "own, overrides the built-in" and {*origins.values()} == {"built-in"}


def test_directory_with_too_many_configurations(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_roots, "MAX_FILES", len(configurations.names()))
    for number in range(data_roots.MAX_FILES + 1):
        (own / "configurations" / f"c{number}.toml").write_text("x = [")
    with pytest.raises(BadInput, match=re.escape(str(own / "configurations"))):
        configurations.names()


def test_patches_lie_above_the_built_in(own: Path, tmp_path: Path) -> None:
    put(own, "local", own_patch(tmp_path))
    tree = applied(own, tmp_path)
    assert [patch.slug for patch in tree.patches] == ["first", "second", "local", "third"]
    assert {"ten\n", "own\n"} <= {*text_at(tree, BUILDER).splitlines(keepends=True)}
    origins = {row["slug"]: row["from"] for row in json.loads(succeeds("patch", "list", "--json"))}
    assert origins == {"first": "built-in", "second": "built-in", "local": "own", "third": "built-in"}
    succeeds("patch", "check")


def test_patch_overrides_the_built_in_in_its_place(own: Path, tmp_path: Path) -> None:
    put(own, "first", patch_text(PatchDirectory(tmp_path / "diffs").edit(BUILDER, 10, "TEN\n")))
    series = patches.load(own / "patches", "cutlass")
    assert [(patch.slug, patches.origin(own / "patches", patch)) for patch in series] == [
        ("first", "own, overrides the built-in"),
        ("second", "built-in"),
    ]
    assert b"+TEN" in series[0].diff


def test_problems_of_own_patches_are_reported(own: Path, tmp_path: Path) -> None:
    """A variant for versions of a built-in patch is one, too."""
    put(own, "first--other", own_patch(tmp_path))
    result = sm120kit("patch", "check")
    assert result.exit_code == 1 and "first--other.patch" in result.stdout
    (own / "patches/cutlass/series").write_text("absent\n")
    assert "absent" in sm120kit("patch", "check").stdout


def test_patch_files_are_part_of_the_key_of_a_tree(own: Path, tmp_path: Path) -> None:
    before = patches.checkout.series_files()
    file = put(own, "local", own_patch(tmp_path))
    after = patches.checkout.series_files()
    sha256 = patches.load(own / "patches", "cutlass")[-1].sha256
    assert after["own/patches/cutlass/local.patch"] == sha256 == file_sha256(file) and {*before} < {*after}


# ---- written only there


def test_edited_series_is_exported_to_the_repository(
    own: Path, built_in: PatchDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit without trailers becomes a patch; a changed built-in commit overrides; the others are not copied."""
    before = files(built_in.path)
    checkout = checkout_of(tmp_path / "r", BASE)
    tree = patches.apply(checkout, inside(), own / "patches", built_in.overrides)
    clone = tmp_path / "clone"
    patches.edit(tree, clone, RECIPE, KEY)
    assert export_edits(clone, checkout, own / "patches") == []
    (clone / LAUNCHER).write_text(changed((clone / LAUNCHER).read_text(), 20, "own\n"))
    git_in(clone, "commit", "-qam", "launcher: own thing")
    wrote = export_edits(clone, checkout, own / "patches")
    assert {*wrote} == {own / "patches/flashinfer/launcher-own-thing.patch", own / "patches/flashinfer/series"}
    local = patches.find(own / "patches", "launcher-own-thing")
    assert (local.trailer("Upstream-Status"), local.trailer("Evidence")) == ("Pending", "none")
    asked = [problem.text for problem in patches.lint(own / "patches")]
    assert len(asked) == 2 and any("Origin" in text for text in asked)
    (clone / LAUNCHER).write_text(changed((clone / LAUNCHER).read_text(), 25, "more\n"))
    git_in(clone, "commit", "-qam", "x", "--fixup", ":/launcher: é")
    subprocess.run(
        [
            "git",
            "-C",
            clone,
            "-c",
            "user.name=A",
            "-c",
            "user.email=a@example.invalid",
            "rebase",
            "-q",
            "-i",
            "--autosquash",
            "HEAD~3",
        ],
        check=True,
        env=os.environ | {"GIT_SEQUENCE_EDITOR": "true"},
    )
    wrote = export_edits(clone, checkout, own / "patches")
    assert own / "patches/flashinfer/third.patch" in wrote
    assert not (own / "patches/cutlass").exists() and files(built_in.path) == before
    again = patches.apply(checkout, inside(), own / "patches", built_in.overrides)
    assert text_at(again, LAUNCHER) == (clone / LAUNCHER).read_text()


def test_built_in_patch_is_not_removed(own: Path, built_in: PatchDirectory, tmp_path: Path) -> None:
    before = files(built_in.path)
    checkout = checkout_of(tmp_path / "r", BASE)
    patches.edit(patches.apply(checkout, inside(), own / "patches", built_in.overrides), tmp_path / "clone", RECIPE, KEY)
    git_in(tmp_path / "clone", "reset", "-q", "--hard", "HEAD^")
    with pytest.raises(BadInput, match="flashinfer/third"):
        export_edits(tmp_path / "clone", checkout, own / "patches")
    result = sm120kit("patch", "drop", "first")
    assert isinstance(result.exception, Sm120kitError), result.output
    assert files(built_in.path) == before and not [*(own / "patches").glob("*/*")]


def test_own_patch_is_dropped(own: Path, built_in: PatchDirectory, tmp_path: Path) -> None:
    before = files(built_in.path)
    put(own, "local", own_patch(tmp_path))
    root = own / "patches"
    assert [patch.slug for patch in patches.load(root, "cutlass")] == ["first", "second", "local"]
    patches.drop(patches.find(root, "local"), root, {})
    assert [patch.slug for patch in patches.load(root, "cutlass")] == ["first", "second"]
    assert files(built_in.path) == before


def test_built_in_recipe_is_locked_in_the_repository(own: Path, built_in: PatchDirectory) -> None:
    """With the user's patches, it has other inputs than the built-in lockfile."""
    file = recipes.locate("flashinfer-0.6.6")
    assert recipes.lock_path(file) == file.with_suffix(".lock.json")
    assert recipes.writable_lock_path(file) == own / "recipes/flashinfer-0.6.6.lock.json"
    shutil.copyfile(recipes.lock_path(file), recipes.writable_lock_path(file))
    assert recipes.lock_path(file) == own / "recipes/flashinfer-0.6.6.lock.json"
    listed = {row["name"]: row["from"] for row in json.loads(succeeds("recipe", "list", "--json"))}
    assert listed["flashinfer-0.6.6"] == "built-in, own lockfile" and listed["vllm-0.33.0"] == "built-in"


def test_directory_beside_the_repository_may_be_written(own: Path) -> None:
    data_roots.require_not_installed(own / "../beside/file")


def test_link_out_of_the_repository(own: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (own / "patches/cutlass").symlink_to(tmp_path / "elsewhere")
    for write in (lambda path: write_atomic(path, b""), lambda path: write_together({path: b""})):
        with pytest.raises(SystemRefused):
            write(own / "patches/cutlass/series")
    assert not [*(tmp_path / "elsewhere").iterdir()]
    shutil.rmtree(own / "recipes")
    (own / "recipes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadInput, match="recipes"):
        data_roots.user_repository()


def test_clone_is_read_only_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SM120KIT_DATA", raising=False)
    monkeypatch.chdir(ROOT / "docs")
    assert data_roots.writable_data_root() == ROOT
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemRefused, match="read-only") as refused:
        data_roots.writable_data_root()
    assert "sm120kit init" in refused.value.hint
    with pytest.raises(SystemRefused):
        data_roots.require_writable(ROOT / "recipes/engines/flashinfer-0.6.6.lock.json")
    data_roots.require_writable(tmp_path / "mine.lock.json")


# ---- upgrades


def test_upgrade_is_reported(own: Path, built_in: PatchDirectory, tmp_path: Path) -> None:
    """`recipe check` compares a lockfile of the repository with the present series; the repository stays as it is."""
    series = {patch.name: patch.sha256 for patch in patches.load(own / "patches", "cutlass")}
    sources = (LockedSource("cutlass", "4.2.1", "flashinfer:3rdparty/cutlass", "0" * 40, "0" * 40),)
    locked = tuple(LockedFile(name, sha256) for name, sha256 in series.items())
    lock = Lock(1, {"name": RECIPE}, sources, locked, (), (), "", (), "")
    assert [*lockfile.series_changes(lock, own / "patches")] == []
    (own / f"recipes/{RECIPE}.lock.json").write_text(lockfile.text(lock))
    before = files(own)
    built_in.put("third", own_patch(tmp_path, 25))
    built_in.put("first", patch_text(PatchDirectory(tmp_path / "made").edit(BUILDER, 10, "TEN\n")), listed=False)
    (built_in.root / "cutlass/series").write_text("first\nthird\n")
    (built_in.root / "cutlass/second.patch").unlink()
    lines = succeeds("recipe", "check", RECIPE).splitlines()
    changes = ["changed cutlass/first", "removed cutlass/second", "added cutlass/third"]
    assert [line.rpartition(": ")[2] for line in lines[1:]] == changes
    assert files(own) == before


def test_check_names_files_that_are_no_longer_read(own: Path) -> None:
    assert "no longer read" not in sm120kit("recipe", "check", RECIPE).output
    (own / "recipes/models").mkdir()
    (own / "recipes/models/mine.toml").write_text("edition = 1\n")
    result = sm120kit("recipe", "check", RECIPE)
    assert result.exit_code == 0 and "recipes/models is no longer read" in result.output


@pytest.mark.parametrize("content", ["{}", "x", "[1]", '{"config": 3}'])
def test_recorded_checkpoint_of_another_form_is_refused(content: str, own: Path) -> None:
    file = own / "recipes/checkpoints/Qwen--Qwen3.8-27B-FP8.json"
    file.parent.mkdir()
    file.write_text(content)
    with pytest.raises(BadInput, match=re.escape(str(file))):
        architectures.of_checkpoint("Qwen/Qwen3.8-27B-FP8")
    with pytest.raises(BadInput, match=re.escape(str(file))):
        fit.recorded_model("Qwen/Qwen3.8-27B-FP8")


@pytest.mark.parametrize(("kind", "folder"), [("engines", "recipes"), ("configurations", "configurations")])
def test_file_where_only_the_built_in_ones_are(own: Path, kind: str, folder: str) -> None:
    """It would be ignored without a word."""
    (own / "recipes" / kind).mkdir(exist_ok=True)
    (own / "recipes" / kind / "x-1.toml").write_text("edition = 1\n")
    result = sm120kit("recipe", "list")
    assert isinstance(result.exception, BadInput)
    assert f"recipes/{kind}/x-1.toml" in result.exception.message and str(own / folder) in result.exception.hint


@pytest.mark.parametrize("content", ["edition = ", 'engine = "vllm-0.33.0"\n', None])
def test_damaged_configuration_is_left_out(own: Path, built_in: PatchDirectory, content: str | None) -> None:
    """It is an error only where it is the one that is asked for."""
    before = [configuration.name for configuration in configurations.readable()]
    name = configurations.names()[0]
    text = (built_in.path / f"recipes/configurations/{name}.toml").read_text()
    unknown = text.replace(f'name = "{name}"', 'name = "damaged"').replace('engine = "', 'engine = "no-such-')
    (own / "configurations/damaged.toml").write_text(unknown if content is None else content)
    assert [configuration.name for configuration in configurations.readable()] == before
    listed = sm120kit("config", "list", "--all")
    assert listed.exit_code == 0 and "damaged is left out" in listed.output
    if content is not None:
        with pytest.raises(BadInput):
            configurations.load("damaged")
