"""Record the options of engines' argument parsers, without a GPU and without an image: ``collect.py [RECIPE]...``.

For each recipe that a configuration names, :mod:`parser_options` reads the options of the parser, and its
error message for each configuration; they are written to ``recipes/engines/<recipe>.arguments.json``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import parser_options

from sm120kit import recipes, serving
from sm120kit.core.workspace import Workspace
from sm120kit.engines.parser import record_path
from sm120kit.images import backends, image_inputs
from sm120kit.images.image_records import Image
from sm120kit.recipes import configurations
from sm120kit.recipes import target as targets
from sm120kit.sources.run_options import Options


def main() -> None:
    all_configurations = [configurations.load(name) for name in configurations.names()]
    for engine in sys.argv[1:] or sorted({configuration.engine for configuration in all_configurations}):
        collect(engine, [c for c in all_configurations if c.engine == engine])


def collect(name: str, of_engine: list[configurations.Configuration]) -> None:
    """Write the record of a recipe, with the parser's answers for the configurations of its engine."""
    target = targets.resolve(name, Options(Workspace.open(None)))
    assert isinstance(target, targets.EngineTarget)
    with tempfile.TemporaryDirectory(prefix="sm120kit-arguments-") as scratch:
        lines = {configuration.name: command_line(configuration, target.recipe, Path(scratch)) for configuration in of_engine}
    text, answers = parser_options.record(target, lines)
    record_path(name).write_text(text)
    for configuration, answer in answers.items():
        print(f"{name}: {configuration}: {answer or 'accepted'}")


def command_line(configuration: configurations.Configuration, engine: recipes.EngineRecipe, scratch: Path) -> list[str]:
    """The arguments of the engine's server, as ``serve`` passes them."""
    image = Image("sha256:1", "c" * 64, "linux/amd64", (), {}, "", 1)
    model = scratch / "model"
    model.mkdir(exist_ok=True)
    placement = serving.Placement([(0, "")], 8000, Workspace(scratch / "state"), node=backends.last_node(configuration))
    service = serving.make_service(configuration, engine, image, image.id, model, placement)
    program = image_inputs.server_program(engine)
    assert service.argv[: len(program)] == program
    return list(service.argv[len(program) :])


if __name__ == "__main__":
    main()
