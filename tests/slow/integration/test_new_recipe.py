"""Recipes of upstream releases: a small FlashInfer and a small vLLM on an index, with the real programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from small_engine import ENGINE, KERNELS, PATCH, make_sdist, make_wheel

ROOT = Path(__file__).parents[3]
TAG = "cp38-abi3-manylinux_2_28_x86_64"
VERSION_H = "#define CUTLASS_MAJOR {}\n#define CUTLASS_MINOR 5\n#define CUTLASS_PATCH 0\n"
GENERATORS = """\
import dataclasses, os
from pathlib import Path

@dataclasses.dataclass(frozen=True)
class Spec:
    name: str
    sources: list

    @property
    def build_dir(self):
        return Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / self.name

    @property
    def jit_library_path(self):
        return self.build_dir / f"{self.name}.so"

    @property
    def ninja_path(self):
        return self.build_dir / "build.ninja"

    def write_ninja(self):
        builds = [f"build {self.build_dir / Path(source).stem}.o: cuda_compile {source}" for source in self.sources]
        self.ninja_path.write_text("\\\\n".join(builds) + "\\\\n")

def make(name, *units):
    spec = Spec(name, [])
    spec.build_dir.mkdir(parents=True, exist_ok=True)
    for unit in units:
        (spec.build_dir / unit).write_text("// " + unit)
    return dataclasses.replace(spec, sources=[spec.build_dir / unit for unit in units])
""".replace("\\\\n", "\\n")
MODULES = """\
from flashinfer.jit.spec import make
def gen():
    return make("m", "m_one.cu", "m_sm90_a.cu")
def gen_n_sm120():
    return make("n", "n.cu")
"""
NEWER_MODULES = """\
from flashinfer.jit.spec import make
def gen():
    return make("m", "m_one.cu")
def gen_more_sm120_module():
    return make("more", "more.cu")
"""
KERNELS_EXTRA = """\
[modules.n]
generator = "flashinfer.jit.m:gen_n_sm120"
[groups.rest]
summary = "the rest"
modules = ["n"]
[[modules.m.leave_out]]
units = "m_sm90*"
reason = "not for SM12x"
[sources.cutlass]
inside = "flashinfer"
path = "3rdparty/cutlass"
version = "4.5.0"
"""
ENGINE_EXTRA = """\
[env]
FLASHINFER_DISABLE_VERSION_CHECK = "1"
[environment.overrides.helper]
version = "1.0"
reason = "vLLM 9.0 requires one that does not exist"
[environment.overrides.other]
version = "1.0"
reason = "vLLM requires one that does not exist"
"""
UPSTREAM = """\
upstream = [
  { what = "vllm._C, vllm.gone", reason = "r" }, { what = "vllm._old", reason = "r" }, { what = "helper", reason = "r" },
  { what = "flashinfer-cubin", reason = "r" },
]
"""


class Index:
    """Recipes of a small FlashInfer 1.0 and a small vLLM 9.0, and a directory with those and newer releases."""

    def __init__(self, root: Path) -> None:
        self.state, self.data, self.mirror = root / "state", root / "data", root / "mirror"
        self.recipes = self.data / "recipes" / "engines"
        for directory in (self.mirror, self.recipes, self.data / "patches" / "flashinfer", self.data / "cutlass_overrides"):
            directory.mkdir(parents=True)
        (self.data / "patches" / "flashinfer" / "series").write_text("shout\n")
        (self.data / "patches" / "flashinfer" / "shout.patch").write_text(PATCH)
        sha256 = self.flashinfer("1.0", MODULES)
        (self.recipes / "flashinfer-1.0.toml").write_text(KERNELS.format(sha256=sha256) + KERNELS_EXTRA)
        (self.recipes / "vllm-9.0.toml").write_text(ENGINE.replace("upstream = []\n", UPSTREAM) + ENGINE_EXTRA)
        self.vllm("9.0", "flashinfer-python==1.0", "helper==7", "other==7", modules=("_C", "gone", "_old"))
        for name in ("helper", "other"):
            make_wheel(self.mirror, name, "1.0")
        self.flashinfer("2.0", NEWER_MODULES)

    def flashinfer(self, version: str, modules: str, header: str = "one\ntwo\nthree\n") -> str:
        """Write a release of FlashInfer; returns the sha256 of its sdist."""
        files = {
            "flashinfer/jit/__init__.py": "",
            "flashinfer/jit/spec.py": GENERATORS,
            "flashinfer/jit/m.py": modules,
            "include/x.h": header,
            "3rdparty/cutlass/include/cutlass/version.h": VERSION_H.format(4 if version == "1.0" else 5),
        }
        make_wheel(self.mirror, "flashinfer-python", version)
        return make_sdist(self.mirror / f"flashinfer_python-{version}.tar.gz", files)

    def vllm(self, version: str, *requires: str, modules: tuple[str, ...] = ("_C", "_new")) -> None:
        """Write a release of vLLM."""
        files = {f"vllm/{name}.abi3.so": b"" for name in modules}
        make_wheel(self.mirror, "vllm", version, TAG, requires=requires, files=files)

    def argv(self, *arguments: str) -> list[str]:
        """A command with this index instead of the user's."""
        return [sys.executable, "-m", "sm120kit", *arguments, "--mirror", str(self.mirror)]

    def run(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(self.argv(*arguments), env=self.environment(), capture_output=True, text=True)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def environment(self) -> dict[str, str]:
        return {**os.environ, "SM120KIT_STATE": str(self.state), "SM120KIT_DATA": str(self.data)}

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.recipes.iterdir()}

    def recipe(self, name: str) -> dict[str, object]:
        return tomllib.loads((self.recipes / f"{name}.toml").read_text())


