"""Lockfiles: byte-stable text, build id, differences, and the lockfiles of this repository."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name, parse_wheel_filename
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadInput, Mismatch, NotFound, ResolutionFailed
from sm120kit.patches.patch_records import AppliedPatch, PatchedTree
from sm120kit.recipes import lockfile
from sm120kit.recipes.recipe_records import Lock, LockedFile, LockedSource
from sm120kit.sources import resolver
from sm120kit.sources.git import Repository
from sm120kit.sources.source_records import Checkout, LockedWheel, SdistPin, VendoredProject

PLATFORM = "manylinux_2_35_x86_64"
NAMES = recipes.names()


def wheel(name: str, version: str = "1.0", digit: str = "a") -> LockedWheel:
    return LockedWheel(name, version, f"{name.replace('-', '_')}-{version}-py3-none-any.whl", digit * 64)


@pytest.fixture
def tree(tmp_path: Path) -> PatchedTree:
    """A repository with a file below ``inside/`` that the patched commit changes."""
    repository = Repository.init(tmp_path / "checkout")
    commits = []
    for content in (b"before", b"after"):
        with repository.index() as index:
            index.add("inside/file", content)
            commits.append(repository.commit_tree(index.write_tree(), None, content.decode()))
    base, patched = commits
    pin = SdistPin("flashinfer", "flashinfer-python", "0.6.6", "0" * 64)
    return PatchedTree(
        Checkout(pin, repository.path, base, repository.tree_of(base)),
        (VendoredProject("cutlass", "inside", "4.2.1"),),
        patched,
        repository.tree_of(patched),
        (AppliedPatch("cutlass", "one", "1" * 64, patched), AppliedPatch("flashinfer", "two", "2" * 64, patched)),
    )


def flashinfer() -> recipes.FlashInferRecipe:
    recipe = recipes.load_flashinfer("flashinfer-0.6.6")
    inside = recipe.sources["cutlass"].model_copy(update={"path": "inside"})
    return recipe.model_copy(update={"sources": {**recipe.sources, "cutlass": inside}})


@pytest.fixture
def lock(tree: PatchedTree) -> Lock:
    closures = [
        lockfile.make_closure(platform, "3.12", [wheel("torch"), wheel("vllm", "0.19.1", "b")], replaced=True)
        for platform in ("manylinux_2_35_x86_64", "manylinux_2_35_aarch64")
    ]
    return lockfile.assemble(
        recipes.load_engine("vllm-0.19.1"), flashinfer(), [tree], [LockedFile("a.hpp", "3" * 64)], closures, "k 1"
    )


def test_same_inputs_give_same_bytes_and_build_id(lock: Lock, tree: PatchedTree, tmp_path: Path) -> None:
    again = lockfile.assemble(
        recipes.load_engine("vllm@0.19.1"), flashinfer(), [tree], list(lock.overrides), list(reversed(lock.closures)), "k 1"
    )
    assert lockfile.text(again) == lockfile.text(lock)
    path = tmp_path / "vllm-0.19.1.lock.json"
    path.write_text(lockfile.text(lock))
    assert lockfile.build_id(lock) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert lockfile.read(path) == lock
    assert list(json.loads(path.read_text())) == sorted(asdict(lock))


def test_lock_contains_trees_patches_and_replaced_distribution(lock: Lock, tree: PatchedTree) -> None:
    fetched, inside = lock.sources
    assert (fetched.commit, fetched.tree, fetched.patched_commit, fetched.patched_tree) == (
        tree.checkout.commit,
        tree.checkout.tree,
        tree.commit,
        tree.tree,
    )
    assert fetched.pinned == f"sha256 {'0' * 64}" and inside.pinned == "flashinfer:inside"
    assert inside.tree != inside.patched_tree and inside.tree not in (fetched.tree, fetched.patched_tree)
    assert [patch.path for patch in lock.patches] == ["cutlass/one", "flashinfer/two"]
    assert (lock.replaced[0].name, lock.replaced[0].version) == ("flashinfer-python", "0.6.6")
    assert lock.base_image == lockfile.BASE_IMAGE_OPEN, "not a made-up digest"


def test_closure_excludes_replaced_official_wheel() -> None:
    wheels = [wheel("flashinfer-python"), wheel("torch")]
    assert lockfile.make_closure(PLATFORM, "3.12", wheels, replaced=True).wheels == (wheel("torch"),)
    assert lockfile.make_closure(PLATFORM, "3.12", wheels, replaced=False).wheels == tuple(wheels)


def patch(data: dict[str, Any], number: int) -> dict[str, Any]:
    return data["patches"][number]  # type: ignore[no-any-return]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "pin of the recipe": (
        lambda d: d["recipe"]["environment"].update(requires=["vllm==0.19.0"]),
        r"- +.vllm==0\.19\.0.\n",
    ),
    "python": (lambda d: d["recipe"]["environment"].update(python="3.13"), r"- +.python.: .3\.13."),
    "patch": (lambda d: patch(d, 1).update(sha256="9" * 64), r"- +.sha256.: .9+.\n\+ +.sha256.: .2+."),
    "patch gone": (lambda d: d["patches"].pop(0), r"\+ +.path.: .cutlass/one."),
    "override": (lambda d: d["overrides"][0].update(sha256="9" * 64), r"- +.sha256.: .9+."),
    "source": (lambda d: d["sources"][0].update(pinned="sha256 1"), r"- +.pinned.: .sha256 1."),
    "tree": (lambda d: d["sources"][1].update(patched_tree="1"), r"- +.patched_tree.: .1."),
    "kernels": (lambda d: d.update(rests_on="k 2"), r"- +.rests_on.: .k 2."),
    "base image": (lambda d: d.update(base_image="x@sha256:1"), r"- +.base_image.: .x@sha256:1."),
    "format": (lambda d: d.update(format=0), r"- +.format.: 0"),
    "wheel hash": (lambda d: d["closures"][1]["wheels"][0].update(sha256="9" * 64), rf"closures\.{PLATFORM}: .*were edited"),
    "wheel version": (lambda d: d["closures"][1]["wheels"][0].update(version="2"), rf"closures\.{PLATFORM}: .*were edited"),
    "wheel added": (lambda d: d["closures"][1]["wheels"].append(asdict(wheel("evil"))), "were edited"),
    "closure gone": (lambda d: d["closures"].pop(1), rf"closures\.{PLATFORM}: not in the lockfile"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_each_edit_is_reported(lock: Lock, tree: PatchedTree, tmp_path: Path, edit: str) -> None:
    change, expected = EDITS[edit]
    data = json.loads(lockfile.text(lock))
    change(data)
    path = tmp_path / "vllm-0.19.1.lock.json"
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    edited = lockfile.read(path)
    current = lockfile.assemble(
        recipes.load_engine("vllm-0.19.1"), flashinfer(), [tree], list(lock.overrides), edited.closures, "k 1"
    )
    changes = lockfile.differences(edited, current)
    assert len(changes) >= 1 and re.search(expected, "\n".join(changes)), changes
    assert lockfile.build_id(edited) != lockfile.build_id(lock)


def test_built_in_lock_has_what_is_outside_its_repository(lock: Lock, tmp_path: Path) -> None:
    """One elsewhere has the patches, too: an upgrade of sm120kit may change them."""
    wheel = lock.closures[0].wheels[0]
    patched = LockedSource("torch", wheel.version, f"sha256 {wheel.sha256}", "1", "2")
    lock = replace(lock, sources=(*lock.sources, patched))
    assert lockfile.stored(lock, tmp_path / "x.lock.json") == lock
    assert lockfile.stored(lock, data_root() / "mine/recipes/x.lock.json") == lock, "a repository inside a clone"
    built_in = lockfile.stored(lock, data_root() / "recipes/engines/x.lock.json")
    assert (built_in.patches, built_in.overrides, built_in.rests_on) == ((), (), "k")
    assert [(each.project, each.pinned) for each in built_in.sources] == [
        ("flashinfer", f"sha256 {'0' * 64}"),
        ("cutlass", "flashinfer:inside"),
    ]
    assert [(each.tree, each.patched_tree) for each in built_in.sources] == [(each.tree, "") for each in lock.sources[:2]]
    assert (built_in.closures, built_in.recipe, built_in.base_image) == (lock.closures, lock.recipe, lock.base_image)
    (tmp_path / "link.lock.json").symlink_to(data_root() / "recipes/engines/x.lock.json")
    assert lockfile.stored(lock, tmp_path / "link.lock.json") == built_in


def test_unchanged_lock_has_no_differences(lock: Lock) -> None:
    assert lockfile.differences(lock, lock) == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not locked: there is no"),
        ("fifo", "cannot be read: it is not a regular file"),
        ("{", "is not a lockfile"),
        ("{}", "is not a lockfile"),
        ("\n", "is not a lockfile"),
        ("keys", "has keys or spaces that `recipe lock` does not write"),
        ("spaces", "has keys or spaces that `recipe lock` does not write"),
    ],
)
def test_read_rejects_missing_malformed_and_edited_files(lock: Lock, tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "vllm-0.19.1.lock.json"
    text = lockfile.text(lock)
    data = {"keys": text.replace('"format": 1', '"extra": 1,\n  "format": 1'), "spaces": text.replace('": "', '":  "', 1)}
    if content == "fifo":
        os.mkfifo(path)
    elif content is not None:
        path.write_text(data.get(content, content))
    with pytest.raises(Mismatch, match=re.escape(message)) as caught:
        lockfile.read(path)
    assert caught.value.hint.endswith(f"sm120kit recipe lock {tmp_path}/vllm-0.19.1.toml")


def test_hint_of_a_recipe_by_path_locks_that_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pasted where the first command ran, it finds the recipe."""
    (tmp_path / "my recipes").mkdir()
    (tmp_path / "my recipes/mine-1.toml").write_text(
        recipes.path_of("vllm-0.33.0").read_text().replace('name = "vllm-0.33.0"', 'name = "mine-1"')
    )
    monkeypatch.chdir(tmp_path)
    for form in ("./my recipes/mine-1.toml", str(tmp_path / "my recipes/mine-1.toml")):
        words = ["recipe", "lock", form]
        for _ in range(2):
            error = CliRunner().invoke(app, [*words, "--check", "--offline", "--state", str(tmp_path / "state")]).exception
            assert isinstance(error, Mismatch) and "mine-1 is not locked" in error.message
            words = shlex.split(error.hint.removeprefix("lock it: "))[1:]
        assert words[-1] == form.removeprefix("./")


