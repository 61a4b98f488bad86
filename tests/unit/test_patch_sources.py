"""Patch commands take every recipe that has a source: of FlashInfer, or of an engine, whichever it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from patch_series import BASE, BUILDER, KERNEL, LAUNCHER, TRAILERS, PatchDirectory, changed, git_in, patch_text
from small_engine import ENGINE, KERNELS, make_sdist, make_wheel
from typer.testing import CliRunner, Result

from sm120kit import patches
from sm120kit.cli import app
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, Mismatch, NotFound, PatchConflict, Sm120kitError
from sm120kit.core.workspace import Workspace
from sm120kit.patches.local import read_local
from sm120kit.recipes import lockfile
from sm120kit.recipes import target as targets
from sm120kit.recipes.recipe_records import Lock
from sm120kit.sources.origin import DEFAULT, Origin
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import LockedWheel

CUTLASS = '[sources.cutlass]\ninside = "flashinfer"\npath = "3rdparty/cutlass"\nversion = "4.2.1"\n'
FROM_SOURCE = """
[from_source]
sha256 = "{sha256}"
environment = []
[from_source.targets._tiny]
member = "{engine}/_tiny.abi3.so"
units = ["csrc/tiny.cu"]
"""
PYTHON, BUILD = "{engine}/layers.py", "CMakeLists.txt"
Run = Callable[..., Result]


def engine_files(engine: str) -> dict[str, str]:
    return {PYTHON.format(engine=engine): KERNEL, BUILD: KERNEL}


class Site:
    """A data directory with recipes, and a mirror with their sources.

    ``flashinfer-1.0`` has a source with CUTLASS in it, ``flashinfer-1.1`` one without. ``vllm-9.0`` and ``sglang-9.0`` have an
    sdist of the engine, ``vllm-8.0`` is not locked. The series have two patches of vLLM, one of CUTLASS, one of FlashInfer.
    """

    def __init__(self, root: Path) -> None:
        self.data, self.mirror = root / "data", root / "mirror"
        self.recipes = self.data / "recipes" / "engines"
        self.patches = PatchDirectory(self.data)
        self.mirror.mkdir()
        self.recipes.mkdir(parents=True)
        sha256 = make_sdist(self.mirror / "flashinfer_python-1.0.tar.gz", BASE)
        self.recipe("flashinfer-1.0", KERNELS.format(sha256=sha256) + CUTLASS)
        sha256 = make_sdist(self.mirror / "flashinfer_python-1.1.tar.gz", {LAUNCHER: KERNEL})
        self.recipe("flashinfer-1.1", KERNELS.format(sha256=sha256).replace('"1.0"', '"1.1"').replace("-1.0", "-1.1"))
        for engine in ("vllm", "sglang"):
            sha256 = make_sdist(self.mirror / f"{engine}-9.0.tar.gz", engine_files(engine))
            source = FROM_SOURCE.format(sha256=sha256, engine=engine)
            self.recipe(f"{engine}-9.0", ENGINE.replace("vllm", engine) + source)
        self.recipe("vllm-8.0", ENGINE.replace("9.0", "8.0"))
        self.patches.put("builder", patch_text(self.patches.edit(BUILDER, 10, "ten\n")))
        self.put("launcher", BASE, LAUNCHER, 3, "flashinfer ==1.0")
        files = engine_files("vllm")
        self.put("python", files, "vllm/layers.py", 3, "vllm ==9.0")
        self.put("build", {**files, "vllm/layers.py": changed(KERNEL, 3, "3\n")}, BUILD, 20, "vllm ==9.0")

    def lock(self, name: str, *wheels: str) -> None:
        """Write the lockfile of an engine's recipe with these wheels of the mirror."""
        paths = [next(self.mirror.glob(f"{wheel}-*.whl")) for wheel in wheels]
        locked = tuple(LockedWheel(*path.name.split("-")[:2], path.name, file_sha256(path)) for path in paths)
        closure = lockfile.make_closure("manylinux_2_35_x86_64", "3.12", locked, replaced=False)
        text = lockfile.text(Lock(lockfile.FORMAT, {}, (), (), (), (closure,)))
        (self.recipes / f"{name}.lock.json").write_text(text)

    def recipe(self, name: str, text: str) -> None:
        (self.recipes / f"{name}.toml").write_text(text)

    def put(self, slug: str, files: dict[str, str], path: str, line: int, applies_to: str) -> Path:
        """Put a patch that replaces a line of a file by its number."""
        project, _, versions = applies_to.partition(" ")
        diff = self.patches.edit(path, line, f"{line}\n", files, "")
        return self.patches.put(slug, patch_text(diff, project, versions, f"{slug}: change"), project)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("SM120KIT_STATE", str(tmp_path / "state"))
    return Site(tmp_path)


