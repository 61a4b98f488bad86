"""How a server is started elsewhere: by a command line, ``docker run``, a compose file, or a recipe of sparkrun or eugr."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

from sm120kit.core.outside import parse_yaml
from sm120kit.engines import Engine, all_engines
from sm120kit.recipes._shell_words import OWN_ARGUMENTS, Shell, ShellCommand, commands, expanded, inner_script

FileBeside = Callable[[str], "str | None"]
"""The text of a file that a launch names, by its path from the launch's own; None if it cannot be read."""

MAX_EXTENDED = 16
"""Limit for services that extend one another."""

_FLAGS = re.compile(r"--(rm|detach|interactive|tty|init|privileged|read-only|publish-all|no-healthcheck|quiet)")
_LETTERS = "ditPq"
_RUN = ("docker", "podman", "nerdctl")
_OPTION = re.compile("--?[A-Za-z]")
_HERE_DOCUMENT = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(.*?)^[ \t]*\2[ \t]*$", re.MULTILINE | re.DOTALL)
_ENDED = re.compile(r"\\\r?\n[ \t]*(#.*)?$", re.MULTILINE)
"""A line that continues with a comment or an empty line."""
_BRANCH = re.compile(r"(?:^|;)[ \t]*(else|elif|esac)\b", re.MULTILINE)
_ADDED_KEYS = ("environment", "volumes", "ports", "env_file", "ulimits")
"""Settings of a service that are added to those of the one it extends; others replace them."""
_PROGRAM = re.compile(
    r"(?!(fi|done|esac|for|case|in|function|return|exit|wait|shift|true|local|set|echo|printf|test)$)[a-z/.][\w./+-]+"
)
"""A word that names a program and no part of the shell's own language."""
_IMPLIED = re.compile(r"--((rm|detach|interactive|tty|init|name|hostname|pull|quiet|entrypoint) .*|gpus all|runtime nvidia)")
"""Options that serve sets itself, or that its containers do not need, with their values."""
_SHORT = {"e": "--env", "v": "--volume", "p": "--publish", "h": "--hostname", "w": "--workdir", "u": "--user", "m": "--memory"}
_SHORT |= {"d": "--detach", "i": "--interactive", "t": "--tty", "P": "--publish-all", "q": "--quiet", "c": "--cpu-shares"}


@dataclass(frozen=True)
class LaunchCommand:
    """A server's start. ``arguments`` are those after the engine's command, ``model`` the one that is named beside them.

    ``mounts`` are paths of the host by paths in the container. ``left_out`` is what a configuration does not express,
    ``cut_off`` options that follow the end of a command, as after a comment within continued lines.
    """

    engine: Engine
    arguments: tuple[str, ...]
    image: str = ""
    model: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    shm_gib: int | None = None
    ipc_host: bool = False
    ulimits: Mapping[str, int] = field(default_factory=dict)
    unified: bool = False
    left_out: tuple[str, ...] = ()
    cut_off: tuple[str, ...] = ()


def read(text: str, beside: FileBeside = lambda name: None) -> LaunchCommand:
    """The start of a server in a script, a compose file or a recipe.

    Raises:
        ValueError: it has no start of a known engine, several, or is malformed.
    """
    document = _document(text)
    if not isinstance(document, dict):
        return _of_script(text, beside)
    if isinstance(document.get("services"), dict):
        return _of_compose(document, beside)
    if "model" in document or "command" in document:
        return _of_recipe(document)
    raise ValueError("it is YAML with neither services (compose) nor model or command (a recipe)")


def _document(text: str) -> Any:
    """The content of YAML, or of a compose file in a here-document of a script; None for another script."""
    written = list(_HERE_DOCUMENT.finditer(text))
    if not written:
        return _yaml(text)
    variables = _variables(text)
    for each in (text, *(match[3] if match[1] else expanded(match[3], variables) for match in written)):
        with suppress(ValueError):
            found = _yaml(each)
            if isinstance(found, dict) and (each is text or isinstance(found.get("services"), dict)):
                return found
    return None


def _yaml(text: str) -> Any:
    """The content of YAML, None for a script. A script can be YAML of one text, but no table with these keys."""
    if not re.search(r"^(services|model|command|recipe_version|version|name|x-[\w-]+)[ \t]*:(\s|$)", text, re.MULTILINE):
        return None
    return parse_yaml(text)