def test_closure_is_reused_only_for_unchanged_environment(lock: Lock) -> None:
    recipe = recipes.load_engine("vllm-0.19.1")
    assert lockfile.reusable_closure(lock, recipe, PLATFORM) == lock.closures[1]
    assert lockfile.reusable_closure(lock, recipe, "manylinux_2_35_riscv64") is None
    changed = recipe.model_copy(update={"environment": recipe.environment.model_copy(update={"as_of": "2026-01-01"})})
    assert lockfile.reusable_closure(lock, changed, PLATFORM) is None
    edited = replace(lock, closures=(lock.closures[0], replace(lock.closures[1], wheels=(wheel("evil"),))))
    assert lockfile.reusable_closure(edited, recipe, PLATFORM) is None
    assert lockfile.reusable_closure(None, recipe, PLATFORM) is None


def test_known_bad_versions_are_rejected_with_their_reason(tree: PatchedTree) -> None:
    recipe = recipes.load_engine("sglang-0.5.11")
    for version, reason in (("0.7.4", "KL divergence"), ("0.9.5", "4.4 % slower")):
        bad = lockfile.make_closure(PLATFORM, "3.12", [wheel("b12x", version)], replaced=True)
        with pytest.raises(BadInput, match=f"b12x {version} is known to be bad: .*{reason}"):
            lockfile.assemble(recipe, flashinfer(), [tree], [], [bad])
    assert {"b12x!=0.7.4", "b12x!=0.9.5"} <= set(lockfile.constraints(recipe, flashinfer()))


