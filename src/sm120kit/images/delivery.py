"""Deliver wheels as an image: build context, image, verification, publishing; the stages after :mod:`sm120kit.wheels`."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sm120kit import recipes, sources
from sm120kit.core import reporting, toolchain
from sm120kit.core.errors import BadInput, BadRecord, DaemonUnreachable, NotFound, NotVerified, RequirementMissing
from sm120kit.core.state import Workspace, digest_of, read_record, require_disk
from sm120kit.images import assembly, backends, checks
from sm120kit.images import base as base_layers
from sm120kit.images import context as contexts
from sm120kit.images.docker import Daemon
from sm120kit.images.local import LocalImages
from sm120kit.images.oci import Layout
from sm120kit.images.records import Attestation, Compression, Image, ImageContext, PublishedImage
from sm120kit.images.stores import EveryStore
from sm120kit.recipes import architectures, arguments, bases, configurations
from sm120kit.recipes.records import Closure
from sm120kit.recipes.target import EngineTarget
from sm120kit.sources.context import Options
from sm120kit.sources.debian import ARCHITECTURES
from sm120kit.wheels.image_wheels import EngineBuild
from sm120kit.wheels.pack import local_version
from sm120kit.wheels.plan import PLAN_FORMAT
from sm120kit.wheels.records import BuildRequest, WheelBuild

if TYPE_CHECKING:
    from sm120kit.images.attestation import Signer

# What contacts registries is imported where it is used: with it, a build with nothing to do takes a third longer.

LEFT_OUT = {
    "nvidia-cutlass-dsl": "its kernels are compiled at run time; an image of compiled modules has no use for it",
    "nvidia-cudnn-frontend": "drives cuDNN, which the image does not bring",
}
"""Requirements of FlashInfer that an image of kind ``flashinfer`` may lack, with the reason."""

_UNPACKED_RATIO = 2.3
"""Bytes of layers for each byte of a wheel; 9.6 GB of 4.2 GB for vLLM 0.33.0. Layers are stored twice: packed, and as files."""
_COMPILER_BYTES = 3 * 2**30
"""For the compiler's wheels, packed and unpacked, and for source and wheel of FlashInfer."""

CLAIMS = ("kind", "recipe", "plan", "commit", "tree", "archs", "modules", "patches", "wheels", "ours", "context", "reference")
"""Labels of every image that sm120kit builds."""


class Builder(StrEnum):
    """What writes the layers of an image: sm120kit, or a container daemon with the Dockerfiles."""

    LAYERS = "layers"
    DOCKER = "docker"


@dataclass(frozen=True)
class ImageRequest:
    """How to build an image.

    ``base`` is a base of ``recipes/bases/``, or an image by digest or local id; by default that of the engine's recipe. The
    default builder is ``layers``, for a local id ``docker``. ``network`` is the network of its build steps, which fetch
    nothing; with ``context_only``, only its build context is written.
    """

    base: str = ""
    builder: Builder | None = None
    network: str = "none"
    context_only: bool = False


@dataclass(frozen=True)
class PublishOptions:
    """How an image is published: compression of its layers (an image of the daemon: always gzip), and signature."""

    compression: Compression = Compression.GZIP
    sign: Signer | None = None


@dataclass(frozen=True)
class ImageBuild:
    """A build context and its image; ``image`` is None if only the context was requested.

    ``ran`` is false if the image was built before.
    """

    context: ImageContext
    image: Image | None = None
    ran: bool = False


def read_closure(path: Path) -> Closure:
    """Read a closure from a file, in the form that it has in a lockfile.

    Raises:
        BadInput: it is not a closure, or its wheels were edited.
    """
    try:
        closure = read_record(Closure, path)
    except (OSError, BadRecord) as error:
        raise BadInput(
            f"{path} is not a closure of locked wheels: {error}", "`closures` of a lockfile shows the form"
        ) from error
    if closure.sha256 != digest_of(closure.wheels):
        raise BadInput(f"{path}: its sha256 is not that of its wheels: they were edited", "resolve it again")
    return closure


