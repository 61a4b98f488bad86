"""The arguments of a configuration's server: what its engine's parser and lockfile make of them."""

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from sm120kit import recipes
from sm120kit.core.errors import BadInput
from sm120kit.core.outside import parse_json
from sm120kit.engines import Engine, Node, of_recipe, parser
from sm120kit.recipes import load_engine, locate, lock_path, lockfile
from sm120kit.recipes.configurations import DEFAULT_CACHES, Configuration, texts_only
from sm120kit.recipes.schema import EngineRecipe

PORT = 8000
"""The server's port in its container."""
MODEL_DIRECTORY = "/model"
"""Where the directory of the model is mounted in a container, read-only; in arguments, wherever it is mounted."""
ADDED_FILES = "/opt/sm120kit/files"
"""Where an image has the files that its recipe adds."""
ROOT_HOME, HOME = "/root", "/home/sm120kit"
"""Homes in the container: of root, the one that configurations name, and of the user in the images of sm120kit."""
MAX_REPOSITORY = 96
"""Limit of the Hub for the characters of an owner, and of a name."""
PLACES = (MODEL_DIRECTORY, ADDED_FILES, HOME, "/tmp")
"""What the container needs, beside caches; the last unless its root can be written."""


def require_known(configuration: Configuration) -> bool:
    """Reject a configuration whose arguments its engine's parser rejects. Returns :func:`are_known`."""
    if found := list(problems(configuration.model_dump(mode="json"))):
        listed = found[0] if len(found) == 1 else "\n".join(["", *(f"  {problem}" for problem in found)])
        raise BadInput(
            f"{configuration.name}: {listed}",
            f"correct its arguments; {parser.record_path(configuration.engine)} lists all options",
        )
    return are_known(configuration)


def are_known(configuration: Configuration) -> bool:
    """Whether the arguments were compared with the options of the engine: false if there are any, and these not recorded."""
    return parser.load(configuration.engine) is not None or not configuration.arguments


