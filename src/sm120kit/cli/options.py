"""Options that several commands share, one by one and in groups.

A group is a frozen dataclass whose fields are annotated as options are. A command takes it as one keyword parameter, and has
one option for each field::

    def apply(recipe: SourceRecipeName, into: Into, *, sources: Sources, json: Json = False) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sm120kit.core import console
from sm120kit.core.data_roots import entries, top_root
from sm120kit.core.errors import InvalidOption
from sm120kit.core.urls import Endpoint, read_header, read_key
from sm120kit.core.workspace import Workspace

if TYPE_CHECKING:
    from sm120kit.images.published_images import Source
    from sm120kit.sources.run_options import Options as RunOptions
    from sm120kit.sources.source_records import DebianArchives

COMMON = "Options of every command"
SHARING = "Shared builds"
"""Headings of rare options in the help of a command."""

SHARED = frozenset(
    {
        "api-key",
        "cache",
        "debian-keyring",
        "debian-mirror",
        "find-links",
        "index",
        "index-url",
        "jobs",
        "launcher",
        "memory",
        "mirror",
        "offline",
        "quiet",
        "state",
        "trust",
        "verbose",
    }
)
"""Options with the same meaning in every command: ``SM120KIT_JOBS`` or a key outside all tables sets ``--jobs`` of all."""


def option(usage: str, help: str, **settings: Any) -> Any:
    """An option as its help shows it: ``--output -o FILE``; without a word for its value, it is a flag."""
    words = usage.split()
    names = [word for word in words if word.startswith("-")]
    return typer.Option(*names, metavar=next((word for word in words if word not in names), None), help=help, **settings)


def argument(metavar: str, help: str, **settings: Any) -> Any:
    """An argument by its name in the usage line."""
    return typer.Argument(metavar=metavar, help=help, **settings)


ApiKey = Annotated[
    str,
    option(
        "--api-key KEY|@FILE", "API key for the server; never stored. Process lists show KEY: prefer the variable or @FILE."
    ),
]


Headers = Annotated[
    list[str] | None,
    option("--header NAME:VALUE|@FILE", "Header of each request, such as a proxy's credentials; never stored; repeatable."),
]
Timeout = Annotated[
    float, option("--timeout SECONDS", "A request without data for this long has failed, also before the first token.", min=1)
]


def finite(value: float | None) -> float | None:
    """Refuse nan and infinity, which no limit excludes."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def given(ctx: typer.Context, name: str) -> bool:
    """Whether an option is on the command line. A variable and the configuration file may set it for all commands."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def recipe_names(incomplete: str) -> list[str]:
    """Names of recipes that start with ``incomplete``, for completion; the files are not read."""
    return _names("engines", incomplete)


def lockable_names(incomplete: str) -> list[str]:
    """Names of bases and recipes that start with ``incomplete``, for completion."""
    return [*_names("bases", incomplete), *_names("engines", incomplete)]


def configuration_names(incomplete: str) -> list[str]:
    """Names of configurations that start with ``incomplete``, for completion."""
    return _names("configurations", incomplete)


def patch_names(incomplete: str) -> list[str]:
    """Names of patches, ``project/slug``, that start with ``incomplete``, for completion; the files are not read."""
    names = (f"{path.parent.name}/{path.stem}" for path in patches_root().glob("*/*.patch"))
    return sorted(name for name in names if name.startswith(incomplete))


def patches_root() -> Path:
    """The directory of the patch series: the user's, which lie above the built-in ones, or these."""
    return top_root() / "patches"


def _names(folder: str, incomplete: str) -> list[str]:
    return sorted(name for name in entries(folder) if name.startswith(incomplete))


Base = Annotated[str, option("--base NAME", "Base, as debian-12 or debian-13; default: the recipe's.")]
Json = Annotated[bool, option("--json", "Print JSON.")]


Html = Annotated[
    Path | None,
    option(
        "--html FILE",
        "Also write what is printed to a page without external resources; other sections of the page stay.",
        show_default=False,
    ),
]
"""A parameter that its command leaves alone: see :class:`sm120kit.cli.tree.Command`."""
Index = Annotated[Path, option("--index FILE", "File that lists the published images.")]
Overwrite = Annotated[bool, option("--overwrite", "Replace existing files.")]
Trust = Annotated[Path | None, option("--trust FILE", "Accept only images signed with this public key.")]


def _after_dashes(words: list[str] | None) -> list[str] | None:
    if words and not words[0].startswith("-"):
        raise typer.BadParameter(f"{words[0]!r} is no option: options of the engine follow --")
    return words


