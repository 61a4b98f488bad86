"""From wheels to an image that others can pull: context, image, verification, publishing; the stages after ``pipeline``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit import attest, engines, launch, pipeline, recipe, registry, sources
from sm120kit import image as images
from sm120kit.daemon import Daemon
from sm120kit.errors import BadRecipe, NoSuchImage, NotAttested, NotVerified
from sm120kit.recipe import arguments, configuration
from sm120kit.records import Arch, Attested, Closure, Image, ImageContext, PublishedImage, VerifiedImage
from sm120kit.verify import image as checks
from sm120kit.workspace import Workspace, digest_of, read_record, write_record

LEFT_OUT = {
    "nvidia-cutlass-dsl": "its kernels are compiled at run time; an image of compiled modules has no use for it",
    "nvidia-cudnn-frontend": "drives cuDNN, which the image does not bring",
}
"""What FlashInfer requires and an image of kind ``flashinfer`` may do without."""

CLAIMS = ("kind", "recipe", "plan", "commit", "tree", "archs", "modules", "patches", "wheels", "ours", "context", "reference")
"""What the labels of every image of ours say."""

PORTS = {"vllm": "8000", "sglang": "30000"}
"""Where the engines listen unless told otherwise (``vllm serve --help``, SGLang's ServerArgs)."""


@dataclass(frozen=True)
class Delivered:
    """How far an image came. ``image`` is None when only the context was asked for."""

    context: ImageContext
    image: Image | None = None
    ran: bool = False


def read_closure(path: Path) -> Closure:
    """A closure from a file, as it stands in a lock.

    Raises:
        BadRecipe: it is not one, or its wheels were edited.
    """
    from pydantic import ValidationError

    try:
        closure = read_record(Closure, path)
    except (OSError, ValidationError) as error:
        raise BadRecipe(f"{path} is not a closure of locked wheels: {error}", "a lock's `closures` shows the form") from error
    if closure.sha256 != digest_of(closure.wheels):
        raise BadRecipe(f"{path}: its wheels are not those of its sha256: they were edited", "resolve it again")
    return closure


def image(
    name: str,
    options: pipeline.Options,
    base: str,
    closure: Closure,
    *,
    archs: Sequence[Arch] = (),
    group: str | None = None,
    network: str = "none",
    context_only: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Delivered:
    """Build a FlashInfer recipe's wheel and an image of it with the wheels of ``closure`` on ``base``.

    The daemon is asked only when the context is ready, so that everything else is done where there is none.

    Raises:
        NoSuchImage: the base is not named by digest, or cannot be had.
        DaemonUnreachable: no daemon answers; wheel and context are kept.
        ImageBuildFailed: a step failed.
    """
    images.require_pinned(base)
    built = pipeline.build(name, options, archs=archs, group=group, tell=tell)
    assert built.plan is not None
    setup = images.Setup(
        kind="flashinfer",
        recipe=built.name,
        labels={"sm120kit.build-id": closure.sha256, "sm120kit.python": closure.python},
        env={"FLASHINFER_CUDA_ARCH_LIST": " ".join(arch.number for arch in built.plan.archs)},
    )
    return _delivered(setup, options, base, [built.wheel], closure, network, context_only, tell)


def engine_image(
    engine: engines.Engine,
    options: pipeline.Options,
    base: str,
    *,
    network: str = "none",
    context_only: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Delivered:
    """Build the image of an engine whose wheels of ours are built, with the wheels of its lock. See :func:`image`.

    ``base`` takes the place of the one that the recipe names.

    Raises:
        NoSuchImage: also when neither names a base.
    """
    item, closure = engine.recipe, engine.closure
    if not base and not item.base_image:
        raise NoSuchImage(
            f"the wheel of {item.name} is ready; its image is not made: neither the recipe nor --base names a base image",
            f"the same command with --base name@sha256:<digest>, or the id of a local image, goes on; it must have Python "
            f"{closure.python} and a C++ compiler. --to pack asks for the wheel alone",
        )
    setup = images.Setup(
        kind=item.engine,
        recipe=item.name,
        version=item.version,
        labels={"sm120kit.build-id": engine.build_id, "sm120kit.python": closure.python},
        env={**item.env, "SM120KIT_PORT": PORTS[item.engine]},
        serve=item.serve,
    )
    return _delivered(setup, options, base or item.base_image, engine.wheels, closure, network, context_only, tell)


def _delivered(
    setup: images.Setup,
    options: pipeline.Options,
    base: str,
    ours: Sequence[Path],
    closure: Closure,
    network: str,
    context_only: bool,
    tell: Callable[[str], None],
) -> Delivered:
    """The image of wheels of ours and those of a closure; the daemon is asked when everything else is done."""
    images.require_pinned(base)
    wheels = (*closure.wheels, images.INSTALLER)
    *locked, installer = sources.wheelhouse(wheels, options.workspace, mirror=options.mirror, offline=options.offline)
    pairs = list(zip(closure.wheels, locked, strict=True))
    context = images.make_context(setup, base, ours, pairs, installer, options.workspace)
    tell(f"the build context is ready: {context.directory}")
    if context_only:
        return Delivered(context)
    made, ran = images.build(context, Daemon(), options.workspace, network=network, tell=tell)
    return Delivered(context, made, ran)


def named(image: Image, workspace: Workspace, tell: Callable[[str], None] = lambda line: None) -> checks.Report:
    """The report of an image that has its name already, or of checks that are run now. See :func:`verify`."""
    daemon = Daemon()
    try:
        known = checks.verified(image.id, daemon, workspace)
    except NotVerified:
        return verify(image.id, workspace, tell)
    daemon.tag(image.id, known.reference)
    return checks.Report(image, known.checks, known.said, known)


def verify(reference: str, workspace: Workspace, tell: Callable[[str], None] = lambda line: None) -> checks.Report:
    """Run the checks of an image, built here or pulled. What it must be follows from its labels and its recipe."""
    daemon = Daemon()
    found = daemon.find(reference)
    wanted = expected(found)
    return checks.verify(found, found.labels[f"{images.LABEL}reference"], wanted, daemon, workspace, tell)


def expected(found: Image) -> checks.Expected:
    """What an image must be, from what it claims and from the recipe that it names.

    What is compared with what its FlashInfer wheel says of itself is of the kernels' recipe, on which an engine's rests.

    Raises:
        NotVerified: it is not an image of ours.
        UnknownName: its recipe is not known here.
    """
    said = {key.removeprefix(images.LABEL): value for key, value in found.labels.items() if key.startswith(images.LABEL)}
    missing = [key for key in CLAIMS if key not in said]
    if missing:
        raise NotVerified(
            f"the image {found.id} is not one of ours: it has no label {images.LABEL}{missing[0]}",
            "only images that `sm120kit image` made can be verified",
        )
    named = recipe.load_any(said["recipe"])
    engine = named if isinstance(named, recipe.EngineRecipe) else None
    kernels = recipe.load(engine.flashinfer) if engine else recipe.load(said["recipe"])
    modules = tuple(filter(None, said["modules"].split(",")))
    wheels, ours = (dict(wheel.split("==", 1) for wheel in said[key].split(",") if wheel) for key in ("wheels", "ours"))
    return checks.Expected(
        kind=said["kind"],
        recipe=kernels.name,
        version=f"{kernels.version}+sm120kit.{said['plan'][:12]}",
        commit=said["commit"],
        tree=said["tree"],
        plan=said["plan"],
        archs=tuple(said["archs"].split(",")),
        modules=modules,
        patches=tuple(filter(None, said["patches"].split(","))),
        distributions={**wheels, **ours},
        generators=tuple(kernels.modules[module].generator for module in modules if module in kernels.modules),
        kernels={module: kernels.modules[module].expect_kernels for module in modules if module in kernels.modules},
        left_out=() if engine else tuple(sorted({*LEFT_OUT} - {*wheels})),
        overridden=tuple(sorted(engine.environment.overrides)) if engine else (),
        env=dict(engine.env) if engine else {},
        serve=engine.serve if engine else (),
        arguments={one.name: _released(one, engine) for one in _configurations(engine)} if engine else {},
        unreleased={one.name: one.unreleased.arguments for one in _configurations(engine) if one.unreleased} if engine else {},
    )


def _released(wanted: configuration.Configuration, engine: recipe.EngineRecipe) -> tuple[str, ...]:
    """What a configuration says after ``serve``, without arguments that are unreleased."""
    return launch.arguments(wanted.model_copy(update={"arguments": arguments.released(wanted)}), engine)


def _configurations(engine: recipe.EngineRecipe) -> list[configuration.Configuration]:
    """The configurations that are for an engine's recipe."""
    return [one for one in map(configuration.load, configuration.names()) if one.engine == engine.name]


def publish(
    reference: str,
    repository: str,
    index: Path,
    workspace: Workspace,
    tell: Callable[[str], None] = lambda line: None,
    *,
    key: Path | None = None,
) -> PublishedImage:
    """Publish an image that passed its checks, with SBOM and provenance beside the index, signed when there is a ``key``.

    See :func:`sm120kit.registry.publish` and :func:`sm120kit.attest.write`. What is listed with a statement already keeps it,
    unless a key is given.
    """
    sign = attest.signer(key) if key else None
    daemon = Daemon()
    verified = checks.verified(reference, daemon, workspace)
    made = images.made_of(verified.image, workspace)

    def attested(entry: PublishedImage) -> Attested:
        return entry.attested if entry.attested and not sign else attest.write(entry, made, index.parent, sign)

    return registry.publish(verified, repository, index, daemon, attested, tell)


@dataclass(frozen=True)
class Pulled:
    """An image that was pulled, and what is new in it since the last one of the same recipe; None when there was none."""

    verified: VerifiedImage
    changes: tuple[str, ...] | None


def pull(
    name: str,
    index: Path,
    platform: str,
    workspace: Workspace,
    tell: Callable[[str], None] = lambda line: None,
    *,
    trusted: Path | None = None,
) -> Pulled:
    """Pull an image that an index lists, and with ``trusted`` only what the holder of that key signed.

    See :func:`sm120kit.registry.pull` and :func:`sm120kit.attest.check`.
    """
    entry = registry.find(name, index, platform)
    if trusted:
        attest.check(entry, index.parent, trusted)
    pulled = registry.pull(entry, Daemon(), tell)
    write_record(checks.record_path(workspace, pulled.image), pulled)
    last = workspace.root / "images" / "pulled" / f"{digest_of([entry.recipe, platform])}.json"
    before = read_record(VerifiedImage, last) if last.is_file() else None
    write_record(last, pulled)
    return Pulled(pulled, registry.changes(before.image, pulled.image) if before else None)


def require_signed(reference: str, index: Path, trusted: Path) -> None:
    """Make sure that an image which is here is one that ``index`` lists and the holder of ``trusted`` signed.

    Raises:
        NoSuchImage: it is not here.
        NotAttested: it is not listed, or :func:`sm120kit.attest.check` refuses it.
    """
    found = Daemon().find(reference)
    listed = [one for one in registry.read_index(index).images if one.verified.image.content == found.content]
    if not listed:
        raise NotAttested(f"{index} lists no image with the content of {reference}", "--index names the list it came from")
    attest.check(listed[0], index.parent, trusted)


def unresolved(index: Path) -> tuple[tuple[PublishedImage, ...], tuple[PublishedImage, ...]]:
    """All entries of an index, and those whose digest their registry does not have."""
    listed = registry.read_index(index).images
    return listed, registry.unresolved(listed, Daemon())
