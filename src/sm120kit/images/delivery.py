"""Deliver wheels as an image: what it needs, its build context, the image; the stages after :mod:`sm120kit.wheels`."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sm120kit import recipes, sources
from sm120kit.core import reporting
from sm120kit.core.digests import digest_of
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import BadInput, BadRecord, DaemonUnreachable, NotFound, RequirementMissing
from sm120kit.core.record_files import read_record
from sm120kit.images import assembly
from sm120kit.images import base as base_layers
from sm120kit.images import context as contexts
from sm120kit.images.docker import Daemon
from sm120kit.images.local import LocalImages
from sm120kit.images.records import Image, ImageContext
from sm120kit.recipes import arguments, bases
from sm120kit.recipes.records import Closure
from sm120kit.sources.context import Options
from sm120kit.sources.debian import ARCHITECTURES
from sm120kit.wheels.image_wheels import EngineBuild
from sm120kit.wheels.records import WheelBuild

_UNPACKED_RATIO = 2.3
"""Bytes of layers for each byte of a wheel; 9.6 GB of 4.2 GB for vLLM 0.33.0. Layers are stored twice: packed, and as files."""
_COMPILER_BYTES = 3 * 2**30
"""For the compiler's wheels, packed and unpacked, and for source and wheel of FlashInfer."""


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
    labels = {f"{contexts.LABEL}recipe": recipe.name, **contexts.exceptions(recipe)}
    workspace, store, wheels = options.workspace, LocalImages(options.workspace), closure.wheels
    require_disk(workspace.root, missing_bytes(base, closure, options), f"everything that the image of {recipe.name} needs")
    if base in bases.names():
        # Programs of an image for another machine do not run here; its checks run with this machine's base.
        base_layers.debian_image(base, _machine(closure), options)
        store.require_runtime(base_layers.debian_image(base, platform.machine(), options)[1].partition("@")[2])
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
        layout, manifest = (
            LocalImages(options.workspace).layout,
            base_layers.debian_image(base, machine, options)[1].partition("@")[2],
        )
        return loading.load(layout, manifest, daemon).id if daemon else layout.image(manifest).id
    if daemon:
        contexts.require_base(base, daemon, reporting.info)
    return base


def _machine(closure: Closure) -> str:
    """The machine of a closure's wheels: ``x86_64``, ``aarch64``."""
    return next((machine for machine in ARCHITECTURES if closure.platform.endswith(f"_{machine}")), platform.machine())


@contextmanager
def _opened_base(name: str, machine: str, options: Options) -> Iterator[tuple[assembly.ImageBase, str]]:
    """A base as :func:`sm120kit.images.assembly.assemble` takes it, and its reference, while the block runs."""
    if name in bases.names():
        yield base_layers.debian_image(name, machine, options)
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
    setup = engine_setup(build.recipe, build.build_id, build.closure)
    return _build(setup, build.wheels, build.closure, request, options)


def engine_setup(recipe: recipes.EngineRecipe, build_id: str, closure: Closure) -> contexts.ImageSetup:
    """Kind, labels and environment of the image of an engine."""
    return contexts.ImageSetup(
        kind=recipe.engine,
        recipe=recipe.name,
        version=recipe.version,
        labels={
            "sm120kit.build-id": build_id,
            "sm120kit.python": closure.python,
            **contexts.exceptions(recipe),
            **_overridden(recipe),
        },
        env={**recipe.env, "SM120KIT_PORT": str(recipe.served_by.port)},
        serve=recipe.serve,
        usage=arguments.help_text(recipe),
        b12x=recipe.b12x.model_dump(mode="json") if recipe.b12x else {},
    )


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