def _of_script(text: str, beside: FileBeside) -> LaunchCommand:
    shell = Shell()
    found = _launch_among(list(commands(text, shell)), beside)
    if found is None:
        names = ", ".join(program for engine in all_engines() for program in engine.programs)
        ended = " (a comment or an empty line ends a command, also after \\)" if _ENDED.search(text) else ""
        raise ValueError(f"no command starts a server: none of {names}, in docker run or without{ended}")
    launch, others = found
    programs = dict.fromkeys(each.words[0] for each in others if _PROGRAM.fullmatch(each.words[0]))
    used = {*shell.exported, *re.findall(r"\$\{?(\w+)", text)}
    notes = [f"variable {name}: not exported" for name in shell.variables if name not in used]
    notes += [f"other commands: {', '.join(list(programs)[:20])}"] if programs else []
    notes += ["the arguments of the script itself"] if any(word in text for word in OWN_ARGUMENTS) else []
    notes += ["conditions: every branch was read, and the last value of a variable taken"] if _BRANCH.search(text) else []
    return replace(launch, left_out=(*launch.left_out, *notes))


def _launch_among(given: Sequence[ShellCommand], beside: FileBeside) -> tuple[LaunchCommand, list[ShellCommand]] | None:
    """The first start of a server, with what else starts one or was cut off, and the other commands."""
    launches = [_of_command(command, beside) for command in given]
    found = [launch for launch in launches if launch]
    if not found:
        return None
    rest = [command for command, launch in zip(given, launches, strict=True) if not launch]
    cut_off = [shlex.join(command.words) for command in rest if _OPTION.match(command.words[0])]
    servers = (f"another command of the file: {shlex.join(each.arguments)[:80]}" for each in found[1:])
    first = replace(found[0], left_out=(*found[0].left_out, *servers), cut_off=(*found[0].cut_off, *cut_off))
    return first, [command for command in rest if not _OPTION.match(command.words[0])]


def _of_command(command: ShellCommand, beside: FileBeside) -> LaunchCommand | None:
    """The start of a server by a command, None for any other."""
    words = list(command.words)
    if len(words) > 2 and words[0].rpartition("/")[2] in _RUN and "run" in words[1:3]:
        return _of_docker_run(words[words.index("run") + 1 :], _ContainerSettings(beside, command.environment))
    if started := _started(words):
        engine, arguments = started
        return LaunchCommand(engine, arguments, environment=command.environment)
    return None


def _started(words: Sequence[str]) -> tuple[Engine, tuple[str, ...]] | None:
    """The engine that a command line starts, and the arguments of its server."""
    for engine in all_engines():
        for program in engine.programs:
            parts = program.split()
            for start in range(len(words) - len(parts) + 1):
                head = [words[start].rpartition("/")[2], *words[start + 1 : start + len(parts)]]
                if head == parts and (len(parts) > 1 or words[start - 1] == "-m"):
                    return engine, tuple(words[start + len(parts) :])
    return None


def _of_docker_run(words: Sequence[str], container: _ContainerSettings) -> LaunchCommand | None:
    options, rest = _docker_options(words)
    if not rest:
        return None
    image, *argv = rest
    replaced = [value for name, value in options if name == "--entrypoint"]
    for name, value in options:
        container.docker_option(name, value)
    return container.launch(image, [*filter(None, replaced), *argv], replaced=bool(replaced))


_ARRAY = re.compile(r"\$\{\w+\[@\]\}")