@pytest.fixture
def index(tmp_path: Path) -> Index:
    return Index(tmp_path)


def test_release_gets_recipes_with_the_flashinfer_that_it_requires(index: Index) -> None:
    index.vllm("9.1", "flashinfer-python==2.0", "helper", "other==7")
    text = (index.recipes / "flashinfer-1.0.toml").read_text()
    (index.recipes / "flashinfer-1.9.toml").write_text(text.replace("flashinfer-1.0", "flashinfer-1.9").replace("1.0", "1.9"))
    done = index.run("recipe", "new", "vllm@9.1", "--json")
    record = json.loads(done.stdout)
    made = {f"{name}.{kind}" for name in ("flashinfer-2.0", "vllm-9.1") for kind in ("toml", "lock.json")}
    assert {Path(path).name for path in record["files"]} == made <= set(index.files())

    drafted = (index.recipes / "flashinfer-2.0.toml").read_text()
    assert drafted.startswith("# Drafted from flashinfer-1.0: "), "its groups have what vLLM requests"
    kernels = index.recipe("flashinfer-2.0")
    assert kernels["sources"]["cutlass"] == {"inside": "flashinfer", "path": "3rdparty/cutlass", "version": "5.5.0"}  # type: ignore[index]
    assert kernels["modules"] == {"m": {"generator": "flashinfer.jit.m:gen"}}, "n has no generator, and no unit is for SM90"
    assert list(kernels["groups"]) == ["quick"], "the other has no module"  # type: ignore[call-overload]
    assert [state["state"] for state in record["states"]] == ["applies"]

    engine = index.recipe("vllm-9.1")
    assert engine["flashinfer"] == "flashinfer-2.0"
    assert engine["environment"]["requires"] == ["vllm==9.1"]  # type: ignore[index]
    assert list(engine["environment"]["overrides"]) == ["helper", "other"], "other is not resolved without"  # type: ignore[index]
    assert [part["what"] for part in engine["upstream"]] == ["vllm._C, vllm.gone", "helper"]  # type: ignore[union-attr,index]

    assert "env" not in engine, "the variable is for flashinfer-cubin"

    decisions = "\n".join(record["decisions"])
    for part in (
        "module n is left out",
        "gen_more_sm120_module",
        "no vllm.gone",
        "vllm._new",
        "as_of",
        "helper, other: remove",
    ):
        assert part in decisions, decisions
    assert (index.recipes / "vllm-9.1.toml").read_text().startswith("# Drafted from vllm-9.0: ")
    index.run("recipe", "lock", "flashinfer-2.0", "vllm-9.1", "--check", "--offline")


