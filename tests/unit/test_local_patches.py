"""Local patches: applied above the series of the project that has their files, recorded as local, written to no series."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import layout_images
import pytest
from locked_engine import HEADER, LAYERS, MOE, Site
from patch_series import BASE, KERNEL, LAUNCHER, changed, git_in, patch_text
from typer.testing import CliRunner

from sm120kit import recipes
from sm120kit.bench.bench_environment import served_from
from sm120kit.cli import app
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, Mismatch, NotFound, NotVerified, PatchConflict, RegistryFailed
from sm120kit.core.process import run
from sm120kit.core.records import Stage
from sm120kit.core.workspace import Workspace
from sm120kit.images import image_inputs as contexts
from sm120kit.images import publication
from sm120kit.images.attestation import _sbom
from sm120kit.images.delivery import kernel_group
from sm120kit.images.image_records import BuiltWheel, image_name
from sm120kit.patches.local import read_local
from sm120kit.recipes.target import resolve
from sm120kit.serving._supervise import Run
from sm120kit.serving.resolve import _local_image
from sm120kit.sources.origin import DEFAULT
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels import image_wheels
from sm120kit.wheels._overlay import build_overlay
from sm120kit.wheels.build_records import BuildRequest


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "data"))
    return Site(tmp_path)


def planned(site: Site, *paths: Path) -> image_wheels.EngineBuild:
    return image_wheels.build(site.target(*paths), BuildRequest(group="none", stage=Stage.PLAN))


def test_patch_of_an_engine_gives_a_wheel_that_records_it(site: Site) -> None:
    before, official = site.contents(), image_wheels.build(site.target(), BuildRequest(group="none", stage=Stage.PLAN))
    assert (official.repacked, official.local) == ((), ())
    patch = site.diff("mine.patch", LAYERS, 25)
    target = site.target(patch)
    repacked = build_overlay(target, target.engine_tree)
    assert repacked is not None and repacked.ran
    with zipfile.ZipFile(repacked.wheel) as wheel:
        assert wheel.read(LAYERS).decode() == changed(KERNEL, 25, "mine.patch\n")
        assert wheel.testzip() is None and wheel.read("vllm/other.py").decode() == KERNEL
        (record,) = (json.loads(wheel.read(name)) for name in wheel.namelist() if name.endswith("sm120kit.json"))
    assert record["patches"] == []
    (local,) = record["local"]
    assert (local["project"], local["slug"], local["sha256"]) == ("vllm", "mine", file_sha256(patch))
    assert target.build_id == site.target().build_id, "the lockfile is that of the series"
    assert site.contents() == before, "nothing is written to the data directory"
    again = build_overlay(site.target(patch), site.target(patch).engine_tree)
    assert again is not None and (again.ran, again.wheel) == (False, repacked.wheel)


@pytest.mark.parametrize(
    ("path", "files", "project"),
    [
        (LAYERS, None, "vllm"),
        (MOE, None, "b12x"),
        (LAUNCHER, None, "flashinfer"),
        (HEADER, None, "cutlass"),
        (f"3rdparty/cutlass/{HEADER}", None, "cutlass"),
        ("other.py", None, "vllm"),
        ("python/vllm/srt/deep.py", None, "vllm"),
    ],
)
def test_project_is_the_one_with_the_files(path: str, files: dict[str, str] | None, project: str, site: Site) -> None:
    """Also paths relative to the package, and those of a repository with the package in a directory."""
    build = planned(site, site.diff("mine.diff", path, 20, files))
    assert [patch.project for patch in build.local] == [project]
    changed_wheels = [each.plan.engine for each in build.repacked]
    assert changed_wheels == ([project] if project in ("vllm", "b12x") else [])
    assert build.flashinfer.plan is not None and planned(site).flashinfer.plan is not None
    assert (build.flashinfer.plan != planned(site).flashinfer.plan) == (project in ("flashinfer", "cutlass"))


@pytest.mark.parametrize("path", ["vllm/new.py", "csrc/new.cuh"])
@pytest.mark.parametrize("prefixes", [("/dev/null", "b/"), ("", "")])
def test_project_of_a_new_file_is_the_one_with_its_directory(path: str, prefixes: tuple[str, str], site: Site) -> None:
    """With a header of git, or as ``diff -N`` of directories writes it."""
    old, new = prefixes
    times = "1970-01-01 00:00:00.000000000 +0000", "2026-01-01 00:00:00.000000000 +0000"
    names = (old or f"{path}\t{times[0]}", f"{new}{path}" + ("" if new else f"\t{times[1]}"))
    file = site.root / "new.diff"
    file.write_text(f"--- {names[0]}\n+++ {names[1]}\n@@ -0,0 +1 @@\n+x = 1\n")
    project = "vllm" if path.startswith("vllm") else "flashinfer"
    assert [patch.project for patch in planned(site, file).local] == [project]


@pytest.mark.parametrize("old", ["/dev/null", "a/vllm/other.py"])
def test_new_file_that_exists_is_not_made_in_another_project(old: str, site: Site) -> None:
    file = site.root / "new.diff"
    file.write_text(f"--- {old}\n+++ b/vllm/other.py\n@@ -0,0 +1 @@\n+x = 1\n")
    with pytest.raises(BadInput, match=r"vllm/other\.py exists already"):
        planned(site, file)


def test_missing_files_are_those_of_the_nearest_project(site: Site) -> None:
    both = {LAYERS: KERNEL, "csrc/absent.cu": KERNEL}
    file = site.root / "two.diff"
    file.write_bytes(site.patches.diff(both, {name: changed(text, 5, "5\n") for name, text in both.items()}, ""))
    with pytest.raises(BadInput) as error:
        planned(site, file)
    assert error.value.message.splitlines()[1:] == ["vllm:", "  csrc/absent.cu does not exist"]


@pytest.mark.parametrize("old", ["other.py.orig", "vllm-7.0.orig/vllm/other.py"])
@pytest.mark.parametrize("shift", [0, 5])
def test_plain_diff_of_a_copy_with_another_name(old: str, shift: int, site: Site) -> None:
    """As ``diff -u other.py.orig other.py`` in the directory of the package, also with hunks that are not at their lines."""
    lines = site.diff("mine.diff", "vllm/other.py", 20).read_text().splitlines(keepends=True)
    hunks = "".join(lines[next(number for number, line in enumerate(lines) if line.startswith("@@")) :])
    hunks = re.sub(r"(?<=[-+])(\d+),", lambda start: f"{int(start[1]) + shift},", hunks, count=2)
    plain = site.root / "plain.diff"
    plain.write_text(f"--- {old}\n+++ {old.replace('.orig', '')}\n{hunks}")
    assert [patch.project for patch in planned(site, plain).local] == ["vllm"]


def test_patches_lie_above_the_series_and_each_other(site: Site) -> None:
    first = {LAYERS: changed(KERNEL, 10, "ten\n")}
    site.put("vllm", "ten", patch_text(site.patches.edit(LAYERS, 10, "ten\n", {LAYERS: KERNEL}, ""), "vllm", "==7.0"))
    site.lock()
    second = site.diff("b.patch", LAYERS, 11, first)
    third = site.diff("a.patch", LAYERS, 12, {LAYERS: changed(first[LAYERS], 11, "b.patch\n")})
    target = site.target(second, third)
    assert target.engine_tree and [patch.slug for patch in target.engine_tree.patches] == ["ten"]
    assert [patch.slug for patch in target.engine_tree.local] == ["b", "a"]
    with pytest.raises(PatchConflict):
        site.target(third, second)
    assert planned(site, second).build_id == planned(site).build_id


def test_plan_of_a_tree_that_a_series_gives_differs_from_that_of_local_patches(site: Site) -> None:
    local = planned(site, site.diff("x.patch", LAUNCHER, 3, text="three\n")).flashinfer.plan
    site.put("flashinfer", "x", patch_text(site.patches.edit(LAUNCHER, 3, "three\n", BASE, ""), "flashinfer", "==1.0"))
    site.lock()
    permanent = planned(site).flashinfer.plan
    assert local and permanent and local.tree == permanent.tree and local.digest != permanent.digest


def test_patch_that_adds_and_removes_files(site: Site) -> None:
    files = {LAYERS: KERNEL, "vllm/other.py": KERNEL}
    file = site.root / "moved.diff"
    file.write_bytes(site.patches.diff(files, {"vllm/other.py": None, "vllm/new.py": "new = 1\n"}, ""))
    repacked = build_overlay(target := site.target(file), target.engine_tree)
    assert repacked is not None
    with zipfile.ZipFile(repacked.wheel) as wheel:
        assert "vllm/other.py" not in wheel.namelist() and wheel.read("vllm/new.py") == b"new = 1\n"


BINARY = b"""\
diff --git a/vllm/x.bin b/vllm/x.bin
new file mode 100644
index 0000000000000000000000000000000000000000..f76dd238ade08917e6712764a16a22005a50573d
GIT binary patch
literal 1
IcmZPo000310RR91