def _docker_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Options before the image, and the words from it on. An array that a script does not set stands for options."""
    options, rest = list[tuple[str, str]](), list(words)
    while rest and (rest[0].startswith("-") or _ARRAY.fullmatch(rest[0])):
        word, *rest = rest
        if _ARRAY.fullmatch(word):
            options.append((word, ""))
            continue
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if not equals and not _FLAGS.fullmatch(name) and rest:
                value, *rest = rest
            options.append((name, value))
            continue
        letters = word[1:]
        while letters and letters[0] in _LETTERS:
            options.append((_SHORT[letters[0]], ""))
            letters = letters[1:]
        if letters:
            value = letters[1:].removeprefix("=")
            if not value and rest:
                value, *rest = rest
            options.append((_SHORT.get(letters[0], f"-{letters[0]}"), value))
    return options, rest


class _ContainerSettings:
    """Collects the settings of a container; ``shell`` has the variables that it can be given by name."""

    def __init__(self, beside: FileBeside, shell: Mapping[str, str]) -> None:
        self._beside, self._shell = beside, shell
        self.environment: dict[str, str] = {}
        self.mounts: dict[str, str] = {}
        self.ulimits: dict[str, int] = {}
        self.shm_gib: int | None = None
        self.ipc_host = False
        self.left_out: list[str] = []

    def docker_option(self, name: str, value: str) -> None:
        """Take an option of ``docker run``."""
        known: dict[str, Callable[[str], None]] = {
            "--env": self.variable,
            "--env-file": self.file,
            "--volume": self.volume,
            "--mount": self.mount,
            "--publish": self.port,
            "--shm-size": self.shared_memory,
            "--ipc": self.ipc,
            "--ulimit": self.ulimit,
        }
        if name in known:
            known[name](value)
        elif not _IMPLIED.fullmatch(f"{name} {value}"):
            self.left_out.append(f"docker run {name} {value}".strip())

    def variable(self, text: str) -> None:
        name, equals, value = text.partition("=")
        if equals or name in self._shell:
            self.environment[name] = value if equals else self._shell[name]
        else:
            self.left_out.append(f"variable {name}: its value is that of the shell")

    def file(self, name: str) -> None:
        text = self._beside(name)
        if text is None:
            self.left_out.append(f"variables in the file {name}, which cannot be read")
        self.environment |= _variables(text or "")

    def volume(self, text: str) -> None:
        source, _, rest = text.partition(":")
        target = rest.partition(":")[0]
        if target:
            self.bind(source, target)
        else:
            self.left_out.append(f"volume {text}")

    def bind(self, source: str, target: str) -> None:
        if source.startswith(("/", "~", ".", "$")):
            self.mounts[target.rstrip("/") or "/"] = source
        elif _cache(target) is None:
            self.left_out.append(f"volume {source} at {target}")
        else:
            self.mounts[target.rstrip("/")] = source

    def mount(self, text: str) -> None:
        table = dict(part.partition("=")[::2] for part in text.split(","))
        source, target = (
            table.get("source") or table.get("src"),
            table.get("target") or table.get("dst") or table.get("destination"),
        )
        if table.get("type", "bind") == "bind" and source and target:
            self.bind(source, target)
        else:
            self.left_out.append(f"mount {text}")

    def port(self, text: str) -> None:
        host = text.rpartition(":")[0].rpartition(":")[2] or text
        self.left_out.append(f"port {text}: sm120kit serve --port {host}")

    def shared_memory(self, text: str) -> None:
        match = re.fullmatch(r"([0-9.]{1,12})\s*([kmgt]?)i?b?", text.strip().lower())
        factor = {"": 2**-30, "k": 2**-20, "m": 2**-10, "g": 1, "t": 2**10}
        if match and match[1].count(".") < 2 and match[1] != ".":
            self.shm_gib = max(1, round(float(match[1]) * factor[match[2]]))
        else:
            self.left_out.append(f"size of shared memory {text}")

    def ipc(self, value: str) -> None:
        self.ipc_host = value == "host"
        if value not in ("host", "private", "shareable"):
            self.left_out.append(f"--ipc {value}")

    def ulimit(self, text: str) -> None:
        name, _, value = text.partition("=")
        first = value.partition(":")[0]
        if re.fullmatch(r"-?[0-9]{1,19}", first):
            self.ulimits[name] = int(first)
        else:
            self.left_out.append(f"ulimit {text}")

    def launch(self, image: str, argv: list[str], *, replaced: bool) -> LaunchCommand | None:
        """The start of a server in this container, None if it starts another program."""
        inner = inner_script(argv)
        if inner is not None:
            found = _launch_among(list(commands(inner, Shell(dict(self.environment)))), self._beside)
            if found is None:
                return None
            launch, others = found
            changes = (f"a command in the container: {shlex.join(each.words)[:80]}" for each in others)
            return self._complete(replace(launch, left_out=(*launch.left_out, *changes)), image)
        started = _started(argv)
        engine = next((each for each in all_engines() if each.name in image), None)
        if not started and engine and argv[:1] == ["serve"]:
            started = engine, tuple(argv[1:])
        if not started and engine and not replaced and argv and re.match(r"-|/\S|<|\$|[\w.-]+/[\w.-]+$", argv[0]):
            started = engine, tuple(argv)
        return self._complete(LaunchCommand(*started), image) if started else None

    def _complete(self, launch: LaunchCommand, image: str) -> LaunchCommand:
        return replace(
            launch,
            image=image,
            environment={**self.environment, **launch.environment},
            mounts=self.mounts,
            shm_gib=self.shm_gib,
            ipc_host=self.ipc_host,
            ulimits=self.ulimits,
            unified=_is_spark(image),
            left_out=(*launch.left_out, *self.left_out),
        )


def _cache(target: str) -> str | None:
    """A directory that serve keeps: a download cache (""), or a hidden one of root, with compiled kernels; None for others."""
    path = PurePosixPath(target)
    if "huggingface" in path.parts or "modelscope" in path.parts:
        return ""
    return target if path.is_relative_to("/root") and [*path.parts, "", "", ""][2].startswith(".") else None


def is_download_cache(target: str) -> bool:
    """Whether a path in a container is a cache of models."""
    return _cache(target) == ""


def is_kernel_cache(target: str) -> bool:
    """Whether a path in a container is a cache of compiled kernels."""
    return bool(_cache(target))


def _is_spark(text: str) -> bool:
    return bool(re.search(r"spark|gb10|vllm-node", text, re.IGNORECASE))


# ---- compose files


def _variables(text: str) -> dict[str, str]:
    """The variables of lines ``NAME=VALUE``."""
    pairs = (re.fullmatch(r"\s*(?:export\s+)?([A-Za-z_]\w*)=(['\"]?)(.*?)\2\s*", line) for line in text.splitlines())
    return {match[1]: match[3] for match in pairs if match}


def _of_compose(document: Mapping[str, Any], beside: FileBeside) -> LaunchCommand:
    variables = _variables(beside(".env") or "")
    given = _services(document)
    tables = {name: _extended(given, name, beside) for name in given}
    found = {name: launch for name, table in tables.items() if (launch := _of_service(table, variables, beside))}
    if not found:
        raise ValueError(f"no service starts a server: {', '.join(tables)[:200] or 'it has none'}")
    first = next((name for name, launch in found.items() if _names_model(launch)), next(iter(found)))
    others = (
        f"service {name}" + ": another server, for a file of its own" * (name in found) for name in tables if name != first
    )
    return replace(found[first], left_out=(*found[first].left_out, *others))


def _names_model(launch: LaunchCommand) -> bool:
    options = launch.engine.options["model"]
    first = launch.arguments[:1]
    return bool(first and first[0][:1] != "-") or any(word.partition("=")[0] in options for word in launch.arguments)


def _services(document: Any) -> dict[str, Mapping[str, Any]]:
    services = document.get("services") if isinstance(document, dict) else None
    tables = services if isinstance(services, dict) else {}
    return {str(name): table for name, table in tables.items() if isinstance(table, dict)}


def _extended(tables: Mapping[str, Mapping[str, Any]], name: str, beside: FileBeside, depth: int = 0) -> Mapping[str, Any]:
    """A service with the settings of the one that it extends, of the same file or of one in its directory.

    Raises:
        ValueError: the extended one is not there, or extends too many in turn; or its file is no YAML.
    """
    own = tables[name]
    named = own.get("extends")
    base = named.get("service") if isinstance(named, dict) else named
    file = str(named["file"]).removeprefix("./") if isinstance(named, dict) and "file" in named else ""
    text = beside(file) if file and "/" not in file else None  # paths in a file are from its own directory
    if not isinstance(base, str) or (file and text is None):
        return own
    others = tables if text is None else _services(parse_yaml(text))
    if base not in others or depth > MAX_EXTENDED:
        raise ValueError(f"service {name} extends {base}, which is not in {file or 'the file'} or extends too many in turn")
    merged = dict(_extended(others, base, beside, depth + 1))
    for key, value in own.items():
        if key != "extends":
            merged[key] = _merged(merged.get(key), value) if key in _ADDED_KEYS else value
    return merged


def _merged(base: Any, own: Any) -> Any:
    """A service's own values after those of the one it extends."""
    if isinstance(base, dict) and isinstance(own, dict):
        return {**base, **own}
    return [*_entries(base), *_entries(own)]