def complete(request: ImageRequest, recipe: recipes.Recipe) -> ImageRequest:
    """A request with its base and builder. Nothing is fetched.

    Raises:
        NotFound: neither the recipe nor the request names a base, or it is a tag.
        RequirementMissing: the builder does not compile the kernels of the recipe.
    """
    base = request.base or recipe.base_image or recipe.base or ""
    if not base:
        raise NotFound(
            f"no base: neither {recipe.name} nor --base names one",
            f"--base {'|'.join(bases.names())}, or an image as name@sha256:<digest> or id; without an"
            f" image: sm120kit build {recipe.name.replace('-', '@', 1)} --to pack",
        )
    if base not in bases.names():
        contexts.require_pinned(base)
    is_local = base.startswith("sha256:")  # an id that only the daemon has
    of_docker = is_local or request.context_only or request.network != ImageRequest.network
    builder = request.builder or (Builder.DOCKER if of_docker else Builder.LAYERS)
    if builder is Builder.DOCKER and recipe.b12x:
        raise RequirementMissing(
            f"{recipe.name} compiles kernels of b12x into its image, which only the builder {Builder.LAYERS} does",
            "leave out --builder, --context-only and --network, and name a base by digest instead of a local id",
        )
    return replace(request, base=base, builder=builder)


def prepare(request: ImageRequest, recipe: recipes.Recipe, closure: Closure, options: Options) -> ImageRequest:
    """Complete a request, and require what an image of the wheels of ``closure`` needs, so that nothing is compiled in vain.

    Returns the request with a base and a builder. Base and wheels are fetched. For the builder ``layers``, the base is
    assembled, programs can run in that for this machine, and there is disk space for the image; for ``docker``, the daemon has
    the base, which is pulled if it is named by digest, unless only the context is requested.

    Raises:
        NotFound: see :func:`complete`; or neither daemon nor registry has the base.
        Mismatch: the base is not locked for this machine.
        RequirementMissing: this system does not permit to run the checks without a daemon.
        DaemonUnreachable: no daemon responds.
        RequirementMissing: the Docker SDK is not installed.
        RequirementMissing: the image is for another machine and not built by ``layers`` on a base of ``recipes/bases/``, or an
            image as base lacks what the wheels need, or see :func:`complete`.
        FetchFailed, ResourceUnavailable and others: base or wheels cannot be fetched or stored.
    """
    request = complete(request, recipe)
    base, builder = request.base, request.builder
    foreign = _machine(closure) != platform.machine()
    if foreign and (builder is Builder.DOCKER or base not in bases.names()):
        raise RequirementMissing(
            f"{recipe.name} is for {_machine(closure)}, and this machine, {platform.machine()}, runs no program of its image",
            f"--builder {Builder.LAYERS} with --base {'|'.join(bases.names())} runs none",
        )
    if foreign and recipe.b12x:
        raise RequirementMissing(
            f"{recipe.name} compiles kernels of b12x in its image; this machine, {platform.machine()}, runs no program of it",
            f"build it on a machine for {_machine(closure)}",
        )
    if builder is Builder.LAYERS:
        _prepare_layers(base, closure, options, recipe)
    else:
        base = _prepare_docker(base, request, options)
    return replace(request, base=base)


def _prepare_layers(base: str, closure: Closure, options: Options, recipe: recipes.Recipe) -> None:
    labels = {f"{contexts.LABEL}recipe": recipe.name, **_exceptions(recipe)}
    workspace, store, wheels = options.workspace, LocalImages(options.workspace), closure.wheels
    require_disk(workspace.root, missing_bytes(base, closure, options), f"everything that the image of {recipe.name} needs")
    if base in bases.names():
        # Programs of an image for another machine do not run here; its checks run with this machine's base.
        _debian_base(base, _machine(closure), options)
        store.require_runtime(_debian_base(base, platform.machine(), options)[1].partition("@")[2])
    else:
        from sm120kit.images import existing_base

        programs = existing_base.inspect(existing_base.fetch(base, store.layout), store)
        existing_base.require_suitable(base, programs, closure, compiles=recipe.delivers_image)
    missing = sources.unfetched(wheels, workspace)
    if missing:
        sources.wheelhouse(missing, workspace, options.origin)
    listed = contexts.listed_wheels(wheels)
    if any(image.labels[contexts.WHEELS] == listed for image, _ in store.images(contexts.WHEELS)):
        return  # their layers were written before
    context = ImageContext(workspace.root, "", "", base, "", {}, labels, None, wheels, (), Builder.LAYERS)
    with _opened_base(base, _machine(closure), options) as (image_base, _):
        needed = assembly.required_bytes(
            context, image_base, lambda wheel: workspace.downloads / wheel.sha256 / wheel.filename, store.layout, workspace
        )
    require_disk(workspace.root, needed, "the layers of the image and its checks")