def test_prose_and_state_do_not_change_the_build_id() -> None:
    recipe = recipes.load_engine("sglang-0.5.11")
    flashinfer = recipes.load_flashinfer("flashinfer-0.6.6")
    assert recipe.model_copy(update={"state": "verified", "summary": "other", "upstream": ()}).inputs() == recipe.inputs()
    assert flashinfer.model_copy(update={"summary": "other"}).inputs() == flashinfer.inputs()
    assert recipe.model_copy(update={"env": {}}).inputs() != recipe.inputs()


# The lockfiles of this repository


@pytest.mark.parametrize("name", NAMES)
def test_committed_locks_fit_their_recipes(name: str) -> None:
    """Everything that can be checked without the sources; an integration test checks the trees."""
    recipe, path = recipes.load(name), recipes.lock_path(recipes.locate(name))
    lock = lockfile.read(path)
    assert lock.recipe == recipe.inputs()
    assert lockfile.stored(lock, path) == lock
    if isinstance(recipe, recipes.EngineRecipe):
        assert lock.rests_on == recipe.flashinfer
        below = lockfile.read(recipes.lock_path(recipes.locate(recipe.flashinfer))).sources
        assert lock.sources[: len(below)] == below
        wheels = {wheel.sha256 for closure in lock.closures for wheel in closure.wheels}
        pins = [recipe.pin] if recipe.pin and recipe.pin.sha256 not in wheels else []
        pinned = [(pin.project, pin.version, f"sha256 {pin.sha256}") for pin in pins]
        assert [(source.project, source.version, source.pinned) for source in lock.sources[len(below) :]] == pinned


