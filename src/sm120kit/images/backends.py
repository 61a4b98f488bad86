"""The back-ends that an engine selects on SM12x for its configurations, as recorded beside its recipe.

``tests/arguments/backends.py`` writes the records, and the check ``backends`` of images compares with them; both run
``checks/suites/engine/select_backends.py``. The ``config.json`` of checkpoints are in ``recipes/checkpoints/``.
"""

from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from sm120kit.core import data_roots
from sm120kit.core.digests import file_sha256
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json
from sm120kit.engines import Node, parser
from sm120kit.recipes import arguments
from sm120kit.recipes.architectures import recorded_config
from sm120kit.recipes.configurations import Configuration

GPUS: dict[str, dict[str, Any]] = {
    "RTX PRO 6000": {"capability": [12, 0], "multiprocessors": 188, "memory_gb": 96.0},
    "RTX 5090": {"capability": [12, 0], "multiprocessors": 170, "memory_gb": 32.0},
    "GB10": {"capability": [12, 1], "multiprocessors": 48, "memory_gb": 128.0, "integrated": True},
}
"""GPUs by a part of ``hardware.gpu``: SMs and memory of NVIDIA's product pages."""


SELECTS_NOTHING = ("reasoning_parser", "tool_parser", "context", "memory_share")
"""Meanings of options that do not matter for back-ends."""


def record_path(recipe: str) -> Path:
    """Path of the record of a recipe."""
    return data_roots.find("engines", f"{recipe}.backends.json")


def load(recipe: str) -> dict[str, dict[str, Any]]:
    """The recorded entries of a recipe by configuration, none without a record.

    Raises:
        BadInput: the record is damaged.
    """
    return {name: {"refusal": "", "selected": {}, **entry} for name, entry in _read(recipe, "configurations").items()}


def models(recipe: str) -> list[dict[str, Any]]:
    """What is recorded for models without a configuration: ``model``, ``signature``, ``refusal`` and ``selected`` of each.

    Raises:
        BadInput: the record is damaged.
    """
    blank = {"signature": {}, "refusal": "", "selected": {}}
    return [{**blank, **entry, "model": name} for name, entry in _read(recipe, "models").items()]


def _read(recipe: str, table: str) -> dict[str, dict[str, Any]]:
    path = record_path(recipe)
    if not path.is_file():
        return {}
    try:
        return {name: dict(entry) for name, entry in {"models": {}, **parse_json(path.read_bytes())}[table].items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise BadInput(f"{path} is not a record of back-ends: {error!r}", "restore it") from error


def expected(recipe: str, served: Iterable[Configuration]) -> dict[str, dict[str, Any]]:
    """What the image of a recipe must select: ``refusal`` and ``selected`` by configuration, and the ``case`` of the program.

    ``case`` is None for a configuration that was not recorded, or differently: its answer is not established.

    Raises:
        BadInput: the record is damaged.
    """
    recorded = load(recipe)
    requirements = {}
    for configuration in served:
        entry = recorded.get(configuration.name, {})
        requirements[configuration.name] = {
            "refusal": entry.get("refusal", ""),
            "selected": entry.get("selected", {}),
            "case": case(configuration) if is_current(entry, configuration) else None,
        }
    return requirements


def refused_options(configuration: Configuration) -> dict[str, str]:
    """The recorded refusals of an engine by ablation, none of a configuration that was not recorded as it is now.

    Raises:
        BadInput: the record is damaged.
    """
    entry = load(configuration.engine).get(configuration.name, {})
    tried = entry.get("with", {}) if is_current(entry, configuration) else {}
    return {option: refusal for option, refusal in tried.items() if refusal}


def is_current(entry: Mapping[str, Any], configuration: Configuration) -> bool:
    """Whether an entry was recorded for what selects the back-ends of a configuration now."""
    return all(entry.get(key) == value for key, value in inputs(configuration).items())


def case(configuration: Configuration) -> dict[str, Any] | None:
    """The input of the program for a configuration; None if there is a reason why it is not validated.

    A draft model of another repository is left out: its ``config.json`` is not recorded. ``selected_as`` in the record of a
    model has the class of its language model, if the configuration of other parts is not known.
    """
    if not_validated(configuration):
        return None
    model = parse_json(model_path(configuration).read_bytes())
    return {
        "argv": list(arguments.serve_arguments(_without_drafter(configuration), node=last_node(configuration))),
        "environment": {**configuration.environment},
        "gpu": gpu(configuration),
        "model": {"repository": model["repository"], "config": model["config"] | model.get("selected_as", {})},
    }


def _without_drafter(configuration: Configuration) -> Configuration:
    """The configuration without speculation if that names the repository of a draft model."""
    groups = parser.split(configuration.engine, configuration.arguments)
    drafting = [words for option, words in groups if option.startswith("--speculative")]
    if not any("/" in word for words in drafting for word in words):
        return configuration
    return configuration.model_copy(
        update={"arguments": tuple(chain(*(words for _, words in groups if words not in drafting)))}
    )


def not_validated(configuration: Configuration) -> str:
    """Why no selection is recorded for a configuration, "" if one is."""
    path = model_path(configuration)
    if not path.is_file():
        return "the config.json of its checkpoint is not established"
    return str(parse_json(path.read_bytes()).get("not_validated", ""))


def inputs(configuration: Configuration) -> dict[str, Any]:
    """What a selection depends on; a record whose inputs are not those of its configuration is out of date.

    Parsers of answers, the length of sequences and the share of memory select no back-end.
    """
    path = model_path(configuration)
    return {
        "arguments": _selecting(configuration),
        "environment": dict(sorted(configuration.environment.items())),
        "gpu": gpu(configuration),
        "model": file_sha256(path) if path.is_file() else "",
    }


def _selecting(configuration: Configuration) -> list[str]:
    """The arguments without the options of :data:`SELECTS_NOTHING`."""
    engine, words = configuration.served_by, [*configuration.arguments]
    names = {name for meaning in SELECTS_NOTHING for name in engine.options.get(meaning, ())}
    for name in names & {*words}:
        del words[words.index(name) : words.index(name) + 2]
    return [word for word in words if word not in engine.tool_arguments]


def gpu(configuration: Configuration) -> dict[str, Any]:
    """The GPU of a configuration, empty if it is none of :data:`GPUS`."""
    kinds = [kind for kind in GPUS if kind in configuration.hardware.gpu]
    return {"name": f"NVIDIA {kinds[0]}", **GPUS[kinds[0]]} if kinds else {}


def model_path(configuration: Configuration) -> Path:
    """Path of the ``config.json`` of a configuration's checkpoint, with its source."""
    return recorded_config(configuration.model.repository)


def last_node(configuration: Configuration) -> Node | None:
    """The last node of a configuration for several machines, which has the options of all others and --headless."""
    addresses = tuple(f"192.0.2.{number}" for number in range(1, configuration.hardware.nodes + 1))
    return Node(len(addresses) - 1, addresses, "eth0") if len(addresses) > 1 else None