def problems(data: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the arguments in the content of a configuration's file: for the engine's parser, lockfile and image.

    Nothing for content of another form, and for an engine that no recipe builds.

    Raises:
        Mismatch: the lockfile of the engine is damaged.
    """
    name, argv = data.get("engine"), data.get("arguments")
    if not isinstance(name, str) or not texts_only(argv) or name not in recipes.names(EngineRecipe):
        return
    if missing := missing_extras(name, argv):
        yield (
            f"arguments need {', '.join(missing)}, which the lockfile of {name} lacks: add it to environment.requires of the"
            f" recipe and run `sm120kit recipe lock {name}`, or omit the argument"
        )
    known = parser.load(name)
    launched = (*of_recipe(name).model_arguments(MODEL_DIRECTORY), *argv)  # a word without an option is no second model
    for reason in parser.rejections(known, launched) if known else ():
        yield f"the argument parser of {name} rejects: {reason}"
    given, model = parser.options(name, argv), data.get("model")
    for option, meaning in _of_serve(of_recipe(name)).items():
        kept, remedy = _SERVED[meaning]
        same = (*kept, model.get("repository") if meaning == "model" and isinstance(model, dict) else "")
        if (given.get(option) or kept[0]) not in same:
            yield f"arguments: {option} {given[option]}: in the container it is {kept[0]}; omit it, and use {remedy}"
    repository = model.get("repository") if isinstance(model, dict) else ""
    longest = 255 if str(repository).startswith("local/") else MAX_REPOSITORY  # the name of a folder
    if isinstance(repository, str) and max(map(len, repository.split("/"))) > longest:
        yield f"model.repository: {repository[:200]!r} is no name of a repository; write it as the Hub does: owner/name"
    hardware = data.get("hardware")
    machines = hardware.get("nodes", 1) if isinstance(hardware, dict) else 1
    for option in of_recipe(name).options.get("nodes", ()):
        if option in given and not _fits(option, given[option], machines):
            yield f"arguments: {option} {given[option]}: hardware.nodes is {machines}; omit it, serve --nodes sets it"
    container = data.get("container")
    container = container if isinstance(container, dict) else {}
    mounts, caches = container.get("mounts"), container.get("caches", list(DEFAULT_CACHES))
    mounts = tuple(mounts) if isinstance(mounts, dict) else ()
    yield from _absent_files(name, argv, mounts)
    taken = PLACES[: -1 if container.get("writable_root") else None]
    yield from collisions(mounts, (*taken, *(caches if texts_only(caches) else ())))


def _fits(option: str, value: str, machines: object) -> bool:
    """Whether an option by which machines find each other fits their number: ``serve`` gives each one its own rank."""
    if option == "--nnodes":
        return value == str(machines)
    if machines != 1:
        return option != "--node-rank"
    return value == "0" if option == "--node-rank" else not option.endswith("-addr") or _is_loopback(value)


def _is_loopback(address: str) -> bool:
    """Whether an address, with a port or without one, is of this machine only."""
    host = re.sub(r"^\[(.*)\](:\d*)?$|^([^:]*):\d*$", r"\1\3", address)
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


_SERVED = {
    "model": ((MODEL_DIRECTORY,), "model.repository"),
    "host": (("0.0.0.0", "::"), "--listen of `sm120kit serve`"),
    "port": ((str(PORT),), "--port of `sm120kit serve`"),
}
"""Values of what ``serve`` sets, by meaning, with which its server is the same, and where others are stated."""


def _of_serve(engine: Engine) -> dict[str, str]:
    """The options of ``_SERVED`` with their meanings."""
    return {option: meaning for meaning in _SERVED for option in engine.options.get(meaning, ())}


def collisions(mounts: Sequence[str], taken: Sequence[str]) -> Iterator[str]:
    """Mounts at or above a place that the container needs, or in the directory of the model, which is read-only."""
    for target in mounts:
        path = PurePosixPath("/", posixpath.normpath(target).lstrip("/"))
        places = [place for place in taken if PurePosixPath(place).is_relative_to(path)]
        for place in (places or [MODEL_DIRECTORY] * path.is_relative_to(MODEL_DIRECTORY))[:1]:
            yield f"container.mounts: {target!r} collides with {place} of the container; mount it elsewhere"


def _absent_files(name: str, argv: Sequence[str], mounts: Sequence[str]) -> Iterator[str]:
    """Files that arguments name and the container does not have: neither the image, nor the model, nor a mount."""
    engine, given, record = of_recipe(name), parser.options(name, argv), parser.load(name)
    templates = record.models.get("templates", ()) if record else ()
    for option in engine.files:
        value = _path_in(given.get(option, ""))
        path = PurePosixPath(value)
        if value in templates or not _FILE.fullmatch(value) or any(map(path.is_relative_to, (MODEL_DIRECTORY, *mounts))):
            continue
        added = {f"{ADDED_FILES}/{file.path}" for file in load_engine(name).files}
        if value not in added:
            yield f"{option} {value} is neither in the image nor mounted: mount it with container.mounts"


def _path_in(value: str) -> str:
    """The path in the value of an option: of a draft model's JSON, or after the name of an adapter."""
    if not value.startswith("{"):
        return re.sub(r"^[\w.-]+=", "", value)
    with suppress(ValueError):
        return str(parse_json(value).get("model", ""))
    return ""


_FILE = re.compile(r"\.{0,2}/[^{\n]*|[^{\n]*\.(jinja2?|json|py|ya?ml|txt|pem|crt|key)")
"""A value that is a path. A chat template can also be its text, or for SGLang a name; a tokenizer a repository."""


def missing_extras(name: str, argv: Sequence[str]) -> tuple[str, ...]:
    """Distributions that an argument needs and the lockfile of an engine lacks; none without a lockfile.

    Raises:
        Mismatch: the lockfile is damaged.
    """
    path = lock_path(locate(name))
    if not path.is_file():
        return ()
    locked = {wheel.name for closure in lockfile.read(path).closures for wheel in closure.wheels}
    optional, pairs = of_recipe(name).optional, pairwise(parser.words(name, argv))
    return tuple(sorted({optional[pair] for pair in pairs if pair in optional} - locked))


def serve_arguments(
    configuration: Configuration,
    model: str = MODEL_DIRECTORY,
    address: tuple[str, int] = ("0.0.0.0", PORT),
    node: Node | None = None,
) -> tuple[str, ...]:
    """The arguments after the ``serve`` command of a configuration's engine.

    ``model`` is the model's directory in the container, and the server listens there on ``address``.
    """
    name = configuration.model.repository
    own, split = _of_serve(configuration.served_by), parser.split(configuration.engine, configuration.arguments)
    kept = [word for option, words in split if option not in own for word in words]
    given = [re.sub(f"^{MODEL_DIRECTORY}(?=/)", lambda _: model, argument) for argument in kept]
    return configuration.served_by.serve_arguments(model, name, address, given, node)


def help_text(engine: EngineRecipe) -> str:
    """The usage of an engine's serve command, from the recorded options: a line each, without their descriptions."""
    known = parser.load(engine.name)
    command = " ".join(engine.serve)
    lines = [f"{engine.served_by.name} {engine.version}, served by: {command} [ARGUMENT]...", ""]
    if known is None:
        lines.append(f"The options of {engine.name} were not recorded.")
    else:
        options = sorted(known.options, key=lambda option: option.names)
        lines += [f"  {', '.join(option.names)} {_value(option)}".rstrip() for option in options if option.names]
    lines += ["", "This container has no NVIDIA driver. With a GPU (docker run --gpus all), --help describes the options."]
    return "".join(f"{line}\n" for line in lines)


def _value(option: parser.Option) -> str:
    """The values of an option in the form of argparse."""
    value = f"{{{','.join(option.choices)}}}" if option.choices else {"int": "INT", "float": "FLOAT"}.get(option.type, "VALUE")
    if isinstance(option.nargs, int):
        return " ".join([value] * option.nargs)
    return {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} [{value} ...]"}.get(option.nargs or "", value)