@pytest.mark.parametrize("name", NAMES)
def test_committed_locks_pin_one_fitting_wheel_per_distribution(name: str) -> None:
    lock = lockfile.read(recipes.lock_path(recipes.locate(name)))
    environment = lock.recipe["environment"]
    assert {closure.platform for closure in lock.closures} == set(environment["platforms"])
    for closure in lock.closures:
        assert closure.sha256 == digest_of(closure.wheels)
        versions = {}
        for wheel in closure.wheels:
            distribution, version, _, tags = parse_wheel_filename(wheel.filename)
            assert distribution == canonicalize_name(wheel.name) == wheel.name and str(version) == wheel.version
            assert re.fullmatch("[0-9a-f]{64}", wheel.sha256)
            machine = closure.platform.split("_", 3)[3]
            assert any(tag.platform == "any" or tag.platform.endswith(machine) for tag in tags), wheel.filename
            assert wheel.name not in versions, "a single wheel per distribution"
            versions[wheel.name] = wheel.version
        for line in environment["requires"]:
            pinned, _, version = line.partition("==")
            assert versions[re.sub(r"\[.*", "", pinned)] == version
        for file in lock.replaced:
            assert file.name not in versions


@pytest.mark.parametrize("name", NAMES)
def test_committed_locks_name_no_host(name: str) -> None:
    text = recipes.lock_path(recipes.locate(name)).read_text()
    assert not re.search(r"://|\b[a-z0-9-]+\.(org|com|io|net|dev|ai|invalid)\b|/(home|root|tmp|opt|work)/", text)


@pytest.mark.parametrize("name", recipes.names(recipes.EngineRecipe))
def test_engine_tvm_ffi_is_at_least_as_new_as_that_of_kernels(name: str) -> None:
    """apache-tvm-ffi of the engine is at least as new as the headers with which the FlashInfer wheel is compiled."""
    from packaging.version import Version

    recipe = recipes.load_engine(name)
    flashinfer = recipes.load_flashinfer(recipe.flashinfer)
    assert flashinfer.environment is not None and recipe.kernels in flashinfer.groups
    built_with = dict(line.split("==") for line in flashinfer.environment.requires)["apache-tvm-ffi"]
    for closure in lockfile.read(recipes.lock_path(recipes.locate(name))).closures:
        (runs_with,) = (wheel.version for wheel in closure.wheels if wheel.name == "apache-tvm-ffi")
        assert Version(runs_with) >= Version(built_with)


# Choice among the wheels of a package


def chosen(*files: str, platform: str = PLATFORM, python: str = "3.12") -> str:
    package = {"name": "x", "version": "1", "wheels": [{"url": f"h://h/{file}", "hashes": {"sha256": "0"}} for file in files]}
    ranks = {tag: rank for rank, tag in enumerate(resolver._tags(python, platform))}
    return resolver._best_wheel(package, ranks, platform).filename


def test_best_wheel_is_the_one_an_installer_takes() -> None:
    pure, abi3, cp312 = "x-1-py3-none-any.whl", "x-1-cp38-abi3-manylinux_2_28_x86_64.whl", "x-1-cp312-cp312-{}_x86_64.whl"
    assert chosen(pure, abi3) == abi3
    assert chosen(pure, abi3, cp312.format("manylinux2014")) == cp312.format("manylinux2014")
    assert chosen(cp312.format("manylinux_2_17"), cp312.format("manylinux_2_34")) == cp312.format("manylinux_2_34")
    assert chosen(cp312.format("manylinux_2_39"), abi3) == abi3, "needs a newer glibc than the platform has"
    assert chosen(pure, "x-1-cp311-cp311-manylinux2014_x86_64.whl", "x-1-cp38-abi3-win_amd64.whl") == pure
    assert chosen(pure, abi3, platform="manylinux_2_35_aarch64") == pure
    assert chosen("x-1-2-py3-none-any.whl", "x-1-10-py3-none-any.whl") == "x-1-10-py3-none-any.whl", "the highest build number"


def test_no_wheel_for_the_platform_is_an_error() -> None:
    with pytest.raises(ResolutionFailed, match="x 1 has no wheel with a sha256 for manylinux_2_35_aarch64"):
        chosen("x-1-cp38-abi3-manylinux_2_28_x86_64.whl", platform="manylinux_2_35_aarch64")


def test_upgrade_of_a_distribution_that_no_lockfile_has_is_refused(tmp_path: Path) -> None:
    words = ["recipe", "lock", "flashinfer-0.6.6", "--upgrade-package", "tvm-ffi", "--state", str(tmp_path)]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, NotFound) and "apache-tvm-ffi" in result.exception.message
    assert not (tmp_path / "checkouts").exists(), "nothing is fetched"
