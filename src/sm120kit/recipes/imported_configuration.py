"""Make a configuration of a :class:`LaunchCommand`: what it can express, judged by the engine's recorded parser."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sm120kit.core.secrets import is_secret_name
from sm120kit.engines import parser
from sm120kit.recipes import EngineRecipe
from sm120kit.recipes._shell_words import unset
from sm120kit.recipes.arguments import MODEL_DIRECTORY, PLACES, ROOT_HOME, collisions, missing_extras, problems
from sm120kit.recipes.configurations import completed
from sm120kit.recipes.launch_command import LaunchCommand, is_download_cache, is_kernel_cache

_SET_BY_SERVE = ("model", "served_name", "host", "port", "revision", "api_key", "nodes")
_CHOSEN = re.compile(
    r"(NVIDIA|CUDA)_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES|HF_(HOME|HUB_CACHE|HUB_OFFLINE|HUB_ENABLE_\w+)|"
    r"HUGGINGFACE_HUB_CACHE|TRANSFORMERS_(CACHE|OFFLINE)|VLLM_HOST_IP|SGLANG_HOST_IP|HOST_IP|(LD_LIBRARY_)?PATH|HOME"
)
"""Variables of GPUs, download caches, addresses and paths, which serve or the image sets."""


@dataclass(frozen=True)
class ImportedConfiguration:
    """The content of a configuration's file, ``left_out``: what it does not express, and ``problems`` that make it unusable."""

    data: dict[str, Any]
    left_out: tuple[str, ...]
    problems: tuple[str, ...]


def imported(launch: LaunchCommand, recipe: EngineRecipe, name: str, directory: Path) -> ImportedConfiguration:
    """The configuration of a launch for a recipe of its engine; relative paths of the host are below ``directory``."""
    return _Import(launch, recipe, directory).configuration(name)