def missing_bytes(base: str, closure: Closure, options: Options) -> int:
    """The disk space that all steps of an image's build need for what is not fetched yet, before the first is fetched.

    The sizes of wheels are those that their index states. Layers of wheels that are fetched are counted exactly, later.
    """
    workspace = options.workspace
    machines = {_machine(closure), platform.machine()} if base in bases.names() else ()
    absent = [machine for machine in machines if not base_layers.is_assembled(bases.load(base), machine, workspace)]
    packages = sum(package.size for machine in absent for package in bases.read_lock(base, machine))
    wheels = sum(sources.sizes(sources.unfetched(closure.wheels, workspace), workspace, options.origin).values())
    compiler = 0 if (workspace.cache / "toolchains").is_dir() else _COMPILER_BYTES
    return int(base_layers.BYTES_PER_PACKED * packages + (1 + 2 * _UNPACKED_RATIO) * wheels) + (compiler if wheels else 0)


def _prepare_docker(base: str, request: ImageRequest, options: Options) -> str:
    """The base as an image that the daemon has, by id or digest; with ``context_only``, no daemon is contacted."""
    from sm120kit.images import loading

    try:
        daemon = None if request.context_only else Daemon()
    except DaemonUnreachable as error:
        raise DaemonUnreachable(
            error.message,
            "start it, or set DOCKER_HOST to its socket; --builder layers needs none; --context-only writes the build context",
        ) from error
    if base in bases.names():
        machine = platform.machine()
        layout, manifest = LocalImages(options.workspace).layout, _debian_base(base, machine, options)[1].partition("@")[2]
        return loading.load(layout, manifest, daemon).id if daemon else layout.image(manifest).id
    if daemon:
        contexts.require_base(base, daemon, reporting.info)
    return base


def _machine(closure: Closure) -> str:
    """The machine of a closure's wheels: ``x86_64``, ``aarch64``."""
    return next((machine for machine in ARCHITECTURES if closure.platform.endswith(f"_{machine}")), platform.machine())


def _debian_base(name: str, machine: str, options: Options) -> tuple[assembly.ImageBase, str]:
    """A base of ``recipes/bases/`` for a machine as an image in the state directory, and ``name@digest`` of that image."""
    layout = LocalImages(options.workspace).layout
    base = base_layers.image_base(bases.load(name), machine, layout, options)
    manifest = layout.add_image(base.layers, base.diff_ids, base.config)
    return base, f"{name}@{manifest.digest}"


@contextmanager
def _opened_base(name: str, machine: str, options: Options) -> Iterator[tuple[assembly.ImageBase, str]]:
    """A base as :func:`sm120kit.images.assembly.assemble` takes it, and its reference, while the block runs."""
    if name in bases.names():
        yield _debian_base(name, machine, options)
        return
    from sm120kit.images import existing_base

    store = LocalImages(options.workspace)
    with existing_base.image_base(existing_base.fetch(name, store.layout), store) as base:
        yield base, name


def flashinfer_image(build: WheelBuild, closure: Closure, request: ImageRequest, options: Options) -> ImageBuild:
    """Build an image of a FlashInfer wheel with the wheels of ``closure``; ``request`` is from :func:`prepare`.

    No daemon is needed until the build context is complete.

    Raises:
        NotFound: the base does not exist.
        DaemonUnreachable: no daemon responds; wheel and context are kept.
        CommandFailed: a step failed.
    """
    assert build.plan is not None
    setup = contexts.ImageSetup(
        kind="flashinfer",
        recipe=build.name,
        labels={"sm120kit.build-id": closure.sha256, "sm120kit.python": closure.python},
        env={"FLASHINFER_CUDA_ARCH_LIST": " ".join(arch.number for arch in build.plan.archs)},
    )
    return _build(setup, build.wheels, closure, request, options)


