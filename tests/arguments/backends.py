"""Record the back-ends that engines select on SM12x for each configuration, without a GPU: ``backends.py [RECIPE]...``.

A temporary environment has the locked distributions of a recipe, with their compiled libraries, and the patched Python files of
the engine. In it, the program that checks images takes each configuration's command line, with the ``config.json`` of its
checkpoint and a GPU of its kind, through the engine's own validation after parsing. The result is written to
``recipes/engines/<recipe>.backends.json``, see :mod:`sm120kit.images.backends`.
``backends.py --table`` prints the table of docs/measurements/backends.md, and ``backends.py --options`` that of
docs/measurements/speed-options.md, with the options of ``recipes/ablations.toml`` that the engine refuses.

About 10 GB of disk for an engine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.append(str(Path(__file__).parent))  # last: images have a module backends, too

import parser_options
import repositories

from sm120kit import recipes
from sm120kit.bench.ablation import configured
from sm120kit.core.workspace import Workspace
from sm120kit.engines import parser
from sm120kit.images import backends, checks
from sm120kit.kernels import driver_stub
from sm120kit.recipes import arguments, configurations, reported
from sm120kit.recipes import target as targets
from sm120kit.recipes.load import read_entries
from sm120kit.serving import flight_plan
from sm120kit.serving.checkpoint import described
from sm120kit.serving.derived_configuration import DRAFT_TOKENS, PLANNED_GPUS
from sm120kit.sources import resolver, wheelhouse
from sm120kit.sources.run_options import Options
from sm120kit.sources.source_records import LockedWheel
from sm120kit.wheels._overlay import locked_wheels, write_patched_members

FORMAT = 1
HERE = Path(__file__).parent
SUITES = Path(checks.__file__).parent / "suites"
LEFT_OUT = ("opencv-python-headless", "decord2")
"""Locked distributions that no selection imports."""
NEEDED = {"qwen3.5-122b-nvfp4-2x-rtx-pro-6000": "--mamba-scheduler-strategy"}
"""Options, each with its value, without which an engine refuses a configuration: that it does is recorded too."""
MISSING = {"sglang": ("quantized-draft-head", "b12x-experts", "b12x-linear")}
"""Options that an engine has not: names in the wheel of SGLang 0.5.23."""
USES = ("attention", "linear attention", "KV cache", "experts", "layers")
"""Columns of the table."""


def main() -> None:
    if printed := {"--table": table, "--options": options_table}.get("".join(sys.argv[1:])):
        print(printed())
        return
    for engine in sys.argv[1:] or sorted({configurations.load(name).engine for name in configurations.names()}):
        with tempfile.TemporaryDirectory(prefix="sm120kit-backends-") as scratch:
            record(engine, Path(scratch))


def record(name: str, scratch: Path) -> None:
    """Write the record of a recipe."""
    python, wheel = install(name, scratch)
    write_selection(name, python, scratch, wheel)


def engine_environment(name: str, scratch: Path) -> tuple[Path, dict[str, str]]:
    """The Python of a recipe's engine, and the variables with which it finds a stub of the driver."""
    python, _ = install(name, scratch)
    return python, variables(recipes.load_engine(name), python, scratch)


def install(name: str, scratch: Path) -> tuple[Path, LockedWheel]:
    """The Python of an environment with a recipe's engine, and its locked wheel."""
    target = targets.resolve(name, Options(Workspace.open(None)))
    assert isinstance(target, targets.EngineTarget)
    engine = target.recipe
    wheels = locked_wheels(target)
    flashinfer = recipes.load_flashinfer(engine.flashinfer).pin.version
    locked = [f"{wheel.name}=={wheel.version}" for wheel in wheels.values() if wheel.name not in LEFT_OUT]
    options = target.options
    last = ("--no-deps", f"flashinfer-python=={flashinfer}")
    python = parser_options.environment(scratch, locked, options.workspace, options.origin, last)
    leave_out(engine, python, options)
    wheel = wheels[engine.engine]
    if target.engine_tree:
        (packed,) = wheelhouse([wheel], target.options.workspace)
        write_patched_members(engine.engine, target.engine_tree, packed, site_of(python))
    return python, wheel


def leave_out(engine: recipes.EngineRecipe, python: Path, options: Options) -> None:
    """Remove the files of an environment that the image leaves out.

    A path that another distribution has, too, is a file of the other one then, which is installed again.
    """
    site = site_of(python)
    files = {each: {str(path) for path in each.files or ()} for each in importlib.metadata.distributions(path=[str(site)])}
    absent, owners = set(), set()
    for table in engine.leave_out:
        (owner,) = (each for each in files if each.name.replace("_", "-").lower() == table.distribution)
        absent |= {path for path in files[owner] if any(fnmatchcase(path, pattern) for pattern in table.files)}
        owners.add(owner)
    for path in absent:
        (site / path).unlink(missing_ok=True)
    if others := [f"{each.name}=={each.version}" for each in files if absent & files[each] and each not in owners]:
        resolver.install(python, ["--no-deps", "--reinstall", *others], options.workspace, options.origin)


