"""What differs between engines, with the defaults of an OpenAI-compatible server."""

import ast
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120kit.core.outside import integer, parse_json

MASTER_PORT = 29501
"""Port of the first node on which the others meet it: vLLM's default (0.33.0, vllm/config/parallel.py)."""

Parse = Callable[[list[str]], object]
"""Reads a command line, and raises or exits if it is wrong."""


@dataclass(frozen=True)
class AllReduce:
    """What selects an all-reduce between GPUs: arguments and variables."""

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


OWN_OFF = ("--disable-custom-all-reduce",)
"""Turns the all-reduce of vLLM and of SGLang off."""
NCCL = {
    "nccl": AllReduce(OWN_OFF),
    **{f"nccl-{level.lower()}": AllReduce(OWN_OFF, {"NCCL_P2P_LEVEL": level}) for level in ("LOC", "SYS")},
}
"""NCCL as it decides itself, through the host's memory, and with P2P at any distance, also between processors."""


@dataclass(frozen=True)
class Metrics:
    """Names of a server's Prometheus metrics by meaning; empty for one that it does not have.

    Counters of tokens, with a value for each engine of a server with data parallelism: ``prompt_tokens``, those of them in the
    prefix cache, ``drafted`` and ``accepted``. Gauges instead of such counters: ``accept_rate`` (accepted over drafted) and
    ``accept_length`` (tokens per step), both 0 before the first.
    """

    prompt_tokens: str = ""
    cached_tokens: str = ""
    drafted: str = ""
    accepted: str = ""
    accept_rate: str = ""
    accept_length: str = ""


@dataclass(frozen=True)
class LogSigns:
    """What shows an engine in its log. All expressions are of lower-case lines.

    ``words`` are strings that only its logs have. A line with one of ``texts`` is searched for its version by
    the expression ``version``, which matches what precedes it.
    """

    words: tuple[str, ...]
    texts: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class ApiKey:
    """How an engine takes its API key: from the environment ``variable``, which ``arguments`` may reference as ``$(NAME)``."""

    variable: str
    arguments: tuple[str, ...] = ()


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


