"""Deliver wheels as an image: what it needs, its inputs, the image; the stages after :mod:`sm120kit.wheels`."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sm120kit import recipes, sources
from sm120kit.core.disk import require_disk
from sm120kit.core.errors import CheckFailed, NotFound, RequirementMissing
from sm120kit.core.workspace import Workspace
from sm120kit.images import _assembly, _base, checks
from sm120kit.images import _triton as triton
from sm120kit.images import image_inputs as contexts
from sm120kit.images.image_records import Image, ImageContext
from sm120kit.images.local_images import LocalImages
from sm120kit.patches.local import read_local
from sm120kit.recipes import arguments, bases
from sm120kit.recipes.added_files import read_added
from sm120kit.recipes.cross_tools import cross_tools
from sm120kit.recipes.recipe_records import Closure
from sm120kit.recipes.target import resolve, with_local
from sm120kit.sources.run_options import Options
from sm120kit.wheels import image_wheels
from sm120kit.wheels.build_records import BuildRequest
from sm120kit.wheels.compile import Progress
from sm120kit.wheels.image_wheels import EngineBuild

_UNPACKED_RATIO = 2.3
"""Bytes of layers for each byte of a wheel; 9.6 GB of 4.2 GB for vLLM 0.33.0. Layers are stored twice: packed, and as files."""
_COMPILER_BYTES = 3 * 2**30
"""For the compiler's wheels, packed and unpacked, and for source and wheel of FlashInfer."""


@dataclass(frozen=True)
class ImageBuild:
    """The inputs of an image, and the image. ``ran`` is false if it was built before."""

    context: ImageContext
    image: Image
    ran: bool


def complete(base: str, recipe: recipes.Recipe) -> str:
    """The base that is requested, or that of the recipe. Nothing is fetched.

    Raises:
        NotFound: neither the recipe nor the request names one of ``recipes/bases/``.
    """
    base = base or recipe.base or ""
    if base not in bases.of_images():
        raise NotFound(
            f"there is no base {base!r}" if base else f"no base: neither {recipe.name} nor --base names one",
            f"--base {'|'.join(bases.of_images())}; without an image:"
            f" sm120kit build {recipe.name.replace('-', '@', 1)} --to pack",
        )
    return base


def prepare(base: str, recipe: recipes.Recipe, closure: Closure, options: Options) -> str:
    """Complete a base, and require what an image of the wheels of ``closure`` needs, so that nothing is compiled in vain.

    Base and wheels are fetched, the base is assembled, its programs can run here, and there is disk space for the image.

    Raises:
        NotFound: see :func:`complete`.
        Mismatch: the base is not locked for this machine.
        RequirementMissing: this system does not permit to run the checks without a daemon; or the image is for another machine
            and has kernels of b12x.
        FetchFailed, ResourceUnavailable and others: base or wheels cannot be fetched or stored.
    """
    base, workspace = complete(base, recipe), options.workspace
    if (foreign := closure.machine != platform.machine()) and recipe.b12x:
        raise RequirementMissing(
            f"{recipe.name} compiles kernels of b12x in its image, which is not done in an emulator on {platform.machine()}",
            f"build it on a machine for {closure.machine}",
        )
    require_disk(workspace.root, missing_bytes(base, closure, options), f"building the image of {recipe.name}")
    if foreign:
        cross_tools(closure.machine, options)
    LocalImages(workspace).require_runtime(_base.debian_image(base, closure.machine, options)[1].partition("@")[2])
    if missing := sources.unfetched(closure.wheels, workspace):
        sources.wheelhouse(missing, workspace, options.origin)
    return base


