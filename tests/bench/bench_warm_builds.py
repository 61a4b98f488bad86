"""Cost of a warm ``sm120kit build ENGINE`` with nothing to do, and of ``--dry-run``.

    python tests/bench/bench_warm_builds.py [--as-finished] [RECIPE...]

Runs are interleaved, so that other work on the machine affects all rows alike. CPU seconds are those of the command and its
children; ratios are those to an interpreter that imports typer and pydantic. The state directory is that of the environment; a
first run of each recipe warms it. With ``--as-finished``, a build of the recipe that does not exist is recorded there as
finished, with other contents: the FlashInfer wheel is packed from random bytes instead of compiled modules, layers have one
small file, no wheel of the closure is fetched, no check runs. Plan, lockfiles, base and records are those of a real build. Do
not use such a state directory for anything else.

Prints a table, asserts nothing.
"""

from __future__ import annotations

import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import layout_images
import small_engine

from sm120kit.core.record_files import record_json, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import base as base_layers
from sm120kit.images import checks
from sm120kit.images import image_inputs as contexts
from sm120kit.images.image_records import Check, CheckResult, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.recipes import arguments
from sm120kit.recipes.target import EngineTarget
from sm120kit.sources import Origin
from sm120kit.sources.run_options import Options
from sm120kit.wheels import pipeline
from sm120kit.wheels.build_records import Artifacts, BuildRequest, Stage
from sm120kit.wheels.image_wheels import EngineBuild
from sm120kit.wheels.published_wheels import artifact_of, wheel_record

ROUNDS = 15
FLOOR = "python -c 'import typer, pydantic'"
WHEEL_BYTES = 59_000_000
"""Of the FlashInfer wheel with the kernel group ``quick``."""
LAYERS = 35


def measure(argv: list[str]) -> tuple[float, float]:
    """Wall time and CPU time of a program with its children, in seconds."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def record_as_finished(engine: str) -> None:
    """Record a build of an engine as finished, see above."""
    options = Options(Workspace.open(), Origin())
    workspace, target = options.workspace, pipeline.resolve(engine, options)
    assert isinstance(target, EngineTarget) and target.recipe.base
    planned = pipeline.build(target, BuildRequest(stage=Stage.PLAN))
    assert isinstance(planned, EngineBuild) and planned.engine is None, "the engine's own wheel is packed again"
    plan, tree = planned.flashinfer.plan, planned.flashinfer.tree
    assert plan is not None and tree is not None
    directory = workspace.build("flashinfer", plan.digest)
    if not directory.is_dir():
        directory.mkdir(parents=True)
        version = f"{plan.version}+sm120kit.{plan.digest[:12]}"
        members = {
            "flashinfer/data/aot/modules": random.Random(1).randbytes(WHEEL_BYTES),
            f"flashinfer_python-{version}.dist-info/sm120kit.json": record_json(wheel_record(plan, tree)).encode(),
        }
        small_engine.make_wheel(directory, "flashinfer-python", version, files=members)
        (wheel,) = directory.iterdir()
        write_record(directory / "plan.json", plan)
        write_record(directory / "artifacts.json", Artifacts(plan.digest, artifact_of(wheel, directory), (), 0, plan.left_out))
    for locked in target.closure.wheels:
        file = workspace.downloads / locked.sha256 / locked.filename
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    done = pipeline.build(target, BuildRequest())
    assert isinstance(done, EngineBuild)
    recipe, closure = done.recipe, done.closure
    setup = contexts.ImageSetup(
        kind=recipe.engine,
        recipe=recipe.name,
        version=recipe.version,
        labels={"sm120kit.build-id": done.build_id, "sm120kit.python": closure.python},
        env={**recipe.env, "SM120KIT_PORT": str(recipe.served_by.port)},
        serve=recipe.serve,
        usage=arguments.help_text(recipe),
    )
    base, reference = base_layers.debian_image(target.recipe.base, platform.machine(), options)
    context, _, _ = contexts.describe(setup, reference, done.wheels, closure.wheels, workspace)
    layout = LocalImages(workspace).layout
    layers = [layout_images.add_layer(layout, f"file-{number}", number, 4096) for number in range(LAYERS)]
    settings = {"Labels": context.labels, "User": "1000"}
    history = [{"created_by": f"layer {number}"} for number in range(len(base.layers) + LAYERS)]
    config = base.config | {"config": settings, "history": history}
    diff_ids = (*base.diff_ids, *(layer.digest for layer in layers))
    manifest = layout.add_image((*base.layers, *layers), diff_ids, config).digest
    image = layout.image(manifest)
    write_record(workspace.root / "images" / context.digest / "context.json", context)
    write_record(workspace.root / "images" / context.digest / "image.json", image)
    results = tuple(Check("base", f"check {number}", CheckResult.NOT_RUN, "as finished") for number in range(30))
    record = VerifiedImage(image, image.canonical_name, checks.suite_digest(recipe.engine), results, {})
    write_record(checks.record_path(workspace, image), record)
    layout.tag(manifest, image.canonical_name)


def main() -> None:
    """Print the best and the median of each row."""
    as_finished = "--as-finished" in sys.argv
    recipes = [name for name in sys.argv[1:] if not name.startswith("-")]
    rows = {FLOOR: [sys.executable, "-c", "import typer, pydantic"]}
    for recipe in recipes or (["vllm"] if as_finished else ["vllm", "sglang", "flashinfer"]):
        command = [sys.executable, "-m", "sm120kit", "build", recipe]
        rows[f"sm120kit build {recipe} --dry-run"] = [*command, "--dry-run"]
        if as_finished:
            record_as_finished(recipe)
            rows[f"sm120kit build {recipe}, nothing to do"] = [*command, "-o", tempfile.gettempdir()]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for argv in rows.values():
        measure(argv)
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for _ in range(ROUNDS):
        for name, argv in rows.items():
            figures[name].append(measure(argv))
    floor = min(cpu for _, cpu in figures[FLOOR])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {ROUNDS} rounds")
    print(f"{'best':>8} {'median':>8} {'CPU':>8} {'ratio':>7}")
    for name, taken in figures.items():
        best, median = min(wall for wall, _ in taken), statistics.median(wall for wall, _ in taken)
        cpu = min(cpu for _, cpu in taken)
        print(f"{best:7.3f}s {median:7.3f}s {cpu:7.3f}s {cpu / floor:7.1f}  {name}")


if __name__ == "__main__":
    main()
