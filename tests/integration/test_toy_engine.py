"""An engine of another distribution is one file, an entry point, a suite of checks and a recipe."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import parser_options
import parser_probe
import pytest
from cpu_server import free_port
from python_base import VERSION, python_base
from small_assembly import SmallImage
from small_engine import ENGINE, KERNELS
from typer.testing import CliRunner

from sm120kit import engines, serving
from sm120kit.bench import Measurement, _metrics, launched, workload
from sm120kit.bench.result_file import Result
from sm120kit.cli import app
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput, RequirementMissing
from sm120kit.core.urls import Endpoint
from sm120kit.engines import parser
from sm120kit.images import _assembly, checks, delivery, image_inputs
from sm120kit.images.checks import _suite_programs
from sm120kit.images.image_records import Image, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.published_images import Source
from sm120kit.recipes import arguments, configurations, load_engine
from sm120kit.recipes.recipe_records import Closure
from sm120kit.serving import Run, launch
from sm120kit.serving.launch import LaunchOptions

SUPPORT = Path(__file__).parents[1] / "support"
SERVER = b"""
import argparse, os, runpy, sys
parser = argparse.ArgumentParser("toy")
for name in ("--weights", "--served-model-name", "--host", "--longest"):
    parser.add_argument(name)
for name in ("--port", "--slices"):
    parser.add_argument(name, type=int)
if __name__ == "__main__":
    given = parser.parse_args()
    os.environ |= {"OWNER": "toy", "METRICS": os.path.join(given.weights, "metrics")}
    sys.argv[1:] = [str(given.port), "0.001"]
    runpy.run_module("toy_schedule", run_name="__main__")
"""
CONFIGURATION = """
edition = 1
name = "toy"
summary = "a toy"
engine = "toy-1.0"
original = "none"
tensor_parallel = 2
arguments = ["--slices", "2", "--longest=64"]
model = { repository = "a/b", revision = "unpinned", why_unpinned = "a test", quantization = "none", needs_mtp = false }
hardware = { gpu = "RTX 5090", gpus = 2, memory_gb = 32.0 }
container = { shm_gib = 1 }
[[reference]]
value = 1.0
unit = "tok/s"
method = "none"
conditions = "none"
source = "none"
reproducibility = "not-found"
differs = "all"
"""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data directory with the recipe, in an environment with the distribution of the engine."""
    installed, root = tmp_path / "site", tmp_path / "data"
    (installed / "toy_engine-1.0.dist-info").mkdir(parents=True)
    (installed / "toy_engine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-engine\nVersion: 1.0\n")
    (installed / "toy_engine-1.0.dist-info" / "entry_points.txt").write_text("[sm120kit.engines]\ntoy = toy_engine:TOY\n")
    shutil.copy(SUPPORT / "toy_engine.py", installed)
    (installed / "toy_checks").mkdir()
    (installed / "toy_checks" / "checks_toy.py").write_text(
        "import importlib.util\n\n\ndef check_server(expected):\n    assert importlib.util.find_spec('toy')\n"
        "    return {'toy': 'ok'}\n"
    )
    (root / "recipes" / "engines").mkdir(parents=True)
    (root / "recipes" / "configurations").mkdir()
    for name in ("image_programs", "patches", "cutlass_overrides"):
        (root / name).symlink_to(data_root() / name)
    (root / "recipes" / "engines" / "flashinfer-1.0.toml").write_text(KERNELS.format(sha256="a" * 64))
    (root / "recipes" / "engines" / "toy-1.0.toml").write_text(
        ENGINE.replace('["vllm", "serve"]', '["python3", "-m", "toy"]').replace("vllm", "toy").replace("9.0", "1.0")
    )
    (root / "recipes" / "configurations" / "toy.toml").write_text(CONFIGURATION)
    monkeypatch.setenv("SM120KIT_DATA", str(root))
    monkeypatch.syspath_prepend(installed)
    sys.modules.pop("toy_engine", None)
    engines.all_engines.cache_clear()
    yield root
    engines.all_engines.cache_clear()
    sys.modules.pop("toy_engine", None)


def wheel_files() -> dict[str, bytes]:
    return {"toy.py": SERVER, "toy_schedule.py": (SUPPORT / "schedule_server.py").read_bytes()}


def record_options(directory: Path) -> None:
    """Record the options of the parser in the wheel."""
    directory.mkdir()
    for name, content in wheel_files().items():
        (directory / name).write_bytes(content)
    function = engines.of_recipe("toy-1.0").parser
    assert function
    given = {"parser": inspect.getsource(function), "lines": {"bad": ["--no-such-option"], "good": ["--slices", "2"]}}
    argv = [sys.executable, parser_probe.__file__]
    environment = {"PYTHONPATH": str(directory)}
    done = subprocess.run(argv, input=json.dumps(given), env=environment, capture_output=True, text=True, check=True)
    parsed = json.loads(done.stdout)
    assert parsed["answers"] == {"bad": "unrecognized arguments: --no-such-option", "good": ""}
    parser.record_path("toy-1.0").write_text(parser_options.record_text("toy-1.0", {"sha256": "0" * 64}, parsed))