def engine_image(build: EngineBuild, request: ImageRequest, options: Options) -> ImageBuild:
    """Build the image of an engine from the wheels of ``build`` and the official wheels of its lockfile.

    See :func:`flashinfer_image`.
    """
    setup = _engine_setup(build.recipe, build.build_id, build.closure)
    return _build(setup, build.wheels, build.closure, request, options)


def _engine_setup(recipe: recipes.EngineRecipe, build_id: str, closure: Closure) -> contexts.ImageSetup:
    """Kind, labels and environment of the image of an engine."""
    return contexts.ImageSetup(
        kind=recipe.engine,
        recipe=recipe.name,
        version=recipe.version,
        labels={"sm120kit.build-id": build_id, "sm120kit.python": closure.python, **_exceptions(recipe), **_overridden(recipe)},
        env={**recipe.env, "SM120KIT_PORT": str(recipe.served_by.port)},
        serve=recipe.serve,
        usage=arguments.help_text(recipe),
        b12x=recipe.b12x.model_dump(mode="json") if recipe.b12x else {},
    )


def shared_key(target: EngineTarget, build: BuildRequest, request: ImageRequest) -> str:
    """The key of an engine's image in a remote cache: its inputs; empty if others than these decide it.

    The builder ``docker`` is not shared, nor are images on a base that only a local daemon has.

    Raises:
        NotFound, RequirementMissing: see :func:`complete`.
    """
    recipe, request = target.recipe, complete(request, target.recipe)
    base = request.base
    if request.builder is Builder.DOCKER or base.startswith("sha256:") or os.environ.get("CUDA_HOME"):
        return ""
    inputs = [
        target.build_id,
        build.group or recipe.kernels,
        build.from_source,
        bases.lock_id(base) if base in bases.names() else base,
        contexts.programs(_engine_setup(recipe, target.build_id, target.closure)),
        [os.environ.get("SOURCE_DATE_EPOCH", ""), toolchain.host_compiler()[1], PLAN_FORMAT],
    ]
    return f"image-{digest_of(inputs)}"


def fetch_shared(key: str, target: EngineTarget) -> checks.CheckReport | None:
    """The report of an image in the remote cache of a command, which is pulled; None if there is none."""
    from sm120kit.images import shared_images

    options = target.options
    if options.remote is None or not key:
        return None
    verified = shared_images.fetch(key, target.build_id, options.remote, options.workspace)
    return checks.CheckReport(verified.image, verified.checks, verified.facts, verified) if verified else None


def share(key: str, report: checks.CheckReport, options: Options) -> None:
    """Store an image that passed its checks in the remote cache of a command, if it may."""
    from sm120kit.images import shared_images

    if options.remote and key and report.verified:
        shared_images.push(key, report.verified, options.remote, options.workspace)


def _exceptions(recipe: recipes.Recipe) -> dict[str, str]:
    """Labels of the files of wheels that are not installed as they are, or not compared with RECORD."""
    tables = ((contexts.LEFT_OUT, recipe.leave_out), (contexts.WRONG_RECORD, recipe.wrong_record))
    return {
        label: ",".join(f"{entry.distribution}:{files}" for entry in entries for files in entry.files)
        for label, entries in tables
        if entries
    }


def _overridden(recipe: recipes.EngineRecipe) -> dict[str, str]:
    """The label that explains the conflicts that ``pip check`` reports in an image."""
    overrides = recipe.environment.overrides
    text = "; ".join(f"{name}=={override.version}: {override.reason}" for name, override in sorted(overrides.items()))
    return {f"{contexts.LABEL}overridden": text} if text else {}


def _build(
    setup: contexts.ImageSetup, ours: Mapping[Path, str], closure: Closure, request: ImageRequest, options: Options
) -> ImageBuild:
    """Build an image of our wheels and those of a closure."""
    if request.builder is Builder.LAYERS:
        return _assemble(setup, ours, closure, request.base, options)
    *locked, installer = sources.wheelhouse((*closure.wheels, contexts.INSTALLER), options.workspace, options.origin)
    pairs = list(zip(closure.wheels, locked, strict=True))
    context = contexts.make_context(setup, request.base, ours, pairs, installer, options.workspace)
    reporting.info(f"the build context is complete: {context.directory}")
    if request.context_only:
        return ImageBuild(context)
    image, ran = contexts.build(context, Daemon(), options.workspace, network=request.network, report=reporting.info)
    return ImageBuild(context, image, ran)