ConfigName = Annotated[str, argument("CONFIG", "A configuration, by name or file.", autocompletion=configuration_names)]
ServeTarget = Annotated[
    str,
    argument(
        "CONFIG",
        "A configuration, by name or file; a repository of the Hugging Face Hub, such as openai/gpt-oss-20b; or a folder.",
        autocompletion=configuration_names,
    ),
]
ServerArguments = Annotated[
    list[str] | None, argument("ARGUMENT", "After --: options of the engine, which override others.", callback=_after_dashes)
]
PlannedGpu = Annotated[
    str, option("--gpu KIND", "Plan a repository or folder for rtx-pro-6000, rtx-5090 or dgx-spark, which need not exist.")
]
ServingEngine = Annotated[str, option("--engine ENGINE", "The engine or recipe; default: the newest with the model's class.")]


Draft = Annotated[str, option("--draft REPO", "Speculate with this draft model: `sm120kit plan` names those known.")]


def gpu_count(text: str) -> int | None:
    """The number of planned GPUs.

    Raises:
        typer.BadParameter: it is no number from 1 to 64.
    """
    if text and not (re.fullmatch("[0-9]{1,2}", text) and 1 <= int(text) <= 64):
        raise typer.BadParameter(f"{text!r} is not a number of GPUs from 1 to 64", param_hint="--gpus")
    return int(text) if text else None