@pytest.fixture
def run(site: Site) -> Run:
    """Run a command of ``sm120kit patch``; a command that fetches takes sources from the mirror. Raises the command's error."""

    def run_command(command: str, *words: str | Path, code: int = 0) -> Result:
        sources = () if command in ("export", "new") else ("--mirror", site.mirror, "--offline")
        result = CliRunner().invoke(app, ["patch", command, *map(str, (*words, *sources))])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run_command


def states(result: Result) -> list[tuple[str, str, str]]:
    return [(row["recipe"], f"{row['project']}/{row['slug']}", row["state"]) for row in json.loads(result.stdout)]


KERNEL_STATES = [
    ("flashinfer-1.0", "cutlass/builder", "applies"),
    ("flashinfer-1.0", "flashinfer/launcher", "applies"),
    ("flashinfer-1.1", "flashinfer/launcher", "not for this version"),
]
VLLM_STATES = [("vllm-9.0", "vllm/python", "applies"), ("vllm-9.0", "vllm/build", "applies")]


def test_status_lists_every_recipe_with_a_source(site: Site, run: Run) -> None:
    assert states(run("status", "--json")) == KERNEL_STATES + VLLM_STATES, "sglang-9.0 has a source, but no series"
    assert states(run("status", "vllm@9.0", "flashinfer-1.1", "--json")) == VLLM_STATES + KERNEL_STATES[2:]
    site.put("only", engine_files("sglang"), "sglang/layers.py", 5, "sglang >=9")
    assert states(run("status", "--json")) == [*KERNEL_STATES, ("sglang-9.0", "sglang/only", "applies"), *VLLM_STATES]


@pytest.mark.parametrize("command", ["status", "check", "edit", "export", "import"])
def test_engine_that_is_not_locked_is_refused(command: str, site: Site, run: Run, tmp_path: Path) -> None:
    """Before anything is fetched or written, whatever other recipes the command was given."""
    words: dict[str, list[Any]] = {
        "status": ["flashinfer-1.0", "vllm-8.0"],
        "check": ["vllm-8.0"],
        "export": ["vllm-8.0", "--from", tmp_path],
        "import": [site.patches.root / "vllm/build.patch", "--recipe", "vllm-8.0"],
    }
    unformed = site.patches.root / "cutlass/builder.patch"
    unformed.write_bytes(unformed.read_bytes().replace(b"From 0000", b"From 1111"))
    before = unformed.read_bytes()
    with pytest.raises(Mismatch, match=r"vllm-8\.0 is not locked") as error:
        run(command, *words.get(command, ["vllm-8.0", "--into", tmp_path / "out"]))
    assert "sm120kit recipe lock vllm-8.0" in error.value.hint
    assert unformed.read_bytes() == before
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "state").glob("checkouts/*"))


@pytest.fixture
def locked(site: Site) -> str:
    """The recipe of an engine whose source is its locked wheel, with a locked b12x."""
    files = {"vllm/layers.py": KERNEL.encode(), "vllm/_C.abi3.so": bytes(5 * 2**20)}
    make_wheel(site.mirror, "vllm", "7.0", "cp38-abi3-linux_x86_64", files=files)
    make_wheel(site.mirror, "b12x", "1.0", files={"b12x/moe.py": KERNEL.encode()})
    site.recipe("vllm-7.0", ENGINE.replace("9.0", "7.0"))
    site.lock("vllm-7.0", "vllm", "b12x")
    return "vllm-7.0"