"""


def refused(name: str) -> Callable[[Site], list[Path]]:
    def make(site: Site) -> list[Path]:
        other = {"csrc/a.cu": KERNEL}
        empty = site.root / "empty"
        empty.mkdir()
        (site.root / "text").write_text("no diff\n")
        (site.root / "binary").write_bytes(BINARY)
        two = site.root / "two.diff"
        both = {LAYERS: KERNEL, LAUNCHER: KERNEL}
        two.write_bytes(site.patches.diff(both, {name: changed(text, 5, "5\n") for name, text in both.items()}, ""))
        mine = site.diff("mine", LAYERS, 25)
        same = site.root / "same"
        same.write_bytes(mine.read_bytes())
        paths = {
            "nothing": [site.diff("csrc", "csrc/a.cu", 5, other)],
            "two projects": [two],
            "empty directory": [empty],
            "absent": [site.root / "absent"],
            "no diff": [site.root / "text"],
            "binary": [site.root / "binary"],
            "same file": [mine, mine],
            "same content": [mine, same],
        }
        return paths[name]

    return make


@pytest.mark.parametrize(
    "case",
    ["nothing", "two projects", "empty directory", "absent", "no diff", "binary", "same file", "same content"],
)
def test_bad_patch_is_refused_and_nothing_is_built(case: str, site: Site) -> None:
    paths, before = refused(case)(site), site.contents()
    with pytest.raises(BadInput) as error:
        planned(site, *paths)
    assert str(paths[-1]) in error.value.message and error.value.hint
    if case == "nothing":
        assert "csrc/a.cu" in error.value.message
    assert site.contents() == before and not (site.root / "state/build").exists()


def test_patch_that_conflicts_with_the_series_is_refused(site: Site) -> None:
    site.put("vllm", "ten", patch_text(site.patches.edit(LAYERS, 10, "ten\n", {LAYERS: KERNEL}, ""), "vllm", "==7.0"))
    site.lock()
    with pytest.raises(PatchConflict, match=r"mine\.diff"):
        site.target(site.diff("mine.diff", LAYERS, 10))
    with pytest.raises(PatchConflict, match=r"same\.diff"):
        site.target(site.diff("same.diff", LAYERS, 10, text="ten\n"))


def test_file_that_fits_two_projects_is_refused(site: Site) -> None:
    site.add_to_wheels("same.py")
    with pytest.raises(BadInput, match="vllm and b12x"):
        site.target(site.diff("mine.diff", "same.py", 4))


def test_files_outside_the_package_are_refused(site: Site) -> None:
    info = "vllm-7.0.dist-info/METADATA"
    with zipfile.ZipFile(next(site.mirror.glob("vllm-*"))) as wheel:
        text = wheel.read(info).decode()
    file = site.root / "info.diff"
    file.write_bytes(site.patches.diff({info: text}, {info: text + "Summary: more\n"}, ""))
    with pytest.raises(BadInput, match=info):
        planned(site, file)


def test_directory_is_read_in_the_order_of_its_series_or_by_name(tmp_path: Path, site: Site) -> None:
    directory = tmp_path / "several"
    directory.mkdir()
    for name in ("b.patch", "a.diff"):
        (directory / name).write_bytes(site.diff(name, LAYERS, 3 if name == "a.diff" else 20).read_bytes())
    (directory / "README").write_text("--- a/x\n")
    assert [patch.file.name for patch in read_local([directory], DEFAULT)] == ["a.diff", "b.patch"]
    (directory / "series").write_text("# mine\nb\na.diff -p1\n")
    assert [patch.file.name for patch in read_local([directory], DEFAULT)] == ["b.patch", "a.diff"]


def test_directory_is_imported_in_its_order_all_or_nothing(site: Site) -> None:
    """The second diff applies above the first one only."""
    directory = site.root / "several"
    directory.mkdir()
    first = changed(KERNEL, 10, "ten\n")
    second = first.replace("ten\n", "TEN\n")
    (directory / "b.patch").write_bytes(site.patches.diff({LAYERS: KERNEL}, {LAYERS: first}, ""))
    (directory / "a.diff").write_bytes(site.patches.diff({LAYERS: first}, {LAYERS: second}, ""))
    words = ["patch", "import", str(directory), "--recipe", "vllm-7.0", "--offline", "--mirror", str(site.mirror)]
    words += ["--state", str(site.root / "state")]
    before = site.contents()
    assert isinstance(CliRunner().invoke(app, words).exception, PatchConflict) and site.contents() == before
    (directory / "series").write_text("b.patch\na.diff\n")
    assert isinstance(CliRunner().invoke(app, [*words, "--name", "mine"]).exception, BadInput) and site.contents() == before
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.exception
    assert (site.data / "patches/vllm/series").read_text().split()[-2:] == ["b", "a"]
    assert {file.name for file in site.contents().keys() - before.keys()} == {"a.patch", "b.patch"}


@pytest.mark.parametrize("command", ["patch check", "patch status", "build", "recipe check"])
def test_patch_instead_of_a_recipe_is_named(command: str, site: Site) -> None:
    for file in (site.diff("mine.patch", LAYERS, 5), Path("mine.diff")):
        refused = CliRunner().invoke(app, [*command.split(), str(file), "--offline"]).exception
        assert isinstance(refused, BadInput) and f"{file} is a patch" in refused.message and "patch import" in refused.hint


def test_command_plans_local_patches(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM120KIT_STATE", str(site.root / "state"))
    patch = site.diff("mine.diff", LAYERS, 25)
    words = ["--patch", str(patch), "--offline", "--mirror", str(site.mirror), "--kernels", "none", "--dry-run"]
    result = CliRunner().invoke(app, ["build", "vllm-7.0", *words])
    assert result.exit_code == 0 and "vllm/mine" in result.stdout and file_sha256(patch) in result.stdout


def test_outdated_lockfile_is_refused_with_local_patches(site: Site) -> None:
    recipe = site.recipes / "vllm-7.0.toml"
    recipe.write_text(recipe.read_text().replace('["vllm", "serve"]', '["vllm", "serve", "--x"]'))
    with pytest.raises(Mismatch, match="outdated"):
        planned(site, site.diff("mine.diff", LAYERS, 25))


def test_nothing_is_locked_beside_an_unknown_recipe(site: Site) -> None:
    """As after ``--upgrade NAME``, which takes no name."""
    recipe = site.recipes / "vllm-7.0.toml"
    recipe.write_text(recipe.read_text().replace('["vllm", "serve"]', '["vllm", "serve", "--x"]'))
    before = site.contents()
    sources = ["--offline", "--mirror", str(site.mirror), "--state", str(site.root / "state")]
    result = CliRunner().invoke(app, ["recipe", "lock", "vllm-7.0", "certifi", *sources])
    assert isinstance(result.exception, NotFound) and site.contents() == before


@pytest.mark.parametrize(("project", "path"), [("vllm", LAYERS), ("flashinfer", LAUNCHER), ("cutlass", HEADER)])
def test_patch_of_the_series_touches_two_files_and_every_build_id(site: Site, project: str, path: str) -> None:
    """The tool writes the patch and the series, and no lockfile of a recipe with the project."""
    spark = (site.recipes / "vllm-7.0.toml").read_text().replace('name = "vllm-7.0"', 'name = "vllm-7.0-spark"')
    (site.recipes / "vllm-7.0-spark.toml").write_text(spark)
    lock = (site.recipes / "vllm-7.0.lock.json").read_text().replace('"vllm-7.0"', '"vllm-7.0-spark"')
    (site.recipes / "vllm-7.0-spark.lock.json").write_text(lock)
    names = ["vllm-7.0", "vllm-7.0-spark", *(["flashinfer-1.0"] if project != "vllm" else [])]
    before = [resolve(name, site.options).build_id for name in names]
    diff = site.diff("toy.diff", path, 25)
    for words in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "before"]):
        git_in(site.data, *words)
    sources = ["--offline", "--mirror", str(site.mirror)]
    recipe = ["--recipe", "vllm-7.0" if project == "vllm" else "flashinfer-1.0"]
    for words in (["patch", "import", str(diff), *recipe], ["recipe", "lock"], ["recipe", "lock", "--check"]):
        result = CliRunner().invoke(app, [*words, *sources, "--state", str(site.root / "state")])
        assert result.exit_code == 0, (result.output, result.exception)
    status = run(["git", "-C", site.data, "status", "--porcelain", "--untracked-files=all"]).stdout
    assert sorted(line[3:] for line in status.splitlines()) == [f"patches/{project}/series", f"patches/{project}/toy.patch"]
    after = [resolve(name, site.options).build_id for name in names]
    assert not {*before} & {*after}


def test_image_has_another_name_and_a_label() -> None:
    origin = {"local": [{"project": "vllm", "slug": "mine", "sha256": "a" * 64}], "patches": []}
    built = BuiltWheel(LockedWheel("vllm", "7.0+sm120kit.1", "vllm-7.0-py3-none-any.whl", "b" * 64), origin)
    assert contexts.local_patches([built]) == (f"vllm/mine@{'a' * 12}",)
    assert contexts.local_patches([replace(built, origin={"patches": []})]) == ()
    assert image_name("vllm", "7.0", "c" * 64, local=True) != image_name("vllm", "7.0", "c" * 64)
    (patch,) = _sbom._patches_of("vllm", built)
    assert _sbom._hashes([patch]) == {"sha256:local/vllm/mine.patch": "a" * 64}


LOCAL = f"vllm/mine@{'a' * 12}"


@pytest.fixture
def with_images(tmp_path: Path) -> Workspace:
    """A state directory with a checked image, and one of the same recipe with a local patch."""
    workspace = Workspace.open(tmp_path / "state")
    layout_images.add_image(workspace, (1, 2))
    add_local_image(workspace)
    return workspace


def add_local_image(workspace: Workspace) -> str:
    context = "7" * 64
    name = image_name("vllm", layout_images.VERSION, context, local=True)
    more = {"sm120kit.local": LOCAL, "sm120kit.reference": name}
    manifest, _ = layout_images.add_image(workspace, (1, 3), context, more=more)
    layout_images.Layout(workspace.root / "oci").tag(manifest, name)
    return name


def test_image_with_local_patches_is_published_only_if_that_is_allowed(with_images: Workspace, tmp_path: Path) -> None:
    name = image_name("vllm", layout_images.VERSION, "7" * 64, local=True)
    index = tmp_path / "images.json"
    with pytest.raises(NotVerified, match=LOCAL) as error:
        publication.publish(name, "127.0.0.1:1/x", index, with_images)
    assert "--allow-local" in error.value.hint
    with pytest.raises(RegistryFailed):  # nothing listens there: it would have been pushed
        publication.publish(name, "127.0.0.1:1/x", index, with_images, allow_local=True)
    assert not index.exists()


def test_server_gets_an_image_with_local_patches_only_by_name(with_images: Workspace, tmp_path: Path) -> None:
    expected = image_name("vllm", layout_images.VERSION, "4" * 64)
    assert _local_image(layout_images.RECIPE, with_images) == expected
    alone = Workspace.open(tmp_path / "alone")
    add_local_image(alone)
    assert _local_image(layout_images.RECIPE, alone) == ""


@pytest.mark.parametrize("groups", [(), ("none",), ("quick",), ("quick", "all"), ("none", "quick")])
def test_served_patch_has_the_kernels_of_the_largest_image_of_its_recipe(groups: tuple[str, ...], tmp_path: Path) -> None:
    """Not the recipe's, which are all: they take 2.7 CPU-hours."""
    workspace, kernels = Workspace.open(tmp_path / "state"), recipes.load_flashinfer("flashinfer-0.6.6")
    for number, name in enumerate(groups, 4):
        modules = ",".join(sorted(recipes.group(kernels, name).modules))
        layout_images.add_image(workspace, (1, number), f"{number}" * 64, more={"sm120kit.modules": modules})
    layout_images.add_image(workspace, (1, 9), "9" * 64, more={"sm120kit.recipe": "vllm-9", "sm120kit.modules": "a,b,c"})
    group = kernel_group(recipes.load_engine(layout_images.RECIPE), kernels, workspace)
    assert group == (groups[-1] if groups else None)


def test_image_list_shows_local_patches(with_images: Workspace) -> None:
    result = CliRunner().invoke(app, ["image", "list", "--state", str(with_images.root)], env={"COLUMNS": "300"})
    assert result.exit_code == 0 and result.stdout.count(LOCAL) == 1


def test_results_name_the_local_patches_of_a_server(tmp_path: Path) -> None:
    run = Run("c", "vllm-7.0", "1" * 64, "sha256:2", str(tmp_path), (), (), "http://127.0.0.1:1", "log", "now", local=LOCAL)
    assert served_from(run).local == LOCAL
    assert served_from(replace(run, local="")).local is None


@pytest.mark.parametrize("option", [("--image", "y"), ("--print",), ("--compose", "-")])
def test_an_image_is_built_only_for_a_server_that_starts_in_it(option: tuple[str, ...], tmp_path: Path) -> None:
    words = ["--patch", "x.patch", *option, "--state", str(tmp_path / "state")]
    result = CliRunner().invoke(app, ["serve", "gpt-oss-20b-1x-rtx-pro-6000", *words])
    assert result.exit_code == 2 and "--patch" in result.output and "--image" in result.output