def missing_bytes(base: str, closure: Closure, options: Options) -> int:
    """The disk space that all steps of an image's build need for what is not there yet, before anything is fetched.

    The sizes of wheels are those that their index states. Layers of a wheel are there if an image for the same machine lists
    the wheel.
    """
    workspace = options.workspace
    absent = [
        machine
        for machine in {closure.machine, platform.machine()}
        if not _base.record_path(bases.load(base), machine, workspace).is_file()
    ]
    packages = sum(package.size for machine in absent for package in bases.read_lock(base, machine))
    images = [image for image, _ in LocalImages(workspace).images(contexts.WHEELS) if image.machine == closure.machine]
    written = {entry for image in images for entry in image.labels[contexts.WHEELS].split(",")}
    needed = [wheel for wheel in closure.wheels if contexts.listed_wheels([wheel]) not in written]
    unfetched = sources.unfetched(closure.wheels, workspace)
    sizes = sources.sizes([*{*needed, *unfetched}], workspace, options.origin)
    fetched, layers = (sum(sizes.get(wheel, 0) for wheel in wheels) for wheels in (unfetched, needed))
    compiler = 0 if (workspace.cache / "toolchains").is_dir() or not fetched else _COMPILER_BYTES
    return int(_base.BYTES_PER_PACKED * packages + fetched + 2 * _UNPACKED_RATIO * layers) + compiler


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
        triton=triton.record(recipe.name),
        files=read_added(recipe),
    )


def _overridden(recipe: recipes.EngineRecipe) -> dict[str, str]:
    """The label that explains the conflicts that ``pip check`` reports in an image."""
    overrides = recipe.environment.overrides
    text = "; ".join(f"{name}=={override.version}: {override.reason}" for name, override in sorted(overrides.items()))
    return {f"{contexts.LABEL}overridden": text} if text else {}


def engine_image(build: EngineBuild, base: str, options: Options) -> ImageBuild:
    """Write the layers of an engine's image in the state directory, without a daemon. ``base`` is from :func:`prepare`.

    They have the wheels of ``build`` and the upstream wheels of its lockfile.

    Raises:
        BadInput, NotTrusted: a wheel is damaged or hostile.
        CommandFailed: a step failed.
        ResourceUnavailable, SystemRefused: the layers cannot be stored.
    """
    workspace, wheels, official = options.workspace, build.closure.wheels, build.official.wheels
    setup = engine_setup(build.recipe, build.build_id, build.closure)
    image_base, reference = _base.debian_image(base, build.closure.machine, options)
    context, *described = contexts.describe(setup, reference, build.wheels, wheels, workspace)
    ours = {built.wheel: path for built, path in zip(context.ours, build.wheels, strict=True)}
    files = _assembly.wheel_files(ours, official, lambda wheels: sources.wheelhouse(wheels, workspace, options.origin))
    layout = LocalImages(workspace).layout
    image, ran = _assembly.assemble(context, (described[0], described[1]), image_base, files, layout, workspace, official)
    return ImageBuild(context, image, ran)


def patched_image(recipe: str, patches: Sequence[Path], options: Options, watch: Callable[[Progress], None]) -> str:
    """Build and check the image of an engine with local patches, as `build ENGINE --patch` does, and return its name.

    It has the kernel group of the image of the recipe that is here, by default that of the recipe.

    Raises:
        CheckFailed: a check of the image failed.
        Sm120kitError: see the stages.
    """
    local = read_local(patches, options.origin)
    target = with_local(resolve(recipe, options), local).engine
    assert target is not None
    base = prepare("", target.recipe, target.closure, options)
    request = BuildRequest(group=kernel_group(target.recipe, target.flashinfer.recipe, options.workspace))
    image = engine_image(image_wheels.build(target, request, watch), base, options).image
    report = checks.verify_once(image, options.workspace)
    if report.verified is None:
        failed = [f"{check.suite}/{check.name}: {check.detail}" for check in report.checks if check.verdict == "failed"]
        raise CheckFailed("\n  ".join(["the image with these patches failed checks:", *failed]), "correct the patch")
    return report.verified.reference


def kernel_group(recipe: recipes.EngineRecipe, kernels: recipes.FlashInferRecipe, workspace: Workspace) -> str | None:
    """The kernel group whose modules the tagged image of a recipe has, of several images the largest; None if there is none."""
    tagged = (image.labels for image, tags in LocalImages(workspace).images(contexts.MODULES) if tags)
    listed = (labels[contexts.MODULES] for labels in tagged if labels.get(f"{contexts.LABEL}recipe") == recipe.name)
    modules = max(({*text.split(",")} - {""} for text in listed), key=len, default=None)
    names = (recipes.NO_KERNELS, *kernels.groups)
    return next((name for name in names if {*recipes.group(kernels, name).modules} == modules), None)