def _assemble(
    setup: contexts.ImageSetup, ours: Mapping[Path, str], closure: Closure, base_name: str, options: Options
) -> ImageBuild:
    """Write the layers of an image in the state directory, without a daemon."""
    workspace = options.workspace
    with _opened_base(base_name, _machine(closure), options) as (base, reference):
        context, text, scripts = contexts.describe(setup, reference, ours, closure.wheels, workspace)
        ours_by_wheel = {built.wheel: path for built, path in zip(context.ours, ours, strict=True)}
        files = assembly.wheel_files(
            ours_by_wheel, closure.wheels, lambda wheels: sources.wheelhouse(wheels, workspace, options.origin)
        )
        layout = LocalImages(workspace).layout
        image, ran = assembly.assemble(context, (text, scripts), base, files, layout, workspace)
    return ImageBuild(context, image, ran)


def verify_once(image: Image, workspace: Workspace) -> checks.CheckReport:
    """The report of an image that is verified already, after tagging it again, or of the checks that :func:`verify` runs.

    Files that were hashed while the layers were unpacked are not read again.
    """
    store = EveryStore(workspace)
    try:
        verified = checks.require_verified(image.id, store, workspace)
    except NotVerified:
        return verify(image.id, workspace, reporting.info, read_all=False)
    store.tag(image.id, verified.reference)
    return checks.CheckReport(image, verified.checks, verified.facts, verified)


def verify(
    reference: str, workspace: Workspace, report: Callable[[str], None] = lambda line: None, *, read_all: bool = True
) -> checks.CheckReport:
    """Run the checks of a local image against the properties that its labels and its recipe require.

    The image is in the state directory, or else in the container daemon. Without ``read_all``, hashes of files are those of
    when their layers were unpacked, if that was in this state directory.
    """
    store = EveryStore(workspace)
    image = store.find(reference)
    requirements = expected(image)
    if not read_all:
        requirements = replace(requirements, digests=store.digests(image.id))
    native = _native_checks(image, workspace) if requirements.foreign else None
    return checks.verify(image, image.canonical_name, requirements, store, workspace, report, native)


def _native_checks(image: Image, workspace: Workspace) -> checks.RunChecks:
    """What runs the checks of an image for another machine: the Python of the same base for this machine.

    Raises:
        RequirementMissing: the image is not in the state directory, or its base is none of ``recipes/bases/``.
        FetchFailed and others: the base cannot be fetched.
    """
    store, name = LocalImages(workspace), image.labels.get("org.opencontainers.image.base.name", "")
    if store.inspect(image.id) is None or name not in bases.names():
        raise RequirementMissing(
            f"{image.id} is for {image.platform}, and this machine, {platform.machine()}, does not run its checks",
            f"verify it on a machine for {image.platform}",
        )
    base = _debian_base(name, platform.machine(), Options(workspace))[1].partition("@")[2]
    return lambda argv, files: store.run_native(image.id, base, argv, files)