@pytest.mark.parametrize(("project", "path"), [("vllm", "vllm/layers.py"), ("b12x", "b12x/moe.py")])
def test_locked_wheel_is_the_source_of_its_series(
    project: str, path: str, locked: str, site: Site, run: Run, tmp_path: Path
) -> None:
    """Of the engine, and of another locked wheel whose project has a series."""
    site.put("elsewhere", {"b12x/moe.py": KERNEL}, "b12x/moe.py", 3, "b12x ==9.0")
    clone = tmp_path / "clone"
    run("edit", locked, "--into", clone, "--project", project)
    assert not (clone / "vllm/_C.abi3.so").exists(), "libraries are no source"
    version = {"vllm": "7.0", "b12x": "1.0"}[project]
    commit(clone, path, changed(KERNEL, 25, "mine\n"), "layers: mine\n\nBecause.")
    exported = run("export", locked, "--from", clone, "--project", project).stdout
    assert f"{project}/layers-mine.patch" in exported
    patch = patches.find(site.patches.root, f"{project}/layers-mine")
    assert patch.trailer("Applies-To") == f"{project} =={version}"
    assert (locked, f"{project}/layers-mine", "applies") in states(run("status", locked, "--json"))
    assert json.loads(run("prove", f"{project}/layers-mine", "--recipe", locked, "--json").stdout)["files"] == [path]


def test_wheel_without_a_patch_for_its_version_is_not_fetched(locked: str, site: Site, run: Run, tmp_path: Path) -> None:
    (site.mirror / "vllm-7.0-cp38-abi3-linux_x86_64.whl").unlink()
    assert {(name, state) for name, _, state in states(run("status", locked, "--json"))} == {(locked, "not for this version")}
    assert not list((tmp_path / "state").glob("checkouts/*"))
    site.put("seven", {"vllm/layers.py": KERNEL}, "vllm/layers.py", 7, "vllm ==7.0")
    with pytest.raises(Sm120kitError, match=r"vllm 7\.0"):
        run("status", locked)


def engine_target(recipe: str, options: Options) -> targets.EngineTarget:
    target = targets.resolve(recipe, options).engine
    assert target
    return target


def test_no_patch_is_applied_to_a_wheel_as_released(locked: str, site: Site, run: Run, tmp_path: Path) -> None:
    """Of the engine and of another wheel, whose patches other recipes have. Local patches are applied to it."""
    site.put("seven", {"vllm/layers.py": KERNEL}, "vllm/layers.py", 7, "vllm ==7.0")
    site.put("one", {"b12x/moe.py": KERNEL}, "b12x/moe.py", 3, "b12x ==1.0")
    recipe, options = (
        site.recipes / f"{locked}.toml",
        Options(Workspace.open(None), Origin(mirror=str(site.mirror), offline=True)),
    )
    closures = lockfile.read(site.recipes / f"{locked}.lock.json").closures
    trees = engine_target(locked, options).python_trees(closures)
    assert [patch.slug for tree in trees for patch in tree.patches] == ["seven", "one"]
    site.recipe("other-7.0", recipe.read_text().replace("vllm-7.0", "other-7.0"))
    site.lock("other-7.0", "vllm", "b12x")
    recipe.write_text('as_released = ["vllm", "b12x"]\n' + recipe.read_text())
    target = engine_target(locked, options)
    assert target.python_trees(closures) == () and target.engine_tree is None and target.patched == ()
    assert "applies" not in {state for _, _, state in states(run("status", locked, "--json"))}
    assert ("other-7.0", "vllm/seven", "applies") in states(run("status", "other-7.0", "--json"))
    mine = tmp_path / "mine.diff"
    mine.write_bytes(site.patches.edit("vllm/layers.py", 20, "mine\n", {"vllm/layers.py": KERNEL}, ""))
    built = targets.with_local(target, read_local([mine], DEFAULT)).engine
    assert built and (tree := built.engine_tree)
    assert [len(tree.patches), len(tree.local)] == [0, 1]


def test_wheel_that_a_recipe_patches_is_not_as_released(site: Site, run: Run) -> None:
    path = site.recipes / "vllm-9.0.toml"
    path.write_text('as_released = ["vllm"]\n' + path.read_text())
    with pytest.raises(BadInput, match=r"as_released"):
        run("status", "vllm-9.0")