def _entries(value: Any) -> list[Any]:
    """The entries of a list, of one text, or of a table as texts ``NAME=VALUE``."""
    if isinstance(value, dict):
        return [name if each is None else f"{name}={each}" for name, each in value.items()]
    return value if isinstance(value, list) else [value] if value else []


_SERVICE_KEYS = re.compile(
    r"image|command|entrypoint|environment|env_file|volumes|ports|shm_size|ipc|ulimits|container_name|hostname|stdin_open|tty|init|"
    r"pull_policy|gpus"
)
"""Settings of a service that are taken, or that serve's containers do not need."""


def _of_service(service: Mapping[str, Any], variables: Mapping[str, str], beside: FileBeside) -> LaunchCommand | None:
    def text(value: Any) -> str:
        shown = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        return expanded(shown.replace("$$", "\0"), variables).replace("\0", "$")

    def words(value: Any) -> list[str]:
        return [text(each) for each in value] if isinstance(value, list) else shlex.split(text(value).replace("\\\n", " "))

    def each(key: str) -> list[Any]:
        value = service.get(key) or []
        return value if isinstance(value, list) else [value]

    container = _ContainerSettings(beside, variables)
    for named in each("env_file"):
        container.file(text(named.get("path") if isinstance(named, dict) else named))
    given = service.get("environment") or {}
    pairs = given.items() if isinstance(given, dict) else ((text(entry), None) for entry in given)
    for name, value in pairs:
        container.variable(str(name) if value is None else f"{name}={text(value)}")
    for volume in each("volumes"):
        if isinstance(volume, dict):
            container.mount(",".join(f"{key}={text(volume[key])}" for key in ("type", "source", "target") if key in volume))
        else:
            container.volume(text(volume))
    for port in each("ports"):
        container.port(f"{port.get('published')}:{port.get('target')}" if isinstance(port, dict) else text(port))
    if "shm_size" in service:
        container.shared_memory(text(service["shm_size"]))
    container.ipc(text(service.get("ipc", "private")))
    limits = service.get("ulimits") or {}
    for name, limit in limits.items() if isinstance(limits, dict) else ():
        container.ulimit(f"{name}={text(limit.get('soft') if isinstance(limit, dict) else limit)}")
    container.left_out += [f"{key}: {text(value)[:80]}" for key, value in service.items() if not _SERVICE_KEYS.fullmatch(key)]
    entrypoint = words(service.get("entrypoint") or [])
    return container.launch(
        text(service.get("image")), [*entrypoint, *words(service.get("command") or [])], replaced=bool(entrypoint)
    )