def site_of(python: Path) -> Path:
    """The directory of an environment's packages."""
    return next(python.parents[1].glob("lib/python3*/site-packages"))


def write_selection(name: str, python: Path, scratch: Path, wheel: LockedWheel) -> None:
    """Select with an environment's Python for the configurations of a recipe, and write the record."""
    engine = recipes.load_engine(name)
    served = [c for c in map(configurations.load, configurations.names()) if c.engine == name]
    every = {configuration.name: backends.case(configuration) for configuration in served}
    cases = {key: case for key, case in every.items() if case}
    for key, option in NEEDED.items():
        if key in cases:
            argv = list(cases[key]["argv"])
            del argv[argv.index(option) : argv.index(option) + 2]
            cases[f"{key} without {option}"] = {**cases[key], "argv": argv}
    tried = {(each.name, option.name): case for each in served for option, case in with_options(each)}
    cases |= {" with ".join(key): case for key, case in tried.items()}
    answers = select(engine, python, scratch, cases)
    entries = {configuration.name: entry(configuration, answers.get(configuration.name)) for configuration in served}
    for key in NEEDED.keys() & entries.keys():
        entries[key]["refused_without"] = {NEEDED[key]: answers[f"{key} without {NEEDED[key]}"]["refusal"]}
    for key, option in tried:
        entries[key].setdefault("with", {})[option] = answers[f"{key} with {option}"]["refusal"]
    head = {"format": FORMAT, "recipe": name, "wheel": {"filename": wheel.filename, "sha256": wheel.sha256}}
    backends.record_path(name).write_text(record_text(head, entries, select_for_models(engine, python, scratch)))
    for key, value in entries.items():
        print(f"{name}: {key}: {value['refusal'] or value['not_validated'] or 'accepted'}")


def select_for_models(engine: recipes.EngineRecipe, python: Path, scratch: Path) -> dict[str, Any]:
    """What an engine selects for models without a configuration, each with what it selects by."""
    cases = model_cases(engine)
    given = {name: case for name, (_, case) in cases.items()}
    answers = probe(python, variables(engine, python, scratch), engine.engine, given)
    return {
        name: {"signature": cases[name][0], "refusal": answer["refusal"], "selected": answer["selected"]}
        for name, answer in answers.items()
    }


def model_cases(engine: recipes.EngineRecipe) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """The signature and the case of the program for each model of an engine, each type of the KV cache, and drafts."""
    record, found = parser.load(engine.name), dict[str, tuple[dict[str, Any], dict[str, Any]]]()
    assert record
    hardware = PLANNED_GPUS["dgx-spark" if engine.machine == "aarch64" else "rtx-pro-6000"]
    served = engine.served_by
    for name, config, requantized in repositories.cases():
        facts = described(config, name, 0)
        drafts = served.mtp_arguments(DRAFT_TOKENS) if facts.mtp_layers else ()
        usable = drafts and {facts.model_type, *facts.architectures} & {*record.models["mtp"]}
        fp8 = () if requantized else (served.options["kv_type"][0], served.fp8_cache)
        for options in dict.fromkeys(((), fp8, drafts if usable else ())):
            repository = name.partition(" ")[0]
            data = {"engine": engine.name, "arguments": [*options], "model": {"repository": repository}}
            made = configurations.completed(data | {"hardware": hardware.model_dump()}, "model")
            configuration = configurations.Configuration.model_validate(made)
            signature = flight_plan.signature(configuration, facts)
            known = signature in [each for each, _ in found.values()]
            if signature and not known and {*facts.architectures} & {*record.models["architectures"]}:
                found[" ".join((name, *options))] = (
                    signature,
                    {
                        "argv": list(arguments.serve_arguments(configuration)),
                        "environment": {},
                        "gpu": backends.gpu(configuration),
                        "model": {"repository": repository, "config": config},
                    },
                )
    return found


def probe(python: Path, env: dict[str, str], name: str, cases: dict[str, Any]) -> dict[str, Any]:
    """The answers of ``plans_probe.py`` in an environment."""
    argv = [python, HERE / "plans_probe.py", SUITES, name]
    done = subprocess.run(argv, input=json.dumps(cases), env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def with_options(configuration: configurations.Configuration) -> Iterator[tuple[reported.Ablation, dict[str, Any]]]:
    """The inputs of the program for a configuration with each option that changes its arguments."""
    for option in reported.ablations(configuration):
        if option.arguments and (case := backends.case(configured(configuration, option))):
            yield option, case


def select(engine: recipes.EngineRecipe, python: Path, scratch: Path, cases: dict[str, Any]) -> dict[str, Any]:
    """The answers of the program that the check of images runs, too."""
    program = SUITES / "engine" / "select_backends.py"
    argv, env = [python, program, engine.engine], variables(engine, python, scratch)
    done = subprocess.run(argv, input=json.dumps(cases), env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def variables(engine: recipes.EngineRecipe, python: Path, scratch: Path) -> dict[str, str]:
    """The environment of a program in an engine's Python: without settings of this host, with a stub of the driver."""
    home, stub = scratch / "home", scratch / "stub"
    for directory in (home, stub):
        directory.mkdir(exist_ok=True)
    site = site_of(python)
    write_stub(site, stub)
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "SGLANG_", "FLASHINFER_"))},
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_HOME": str(site / "nvidia" / "cu13"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(stub),
        **engine.env,
    }


