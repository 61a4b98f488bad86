"""Verify a local image against what its labels and its recipe require; see :mod:`sm120kit.images.checks`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sm120kit import recipes
from sm120kit.core import reporting
from sm120kit.core.errors import NotVerified
from sm120kit.core.workspace import Workspace
from sm120kit.images import backends, checks
from sm120kit.images import image_inputs as contexts
from sm120kit.images.image_records import Image
from sm120kit.images.local_images import LocalImages
from sm120kit.recipes import architectures, arguments, configurations
from sm120kit.wheels.pack import local_version

LEFT_OUT = {
    "nvidia-cutlass-dsl": "its kernels are compiled at run time; an image of compiled modules has no use for it",
    "nvidia-cudnn-frontend": "drives cuDNN, which the image does not bring",
}
"""Requirements of FlashInfer that an image of kind ``flashinfer`` may lack, with the reason."""

CLAIMS = ("kind", "recipe", "plan", "commit", "tree", "archs", "modules", "patches", "wheels", "ours", "context", "reference")
"""Labels of every image that sm120kit builds."""


def verify_once(image: Image, workspace: Workspace) -> checks.CheckReport:
    """The report of an image that is verified already, after tagging it again, or of the checks that :func:`verify` runs.

    Files that were hashed while the layers were unpacked are not read again, and an image that differs from a checked one in
    Python files only gets quick checks.
    """
    store = LocalImages(workspace)
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

    Without ``read_all``, hashes of files are those of when their layers were unpacked, if that was in this state directory, and
    an image that differs from a checked one in Python files only gets quick checks.
    """
    store = LocalImages(workspace)
    image = store.find(reference)
    requirements = replace(expected(image), read_all=read_all)
    return checks.verify(image, image.canonical_name, requirements, store, workspace, report)


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
    exceptions = contexts.exceptions(recipe)  # not the labels: an image does not exempt its own files
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
        imports=tuple(module for entry in recipe.leave_out for module in entry.imports),
        env=dict(recipe.env),
        serve=recipe.serve,
        arguments={configuration.name: arguments.serve_arguments(configuration) for configuration in served},
        served={configuration.name: _served(configuration, recorded) for configuration in served},
        backends=backends.expected(recipe.name, served),
        b12x=recipe.b12x.model_dump(mode="json") if recipe.b12x else {},
    )


def _served(configuration: configurations.Configuration, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the modules that an engine requests for a configuration, beside its arguments."""
    listed = architectures.of_checkpoint(configuration.model.repository)
    return {
        "environment": dict(configuration.environment),
        "quantization": configuration.model.quantization,
        "architecture": listed[0].model_dump(mode="json") if listed else None,
        "selected": recorded.get(configuration.name, {}).get("selected", {}),
    }


def _configurations(recipe: recipes.Recipe) -> list[configurations.Configuration]:
    """The configurations that the image of a recipe serves."""
    return [each for each in configurations.readable() if each.engine == recipe.name]
