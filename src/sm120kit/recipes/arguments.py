"""Check a configuration's arguments against the options of its engine, without the engine.

``recipe new --arguments`` and ``tests/arguments/collect.py`` record the options of the argument parser in the locked wheel, in
``recipes/engines/<recipe>.arguments.json`` beside the recipe.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from sm120kit.core.errors import BadRecipe
from sm120kit.core.outside import parse_json
from sm120kit.core.state import data_root
from sm120kit.recipes import load_engine, locate, lock_path, lockfile
from sm120kit.recipes.configurations import Configuration
from sm120kit.recipes.load import did_you_mean
from sm120kit.recipes.schema import EngineRecipe

PORT = 8000
"""The server's port in its container."""
MODEL_DIRECTORY = "/model"
"""Where the directory of the model is mounted in a container, read-only."""

MASTER_PORT = 29501
"""Port of the first node on which the others meet it: vLLM's default (0.33.0, vllm/config/parallel.py)."""

HOST_ADDRESS = {"vllm": "VLLM_HOST_IP", "sglang": "SGLANG_HOST_IP"}
"""Variables with the address of a machine for the others: vLLM's ``envs.py``, SGLang's srt/utils/network.py."""

OPTIONAL = {
    ("vllm", "--load-format", "fastsafetensors"): "fastsafetensors",
    ("vllm", "--load-format", "instanttensor"): "instanttensor",
    ("vllm", "--load-format", "runai_streamer"): "runai-model-streamer",
    ("vllm", "--load-format", "runai_streamer_sharded"): "runai-model-streamer",
    ("vllm", "--load-format", "tensorizer"): "tensorizer",
    ("vllm", "--moe-backend", "b12x"): "b12x",
    ("vllm", "--linear-backend", "b12x"): "b12x",
    ("sglang", "--moe-runner-backend", "b12x"): "b12x",
    ("sglang", "--fp4-gemm-backend", "b12x"): "b12x",
}
"""Distributions that an engine imports only with a value of an option: the optional extras in its METADATA."""

_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "loads": parse_json}
"""Types of values that are checked. All others are functions of the engine, which is not available."""


@dataclass(frozen=True)
class Option:
    """An option with its names; no names for a positional argument. ``nargs`` and ``choices`` as in argparse."""

    names: tuple[str, ...]
    nargs: str | int | None
    type: str
    choices: tuple[str, ...] | None


@dataclass(frozen=True)
class Arguments:
    """The options of the parser in an engine's wheel (by sha256).

    ``answers`` are the parser's own error messages for each configuration that names this recipe; empty for a command line
    that it accepts.
    """

    recipe: str
    wheel_sha256: str
    options: tuple[Option, ...]
    answers: dict[str, str]


@dataclass(frozen=True)
class Node:
    """One of the machines that a server spans: number ``rank`` of those with these ``addresses``, the first of which serves.

    ``interface`` is the network interface with its address, and ``rdma`` are the RDMA devices that transfer data, none for TCP.
    """

    rank: int
    addresses: tuple[str, ...]
    interface: str
    rdma: tuple[str, ...] = ()

    @property
    def address(self) -> str:
        """The address of this machine."""
        return self.addresses[self.rank]


def record_path(recipe: str) -> Path:
    """Path of the record of a recipe's options."""
    return data_root() / "recipes" / "engines" / f"{recipe}.arguments.json"


def load(recipe: str) -> Arguments | None:
    """The recorded options of a recipe's engine, or None without a record.

    Raises:
        BadRecipe: the record is damaged.
    """
    path = record_path(recipe)
    if not path.is_file():
        return None
    try:
        record = parse_json(path.read_bytes())
        options = tuple(map(_option, record["options"]))
        return Arguments(record["recipe"], record["wheel"]["sha256"], options, record["answers"])
    except (ValueError, KeyError, TypeError) as error:
        raise BadRecipe(f"{path} is not a record of arguments: {error!r}", "restore it") from error


@cache
def recorded() -> tuple[Arguments, ...]:
    """All records of options, by recipe.

    Raises:
        BadRecipe: a record is damaged.
    """
    suffix = ".arguments.json"
    names = sorted(path.name.removesuffix(suffix) for path in record_path("").parent.glob(f"*{suffix}"))
    return tuple(record for name in names if (record := load(name)))


def accepts(record: Arguments, name: str, value: str = "") -> bool | None:
    """Whether a parser has an option and, if given, permits its value; None if it has the option without a list of values."""
    option = next((option for option in record.options if name in option.names), None)
    if option is None or not value:
        return option is not None
    return None if option.choices is None else value in option.choices


def _option(table: dict[str, Any]) -> Option:
    choices = table["choices"]
    return Option(tuple(table["names"]), table["nargs"], table["type"], None if choices is None else tuple(choices))


def require_known(configuration: Configuration) -> None:
    """Reject a configuration whose arguments its engine's parser rejects.

    A configuration passes if there is no record of its engine's options.

    Raises:
        BadRecipe: an argument is rejected, or needs a distribution that is not locked; the message has the reason.
    """
    if missing := missing_extras(configuration):
        engine = configuration.engine
        raise BadRecipe(
            f"{configuration.name}: its arguments need {', '.join(missing)}, which the lockfile of {engine} lacks",
            f"add it to environment.requires of the recipe and run `sm120kit recipe lock {engine}`; or omit the argument",
        )
    known = load(configuration.engine)
    reason = rejection(known, configuration.arguments) if known else ""
    if reason:
        raise BadRecipe(
            f"{configuration.name}: the argument parser of {configuration.engine} rejects: {reason}",
            f"correct its arguments; {record_path(configuration.engine)} lists all options",
        )