def test_flashinfer_recipe_that_exists_is_used_and_no_recipe_is_replaced(index: Index) -> None:
    index.run("recipe", "lock", "flashinfer-1.0")
    index.vllm("9.0.1", "flashinfer-python==1.0")
    before = index.files()
    index.run("recipe", "new", "vllm@latest")
    assert "overrides" not in index.recipe("vllm-9.0.1")["environment"], "it is resolved without"  # type: ignore[operator]
    assert set(index.files()) == {*before, "vllm-9.0.1.toml", "vllm-9.0.1.lock.json"}
    error = index.run("recipe", "new", "vllm@9.0.1", code=13).stderr
    assert "vllm-9.0.1.toml exists" in error and "--overwrite" in error
    (index.recipes / "vllm-9.0.1.toml").write_text("edited")
    index.run("recipe", "new", "vllm@9.0.1", "--overwrite", "--like", "vllm-9.0")
    assert index.recipe("vllm-9.0.1")["version"] == "9.0.1"


@pytest.mark.parametrize(
    ("release", "code", "message"),
    [
        ("vllm@8.7", 10, "the index lists no release 8.7 of vLLM"),
        ("vlm@9.0", 10, "did you mean 'vllm'?"),
        ("vllm", 10, "vllm names no release"),
        ("vllm@new", 10, "'new' is not a version"),
        ("sglang@latest", 20, "no release of sglang is at any configured location"),
        ("vllm@9.2", 22, "does not require flashinfer-python"),
        ("vllm@9.3", 10, "no sdist of FlashInfer 3.0"),
        ("vllm@9.4", 22, "9.4"),
    ],
)
def test_release_without_a_recipe_leaves_nothing(index: Index, release: str, code: int, message: str) -> None:
    index.vllm("9.2", "helper")
    index.vllm("9.3", "flashinfer-python==3.0")
    index.vllm("9.4", "flashinfer-python==2.0", "absent==1")
    before = index.files()
    assert message in index.run("recipe", "new", release, code=code).stderr
    assert index.files() == before


def test_extra_that_conflicts_is_left_out_as_a_decision(index: Index) -> None:
    """vLLM 0.30.0 and its extra b12x require two versions of a library."""
    recipe = index.recipes / "vllm-9.0.toml"
    recipe.write_text(recipe.read_text().replace('["vllm==9.0"]', '["vllm==9.0", "vllm[fast]==9.0"]'))
    index.run("recipe", "lock", "flashinfer-1.0")
    for version, fast in (("9.1", "==2.0"), ("9.2", "==1.0")):
        make_wheel(index.mirror, "library", fast.removeprefix("=="))
        index.vllm(version, "flashinfer-python==1.0", "library==1.0", f'library{fast}; extra == "fast"')
    decided = index.run("recipe", "new", "vllm@9.1").stdout
    assert index.recipe("vllm-9.1")["environment"]["requires"] == ["vllm==9.1"]  # type: ignore[index]
    assert "vllm[fast]==9.1 of vllm-9.0 is left out" in decided and "library==2.0" in decided
    assert "is left out, because" not in index.run("recipe", "new", "vllm@9.2", "--like", "vllm-9.0").stdout
    assert index.recipe("vllm-9.2")["environment"]["requires"] == ["vllm==9.2", "vllm[fast]==9.2"]  # type: ignore[index]


def test_patch_that_does_not_fit_stops_and_a_draft_is_written_on_request(index: Index) -> None:
    index.flashinfer("2.1", MODULES, header="another\n")
    before = index.files()
    error = index.run("recipe", "new", "flashinfer@2.1", code=30).stderr
    assert "flashinfer/shout: conflicts" in error and "--draft" in error
    assert index.files() == before
    assert "recipe lock flashinfer-2.1" in index.run("recipe", "new", "flashinfer@2.1", "--draft").stderr
    assert set(index.files()) == {*before, "flashinfer-2.1.toml"}
    index.vllm("9.1", "flashinfer-python==1.0")
    assert "overrides of helper, other: remove those" in index.run("recipe", "new", "vllm@9.1", "--draft").stdout


