"""Ask engines' own argument parsers about our configurations, without a GPU and without an image: ``collect.py [RECIPE]...``.

For each recipe that a configuration names: the engine's wheel as it is locked (by sha256), only its Python unpacked; beside it,
in an environment that is thrown away, the locked versions of the Python that its parser imports and a torch for the CPU. What
the parser knows, and what it says to each configuration, is written to ``recipes/engines/<recipe>.arguments.json``.
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

from sm120kit import launch, lock, recipe
from sm120kit.recipe import configuration
from sm120kit.recipe.arguments import FORMAT, place_of
from sm120kit.records import Image, VerifiedImage
from sm120kit.sources import wheelhouse
from sm120kit.sources.settings import read_settings
from sm120kit.workspace import Workspace

CONTROL = "an option that no engine has"
TORCH = "torch==2.13.0"
HEAVY = re.compile(
    r"nvidia-|cuda-|torch|flash|b12x|quack|tilelang|tokenspeed|sglang-kernel|vllm$|sglang$|numba|llvmlite|opencv|scipy|pyarrow"
    r"|datasets|pandas|soundfile|timm|modelscope|decord|av$|supervisor|py-spy|kernels|networkx|airportsdata"
)
"""Distributions with code for GPUs, large ones that no parser imports, and what comes with torch."""


def main() -> None:
    wanted = [configuration.load(name) for name in configuration.names()]
    for name in sys.argv[1:] or sorted({one.engine for one in wanted}):
        with tempfile.TemporaryDirectory(prefix="sm120kit-arguments-") as scratch:
            collect(name, [one for one in wanted if one.engine == name], Path(scratch))


def collect(name: str, wanted: list[configuration.Configuration], scratch: Path) -> None:
    """Write the evidence of one recipe."""
    engine = recipe.load_engine(name)
    wheels = {wheel.name: wheel for wheel in lock.read(recipe.lock_path(name)).closures[0].wheels}
    (packed,) = wheelhouse([wheels[engine.engine]], Workspace.open(None))
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(scratch / "engine", [each for each in archive.namelist() if not each.endswith(".so")])
    python = environment(scratch, [f"{one.name}=={one.version}" for one in wheels.values() if not HEAVY.match(one.name)])
    lines = {one.name: command_line(one, engine, scratch) for one in wanted}
    lines[CONTROL] = [*(["--model-path"] if engine.engine == "sglang" else []), "/model", "--no-such-option"]
    done = subprocess.run(
        [python, Path(__file__).with_name("probe.py"), engine.engine],
        input=json.dumps(lines),
        env=os.environ | {"PYTHONPATH": str(scratch / "engine"), "HOME": str(scratch), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    assert "--no-such-option" in said["answers"].pop(CONTROL), "a parser that accepts this answers nothing"
    wheel = wheels[engine.engine]
    place_of(name).write_text(written(name, {"filename": wheel.filename, "sha256": wheel.sha256}, said))
    for config, answer in said["answers"].items():
        print(f"{name}: {config}: {answer or 'accepted'}")


def environment(scratch: Path, requirements: list[str]) -> Path:
    """A Python with these distributions, exactly, and torch."""
    settings = read_settings()
    env = os.environ | ({"SSL_CERT_FILE": settings.certificates} if settings.certificates else {})
    python = scratch / "venv" / "bin" / "python"
    links = [word for place in settings.find_links for word in ("--find-links", place)]
    (scratch / "requirements").write_text("\n".join(requirements))
    uv = find_uv_bin()
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, scratch / "venv"], check=True, env=env)
    install = [uv, "pip", "install", "-q", "--python", python, *links]
    subprocess.run([*install, "--no-deps", "-r", scratch / "requirements"], check=True, env=env)
    subprocess.run([*install, TORCH], check=True, env=env)
    return python


def command_line(wanted: configuration.Configuration, engine: recipe.EngineRecipe, scratch: Path) -> list[str]:
    """What the engine is started with, as launch makes it."""
    image = VerifiedImage(Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "", 1), "", "", (), {})
    model = scratch / "model"
    model.mkdir(exist_ok=True)
    service = launch.make(wanted, engine, image, image.image.id, model, [(0, "")], Workspace(scratch / "state"), 8000)
    return list(service.argv[len(engine.serve) :])


def written(name: str, wheel: dict[str, str], said: dict[str, Any]) -> str:
    """The evidence as text: one option or answer on a line."""

    def rows(values: list[str]) -> str:
        return ",\n".join(f"  {value}" for value in values)

    options = rows([json.dumps(one) for one in sorted(said["options"], key=lambda one: one["names"])])
    answers = rows([f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(said["answers"].items())])
    head = f'"format": {FORMAT},\n"recipe": {json.dumps(name)},\n"wheel": {json.dumps(wheel)}'
    return f'{{\n{head},\n"answers": {{\n{answers}\n}},\n"options": [\n{options}\n]\n}}\n'


if __name__ == "__main__":
    main()