def missing_extras(configuration: Configuration) -> tuple[str, ...]:
    """Distributions that an argument of a configuration needs and the lockfile of its engine lacks; none without a lockfile.

    Raises:
        LockDiffers: the lockfile is damaged.
    """
    path = lock_path(locate(configuration.engine))
    if not path.is_file():
        return ()
    locked = {wheel.name for closure in lockfile.read(path).closures for wheel in closure.wheels}
    engine = load_engine(configuration.engine).engine
    pairs = pairwise([word for argument in configuration.arguments for word in argument.split("=", 1)])
    needed = {OPTIONAL[key] for name, value in pairs if (key := (engine, name, value)) in OPTIONAL}
    return tuple(sorted(needed - locked))


def serve_arguments(
    configuration: Configuration,
    engine: EngineRecipe,
    model: str = MODEL_DIRECTORY,
    address: tuple[str, int] = ("0.0.0.0", PORT),
    node: Node | None = None,
) -> tuple[str, ...]:
    """The arguments after the ``serve`` command of an engine.

    ``model`` is the model's directory in the container, and the server listens there on ``address``.
    """
    named = (model,) if engine.engine == "vllm" else ("--model-path", model)
    listen = ("--host", address[0], "--port", str(address[1]))
    span = node_arguments(engine, node) if node else ()
    # vLLM always has metrics.
    metrics = ["--enable-metrics"] * (engine.engine == "sglang" and "--enable-metrics" not in configuration.arguments)
    return (*named, "--served-model-name", configuration.model.repository, *listen, *metrics, *span, *configuration.arguments)


def node_arguments(engine: EngineRecipe, node: Node) -> tuple[str, ...]:
    """The arguments by which an engine's server spans several machines.

    Sources: vLLM, docs/serving/parallelism_scaling.md, "Running vLLM with MultiProcessing"; SGLang,
    docs/references/multi_node_deployment.
    """
    head = node.addresses[0]
    common = ("--nnodes", str(len(node.addresses)), "--node-rank", str(node.rank))
    if engine.engine == "sglang":
        return (*common, "--dist-init-addr", f"[{head}]:{MASTER_PORT}" if ":" in head else f"{head}:{MASTER_PORT}")
    return (*common, "--master-addr", head, "--master-port", str(MASTER_PORT), *["--headless"] * (node.rank > 0))


def node_environment(engine: EngineRecipe, node: Node) -> dict[str, str]:
    """Variables with which a machine's processes find those of the others.

    Without them, Gloo binds to the address of the host's name, which can be 127.0.1.1, and the engines to another one, such as
    that of the default route (vLLM 0.33.0, vllm/utils/network_utils.py ``get_ip``; SGLang 0.5.11, srt/utils/network.py
    ``get_local_ip_auto``). NCCL takes names as prefixes unless they start with "=" (its manual, NCCL_SOCKET_IFNAME,
    NCCL_IB_HCA).
    """
    return {
        **({"NCCL_IB_HCA": f"={','.join(node.rdma)}"} if node.rdma else {}),
        "NCCL_SOCKET_IFNAME": f"={node.interface}",
        "GLOO_SOCKET_IFNAME": node.interface,
        HOST_ADDRESS[engine.engine]: node.address,
    }


def rejection(known: Arguments, argv: Sequence[str]) -> str:
    """The reason why the engine's parser rejects ``argv``; empty if it accepts. Abbreviated options are rejected."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    for option in known.options:
        if not option.names:
            parser.add_argument("positional", nargs=option.nargs)
        elif option.nargs == 0:
            parser.add_argument(*option.names, action="store_true")
        else:
            action = parser.add_argument(*option.names, nargs=option.nargs, type=_TYPES.get(option.type, str))
            action.choices = None if option.choices is None else _TextChoices(option.choices)
    try:
        _, rest = parser.parse_known_args(list(argv))
    except ValueError as error:
        return str(error)
    names = [name for option in known.options for name in option.names]
    return "; ".join(f"unknown argument {argument}{did_you_mean(argument, names)}" for argument in rest)


def help_text(engine: EngineRecipe) -> str:
    """The usage of an engine's serve command, from the recorded options: a line each, without their descriptions."""
    known = load(engine.name)
    command = " ".join(engine.serve)
    lines = [f"{engine.engine} {engine.version}, served by: {command} [ARGUMENT]...", ""]
    if known is None:
        lines.append(f"The options of {engine.name} were not recorded.")
    else:
        options = sorted(known.options, key=lambda option: option.names)
        lines += [f"  {', '.join(option.names)} {_value(option)}".rstrip() for option in options if option.names]
    lines += ["", "This container has no NVIDIA driver. With a GPU (docker run --gpus all), --help describes the options."]
    return "".join(f"{line}\n" for line in lines)


def _value(option: Option) -> str:
    """The values of an option in the form of argparse."""
    value = f"{{{','.join(option.choices)}}}" if option.choices else {"int": "INT", "float": "FLOAT"}.get(option.type, "VALUE")
    if isinstance(option.nargs, int):
        return " ".join([value] * option.nargs)
    return {"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} [{value} ...]"}.get(option.nargs or "", value)


class _TextChoices(tuple[str, ...]):
    """Choices that are compared as text, for values of any type."""

    def __contains__(self, value: object) -> bool:
        return super().__contains__(str(value))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