@dataclass(frozen=True)
class ModelParsers:
    """Parsers of a model's answers: ``models`` is searched in ``<model_type> <name of the repository>``, in lower case.

    ``reasoning`` and ``tools`` are values of the engine's options, "" for none.
    """

    models: str
    reasoning: str
    tools: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Engine:
    """An engine. A subclass overrides the methods that differ.

    ``name`` is the key ``engine`` of its recipes and the name of its distribution, ``title`` its name in prose, ``repository``
    its ``owner/name`` on GitHub. ``port`` is the default port of its server, ``log`` what it prints. ``api_key`` and
    ``host_variable`` are how it takes its key, and the address of its machine for others.

    ``parser(stand_in)`` returns the parser of its server; None: its options cannot be recorded. The function runs in a Python
    that has the engine and not sm120kit, so it imports all that it uses. ``stand_in(*names)`` replaces absent modules.

    ``options`` has the names of its options by meaning: ``tensor_parallel``, ``pipeline_parallel``, ``memory_share`` (of a
    GPU), ``context`` (tokens), ``step_tokens`` (of a prefill step), ``draft_steps``, ``kv_type``, ``reasoning_parser``,
    ``tool_parser``, those of ``pools``, and those that ``serve`` sets itself: ``model``, ``served_name``, ``host``, ``port``,
    ``revision``, ``api_key``, ``nodes``. ``pools`` has the defaults of an engine that divides the KV cache at its start, none
    if layers share it: ``windows`` is the tokens of layers with a window over those of others, ``states`` the bytes of states
    over those of tokens. ``files`` are options whose value can be a path. ``types`` are types of its parser by the names in
    its record, beside those of Python, or what it requires of the value of an option, by its first name; ``optional_types``
    those that take "" and "None" for no value, and ``parse_integer`` is that of numbers of tokens. ``optional`` are the
    distributions that it imports only with a value of an option.

    ``programs`` start its server, as words of a command line.
    ``model_parsers`` are tried in their order; ``tool_arguments`` are needed beside a tool parser. ``any_context`` is the
    length of sequences with which it chooses the longest that fits, "" if it has none. ``memory_share`` leaves what it takes
    beside weights and KV cache, and ``fp8_cache`` is a data type of the cache. ``quantizations`` are its names of
    methods that ``config.json`` names differently, ``other_gpus`` methods that have no code for SM12x.

    ``all_reduces`` select an all-reduce between GPUs other than its default, by the method's name.

    ``metrics`` are the names of its metrics. Its server has JSON with its ``version`` at ``info_path``. With ``counts_tokens``
    it accepts ``continuous_usage_stats``, a count of tokens with each chunk, and with ``salts_cache`` ``cache_salt``: only
    requests with the same salt share their prefixes.

    An unpacked image has at most ``size_limit_bytes``. ``suite`` is the directory of its checks, None for that in
    ``images/checks/suites``.
    """

    name: str
    title: str
    port: int
    log: LogSigns
    api_key: ApiKey
    host_variable: str
    options: Mapping[str, tuple[str, ...]]
    pools: Mapping[str, float] = field(default_factory=dict)
    parser: Callable[[Callable[..., None]], tuple[ArgumentParser, Parse]] | None = None
    parse_integer: Callable[[str], int] = integer
    types: Mapping[str, Callable[[str], object]] = field(default_factory=dict)
    optional_types: frozenset[str] = frozenset()
    optional: Mapping[tuple[str, str], str] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    info_path: str = "/version"
    counts_tokens: bool = False
    salts_cache: bool = False
    size_limit_bytes: int = 16 * 2**30
    suite: Path | None = None
    repository: str = ""
    files: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    model_parsers: tuple[ModelParsers, ...] = ()
    quantizations: Mapping[str, str] = field(default_factory=dict)
    other_gpus: frozenset[str] = frozenset()
    tool_arguments: tuple[str, ...] = ()
    any_context: str = ""
    all_reduces: Mapping[str, AllReduce] = field(default_factory=dict)
    memory_share: float = 0.90
    share_of_free: bool = False
    fp8_cache: str = "fp8"

    def parsers_of(self, model_type: str, name: str) -> ModelParsers:
        """The parsers for a model's answers; none for a model that is not in the table."""
        text = f"{model_type} {name}".lower()
        return next((each for each in self.model_parsers if re.search(each.models, text)), ModelParsers("", "", ""))

    def mtp_arguments(self, draft_tokens: int) -> tuple[str, ...]:
        """The arguments that draft tokens with the checkpoint's own MTP layers; none if it cannot."""
        return ()

    def draft_arguments(self, method: str, repository: str, draft_tokens: int) -> tuple[str, ...]:
        """The arguments that draft tokens with a draft model of another repository; none if it cannot."""
        return ()

    def speculation(self, options: Mapping[str, str]) -> tuple[str, int, bool] | None:
        """Method, most draft tokens of a step, and whether it uses the checkpoint's MTP layers, by options and values."""
        return None

    def model_names(self, package: Path) -> dict[str, list[str]]:
        """What its Python files name, without importing them: ``package`` is the directory of its wheel's content.

        ``architectures`` are classes that generate text, ``pooling`` those for embeddings or classes, ``mtp`` the types and
        classes of models whose MTP layers it drafts with, ``quantizations``, ``reasoning`` and ``tools`` the values of options,
        ``templates`` files of chat templates, and ``windows`` classes whose layers with a window have a pool of their own.
        """
        return {}

    def spelled(self, argv: Sequence[str]) -> list[str]:
        """A command line as the server's parser spells it before it reads it.

        Raises:
            ValueError: the parser refuses it.
        """
        return list(argv)

    def contradictions(self, options: Mapping[str, str], models: Mapping[str, Sequence[str]]) -> Iterator[str]:
        """What the server refuses of options, each valid by itself, before it loads a model; ``models`` as in its record."""
        return iter(())

    def hidden_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Names of the option with these ``names`` that the parser accepts, but its help does not show."""
        return ()

    def integer(self, text: str) -> int | None:
        """The positive integer that an argument states, such as a number of tokens; None for others, such as ``auto``."""
        try:
            value = self.parse_integer(text)
        except ValueError:
            return None
        return value if value > 0 else None

    def prompt_request(self, model: str, tokens: Sequence[Sequence[int]], top: int) -> tuple[str, dict[str, Any]]:
        """Path and body of a request for the ``top`` most likely tokens at each position of prompts; -1 is all.

        Raises:
            ValueError: the server does not accept this number.
        """
        prompts = [list(window) for window in tokens]
        body = {"model": model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
        return "/v1/completions", body

    def prompt_positions(self, answer: Any) -> list[list[list[tuple[Any, Any]]]]:
        """In its answer for each prompt and position the tokens with their log-probabilities; the first position has none.

        The entry of a position is the distribution before it.
        """
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        listed = [choice["prompt_logprobs"][1:] for choice in choices]
        return [[[(token, entry["logprob"]) for token, entry in place.items()] for place in places] for places in listed]

    def model_arguments(self, model: str) -> tuple[str, ...]:
        """The arguments that name the model, a directory."""
        return ("--model", model)

    def metrics_arguments(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """The arguments without which the server has no metrics, beside ``arguments``."""
        return ()

    def node_arguments(self, node: Node) -> tuple[str, ...]:
        """The arguments by which a server spans several machines."""
        return ("--nnodes", str(len(node.addresses)), "--node-rank", str(node.rank))

    def node_environment(self, node: Node) -> dict[str, str]:
        """Variables with which a machine's processes find those of the others.

        Without them, Gloo binds to the address of the host's name, which can be 127.0.1.1, and the engines to another one, such
        as that of the default route (vLLM 0.33.0, vllm/utils/network_utils.py ``get_ip``; SGLang 0.5.11, srt/utils/network.py
        ``get_local_ip_auto``). NCCL takes names as prefixes unless they start with "=" (its manual, NCCL_SOCKET_IFNAME,
        NCCL_IB_HCA).
        """
        return {
            **({"NCCL_IB_HCA": f"={','.join(node.rdma)}"} if node.rdma else {}),
            "NCCL_SOCKET_IFNAME": f"={node.interface}",
            "GLOO_SOCKET_IFNAME": node.interface,
            self.host_variable: node.address,
        }

    def serve_arguments(
        self, model: str, served_as: str, address: tuple[str, int], arguments: Sequence[str], node: Node | None = None
    ) -> tuple[str, ...]:
        """The arguments after the command that starts the server, which listens on ``address``."""
        listen = ("--served-model-name", served_as, "--host", address[0], "--port", str(address[1]))
        span = self.node_arguments(node) if node else ()
        return (*self.model_arguments(model), *listen, *self.metrics_arguments(arguments), *span, *arguments)


def adapter(text: str, *keys: str, json_only: bool = False) -> None:
    """Require an adapter of a model: its path, with or without a name before it, or a JSON object with these keys.

    Raises:
        argparse.ArgumentTypeError: it is another text.
    """
    if not json_only and not (text.startswith("{") and text.endswith("}")):
        return
    try:
        table = parse_json(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text[:80]!r} is not JSON") from error
    if not isinstance(table, dict) or {*keys} - {*table}:
        raise ArgumentTypeError(f"{text[:80]!r} is not a JSON object with {' and '.join(keys)}")


def assigned(file: Path, name: str) -> ast.expr | None:
    """The last value that a Python file assigns to a name at its top level."""
    found = None
    for statement in ast.parse(file.read_bytes()).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            found = getattr(statement, "value", None)
    return found


def texts(node: ast.AST | None) -> Iterator[str]:
    """The texts in an expression, without values of dictionaries."""
    if isinstance(node, ast.Dict):
        node = ast.Tuple([key for key in node.keys if key], ast.Load())
    for each in ast.walk(node) if node else ():
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.value


def function(file: Path, name: str) -> ast.FunctionDef | None:
    """The function of a name in a Python file."""
    found = (node for node in ast.walk(ast.parse(file.read_bytes())) if isinstance(node, ast.FunctionDef) and node.name == name)
    return next(found, None)


def tested_texts(file: Path, name: str) -> Iterator[str]:
    """The texts that conditions in a function compare with."""
    node = function(file, name)
    for each in ast.walk(node) if node else ():
        if isinstance(each, ast.If):
            yield from texts(each.test)