def entry(configuration: configurations.Configuration, answer: dict[str, Any] | None) -> dict[str, Any]:
    """The entry of a configuration in a record."""
    return backends.inputs(configuration) | {
        "not_validated": backends.not_validated(configuration),
        **(answer or {"refusal": "", "selected": {}}),
    }


def write_stub(site: Path, directory: Path) -> None:
    """Write the stub of the CUDA driver that the checks of images use, for all libraries of an environment."""
    names = driver_stub.imported_names(path for path in site.rglob("*.so*") if path.is_file())
    (directory / driver_stub.SONAME).write_bytes(driver_stub.library(names))


def load_module(path: Path) -> ModuleType:
    """Load a module from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record_text(head: dict[str, Any], entries: dict[str, Any], models: dict[str, Any]) -> str:
    """The text of a record: each part of an entry on its own line, and each model on one."""
    blocks = []
    for name, entry in sorted(entries.items()):
        rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(entry.items()))
        blocks.append(f"  {json.dumps(name)}: {{\n{rows}\n  }}")
    top = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(models.items()))
    return f'{{\n{top}"configurations": {{\n' + ",\n".join(blocks) + f'\n}},\n"models": {{\n{lines}\n}}\n}}\n'


def entries() -> dict[str, tuple[str, dict[str, Any]]]:
    """The recipe and the recorded entry of each configuration that has one."""
    found = {}
    for name in configurations.names():
        engine = configurations.load(name).engine
        if recorded := backends.load(engine).get(name):
            found[name] = (engine, recorded)
    return found


def capable() -> dict[str, dict[str, dict[str, dict[str, str]]]]:
    """The table of what SM12x runs: by engine, use and back-end, its ``source`` and ``sm12x``."""
    return dict(tomllib.loads((HERE / "capable.toml").read_text()))


def table() -> str:
    """The recorded back-ends of all configurations as a table."""
    rows = [f"| configuration | engine | {' | '.join(USES)} | draft |", "|" + "---|" * (len(USES) + 3)]
    recorded = entries()
    for name in configurations.names():
        if name not in recorded:
            rows.append(f"| {name} | {configurations.load(name).engine} | not recorded |{' |' * len(USES)}")
            continue
        engine, entry = recorded[name]
        if entry["refusal"] or entry["not_validated"]:
            reason = f"refused: {entry['refusal']}" if entry["refusal"] else f"not validated: {entry['not_validated']}"
            rows.append(f"| {name} | {engine} | {reason} |{' |' * len(USES)}")
            continue
        selected = entry["selected"]
        cells = [", ".join(selected.get(use, ["none"])) for use in USES]
        draft = ", ".join(
            f"{use.removeprefix('draft: ')}: {', '.join(names)}" for use, names in selected.items() if use.startswith("draft: ")
        )
        rows.append(f"| {name} | {engine} | {' | '.join(cells)} | {draft or 'none'} |")
    return "\n".join(rows)


def options_table() -> str:
    """The options with what sets them, which configuration can have which, and why the engine refuses some."""
    options = read_entries(reported.Ablation, "ablations", "ablation")
    names = list(dict.fromkeys(option.name for option in options))
    rows = [f"| {each.name} | {each.engine} | `{each.text}` |" for each in options]
    rows += ["", f"| configuration | {' | '.join(names)} | drafter |", "|" + "---|" * (len(names) + 2)]
    recorded, reasons = entries(), []
    for configuration in map(configurations.load, configurations.names()):
        own = {option.name: option for option in options if configuration.engine.startswith(option.engine)}
        tried = recorded[configuration.name][1].get("with", {})
        if own:
            lacking = MISSING.get(configuration.served_by.name, ())
            cells = [
                option_state(configuration, own[name], tried) if name in own else "missing" * (name in lacking)
                for name in names
            ]
            rows.append(f"| {configuration.name} | {' | '.join(cells)} | {drafter_state(configuration)} |")
        reasons += [f"* {configuration.name}, {option}: {reason}" for option, reason in tried.items() if reason]
    return "\n".join([*rows, "", "What the engine answers where it refuses:", "", *reasons])


def option_state(configuration: configurations.Configuration, option: reported.Ablation, tried: dict[str, str]) -> str:
    """A cell of the table."""
    if option.is_in(configuration):
        value = option.arguments[-1] if option.arguments else ""
        return "on" if any(value in word for word in configuration.arguments) else "other value"
    if not option.applies(configuration):
        return ""
    return ("refused" if tried[option.name] else "accepted") if option.name in tried else "off"


def drafter_state(configuration: configurations.Configuration) -> str:
    """The draft models that an engine loads for a configuration."""
    known = reported.drafters(configuration.model.repository, recipes.load_engine(configuration.engine))
    states = ((each.repository, any(each.repository in word for word in configuration.arguments)) for each in known)
    return "; ".join(f"{repository}: {'on' if on else 'off'}" for repository, on in states)


if __name__ == "__main__":
    main()
