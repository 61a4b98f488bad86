"""A lock is byte-stable, its sha256 names the build, and every way in which it is outdated or edited is told by field."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name, parse_wheel_filename

from sm120kit import lock, locking, recipe
from sm120kit.errors import BadRecipe, LockDiffers, ResolutionFailed
from sm120kit.gitrepo import Repository
from sm120kit.records import AppliedPatch, Checkout, Inside, Lock, LockedFile, LockedWheel, PatchedTree, SdistPin, Toolchain
from sm120kit.sources import resolver
from sm120kit.workspace import data_root, digest_of, file_sha256

PLATFORM = "manylinux_2_35_x86_64"
NAMES = recipe.names()


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
        (Inside("cutlass", "inside", "4.2.1"),),
        patched,
        repository.tree_of(patched),
        (AppliedPatch("cutlass", "one", "1" * 64, patched), AppliedPatch("flashinfer", "two", "2" * 64, patched)),
    )


def kernels() -> recipe.Recipe:
    item = recipe.load("flashinfer-0.6.6")
    inside = item.sources["cutlass"].model_copy(update={"path": "inside"})
    return item.model_copy(update={"sources": {**item.sources, "cutlass": inside}})


@pytest.fixture
def made(tree: PatchedTree) -> Lock:
    closures = [
        lock.closure(platform, "3.12", [wheel("torch"), wheel("vllm", "0.19.1", "b")], replaced=True)
        for platform in ("manylinux_2_35_x86_64", "manylinux_2_35_aarch64")
    ]
    return lock.make(recipe.load_engine("vllm-0.19.1"), kernels(), tree, [LockedFile("a.hpp", "3" * 64)], closures, "k 1")


def test_same_content_same_bytes_and_their_sha256_is_the_build_id(made: Lock, tree: PatchedTree, tmp_path: Path) -> None:
    again = lock.make(
        recipe.load_engine("vllm@0.19.1"), kernels(), tree, list(made.overrides), list(reversed(made.closures)), "k 1"
    )
    assert lock.text(again) == lock.text(made)
    path = tmp_path / "vllm-0.19.1.lock.json"
    path.write_text(lock.text(made))
    assert lock.build_id(made) == hashlib.sha256(path.read_bytes()).hexdigest()
    assert lock.read(path) == made
    assert list(json.loads(path.read_text())) == sorted(asdict(made))


def test_it_states_trees_patches_and_what_is_replaced(made: Lock, tree: PatchedTree) -> None:
    fetched, inside = made.sources
    assert (fetched.commit, fetched.tree, fetched.patched_commit, fetched.patched_tree) == (
        tree.checkout.commit,
        tree.checkout.tree,
        tree.commit,
        tree.tree,
    )
    assert fetched.pinned == f"sha256 {'0' * 64}" and inside.pinned == "flashinfer:inside"
    assert inside.tree != inside.patched_tree and inside.tree not in (fetched.tree, fetched.patched_tree)
    assert [patch.path for patch in made.patches] == ["cutlass/one", "flashinfer/two"]
    assert (made.replaced[0].name, made.replaced[0].version) == ("flashinfer-python", "0.6.6")
    assert made.base_image == lock.BASE_IMAGE_OPEN, "no digest is invented"


def test_the_official_wheel_of_what_is_built_is_not_in_the_closure() -> None:
    wheels = [wheel("flashinfer-python"), wheel("torch")]
    assert lock.closure(PLATFORM, "3.12", wheels, replaced=True).wheels == (wheel("torch"),)
    assert lock.closure(PLATFORM, "3.12", wheels, replaced=False).wheels == tuple(wheels)


def patch(data: dict[str, Any], number: int) -> dict[str, Any]:
    return data["patches"][number]  # type: ignore[no-any-return]


EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "pin of the recipe": (
        lambda d: d["recipe"]["environment"].update(requires=["vllm==0.19.0"]),
        r"recipe\.environment\.requires\.vllm==0\.19\.0: in the lock, no longer there",
    ),
    "python": (lambda d: d["recipe"]["environment"].update(python="3.13"), r"recipe\.environment\.python: the lock has 3\.13"),
    "patch": (lambda d: patch(d, 1).update(sha256="9" * 64), r"patches\.flashinfer/two\.sha256: the lock has 9+, now 2+"),
    "patch gone": (lambda d: d["patches"].pop(0), r"patches\.cutlass/one: not in the lock"),
    "override": (lambda d: d["overrides"][0].update(sha256="9" * 64), r"overrides\.a\.hpp\.sha256"),
    "source": (lambda d: d["sources"][0].update(pinned="sha256 1"), r"sources\.flashinfer\.pinned: the lock has sha256 1, now"),
    "tree": (lambda d: d["sources"][1].update(patched_tree="1"), r"sources\.cutlass\.patched_tree: the lock has 1, now"),
    "kernels": (lambda d: d.update(rests_on="k 2"), r"rests_on: the lock has k 2, now k 1"),
    "base image": (lambda d: d.update(base_image="x@sha256:1"), r"base_image: the lock has x@sha256:1"),
    "format": (lambda d: d.update(format=0), r"format: the lock has 0, now 1"),
    "wheel hash": (lambda d: d["closures"][1]["wheels"][0].update(sha256="9" * 64), rf"closures\.{PLATFORM}: .*were edited"),
    "wheel version": (lambda d: d["closures"][1]["wheels"][0].update(version="2"), rf"closures\.{PLATFORM}: .*were edited"),
    "wheel added": (lambda d: d["closures"][1]["wheels"].append(asdict(wheel("evil"))), "were edited"),
    "closure gone": (lambda d: d["closures"].pop(1), rf"closures\.{PLATFORM}: not in the lock"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_each_edit_is_told_by_its_field(made: Lock, tree: PatchedTree, tmp_path: Path, edit: str) -> None:
    change, said = EDITS[edit]
    data = json.loads(lock.text(made))
    change(data)
    path = tmp_path / "vllm-0.19.1.lock.json"
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n")
    held = lock.read(path)
    now = lock.make(recipe.load_engine("vllm-0.19.1"), kernels(), tree, list(made.overrides), held.closures, "k 1")
    found = lock.differences(held, now)
    assert len(found) >= 1 and re.search(said, "\n".join(found)), found
    assert lock.build_id(held) != lock.build_id(made)


def test_an_untouched_lock_has_no_differences(made: Lock) -> None:
    assert lock.differences(made, made) == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is not locked: there is no"),
        ("{", "is not a lock"),
        ("{}", "is not a lock"),
        ("\n", "is not a lock"),
        ("keys", "has keys or spaces that `recipe lock` does not write"),
        ("spaces", "has keys or spaces that `recipe lock` does not write"),
    ],
)
def test_a_file_that_is_no_lock(made: Lock, tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "vllm-0.19.1.lock.json"
    text = lock.text(made)
    data = {"keys": text.replace('"format": 1', '"extra": 1,\n  "format": 1'), "spaces": text.replace('": "', '":  "', 1)}
    if content is not None:
        path.write_text(data.get(content, content))
    with pytest.raises(LockDiffers, match=re.escape(said)) as caught:
        lock.read(path)
    assert caught.value.hint.endswith("sm120kit recipe lock vllm-0.19.1")


def test_wheels_stay_only_while_the_same_environment_is_asked_for(made: Lock) -> None:
    item = recipe.load_engine("vllm-0.19.1")
    assert lock.usable(made, item, PLATFORM) == made.closures[1]
    assert lock.usable(made, item, "manylinux_2_35_riscv64") is None
    changed = item.model_copy(update={"environment": item.environment.model_copy(update={"as_of": "2026-01-01"})})
    assert lock.usable(made, changed, PLATFORM) is None
    edited = replace(made, closures=(made.closures[0], replace(made.closures[1], wheels=(wheel("evil"),))))
    assert lock.usable(edited, item, PLATFORM) is None
    assert lock.usable(None, item, PLATFORM) is None


def test_known_bad_versions_are_refused_with_their_reason(tree: PatchedTree) -> None:
    item = recipe.load_engine("sglang-0.5.11")
    for version, why in (("0.7.4", "KL divergence"), ("0.9.5", "4.4 % slower")):
        bad = lock.closure(PLATFORM, "3.12", [wheel("b12x", version)], replaced=True)
        with pytest.raises(BadRecipe, match=f"b12x {version} is known to be bad: .*{why}"):
            lock.make(item, kernels(), tree, [], [bad])
    assert {"b12x!=0.7.4", "b12x!=0.9.5"} <= set(lock.constraints(item, kernels()))


def test_prose_and_state_do_not_change_the_build_id() -> None:
    item = recipe.load_engine("sglang-0.5.11")
    kernel = recipe.load("flashinfer-0.6.6")
    assert item.model_copy(update={"state": "verified", "summary": "other", "official": ()}).inputs() == item.inputs()
    assert kernel.model_copy(update={"summary": "other"}).inputs() == kernel.inputs()
    assert item.model_copy(update={"env": {}}).inputs() != item.inputs()


def test_requirements_are_pinned_by_hash() -> None:
    held = lock.closure(PLATFORM, "3.12", [wheel("a-b", "1.0", "c")], replaced=False)
    assert lock.requirements(held) == f"a-b==1.0 --hash=sha256:{'c' * 64}\n"


def test_other_compilers_than_the_locked_ones_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    held = lock.read(recipe.lock_path("flashinfer-0.6.6"))
    monkeypatch.setattr("sm120kit.locking._version", lambda package: "0.1.9")
    tools = Toolchain(Path("/cuda"), "13.0.88", "g++", "g++ 12")
    assert locking.toolchain_differences(held, tools) == ("apache-tvm-ffi 0.1.9, the lock has 0.1.15.post2",)
    monkeypatch.setattr("sm120kit.locking._version", lambda package: "0.1.15.post2")
    assert locking.toolchain_differences(held, tools) == ()
    assert locking.toolchain_differences(held, replace(tools, nvcc_version="13.1.7")) == (
        "nvidia-cuda-nvcc 13.1.7, the lock has 13.0.88",
    )


# What is committed


@pytest.mark.parametrize("name", NAMES)
def test_committed_locks_fit_their_recipes_and_patches(name: str) -> None:
    """All that can be told without the sources; an integration test looks at the trees."""
    item, held = recipe.load_any(name), lock.read(recipe.lock_path(name))
    assert held.recipe == item.inputs()
    for file in held.patches:
        assert file.sha256 == file_sha256(data_root() / "patches" / f"{file.path}.patch"), file.path
    overrides = data_root() / "cutlass_overrides"
    assert {file.path: file.sha256 for file in held.overrides} == {
        str(path.relative_to(overrides)): file_sha256(path) for path in overrides.rglob("*") if path.is_file()
    }
    if isinstance(item, recipe.EngineRecipe):
        assert held.rests_on == f"{item.flashinfer} {file_sha256(recipe.lock_path(item.flashinfer))}"
        below = lock.read(recipe.lock_path(item.flashinfer)).sources
        assert held.sources[: len(below)] == below
        pinned = [(item.engine, item.version, f"sha256 {item.from_source.sha256}")] if item.from_source else []
        assert [(one.project, one.version, one.pinned) for one in held.sources[len(below) :]] == pinned


@pytest.mark.parametrize("name", NAMES)
def test_committed_locks_pin_one_fitting_wheel_per_distribution(name: str) -> None:
    held = lock.read(recipe.lock_path(name))
    environment = held.recipe["environment"]
    assert {closure.platform for closure in held.closures} == set(environment["platforms"])
    for closure in held.closures:
        assert closure.sha256 == digest_of(closure.wheels)
        versions = {}
        for one in closure.wheels:
            distribution, version, _, tags = parse_wheel_filename(one.filename)
            assert distribution == canonicalize_name(one.name) == one.name and str(version) == one.version
            assert re.fullmatch("[0-9a-f]{64}", one.sha256)
            machine = closure.platform.split("_", 3)[3]
            assert any(tag.platform == "any" or tag.platform.endswith(machine) for tag in tags), one.filename
            assert one.name not in versions, "one wheel per distribution"
            versions[one.name] = one.version
        for line in environment["requires"]:
            pinned, _, version = line.partition("==")
            assert versions[re.sub(r"\[.*", "", pinned)] == version
        for file in held.replaced:
            assert file.name not in versions


@pytest.mark.parametrize("name", NAMES)
def test_committed_locks_name_no_host(name: str) -> None:
    text = recipe.lock_path(name).read_text()
    assert not re.search(r"://|\b[a-z0-9-]+\.(org|com|io|net|dev|ai|invalid)\b|/(home|root|tmp|opt|work)/", text)


@pytest.mark.parametrize("name", recipe.names(recipe.EngineRecipe))
def test_engines_meet_the_library_that_our_modules_are_compiled_for(name: str) -> None:
    """apache-tvm-ffi of the engine is at least as new as the headers with which the FlashInfer wheel is compiled."""
    from packaging.version import Version

    item = recipe.load_engine(name)
    kernel = recipe.load(item.flashinfer)
    assert kernel.environment is not None and item.kernels in kernel.groups
    built_with = dict(line.split("==") for line in kernel.environment.requires)["apache-tvm-ffi"]
    for closure in lock.read(recipe.lock_path(name)).closures:
        (runs_with,) = (one.version for one in closure.wheels if one.name == "apache-tvm-ffi")
        assert Version(runs_with) >= Version(built_with)


# The choice among the wheels of a package


def chosen(*files: str, platform: str = PLATFORM, python: str = "3.12") -> str:
    package = {"name": "x", "version": "1", "wheels": [{"url": f"h://h/{file}", "hashes": {"sha256": "0"}} for file in files]}
    ranks = {tag: rank for rank, tag in enumerate(resolver._tags(python, platform))}
    return resolver._best(package, ranks, platform).filename


def test_the_wheel_an_installer_would_take() -> None:
    pure, abi3, cp312 = "x-1-py3-none-any.whl", "x-1-cp38-abi3-manylinux_2_28_x86_64.whl", "x-1-cp312-cp312-{}_x86_64.whl"
    assert chosen(pure, abi3) == abi3
    assert chosen(pure, abi3, cp312.format("manylinux2014")) == cp312.format("manylinux2014")
    assert chosen(cp312.format("manylinux_2_17"), cp312.format("manylinux_2_34")) == cp312.format("manylinux_2_34")
    assert chosen(cp312.format("manylinux_2_39"), abi3) == abi3, "needs a newer glibc than the platform has"
    assert chosen(pure, "x-1-cp311-cp311-manylinux2014_x86_64.whl", "x-1-cp38-abi3-win_amd64.whl") == pure
    assert chosen(pure, abi3, platform="manylinux_2_35_aarch64") == pure
    assert chosen("x-1-2-py3-none-any.whl", "x-1-10-py3-none-any.whl") == "x-1-10-py3-none-any.whl", "the highest build number"


def test_no_wheel_for_the_platform() -> None:
    with pytest.raises(ResolutionFailed, match="x 1 has no wheel with a sha256 for manylinux_2_35_aarch64"):
        chosen("x-1-cp38-abi3-manylinux_2_28_x86_64.whl", platform="manylinux_2_35_aarch64")