# ---- recipes


def _of_recipe(document: Mapping[str, Any]) -> LaunchCommand:
    """A recipe of sparkrun or eugr: ``command`` with ``{names}`` of ``defaults``; without it, these are its options."""
    defaults = document.get("defaults") if isinstance(document.get("defaults"), dict) else {}
    values = {str(key): value for key, value in {**(defaults or {}), "model": document.get("model")}.items()}
    template = document.get("command")
    if template:
        command = str(template)
        command = command.replace("{{", "{").replace("}}", "}") if '{{"' in command else command
        script = _filled(_filled(command, values), values)
    else:
        script = shlex.join(_options(str(document.get("runtime") or all_engines()[0].name), values))
    launch = _of_script(script, lambda name: None)
    given = document.get("env") or document.get("environment") or {}
    environment = {str(name): str(value) for name, value in given.items()} if isinstance(given, dict) else {}
    mods = document.get("mods") or []
    left_out = [f"{mod}: a change of another image" for mod in mods if isinstance(mods, list)]
    left_out += [
        f"{key}: {str(value)[:80]}" for key, value in document.items() if value and not _RECIPE_KEYS.fullmatch(str(key))
    ]
    revision = launch.engine.options["revision"][0]
    pinned = (revision, str(document["model_revision"])) if document.get("model_revision") else ()
    return replace(
        launch,
        image=str(document.get("container") or ""),
        model=str(document.get("model") or ""),
        environment={**environment, **launch.environment},
        unified=True,
        arguments=(*launch.arguments, *(pinned if revision not in launch.arguments else ())),
        left_out=(*launch.left_out, *left_out),
    )


_RECIPE_KEYS = re.compile(
    r"(sparkrun|recipe)_version|name|description|metadata|model(_revision)?|runtime|mode|(min|max)_nodes|(solo|cluster)_only|"
    r"container|defaults|env|environment|command|mods|benchmark"
)
"""Keys of recipes that are taken, or say nothing about the server."""


def _filled(command: str, values: Mapping[str, Any]) -> str:
    """A command with the values of its ``{names}``; those without stay."""
    return re.sub(r"\{(\w+)\}", lambda match: str(values[match[1]]) if values.get(match[1]) is not None else match[0], command)


def _options(runtime: str, values: Mapping[str, Any]) -> Iterator[str]:
    """The command line of a recipe without a command: of sparkrun's names, those that an engine's option has differently."""
    engine = next((each for each in all_engines() if runtime.startswith(each.name)), None)
    if engine is None:
        raise ValueError(f"its runtime {runtime[:40]!r} is no engine of sm120kit")
    meanings = {"tensor_parallel": "tensor_parallel", "pipeline_parallel": "pipeline_parallel"}
    meanings |= {"gpu_memory_utilization": "memory_share", "max_model_len": "context", "served_model_name": "served_name"}
    yield from shlex.split(engine.programs[0]) if " " in engine.programs[0] else ("python", "-m", engine.programs[0])
    yield from engine.model_arguments(str(values.get("model")))
    for name, value in values.items():
        option = engine.options[meanings[name]][0] if name in meanings else f"--{name.replace('_', '-')}"
        if name == "model" or value in (None, False):
            continue
        yield from (option,) if value is True else (option, str(value))
