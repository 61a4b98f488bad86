"""What ``serve`` and ``plan`` are given, a configuration, a repository of the Hub or a folder, becomes a configuration."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from sm120kit.core import reporting
from sm120kit.core.errors import BadInput, HubUnreachable, OfflineMiss, ResourceUnavailable
from sm120kit.engines import all_engines
from sm120kit.hosts.facts import probe
from sm120kit.recipes import arguments, configurations, load_engine, newest, reported
from sm120kit.recipes.configurations import Configuration, Hardware
from sm120kit.serving import checkpoint, derived_configuration, model_download
from sm120kit.serving.checkpoint import Checkpoint, LocalFiles, ModelFiles
from sm120kit.serving.derived_configuration import COUNTS, NamedModel
from sm120kit.serving.fit import recorded_model
from sm120kit.serving.model_download import DEFAULT_BRANCH, ModelDownload

_REPOSITORY = re.compile(r"\w[\w.-]{0,95}/[\w.-]{1,96}")
"""Limits of the Hub (huggingface_hub, ``validate_repo_id``)."""
ASSUMED_GPU = "rtx-pro-6000"
"""The GPU that is planned for on a host without one, if none is named."""
FOLDER_OWNER = "local"
"""The owner in the name under which a folder's model is served."""


@dataclass(frozen=True)
class ServeRequest:
    """What a user names: ``target`` is a configuration, a repository or a folder.

    ``gpu`` is a kind of GPU to plan for, and ``count`` how many there are, None for as many as needed, or as the host has.
    ``engine``, a ``draft`` model and ``arguments``, options of the engine's server, override what follows from the rest.
    """

    target: str
    engine: str = ""
    gpu: str = ""
    draft: str = ""
    count: int | None = None
    arguments: tuple[str, ...] = ()
    revision: str = ""
    offline: bool = False


@dataclass(frozen=True)
class ModelToServe:
    """A configuration to serve.

    It is ``derived`` if no file has it. ``download`` is the model on the Hub, ``folder`` that of a local one, ``facts`` what is
    known of it; None where the configuration alone decides, or the Hub cannot be reached, for the reason ``unreached``.
    """

    configuration: Configuration
    derived: bool = False
    notes: tuple[str, ...] = ()
    download: ModelDownload | None = None
    folder: Path | None = None
    facts: Checkpoint | None = None
    unreached: str = ""
    elsewhere: bool = False

    @property
    def revision(self) -> str:
        """The commit or branch of the model."""
        pinned = self.configuration.model.revision
        return self.download.commit if self.download else DEFAULT_BRANCH if pinned == configurations.UNPINNED else pinned

    @property
    def files(self) -> ModelFiles | None:
        """The files of the model, if they can be read."""
        return LocalFiles(self.folder) if self.folder else self.download.files if self.download else None


def served_model(request: ServeRequest, root: Path, *, planned: bool) -> ModelToServe:
    """The configuration that a request means: the one of a file, one that exists for the model and the GPUs, or a derived one.

    The GPUs are those of the host at ``root``.

    What is only ``planned`` needs neither the GPUs nor the Hub, if the sizes of the model are recorded.

    Raises:
        NotFound: there is no such configuration, repository, GPU or engine.
        BadInput: see :func:`sm120kit.recipes.configurations.load` and :func:`sm120kit.serving.checkpoint.read_files`.
        ResourceUnavailable: the host has no SM12x GPU, and nothing is planned for another one.
        FetchFailed: the Hub refuses access, or is needed and cannot be reached.
        Mismatch: see :func:`sm120kit.serving.derived_configuration.choose_engine`.
    """
    if request.target.endswith(".toml") or request.target in configurations.names():
        return _of_file(request)
    folder = Path(request.target)
    if folder.is_dir():
        model = NamedModel(_name_of(folder.resolve()), "", checkpoint.read(folder))
        return _for_gpus(request, ModelToServe(_any(model.repository), folder=folder, facts=model.facts), model, root, planned)
    if not _REPOSITORY.fullmatch(request.target):
        return _of_file(request)
    found = _on_hub(request, planned)
    facts = found.facts
    if facts is None:
        raise HubUnreachable(f"{request.target}: {found.unreached}", "sizes of this model are not in recipes/; try again later")
    model = NamedModel(request.target, found.download.commit if found.download else "", facts)
    return _for_gpus(request, found, model, root, planned)


def _of_file(request: ServeRequest) -> ModelToServe:
    configuration = configurations.load(request.target, arguments.problems)
    if request.gpu:
        raise BadInput(
            f"{request.target} is a configuration, for {configuration.hardware.gpu}",
            "--gpu is for a repository or a folder; `sm120kit config list` has configurations for others",
        )
    if request.engine:
        recipe = derived_configuration.recipe_of(configuration.served_by, request.engine)
        configuration = configuration.model_copy(update={"engine": recipe.name})
    return ModelToServe(_with_options(configuration, request))


def overridden(configuration: Configuration, argv: tuple[str, ...]) -> Configuration:
    """A configuration with options of the engine that win over its own.

    Raises:
        BadInput: the engine's parser, lockfile or image refuses them.
    """
    changed = derived_configuration.with_arguments(configuration, argv)
    if argv:
        arguments.require_known(changed)
    return changed


def _with_options(configuration: Configuration, request: ServeRequest) -> Configuration:
    """A configuration with the draft model and the options of a request."""
    words: tuple[str, ...] = ()
    if request.draft:
        recipe = load_engine(configuration.engine)
        drafter = reported.drafter_named(request.draft, configuration.model.repository, recipe)
        words = recipe.served_by.draft_arguments(drafter.method, drafter.repository, drafter.draft_tokens)
    return overridden(configuration, (*words, *request.arguments))