def expected(image: Image) -> checks.ExpectedImage:
    """Required properties of an image, from its labels and from the recipe that they name.

    Properties that are compared with the record in its FlashInfer wheel are those of the FlashInfer recipe.

    Raises:
        NotVerified: it is not an image that sm120kit built.
        NotFound: there is no recipe of that name.
    """
    prefix = contexts.LABEL
    labels = {key.removeprefix(prefix): value for key, value in image.labels.items() if key.startswith(prefix)}
    missing = [key for key in CLAIMS if key not in labels]
    if missing:
        raise NotVerified(
            f"the image {image.id} was not built by sm120kit: it has no label {prefix}{missing[0]}",
            "only images that `sm120kit image` built can be verified",
        )
    if not image.canonical_name:
        raise NotVerified(
            f"the image {image.id} has the label {labels['reference']}, which does not fit its kind, version and context",
            "its labels were edited; build it again",
        )
    recipe = recipes.load(labels["recipe"])
    flashinfer = recipes.load_flashinfer(recipe.flashinfer) if recipe.delivers_image else recipe.require_kernels()
    modules = tuple(filter(None, labels["modules"].split(",")))
    built = [name for name in modules if name in flashinfer.modules]
    wheels, ours = (dict(wheel.split("==", 1) for wheel in labels[key].split(",") if wheel) for key in ("wheels", "ours"))
    served, recorded = _configurations(recipe), backends.load(recipe.name)
    exceptions = _exceptions(recipe)  # not the labels: an image does not exempt its own files
    architecture = image.platform.split("/")[1]
    machine = next((key for key, value in ARCHITECTURES.items() if value == architecture), architecture)
    return checks.ExpectedImage(
        kind=labels["kind"],
        recipe=flashinfer.name,
        version=local_version(flashinfer.version, labels["plan"]),
        commit=labels["commit"],
        tree=labels["tree"],
        plan=labels["plan"],
        archs=tuple(labels["archs"].split(",")),
        modules=modules,
        patches=tuple(filter(None, labels["patches"].split(","))),
        distributions={**wheels, **ours},
        generators=tuple(flashinfer.modules[name].call for name in built),
        kernels={name: flashinfer.modules[name].expect_kernels for name in built},
        complete={"all", "serve"} <= {*flashinfer.groups} and {*built} >= {*flashinfer.groups["all"].modules},
        left_out=() if recipe.delivers_image else tuple(sorted({*LEFT_OUT} - {*wheels})),
        overridden=tuple(sorted(recipe.environment.overrides)) if recipe.delivers_image and recipe.environment else (),
        leave_out=contexts.patterns(exceptions, contexts.LEFT_OUT),
        wrong_record=contexts.patterns(exceptions, contexts.WRONG_RECORD),
        linked=labels.get("builder") == "layers",
        imports=tuple(module for entry in recipe.leave_out for module in entry.imports),
        env=dict(recipe.env),
        serve=recipe.serve,
        arguments={configuration.name: arguments.serve_arguments(configuration) for configuration in served},
        served={configuration.name: _served(configuration, recorded) for configuration in served},
        backends=backends.expected(recipe.name, served),
        b12x=recipe.b12x.model_dump(mode="json") if recipe.b12x else {},
        foreign="" if machine == platform.machine() else image.platform,
        machine=machine,
    )


def _served(configuration: configurations.Configuration, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the modules that an engine requests for a configuration, beside its arguments."""
    listed = architectures.of_checkpoint(configuration.model.repository)
    return {
        "environment": dict(configuration.environment),
        "quantization": configuration.model.quantization,
        "architecture": listed[0].model_dump(mode="json", exclude={"source", "checkpoint"}) if listed else None,
        "selected": recorded.get(configuration.name, {}).get("selected", {}),
    }


def _configurations(recipe: recipes.Recipe) -> list[configurations.Configuration]:
    """The configurations that the image of a recipe serves."""
    every = map(configurations.load, configurations.names())
    return [configuration for configuration in every if configuration.engine == recipe.name]


def publish(
    reference: str,
    repository: str,
    index: Path,
    workspace: Workspace,
    options: PublishOptions,
    report: Callable[[str], None] = lambda line: None,
) -> PublishedImage:
    """Publish a verified image of the state directory or the daemon, with SBOM and provenance beside the index.

    See :func:`sm120kit.images.registry.publish` and :func:`sm120kit.images.attestation.write`. An entry of the index that has
    a statement keeps it unless it is to be signed.
    """
    from sm120kit.images import attestation, registry, transports
    from sm120kit.images.attestation import base_packages, origins

    layout = Layout(workspace.root / "oci")
    transport = transports.transport_of(reference, layout, options.compression, report)
    store = EveryStore(workspace)
    verified = checks.require_verified(reference, store, workspace)
    context = contexts.context_of(verified.image, workspace)

    def attest(entry: PublishedImage) -> Attestation:
        if entry.attested and not options.sign:
            return entry.attested
        packages = base_packages.installed(verified.image, store, workspace)
        wheels = origins.of_wheels(verified.image, context, base_packages.reader(verified.image, store, workspace))
        return attestation.write(entry, context, index.parent, options.sign, packages, wheels)

    return registry.publish(verified, repository, index, transport, attest)
