"""Record the back-ends that engines select on SM12x for each configuration, without a GPU: ``backends.py [RECIPE]...``.

A temporary environment has the locked distributions of a recipe, with their compiled libraries, and the patched Python files of
the engine. In it, ``select_<engine>.py`` takes each configuration's command line, with the ``config.json`` of its checkpoint
(``models/``) and a GPU of its kind, through the engine's own validation after parsing. The result is written to
``recipes/engines/<recipe>.backends.json``. ``backends.py --table`` prints the table of docs/measurements/backends.md.

About 10 GB of disk for an engine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

from sm120kit import recipes
from sm120kit.core.state import Workspace, data_root
from sm120kit.images import checks
from sm120kit.recipes import arguments, configurations
from sm120kit.recipes import target as targets
from sm120kit.sources import resolver, wheelhouse
from sm120kit.sources.context import Options
from sm120kit.sources.records import LockedWheel
from sm120kit.wheels import parser_options
from sm120kit.wheels.overlay import locked_wheels, write_patched_members

FORMAT = 1
HERE = Path(__file__).parent
GPUS: dict[str, dict[str, Any]] = {
    "RTX PRO 6000": {"capability": [12, 0], "multiprocessors": 188, "memory_gb": 96.0},
    "RTX 5090": {"capability": [12, 0], "multiprocessors": 170, "memory_gb": 32.0},
    "GB10": {"capability": [12, 1], "multiprocessors": 48, "memory_gb": 128.0, "integrated": True},
}
"""GPUs by a part of ``hardware.gpu``: SMs and memory of NVIDIA's product pages."""
TOKENS = ("<unk>", "<think>", "</think>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>")
"""Tokens of the tokenizer beside ``config.json``: vLLM reads those that delimit reasoning, and nothing else of it."""
LEFT_OUT = ("opencv-python-headless", "decord2")
"""Locked distributions that no selection imports."""
NEEDED = {"qwen3.5-122b-nvfp4-2x-rtx-pro-6000": "--mamba-scheduler-strategy"}
"""Options, each with its value, without which an engine refuses a configuration: that it does is recorded too."""
USES = ("attention", "linear attention", "KV cache", "experts", "layers")
"""Columns of the table."""


def main() -> None:
    if sys.argv[1:] == ["--table"]:
        print(table())
        return
    for engine in sys.argv[1:] or sorted({configurations.load(name).engine for name in configurations.names()}):
        with tempfile.TemporaryDirectory(prefix="sm120kit-backends-") as scratch:
            record(engine, Path(scratch))


def record(name: str, scratch: Path) -> None:
    """Write the record of a recipe."""
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
    write_selection(name, python, scratch, wheel)


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
    collect = load_module(HERE / "collect.py")
    cases, kept = {}, {}
    for configuration in served(name):
        kept[configuration.name] = inputs(configuration)
        if (model := checkpoint(configuration)) is not None:
            directory = write_model(model, scratch / "models")
            argv = arguments.serve_arguments(configuration, engine, str(directory), node=collect.node_of(configuration))
            cases[configuration.name] = {"argv": argv, "environment": {**configuration.environment}, "gpu": gpu(configuration)}
    for key, option in NEEDED.items():
        if key in cases:
            argv = list(cases[key]["argv"])
            del argv[argv.index(option) : argv.index(option) + 2]
            cases[f"{key} without {option}"] = {**cases[key], "argv": argv}
    home = scratch / "home"
    home.mkdir(exist_ok=True)
    site = site_of(python)
    (scratch / "stub").mkdir(exist_ok=True)
    write_stub(site, scratch / "stub")
    env = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("VLLM_", "SGLANG_", "FLASHINFER_"))},
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "CUDA_HOME": str(site / "nvidia" / "cu13"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(scratch / "stub"),
        **engine.env,
    }
    program = HERE / f"select_{engine.engine}.py"
    done = subprocess.run([python, program], input=json.dumps(cases), env=env, stdout=subprocess.PIPE, text=True, check=True)
    answers = json.loads(done.stdout)
    entries = {key: value | result(answers.get(key), scratch) for key, value in kept.items()}
    for key in NEEDED.keys() & entries.keys():
        entries[key]["refused_without"] = {NEEDED[key]: result(answers[f"{key} without {NEEDED[key]}"], scratch)["refusal"]}
    head = {"format": FORMAT, "recipe": name, "wheel": {"filename": wheel.filename, "sha256": wheel.sha256}}
    record_path(name).write_text(record_text(head, entries))
    for key, entry in entries.items():
        print(f"{name}: {key}: {entry['refusal'] or entry['not_validated'] or 'accepted'}")