def _for_gpus(request: ServeRequest, found: ModelToServe, model: NamedModel, root: Path, planned: bool) -> ModelToServe:
    """The published or derived configuration of a model for the GPUs of a request or of the host."""
    there = None if request.gpu else derived_configuration.present_gpus(probe(root))
    exact, notes = request.count is not None, tuple[str, ...]()
    if request.gpu:
        hardware: Hardware | None = derived_configuration.planned_gpus(request.gpu, request.count or COUNTS[-1])
    elif there:
        hardware = there.model_copy(update={"gpus": request.count}) if request.count else there
    elif planned:
        hardware = derived_configuration.planned_gpus(ASSUMED_GPU, request.count) if request.count else None
    else:
        raise ResourceUnavailable(
            "this host has no SM12x GPU", "to plan for one: add --gpu rtx-pro-6000, rtx-5090 or dgx-spark, with --print"
        )
    own = derived_configuration.published(model.repository, hardware, exact=exact, engine=request.engine)
    if own:
        configuration, derived = own, False
    else:
        if hardware is None:
            hardware = derived_configuration.planned_gpus(ASSUMED_GPU, COUNTS[-1])
        if there is None and not request.gpu:
            notes = (f"planned for {ASSUMED_GPU}: this host has no SM12x GPU; --gpu names another",)
        if found.unreached and not model.facts.architectures:
            raise HubUnreachable(
                f"{model.repository}: {found.unreached}", "config.json of this model is not in recipes/; try again later"
            )
        recipe = derived_configuration.choose_engine(model, hardware, request.engine)
        made = derived_configuration.derive(model, recipe, hardware, exact=exact)
        configuration, derived, notes = made.configuration, True, notes + made.notes
    return ModelToServe(
        _with_options(configuration, request),
        derived,
        notes,
        found.download,
        found.folder,
        model.facts,
        found.unreached,
        elsewhere=bool(request.gpu) or there is None,
    )


def _any(repository: str) -> Configuration:
    """A configuration of which only the model counts."""
    (engine, *_) = newest(all_engines()[0].name)
    data = {"engine": engine, "arguments": [], "model": {"repository": repository}}
    return Configuration.model_validate(configurations.completed(data, "model"))


def _name_of(folder: Path) -> str:
    """The name under which a folder's model is served: that of its repository for a folder of a download cache."""
    cached = next((parent.name for parent in folder.parents if parent.name.startswith("models--")), "")
    parts = cached.removeprefix("models--").split("--")
    name = re.sub(r"[^\w.-]", "-", folder.name) or "model"
    return "/".join(parts) if len(parts) == 2 else f"{FOLDER_OWNER}/{name}"


def _on_hub(request: ServeRequest, planned: bool) -> ModelToServe:
    """What the Hub, or else the data of recipes, has on a model."""
    configuration, revision = _any(request.target), request.revision or DEFAULT_BRANCH
    try:
        download = model_download.plan_repository(request.target, revision, offline=request.offline)
        return ModelToServe(configuration, download=download, facts=model_download.preview(download))
    except (HubUnreachable, OfflineMiss) as error:
        if not planned:
            raise
        return ModelToServe(configuration, facts=recorded_model(request.target), unreached=error.message)


def planned_model(request: ServeRequest, root: Path) -> ModelToServe:
    """What is to be served, with all that is known before a download. Without the Hub, that may be its name alone."""
    try:
        served = served_model(request, root, planned=True)
    except HubUnreachable as error:
        hardware = derived_configuration.planned_gpus(request.gpu, request.count or 1) if request.gpu else None
        unknown = _any(request.target).model_copy(update={"hardware": hardware} if hardware else {})
        return ModelToServe(unknown, derived=True, unreached=error.message)
    if served.facts or served.folder:
        return served
    try:
        found = with_sizes(served, request.revision, offline=request.offline, planned=True)
    except (HubUnreachable, OfflineMiss) as error:
        return replace(served, unreached=error.message)
    return found if found.facts or not found.download else replace(found, facts=model_download.preview(found.download))


def with_sizes(served: ModelToServe, revision: str, *, offline: bool, planned: bool) -> ModelToServe:
    """What is to be served with its download, or with what recipes have on its size if the Hub cannot be reached for a plan."""
    if served.download or served.unreached:
        return served
    try:
        return replace(served, download=model_download.plan(served.configuration, revision, offline=offline))
    except (HubUnreachable, OfflineMiss) as error:
        facts = recorded_model(served.configuration.model.repository) if planned else None
        if facts is None:
            raise
        return replace(served, facts=facts, unreached=error.message)


def model_folder(
    served: ModelToServe, revision: str, check: Callable[[Checkpoint], object], *, planned: bool, offline: bool
) -> tuple[Path, Checkpoint | None]:
    """The folder of a model, downloaded unless the launch is only planned; then what the Hub has on the model.

    ``check`` is called with this before the download. Without the Hub, the sizes in recipes do for a plan.
    """
    if served.folder:
        return served.folder, None
    found = with_sizes(served, revision, offline=offline, planned=planned)
    if found.unreached:
        reporting.info(f"model    {found.configuration.model.repository} by its sizes in recipes/: {found.unreached}")
        assert found.facts is not None
        check(found.facts)
        return model_download.cache_folder(found.configuration.model.repository, found.revision), found.facts
    needed = found.download
    assert needed is not None
    reporting.info(f"model    {needed.repository} at {needed.commit}; {needed.missing_bytes / 1e9:.1f} GB to download")
    if not needed.missing_bytes:
        return model_download.fetch(needed), None
    facts = found.facts or model_download.preview(needed)
    check(facts)
    if planned:
        return model_download.cache_folder(needed.repository, needed.commit), facts
    return model_download.fetch(needed), None