class _Import:
    def __init__(self, launch: LaunchCommand, recipe: EngineRecipe, directory: Path) -> None:
        self.launch, self.recipe, self.directory = launch, recipe, directory
        self.left_out = list(launch.left_out)
        self.problems = [f"{text[:200]}: it follows the end of a command, as after a comment" for text in launch.cut_off]

    def configuration(self, name: str) -> ImportedConfiguration:
        launch = self.launch
        given, kept = self._arguments()
        folder = self._folder(given)
        mounts = dict(self._mounts(folder))
        environment = dict(self._environment())
        arguments = [self._in_model(word, folder) for word in self._without_missing(kept)]
        container = {
            "shm_gib": launch.shm_gib,
            "ipc_host": launch.ipc_host or None,
            "ulimits": dict(launch.ulimits),
            "caches": [target for target in launch.mounts if is_kernel_cache(target)],
            "mounts": mounts,
        }
        if launch.image:
            self.left_out.append(f"image {launch.image}: replaced by that of {self.recipe.name}")
        model = self._model(given)
        data: dict[str, Any] = {
            "engine": self.recipe.name,
            "model": model,
            "arguments": arguments,
            "environment": environment,
            "container": {key: value for key, value in container.items() if value},
            "hardware": self._nodes(),
        }
        data = {key: value for key, value in data.items() if value or key == "arguments"}
        for text in unset([*arguments, *environment.values(), *mounts.values(), model["repository"]]):
            self.problems.append(f"{text}: the file does not have its value")
        whole = completed(dict(data), name)
        self.problems += problems(whole)
        return ImportedConfiguration(data, tuple(dict.fromkeys(self.left_out)), tuple(dict.fromkeys(self.problems)))

    def _nodes(self) -> dict[str, int]:
        """The number of machines, if it is stated and more than one."""
        count = parser.options(self.recipe.name, self.launch.arguments).get(self.launch.engine.options["nodes"][0], "")
        return {"nodes": int(count)} if re.fullmatch("[1-9][0-9]{0,2}", count) and count != "1" else {}

    def _arguments(self) -> tuple[dict[str, list[str]], list[tuple[str, list[str]]]]:
        """Values of what serve sets itself, by meaning, and the other options with their words."""
        options, given, kept = self.launch.engine.options, dict[str, list[str]](), list[tuple[str, list[str]]]()
        meanings = {name: meaning for meaning in _SET_BY_SERVE for name in options[meaning]}
        for option, words in parser.split(self.recipe.name, self.launch.arguments):
            if not option or option in meanings:
                values = words if not option else [*words[0].split("=", 1)[1:], *words[1:]]
                known = given.setdefault(meanings[option] if option else "model", values)
                if not option and known != values:
                    self.problems.append(f"{words[0]!r} belongs to no option")
            elif option == "--headless":
                self.left_out.append("--headless: sm120kit serve --nodes sets it")
            else:
                kept.append((option, words))
        for meaning, how in (("nodes", "serve --nodes"), ("port", "serve --port"), ("api_key", "serve with SM120KIT_API_KEY")):
            if meaning in given:
                self.left_out.append(f"{options[meaning][0]}: sm120kit {how}")
        if "served_name" in given and given["served_name"] != given.get("model"):
            self.left_out.append(f"served name {' '.join(given['served_name'])}: it is that of the repository")
        return given, kept

    def _without_missing(self, kept: list[tuple[str, list[str]]]) -> Iterator[str]:
        """The words of options, without those that need a distribution which the image does not have."""
        for _, words in kept:
            if missing := missing_extras(self.recipe.name, words):
                self.left_out.append(f"{' '.join(words)}: needs {', '.join(missing)}, which {self.recipe.name} does not have")
            else:
                yield from words

    def _folder(self, given: dict[str, list[str]]) -> str:
        """The path of the model in the container, "" for one of the Hub."""
        (model, *_) = given.get("model") or [self.launch.model or ""]
        return model.rstrip("/") if model.startswith(("/", "~", ".")) else ""

    def _model(self, given: dict[str, list[str]]) -> dict[str, Any]:
        (model, *_) = given.get("model") or [self.launch.model or ""]
        (revision, *_) = given.get("revision") or [""]
        folder = self._folder(given)
        if folder:
            stated = next((each for each in (self.launch.model, *given.get("served_name", ())) if _is_repository(each)), "")
            cached = re.search(r"models--([\w.-]+?)--([\w.-]+)", folder)
            own = "/".join(cached.groups()) if cached else f"local/{folder.rpartition('/')[2]}"
            host = self._host_path(folder)
            self.left_out.append(f"the model is a folder: sm120kit serve --model {host or folder}")
            model = stated or own
        model = re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/|/(tree/main)?/?$", "", model)
        if not _is_repository(model) and not unset([model]):
            self.problems.append(f"model {model!r} is neither owner/name nor a folder" if model else "it names no model")
        if revision and not re.fullmatch("[0-9a-f]{40}", revision):
            self.left_out.append(f"revision {revision}: a branch or tag; sm120kit serve --revision {revision}")
            revision = ""
        return {"repository": model, **({"revision": revision} if revision else {})}

    def _host_path(self, path: str) -> str:
        """The path on the host of one in the container."""
        target = next((each for each in self.launch.mounts if path == each or path.startswith(f"{each}/")), None)
        return f"{self.launch.mounts[target]}{path[len(target) :]}" if target else "" if self.launch.image else path

    def _in_model(self, word: str, folder: str) -> str:
        """An argument, which for a file of the model names it wherever that is mounted."""
        return MODEL_DIRECTORY + word[len(folder) :] if folder and word.startswith(f"{folder}/") else word

    def _mounts(self, folder: str) -> Iterator[tuple[str, str]]:
        """Mounts other than those of the model and of caches."""
        for target, given in self.launch.mounts.items():
            source = re.sub(r"^(\$\(pwd\)|\$PWD|\$\{PWD\}|\.(?=/|$))", lambda _: str(self.directory), given)
            holds_model = folder and (folder == target or folder.startswith(f"{target}/"))
            if holds_model or is_download_cache(target) or is_kernel_cache(target):
                continue
            unusable = source.startswith(("/dev", "/var/run", "/run", "/sys", "/proc", "..", "$"))
            if unusable or any(collisions((target,), (*PLACES, ROOT_HOME))):
                self.left_out.append(f"mount {source} at {target}")
            else:
                yield target, source.rstrip("/") or "/"

    def _environment(self) -> Iterator[tuple[str, str]]:
        for name, value in self.launch.environment.items():
            if is_secret_name(name):
                self.left_out.append(f"variable {name}: a secret, which is not copied")
            elif _CHOSEN.fullmatch(name):
                self.left_out.append(f"variable {name}={value}: sm120kit serve or the image sets what it is for")
            else:
                yield name, value


def _is_repository(text: str) -> bool:
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", text))
