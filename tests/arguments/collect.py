"""Record the options of engines' argument parsers, without a GPU and without an image: ``collect.py [RECIPE]...``.

For each recipe that a configuration names, the Python files of the engine's locked wheel (by sha256) are unpacked and patched
by its series. A temporary environment has the locked versions of the Python packages that its parser imports, and a torch for
the CPU. The options of the parser, and its error message for each configuration, are written to
``recipes/engines/<recipe>.arguments.json``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from sm120kit import recipes, serving
from sm120kit.core.state import Workspace
from sm120kit.images import context
from sm120kit.images.records import Image
from sm120kit.recipes import configurations
from sm120kit.recipes import target as targets
from sm120kit.recipes.arguments import FORMAT, Node, record_path
from sm120kit.sources import wheelhouse
from sm120kit.sources.context import Options
from sm120kit.sources.records import LockedWheel
from sm120kit.sources.settings import read_settings
from sm120kit.wheels.overlay import locked_wheels, write_patched_members

CONTROL = "an option that no engine has"
"""Name of a command line that every parser must reject."""
TORCH = "torch==2.13.0"
HEAVY = re.compile(
    r"nvidia-|cuda-|torch|flash|b12x|quack|tilelang|tokenspeed|sglang-kernel|vllm$|sglang$|numba|llvmlite|opencv|scipy|pyarrow"
    r"|datasets|pandas|soundfile|timm|modelscope|decord|av$|supervisor|py-spy|kernels|networkx|airportsdata"
)
"""Distributions that are left out: with code for GPUs, large and not imported by a parser, or dependencies of torch."""


def main() -> None:
    all_configurations = [configurations.load(name) for name in configurations.names()]
    for engine in sys.argv[1:] or sorted({configuration.engine for configuration in all_configurations}):
        with tempfile.TemporaryDirectory(prefix="sm120kit-arguments-") as scratch:
            collect(engine, [c for c in all_configurations if c.engine == engine], Path(scratch))


def collect(name: str, of_engine: list[configurations.Configuration], scratch: Path) -> None:
    """Write the record of a recipe, with the parser's answers for the configurations of its engine."""
    engine = recipes.load_engine(name)
    wheels = unpack_engine(name, scratch / "engine")
    light = [f"{wheel.name}=={wheel.version}" for wheel in wheels.values() if not HEAVY.match(wheel.name)]
    python = environment(scratch, light)
    lines = {configuration.name: command_line(configuration, engine, scratch) for configuration in of_engine}
    lines[CONTROL] = [*(["--model-path"] if engine.engine == "sglang" else []), "/model", "--no-such-option"]
    done = subprocess.run(
        [python, Path(__file__).with_name("probe.py"), engine.engine],
        input=json.dumps(lines),
        env=os.environ | {"PYTHONPATH": str(scratch / "engine"), "HOME": str(scratch), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    parsed = json.loads(done.stdout)
    assert "--no-such-option" in parsed["answers"].pop(CONTROL), "the parser accepts an unknown option: its answers are void"
    wheel = wheels[engine.engine]
    record_path(name).write_text(record_text(name, {"filename": wheel.filename, "sha256": wheel.sha256}, parsed))
    for configuration, answer in parsed["answers"].items():
        print(f"{name}: {configuration}: {answer or 'accepted'}")


def unpack_engine(name: str, directory: Path, *, patched: bool = True) -> dict[str, LockedWheel]:
    """Write the Python files of a recipe's engine to ``directory``, and return the recipe's locked wheels by name."""
    target = targets.resolve(name, Options(Workspace.open(None)))
    assert isinstance(target, targets.EngineTarget)
    engine = target.recipe.engine
    wheels = locked_wheels(target)
    (packed,) = wheelhouse([wheels[engine]], target.options.workspace)
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(directory, [member for member in archive.namelist() if not member.endswith(".so")])
    if patched and target.engine_tree:
        write_patched_members(engine, target.engine_tree, packed, directory)
    return wheels


def environment(scratch: Path, requirements: list[str], then: tuple[str, ...] = (TORCH,)) -> Path:
    """The Python of a new environment with exactly these distributions, after which ``then`` is installed."""
    settings = read_settings()
    env = os.environ | ({"SSL_CERT_FILE": settings.certificates} if settings.certificates else {})
    python = scratch / "venv" / "bin" / "python"
    links = [argument for directory in settings.find_links for argument in ("--find-links", directory)]
    (scratch / "requirements").write_text("\n".join(requirements))
    uv = find_uv_bin()
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, scratch / "venv"], check=True, env=env)
    extra = [argument for index in settings.extra_index for argument in ("--extra-index-url", index)]
    install = [uv, "pip", "install", "-q", "--python", python, "--index-strategy", "unsafe-best-match", *links, *extra]
    subprocess.run([*install, "--no-deps", "-r", scratch / "requirements"], check=True, env=env)
    # It requires the other libraries of the DSL and replaces files of them: in images it is installed last.
    if last := [line for line in requirements if line.startswith("nvidia-cutlass-dsl-libs-cu13")]:
        subprocess.run([*install, "--no-deps", "--reinstall", *last], check=True, env=env)
    subprocess.run([*install, *then], check=True, env=env)
    return python


def command_line(configuration: configurations.Configuration, engine: recipes.EngineRecipe, scratch: Path) -> list[str]:
    """The arguments of the engine's server, as ``serve`` passes them."""
    image = Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "", 1)
    model = scratch / "model"
    model.mkdir(exist_ok=True)
    addresses = tuple(f"192.0.2.{number}" for number in range(1, configuration.hardware.nodes + 1))
    # The last node has the options of all others and --headless.
    node = Node(len(addresses) - 1, addresses, "eth0") if len(addresses) > 1 else None
    placement = serving.Placement([(0, "")], 8000, Workspace(scratch / "state"), node=node)
    service = serving.make_service(configuration, engine, image, image.id, model, placement)
    program = tuple(context.entrypoint(engine.serve) if engine.b12x else engine.serve)
    assert service.argv[: len(program)] == program
    return list(service.argv[len(program) :])


def record_text(name: str, wheel: dict[str, str], parsed: dict[str, Any]) -> str:
    """The text of a record: each option and each answer on its own line."""

    def rows(values: list[str]) -> str:
        return ",\n".join(f"  {value}" for value in values)

    options = rows([json.dumps(option) for option in sorted(parsed["options"], key=lambda option: option["names"])])
    answers = rows([f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(parsed["answers"].items())])
    head = f'"format": {FORMAT},\n"recipe": {json.dumps(name)},\n"wheel": {json.dumps(wheel)}'
    return f'{{\n{head},\n"answers": {{\n{answers}\n}},\n"options": [\n{options}\n]\n}}\n'


if __name__ == "__main__":
    main()
