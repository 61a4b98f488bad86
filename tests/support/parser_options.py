"""Record the options of an engine's own argument parser, without a GPU and without an image.

The Python files of the engine's locked wheel (by sha256) are unpacked and patched by its series. A temporary environment has
the locked versions of the Python packages that its parser imports, and a torch for the CPU.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sm120kit import engines
from sm120kit.core import archives, process, reporting
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import CheckFailed, CommandFailed, NotFound
from sm120kit.core.workspace import Workspace
from sm120kit.recipes.target import EngineTarget
from sm120kit.sources import Origin, resolver, wheelhouse
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels._overlay import locked_wheels, write_patched_members

FORMAT = 1
"""Format of the records."""
CONTROL = "an option that no engine has"
"""Name of a command line that every parser must reject."""
TORCH = "torch==2.13.0"
DISK_BYTES = 8 * 10**9
"""For the engine's wheel, uv's cache and the environment: torch of the package index requires NVIDIA's libraries."""
HEAVY = re.compile(
    r"nvidia-|cuda-|torch|flash|b12x|quack|tilelang|tokenspeed|sglang-kernel|numba|llvmlite|opencv|scipy|pyarrow"
    r"|datasets|pandas|soundfile|timm|modelscope|decord|av$|supervisor|py-spy|kernels|networkx|airportsdata"
)
"""Distributions that are left out: with code for GPUs, large and not imported by a parser, or dependencies of torch."""


def is_light(distribution: str) -> bool:
    """Whether a distribution is installed for a parser: the engine itself is unpacked instead."""
    return not HEAVY.match(distribution) and engines.find(distribution) is None


def record(target: EngineTarget, lines: Mapping[str, Sequence[str]]) -> tuple[str, dict[str, str]]:
    """The text of the record of a recipe's engine, and the parser's answers to the command lines ``lines``, by their names.

    Raises:
        ResourceUnavailable: the environment does not fit.
        FetchFailed, OfflineMiss: the engine's wheel cannot be fetched.
        CommandFailed: uv cannot create the environment, or the parser cannot be imported in it.
        NotFound: the engine has no parser.
        CheckFailed: the parser accepts an option that no engine has.
    """
    workspace, engine = target.options.workspace, target.recipe.served_by
    if engine.parser is None:
        raise NotFound(f"{engine.title} has no parser whose options can be recorded", "name a recipe of vLLM or SGLang")
    require_disk(workspace.root, DISK_BYTES, f"an environment for the argument parser of {target.recipe.name}")
    control = [*engine.model_arguments("/model"), "--no-such-option"]
    given = {"parser": inspect.getsource(engine.parser), "lines": {**lines, CONTROL: control}}
    with workspace.scratch() as scratch:
        wheels = unpack_engine(target, scratch / "engine")
        models = engine.model_names(scratch / "engine")
        light = [f"{wheel.name}=={wheel.version}" for wheel in wheels.values() if is_light(wheel.name)]
        with reporting.step(f"installing what the argument parser of {target.recipe.name} imports"):
            python = environment(scratch, light, workspace, target.options.origin)
        done = process.run(
            [python, Path(__file__).with_name("parser_probe.py")],
            stdin=json.dumps(given).encode(),
            env={"PYTHONPATH": str(scratch / "engine"), "HOME": str(scratch), "CUDA_VISIBLE_DEVICES": ""},
        )
    try:
        parsed = json.loads(done.stdout)
    except ValueError as error:
        raise CommandFailed(f"the argument parser of {target.recipe.name} printed no options", done.stderr[-500:]) from error
    if "--no-such-option" not in parsed["answers"].pop(CONTROL):
        raise CheckFailed(
            f"the argument parser of {target.recipe.name} accepts --no-such-option: its answers are void",
            f"the engine has another parser than that of sm120kit.engines.{engine.name}",
        )
    wheel = wheels[engine.name]
    found = parsed | {"models": models}
    text = record_text(target.recipe.name, {"filename": wheel.filename, "sha256": wheel.sha256}, found)
    return text, parsed["answers"]


def unpack_engine(target: EngineTarget, directory: Path, *, patched: bool = True) -> dict[str, LockedWheel]:
    """Write the Python files of a recipe's engine to ``directory``, and return the recipe's locked wheels by name."""
    engine, wheels = target.recipe.engine, locked_wheels(target)
    (packed,) = wheelhouse([wheels[engine]], target.options.workspace, target.options.origin)
    with archives.open_wheel(packed) as archive:
        archive.extractall(directory, [member for member in archive.namelist() if not member.endswith(".so")])
    if patched and target.engine_tree:
        write_patched_members(engine, target.engine_tree, packed, directory)
    return wheels


def environment(
    scratch: Path, requirements: Sequence[str], workspace: Workspace, origin: Origin, then: Sequence[str] = (TORCH,)
) -> Path:
    """The Python of a new environment with exactly these distributions, after which ``then`` is installed.

    Files are links to those in the state directory's cache of uv, if it is on the same file system.
    """
    directory, listed = scratch / "venv", scratch / "requirements"
    listed.write_text("\n".join(requirements))
    python = directory / "bin" / "python"
    process.run([resolver.uv_program(), "venv", "-q", "--python", sys.executable, directory])
    resolver.install(python, ["--no-deps", "-r", listed], workspace, origin)
    # It requires the other libraries of the DSL and replaces files of them: in images it is installed last.
    if last := [line for line in requirements if line.startswith("nvidia-cutlass-dsl-libs-cu13")]:
        resolver.install(python, ["--no-deps", "--reinstall", *last], workspace, origin)
    resolver.install(python, then, workspace, origin)
    return python


def with_answers(text: str, former: str) -> str:
    """The text of a record with the answers of another one, if both are of one wheel with the same options."""
    record, before = json.loads(text), json.loads(former)
    if (before["wheel"], before["options"]) != (record["wheel"], record["options"]):
        return text
    return record_text(record["recipe"], record["wheel"], record | {"answers": before["answers"]})


def record_text(name: str, wheel: Mapping[str, str], parsed: Mapping[str, Any]) -> str:
    """The text of a record: each option, each answer and each kind of names of models on its own line."""

    def rows(values: list[str]) -> str:
        return ",\n".join(f"  {value}" for value in values)

    options = rows([json.dumps(option) for option in sorted(parsed["options"], key=lambda option: option["names"])])
    answers = rows([f"{json.dumps(key)}: {json.dumps(value)}" for key, value in sorted(parsed["answers"].items())])
    head = f'"format": {FORMAT},\n"recipe": {json.dumps(name)},\n"wheel": {json.dumps(wheel)}'
    listed = parsed.get("models") or {}
    models = rows([f"{json.dumps(kind)}: {json.dumps(names)}" for kind, names in sorted(listed.items())])
    last = f',\n"models": {{\n{models}\n}}' if listed else ""
    return f'{{\n{head},\n"answers": {{\n{answers}\n}},\n"options": [\n{options}\n]{last}\n}}\n'