def test_killed_command_leaves_nothing_and_runs_again(index: Index) -> None:
    before = index.files()
    for at in ("flashinfer-2.0.toml", "flashinfer-2.0.lock.json"):
        process = subprocess.Popen(
            index.argv("recipe", "new", "flashinfer@2.0"),
            env=index.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        while process.poll() is None and not list(index.state.glob(f"scratch/*/new/{at}")):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert index.files() == before
    index.run("recipe", "new", "flashinfer@2.0")
    assert set(index.files()) == {*before, "flashinfer-2.0.toml", "flashinfer-2.0.lock.json"}
    assert not list(index.state.glob("scratch/*"))


def test_update_lists_releases_without_a_recipe(index: Index) -> None:
    make_wheel(index.mirror, "sglang", "1.0")
    (index.recipes / "sglang-1.0.toml").write_text("")
    index.vllm("9.1", "flashinfer-python==2.0")
    newer = json.loads(index.run("recipe", "update", "--json", code=1).stdout)
    assert [(each["engine"], each["version"], each["newest_recipe"]) for each in newer] == [
        ("flashinfer", "2.0", "flashinfer-1.0"),
        ("vllm", "9.1", "vllm-9.0"),
    ]
    for release in ("flashinfer-2.0", "vllm-9.1"):
        (index.recipes / f"{release}.toml").write_text("")
    assert "no release is newer" in index.run("recipe", "update").stdout


def test_hint_names_the_flashinfer_recipe_that_an_engine_requires(index: Index) -> None:
    index.vllm("9.1", "flashinfer-python==2.0")
    text = (index.recipes / "vllm-9.0.toml").read_text().replace("9.0", "9.1")
    (index.recipes / "vllm-9.1.toml").write_text(text)
    index.run("recipe", "lock", "flashinfer-1.0")
    error = index.run("recipe", "lock", "vllm-9.1", code=22).stderr
    assert "requires FlashInfer 2.0" in error and "sm120kit recipe new flashinfer@2.0" in error and "overridden" not in error
    index.run("recipe", "new", "flashinfer@2.0")
    error = index.run("recipe", "lock", "vllm-9.1", code=22).stderr
    assert 'write flashinfer = "flashinfer-2.0"' in " ".join(error.split())


def test_script_of_the_workflow_makes_recipes_and_the_text_of_a_pull_request(index: Index, tmp_path: Path) -> None:
    index.vllm("9.1", "flashinfer-python==2.0")
    make_wheel(index.mirror, "sglang", "1.0")
    index.run("recipe", "lock", "flashinfer-1.0")
    before, out = set(index.files()), tmp_path / "out"
    environment = {**index.environment(), "SM120KIT_MIRROR": str(index.mirror), "DRY_RUN": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"

    def script(action: str) -> str:
        argv = [ROOT / "ci" / "update.sh", action, out]
        done = subprocess.run(argv, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        return done.stdout

    assert "nothing to propose" in script("propose")
    script("make")
    assert {path.name for path in (out / "engines").iterdir()} == set(index.files()) - before
    body = (out / "body.md").read_text()
    for part in (
        "## flashinfer 2.0",
        "to decide:",
        "there is no recipe of sglang",
        "flashinfer/shout",
        "ok vllm-9.1: build id",
    ):
        assert part in body, body
    proposed = script("propose")
    assert "+ gh pr create --head recipes/flashinfer-2.0+vllm-9.1" in proposed and "add flashinfer-2.0, vllm-9.1" in proposed
    assert not list((ROOT / "recipes" / "engines").glob("*-9.1*"))


def test_script_of_the_workflow_proposes_nothing_when_a_recipe_is_invalid(index: Index, tmp_path: Path) -> None:
    for engine in ("vllm", "sglang"):
        make_wheel(index.mirror, engine, "9.0", TAG)
        (index.recipes / f"{engine}-9.0.toml").write_text("")
    environment = {**index.environment(), "SM120KIT_MIRROR": str(index.mirror)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    argv = [ROOT / "ci" / "update.sh", "make", tmp_path / "out"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert done.returncode and "sglang-9.0.toml" in done.stderr
    assert not (tmp_path / "out" / "engines").exists()