def test_import_into_a_wheel_refuses_native_files(locked: str, site: Site, run: Run, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.diff"
    theirs.write_bytes(site.patches.edit("csrc/a.cu", 5, "five\n", {"csrc/a.cu": KERNEL}, ""))
    with pytest.raises(BadInput, match=r"csrc/a\.cu"):
        run("import", theirs, "--recipe", locked)
    theirs.write_bytes(site.patches.edit("vllm/layers.py", 5, "five\n", {"vllm/layers.py": KERNEL}, ""))
    run("import", theirs, "--recipe", locked)
    text = (site.patches.root / "vllm/theirs.patch").read_text()
    assert "Applies-To: vllm ==7.0\n" in text


def test_check_applies_the_series_of_an_engine(site: Site, run: Run) -> None:
    assert run("check", "vllm-9.0").stdout == "ok cutlass, flashinfer, vllm; 2 patches apply\n"
    site.put("other", {**engine_files("vllm"), BUILD: changed(KERNEL, 20, "twenty\n")}, BUILD, 21, "vllm ==9.0")
    result = run("check", "vllm-9.0", code=1)
    assert result.stdout.startswith("vllm/other: conflicts in vllm 9.0\n")
    assert run("check", "flashinfer-1.0").stdout == "ok cutlass, flashinfer, vllm; 2 patches apply\n"


def commit(clone: Path, path: str, text: str, message: str) -> None:
    (clone / path).write_text(text)
    git_in(clone, "commit", "-q", "-a", "-m", message)


@pytest.mark.parametrize(("engine", "patches"), [("vllm", 2), ("sglang", 0)])
def test_series_of_an_engine_is_edited_and_applied(engine: str, patches: int, site: Site, run: Run, tmp_path: Path) -> None:
    """Also the first patch of a project without a series."""
    recipe, clone, path = f"{engine}-9.0", tmp_path / "clone", PYTHON.format(engine=engine)
    result = run("edit", recipe, "--into", clone)
    assert f"{patches} patches on branch series" in result.stdout
    kernels = {file: file.read_bytes() for file in site.patches.root.glob("[cf]*/*")}
    text = changed((clone / path).read_text(), 25, "mine\n")
    body = TRAILERS.format(project=engine, versions="==9.0")
    commit(clone, path, text, f"layers: mine\n\nBecause.\n\n{body}")
    result = run("export", recipe, "--from", clone)
    directory = site.patches.root / engine
    assert result.stdout.splitlines() == [f"wrote {directory / 'layers-mine.patch'}", f"wrote {directory / 'series'}"]
    assert {file: file.read_bytes() for file in site.patches.root.glob("[cf]*/*")} == kernels
    assert run("export", recipe, "--from", clone).stdout == ""
    assert states(run("status", recipe, "--json"))[-1] == (recipe, f"{engine}/layers-mine", "applies")


def test_files_of_an_engines_series(site: Site, run: Run, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.diff"
    files = engine_files("vllm")
    theirs.write_bytes(site.patches.edit(BUILD, 20, "twenty\n", files, ""))
    with pytest.raises(PatchConflict, match="does not apply to vllm 9"):
        run("import", theirs, "--recipe", "vllm-9.0")
    theirs.write_bytes(site.patches.edit(BUILD, 5, "five\n", files, ""))
    imported = site.patches.root / "vllm/theirs.patch"
    assert run("import", theirs, "--recipe", "vllm-9.0").stdout == f"wrote {imported}\n"
    site.put("top", {**files, "vllm/layers.py": changed(KERNEL, 3, "3\n")}, "vllm/layers.py", 4, "vllm ==9.0")
    with pytest.raises(PatchConflict, match="vllm/top") as error:
        run("drop", "vllm/python")
    assert "vllm-9.0" in error.value.message
    run("drop", "theirs")
    assert not imported.exists()
    assert states(run("status", "vllm-9.0", "--json")) == [*VLLM_STATES, ("vllm-9.0", "vllm/top", "applies")]


def test_directory_of_an_engine_is_not_exported_as_its_flashinfer_recipe(run: Run, tmp_path: Path) -> None:
    run("edit", "vllm-9.0", "--into", tmp_path / "clone")
    with pytest.raises(Mismatch, match=r"was made from recipe vllm-9\.0, not from flashinfer-1\.0"):
        run("export", "flashinfer-1.0", "--from", tmp_path / "clone")


def test_prove_lists_the_change_of_a_patch_without_probes(site: Site, run: Run) -> None:
    first, second = (json.loads(run("prove", f"vllm/{slug}", "--json").stdout) for slug in ("python", "build"))
    assert first["files"] == ["vllm/layers.py"]
    assert (second["patch"], second["recipe"], second["offsets"]) == ("vllm/build", "vllm-9.0", "")
    assert first["tree_below"] != first["tree_above"] == second["tree_below"] != second["tree_above"]
    assert second["evidence"] == "tests/unit/test_patches.py"
    lines = run("prove", "vllm/build").stdout.splitlines()
    assert "CMakeLists.txt" in lines[3]
    assert lines[-2:] == [
        f"vllm/build applies to vllm-9.0: tree {second['tree_below'][:12]} → {second['tree_above'][:12]}",
        "no probe compiled: the source contains no CUTLASS; evidence, not run: tests/unit/test_patches.py",
    ]
    assert not (site.patches.root.parent / "src").exists()


def test_prove_reports_lines_of_offset_hunks(site: Site, run: Run) -> None:
    files = {**engine_files("sglang"), "sglang/layers.py": "above\n" + KERNEL}
    site.put("only", files, "sglang/layers.py", 20, "sglang >=9")
    assert (
        "applies to sglang-9.0 (sglang/layers.py: hunk 1 lies 1 lines further up): tree " in run("prove", "sglang/only").stdout
    )


def test_prove_applies_a_foreign_diff_to_an_engine(site: Site, run: Run, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.diff"
    theirs.write_bytes(site.patches.edit(BUILD, 4, "four\nand more\n", engine_files("vllm"), ""))
    change = json.loads(run("prove", theirs, "--recipe", "vllm-9.0", "--json").stdout)
    assert (change["patch"], change["files"]) == ("vllm/theirs", [BUILD])
    assert change["evidence"] == "none is named"
    with pytest.raises(PatchConflict, match=r"flashinfer/theirs does not apply to flashinfer-1\.1"):
        run("prove", theirs, "--recipe", "flashinfer-1.1")
    for options in ([], ["--probe", "collective grouped nvfp4 128x128x64"], ["--write"]):
        with pytest.raises(BadInput, match="its version is unknown") as unknown:
            run("prove", theirs, *options)
        assert {"--recipe:", "flashinfer-1.1,"} <= {*unknown.value.hint.split()} and "vllm-9.0" in unknown.value.hint


@pytest.mark.parametrize(
    "option", [["--probe", "collective grouped nvfp4 128x128x64"], ["--write"], ["--code"], ["--for", "nvfp4"]]
)
def test_probes_are_refused_without_cutlass(option: list[str], site: Site, run: Run, tmp_path: Path) -> None:
    """Before anything is fetched."""
    with pytest.raises(NotFound, match=r"no probe of vllm/build can be compiled: the source of vllm-9\.0 contains no CUTLASS"):
        run("prove", "vllm/build", *option)
    site.put("alone", {LAUNCHER: KERNEL}, LAUNCHER, 9, "flashinfer ==1.1")
    with pytest.raises(NotFound, match=r"the source of flashinfer-1\.1 contains no CUTLASS"):
        run("prove", "alone", *option)
    assert not list((tmp_path / "state").glob("checkouts/*"))


def test_prove_lists_the_change_of_a_patch_of_flashinfer_that_names_no_probe(site: Site, run: Run) -> None:
    site.put("python", {LAUNCHER: KERNEL}, LAUNCHER, 9, "flashinfer ==1.0")
    lines = run("prove", "flashinfer/python").stdout.splitlines()
    assert LAUNCHER in lines[3] and lines[-2].startswith("flashinfer/python applies to flashinfer-1.0: tree ")
    assert lines[-1] == "no probe compiled: the patch names none; evidence, not run: tests/unit/test_patches.py"
    with pytest.raises(NotFound, match="flashinfer/python names no probe"):
        run("prove", "flashinfer/python", "--code")


def test_prove_names_the_recipes_with_a_source(site: Site, run: Run) -> None:
    site.put("old", engine_files("vllm"), BUILD, 5, "vllm ==8.0")
    with pytest.raises(PatchConflict, match=r"vllm/old is for vllm ==8\.0, which no recipe with a source has") as error:
        run("prove", "vllm/old")
    assert error.value.hint == "recipes with a source: flashinfer-1.0, flashinfer-1.1, sglang-9.0, vllm-9.0"
    with pytest.raises(Mismatch, match=r"vllm-8\.0 is not locked"):
        run("prove", "vllm/old", "--recipe", "vllm-8.0")
    with pytest.raises(PatchConflict, match=r"vllm/build is for vllm; flashinfer-1\.0 has cutlass, flashinfer"):
        run("prove", "vllm/build", "--recipe", "flashinfer-1.0")
    with pytest.raises(NotFound, match="cutlass/builder names no probe"):
        run("prove", "cutlass/builder")