FlashInferName = Annotated[
    str,
    argument(
        "RECIPE",
        "flashinfer, or with a version such as flashinfer@0.6.6; or a FlashInfer recipe, by name or file.",
        autocompletion=recipe_names,
    ),
]
PatchName = Annotated[
    str, argument("PATCH", "A patch of a series: project/slug, or a unique slug.", autocompletion=patch_names)
]
PatchedProject = Annotated[
    str, option("--project NAME", "Another package that the recipe patches, such as b12x, instead of the engine.")
]
LocalPatches = Annotated[
    list[Path] | None,
    option(
        "--patch FILE|DIR|OWNER/PROJECT#N",
        "Also apply this diff or pull request to the project with its files, in no series; repeatable.",
    ),
]
SourceRecipeName = Annotated[
    str,
    argument(
        "RECIPE", "A recipe of an engine, such as vllm@0.33.0, or of FlashInfer; or its file.", autocompletion=recipe_names
    ),
]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How a build uses the machine; ``memory`` in GiB, ``launcher`` starts the compilers."""

    jobs: Annotated[int | None, option("--jobs -j N", "Files to compile at once; default: number of cores.", min=1)] = None
    memory: Annotated[
        float | None, option("--memory GIB", "Memory to use at most; default: what is available.", min=0.1, callback=finite)
    ] = None
    launcher: Annotated[
        str, option("--launcher PROGRAM", "Program that starts the compilers: ccache, which keeps and shares objects.")
    ] = ""


@dataclasses.dataclass(frozen=True)
class DebianSources:
    """Where Debian packages come from."""

    debian_mirror: Annotated[
        list[str] | None,
        option(
            "--debian-mirror DIR|URL",
            "Debian archive to use instead of this machine's apt sources, such as a snapshot; repeatable.",
        ),
    ] = None
    debian_keyring: Annotated[
        Path | None, option("--debian-keyring FILE", "Keys that sign the indexes of Debian archives; default: Debian's own.")
    ] = None

    def archives(self) -> DebianArchives:
        """These archives as part of an origin."""
        from sm120kit.sources.source_records import DebianArchives

        return DebianArchives(tuple(self.debian_mirror or ()), self.debian_keyring)


@dataclasses.dataclass(frozen=True)
class Sources:
    """Options of every command: where sources and packages come from and are stored, and how much is printed.

    A command that uses them takes them as one parameter, as a group.
    """

    mirror: Annotated[
        str | None, option("--mirror DIR|URL", "Fetch sources from here, not from the index.", rich_help_panel=COMMON)
    ] = None
    index_url: Annotated[
        str, option("--index-url URL", "Package index; default: that of pip or uv.", rich_help_panel=COMMON)
    ] = ""
    find_links: Annotated[
        list[str] | None, option("--find-links DIR|URL", "Search here before the index; repeatable.", rich_help_panel=COMMON)
    ] = None
    offline: Annotated[bool, option("--offline", "Use cached files and local mirrors only.", rich_help_panel=COMMON)] = False
    state: Annotated[
        Path | None, option("--state DIR", "State directory; default: ~/.local/state/sm120kit.", rich_help_panel=COMMON)
    ] = None

    verbose: Annotated[bool, option("--verbose -v", "Also print downloads and programs that run.", rich_help_panel=COMMON)] = (
        False
    )
    quiet: Annotated[bool, option("--quiet -q", "Print results and errors only.", rich_help_panel=COMMON)] = False

    def workspace(self) -> Workspace:
        """The state directory, opened.

        Raises:
            Sm120kitError: it cannot be used.
        """
        return Workspace.open(self.state)

    def run_options(self, limits: Limits = Limits(), debian: DebianSources = DebianSources()) -> RunOptions:
        """The options of a run with these sources and limits.

        Raises:
            Sm120kitError: the state directory cannot be used.
        """
        from sm120kit.core.toolchain import compiler_launcher
        from sm120kit.sources.origin import Origin
        from sm120kit.sources.run_options import Options

        origin = Origin(self.mirror, self.index_url, tuple(self.find_links or ()), self.offline, debian.archives())
        memory_bytes = int(limits.memory * 2**30) if limits.memory is not None else None
        launcher = compiler_launcher(limits.launcher) if limits.launcher else None
        return Options(self.workspace(), origin, limits.jobs, memory_bytes, launcher=launcher)


@dataclasses.dataclass(frozen=True)
class SharedCache:
    """A directory with finished builds that several machines share."""

    cache: Annotated[
        Path | None,
        option("--cache DIR", "Use finished builds of other machines in this shared directory.", rich_help_panel=SHARING),
    ] = None
    cache_push: Annotated[
        bool, option("--cache-push", "Store finished builds in the --cache as well.", rich_help_panel=SHARING)
    ] = False

    def used_by(self, options: RunOptions) -> RunOptions:
        """These options of a run with the cache.

        Raises:
            typer.BadParameter: an option lacks the other that it is for.
            InvalidOption: the cache is no directory.
        """
        if self.cache_push and not self.cache:
            raise typer.BadParameter("--cache-push requires --cache")
        if self.cache and not self.cache.is_dir():
            raise InvalidOption(
                "--cache", f"{self.cache} is not a directory: make one that all machines mount, or leave it out"
            )
        return dataclasses.replace(options, cache=self.cache and self.cache.absolute(), cache_push=self.cache_push)


@dataclasses.dataclass(frozen=True)
class ServerAccess:
    """Credentials of requests to a server that is running already."""

    api_key: ApiKey = ""
    header: Headers = None

    def require_used(self, running: bool, remedy: str) -> None:
        """Refuse headers if no server is running already. A key may be for all commands.

        Raises:
            typer.BadParameter: one is given, but ``running`` is false.
        """
        if self.header and not running:
            raise typer.BadParameter(f"applies only to a running server: {remedy}", param_hint="--header")

    def endpoint(self, url: str) -> Endpoint:
        """The server at ``url``.

        Raises:
            InvalidOption: a header or key is malformed, or its file cannot be read.
            BadInput: see :meth:`sm120kit.core.urls.Endpoint.parse`.
        """
        return Endpoint.parse(url, read_key(self.api_key), dict(map(read_header, self.header or [])))


@dataclasses.dataclass(frozen=True)
class ImageIndex:
    """The index of published images, and who must have signed an image from it."""

    index: Index = Path("images.json")
    trust: Trust = None

    def source(self) -> Source:
        """The index with this condition."""
        from sm120kit.images.published_images import Source

        return Source(self.index, self.trust)


@dataclasses.dataclass(frozen=True)
class PublishedImages(ImageIndex):
    """The index of published images and all conditions that an image from it must meet."""

    allow_older: Annotated[bool, option("--allow-older", "Accept an image older than the newest one pulled before.")] = False

    def source(self) -> Source:
        """The index with these conditions."""
        return dataclasses.replace(super().source(), allow_older=self.allow_older)


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with one keyword parameter for each field of its groups in place of the groups, and those of Sources."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
        elif groups[name] is not Sources:
            parameters += _options(groups[name])
    parameters += _options(Sources)

    def taken(group: Any, values: dict[str, Any]) -> Any:
        return group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        sources = taken(Sources, values)
        console.verbose, console.quiet = sources.verbose, sources.quiet
        for name, group in groups.items():
            values[name] = sources if group is Sources else taken(group, values)
        command(**values)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return expanded


def _common() -> list[Any]:
    """The options of every command as typer has them. Commands are built with pydantic, which takes long to load."""
    return [hint.__metadata__[0] for hint in get_type_hints(Sources, include_extras=True).values()]


def common_help() -> list[tuple[str, str]]:
    """The options of every command with their help."""
    return [
        (" ".join([", ".join(sorted((each.default, *each.param_decls), key=len)), each.metavar or ""]), each.help)
        for each in _common()
    ]


def split_common(args: list[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Separate the options of every command from a group's own options before the name of a command, and what follows.

    ``own`` are the group's options, each with whether it has a value.
    """
    if not args or not args[0].startswith("-"):
        return [], args
    common = {name: bool(each.metavar) for each in _common() for name in (each.default, *each.param_decls)}
    has_value: dict[str, bool] = {**common, **own}
    moved: list[str] = []
    kept: list[str] = []
    while args and (name := args[0].partition("=")[0]) in has_value:
        words = 2 if has_value[name] and "=" not in args[0] else 1
        (moved if name in common else kept).extend(args[:words])
        args = args[words:]
    return moved, kept + args


def _options(group: Any) -> list[inspect.Parameter]:
    """The fields of a group as parameters of a command, those of the groups that it extends last."""
    hints = get_type_hints(group, include_extras=True)
    own = inspect.get_annotations(group)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in sorted(dataclasses.fields(group), key=lambda field: field.name not in own)
    ]