def test_recipe_and_configuration_are_checked(data: Path, tmp_path: Path) -> None:
    def run(*argv: str) -> str:
        result = CliRunner().invoke(app, list(argv))
        assert result.exit_code == 0, result.output
        return result.stdout

    assert run("recipe", "check", "toy-1.0") == "ok toy-1.0\n" and "toy-1.0" in run("recipe", "list")
    assert run("config", "check", "toy").startswith("not checked toy")
    record_options(tmp_path / "wheel")
    assert run("config", "check", "toy") == "ok toy\n"
    file = tmp_path / "toy.toml"
    for changed, message in ((("--slices", "--slabs"), "no --slices"), (("--longest", "--shortest"), "--shortest")):
        file.write_text(CONFIGURATION.replace(*changed))
        with pytest.raises(BadInput, match=message):
            arguments.require_known(configurations.load(str(file)))


def test_image_is_built_and_passes_the_suite(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_suite_programs, "COMMON", ())  # FlashInfer of the small image is none
    small, recipe = SmallImage(tmp_path), load_engine("toy-1.0")
    small.files = {"toy": wheel_files(), "nvidia-cuda-runtime": small.files["nvidia-cuda-runtime"]}
    wheels, ours, store = small.wheels(), small.ours(), LocalImages(small.workspace)
    setup = delivery.engine_setup(recipe, "f" * 64, Closure("manylinux_2_35_x86_64", VERSION, tuple(wheels), ""))
    assert setup.kind == "toy" and setup.env["SM120KIT_PORT"] == "1234" and "toy 1.0, served by: python3" in setup.usage
    digests = {ours: file_sha256(ours)}
    described, text, scripts = image_inputs.describe(setup, f"base@sha256:{'a' * 64}", digests, [*wheels], small.workspace)
    files = _assembly.wheel_files({described.ours[0].wheel: ours}, [*wheels], lambda _: [*wheels.values()])
    image, _ = _assembly.assemble(described, (text, scripts), python_base(store.layout), files, store.layout, small.workspace)
    assert image.canonical_name.startswith("sm120kit/toy:1.0-sm120kit.")
    try:
        store.require_runtime(image.id)
    except RequirementMissing as reason:
        pytest.skip(str(reason))
    expected = checks.ExpectedImage("toy", "", "", "", "", "", (), (), (), {})
    report = checks.run_checks(image, expected, store, small.workspace)
    results = {f"{check.suite}/{check.name}": str(check.verdict) for check in report.checks}
    assert results.get("toy/server") == "passed" and report.facts["toy"] == "ok", report.checks
    assert results["base/size"] == "passed"


def test_server_is_started_and_measured(data: Path, tmp_path: Path) -> None:
    port, model = free_port(), tmp_path / "model"
    model.mkdir()
    (model / "metrics").write_text("toy:active 3\ntoy:tokens_total 7\n")
    (tmp_path / "wheel").mkdir()
    for name, content in wheel_files().items():
        (tmp_path / "wheel" / name).write_bytes(content)
    configuration, recipe = configurations.load("toy"), load_engine("toy-1.0")
    image = Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "1000:1000", 1)
    workspace = SmallImage(tmp_path).workspace
    placement = serving.Placement([(0, "a"), (1, "b")], port, workspace, key="secret")
    service = serving.make_service(configuration, recipe, image, image.id, model, placement)
    assert service.argv[:5] == ("python3", "-m", "toy", "--weights", "/model") and service.variables["TOY_KEY"] == "secret"
    # In place of docker: the process sees the model and the port of the host.
    values = {"/model": str(model), "8000": str(port), "python3": sys.executable, "0.0.0.0": "127.0.0.1"}
    argv = ("env", f"PYTHONPATH={tmp_path / 'wheel'}", *(values.get(word, word) for word in service.argv))
    prepared = launch.PreparedLaunch(
        configuration, VerifiedImage(image, "x:y", "", (), {}), None, None, service, (), Source(Path("none"))
    )
    seen: list[int] = []

    def start(work: object) -> None:
        def observed(run: Run) -> None:
            seen.append(_metrics.metrics_of(Endpoint(run.url)).count("toy:active"))
            work(run)  # type: ignore[operator]

        launch.serve(prepared, argv, LaunchOptions(workspace, 20), work=observed)

    (tmp_path / "mine.toml").write_text('summary = "x"\nprompts = ["a"]\nconcurrency = [1]\noutput_tokens = [20]\n')
    saved: list[Result] = []
    measurement = Measurement(workload.load(str(tmp_path / "mine.toml")), saved.append)
    (result,) = launched.measure([launched.LaunchedConfiguration(start, configuration, measurement)])
    assert seen and seen[0] and result.complete and result.environment.served.engine == "toy-1.0"
    assert all(sample.completion_tokens == 20 for case in result.cases for sample in case.samples)