def result(answer: dict[str, Any] | None, scratch: Path) -> dict[str, Any]:
    """The part of a record's entry that the engine determines."""
    if answer is None:
        return {"not_validated": "the config.json of its checkpoint is not established", "refusal": "", "selected": {}}
    refusal = answer["refusal"].replace(str(scratch / "models"), "").splitlines()
    return {"not_validated": "", "refusal": " ".join(line.strip() for line in refusal)[:400], "selected": answer["selected"]}


def inputs(configuration: configurations.Configuration) -> dict[str, Any]:
    """What a selection depends on; a record whose inputs are not those of its configuration is out of date."""
    path = model_path(configuration)
    model = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
    return {
        "arguments": list(configuration.arguments),
        "environment": dict(sorted(configuration.environment.items())),
        "gpu": gpu(configuration),
        "model": model,
    }


def served(engine: str) -> list[configurations.Configuration]:
    """The configurations of a recipe."""
    return [c for c in map(configurations.load, configurations.names()) if c.engine == engine]


def gpu(configuration: configurations.Configuration) -> dict[str, Any]:
    """The GPU of a configuration."""
    (kind,) = [kind for kind in GPUS if kind in configuration.hardware.gpu]
    return {"name": f"NVIDIA {kind}", **GPUS[kind]}


def model_path(configuration: configurations.Configuration) -> Path:
    """Path of a checkpoint's ``config.json`` with its source."""
    return HERE / "models" / f"{configuration.model.repository.replace('/', '--')}.json"


def checkpoint(configuration: configurations.Configuration) -> dict[str, Any] | None:
    """The ``config.json`` of a configuration's checkpoint, with its source; None if it is not established."""
    path = model_path(configuration)
    return dict(json.loads(path.read_text())) if path.is_file() else None


def write_model(model: dict[str, Any], directory: Path) -> Path:
    """Write a model's directory: its ``config.json`` and a tokenizer of a few tokens."""
    path = directory / model["repository"].replace("/", "--")
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in vocabulary.items()],
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": TOKENS[0]},
        **dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")),
    }
    (path / "config.json").write_text(json.dumps(model["config"]))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def write_stub(site: Path, directory: Path) -> None:
    """Write the stub of the CUDA driver that the checks of images use, for all libraries of an environment."""
    stub = load_module(Path(checks.__file__).parent / "suites" / "driver_stub.py")
    names = stub.imported_names(path for path in site.rglob("*.so*") if path.is_file())
    (directory / stub.SONAME).write_bytes(stub.library(names))


def load_module(path: Path) -> ModuleType:
    """Load a module from its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record_path(recipe: str) -> Path:
    """Path of the record of the back-ends that a recipe's engine selects."""
    return data_root() / "recipes" / "engines" / f"{recipe}.backends.json"


def record_text(head: dict[str, Any], entries: dict[str, Any]) -> str:
    """The text of a record: each part of an entry on its own line."""
    blocks = []
    for name, entry in sorted(entries.items()):
        rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in sorted(entry.items()))
        blocks.append(f"  {json.dumps(name)}: {{\n{rows}\n  }}")
    top = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items())
    return f'{{\n{top}"configurations": {{\n' + ",\n".join(blocks) + "\n}\n}\n"


def entries() -> dict[str, tuple[str, dict[str, Any]]]:
    """The recipe and the recorded entry of each configuration that has one."""
    found = {}
    for name in configurations.names():
        engine = configurations.load(name).engine
        if record_path(engine).is_file():
            recorded = json.loads(record_path(engine).read_text())["configurations"]
            if name in recorded:
                found[name] = (engine, recorded[name])
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


if __name__ == "__main__":
    main()
