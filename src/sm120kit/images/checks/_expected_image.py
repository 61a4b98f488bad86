"""What an image must contain and do, from its labels and its recipe: the input of its checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sm120kit import recipes
from sm120kit.core.errors import NotVerified
from sm120kit.images import _triton as triton
from sm120kit.images import backends
from sm120kit.images import image_inputs as contexts
from sm120kit.images.image_records import Image
from sm120kit.recipes import architectures, arguments, configurations
from sm120kit.wheels.pack import local_version

CLAIMS = ("kind", "recipe", "plan", "commit", "tree", "archs", "modules", "patches", "wheels", "ours", "context", "reference")
"""Labels of every image that sm120kit builds."""


@dataclass(frozen=True)
class ExpectedImage:
    """Required properties of an image, from its labels and recipe. The checks compare them with the installed files.

    ``generators`` are the calls of FlashInfer's generators of the compiled modules; ``kernels`` the patterns of
    ``expect_kernels`` with the minimum count per module; ``complete`` whether the modules are those of the kernel group
    ``all``; ``overridden`` distributions whose version the recipe sets against the requirements of others; ``leave_out``
    patterns of the files that are absent, by distribution, and ``imports`` the Python modules that must be importable without
    them; ``wrong_record`` patterns of files of which RECORD has another hash, as in their upstream wheel.

    ``env`` must be set in the container, ``serve`` is the start command, and ``arguments`` are the arguments of
    each configuration after ``serve``; ``served`` its environment, and the architecture of its model, which is
    None if it is not recorded; ``backends`` what it selects on SM12x, see :func:`sm120kit.images.backends.expected`; ``b12x``
    the kernels of b12x that are compiled into the image; ``triton`` whether it has all recorded kernels of Triton, which is
    false if local patches may have changed some, and None if it has none.

    Unless ``read_all``, files are not hashed again that were hashed while their layers were unpacked, and an image that differs
    from a checked one in Python files only gets quick checks. ``digests`` are these hashes by path, for the check ``files``.

    ``quick`` is why only the checks are run that run no code of the image, empty if all are; ``changed`` are then the paths of
    files in which the image differs from the checked one, ``changed_modules`` the Python modules among them, and
    ``driver_stub`` the names in the driver's stub.
    """

    kind: str
    recipe: str
    version: str
    commit: str
    tree: str
    plan: str
    archs: tuple[str, ...]
    modules: tuple[str, ...]
    patches: tuple[str, ...]
    distributions: dict[str, str]
    generators: tuple[dict[str, Any], ...] = ()
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    complete: bool = False
    overridden: tuple[str, ...] = ()
    leave_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    wrong_record: dict[str, tuple[str, ...]] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    serve: tuple[str, ...] = ()
    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    served: dict[str, dict[str, Any]] = field(default_factory=dict)
    backends: dict[str, dict[str, Any]] = field(default_factory=dict)
    b12x: dict[str, Any] = field(default_factory=dict)
    triton: bool | None = None
    read_all: bool = True
    digests: dict[str, str] = field(default_factory=dict, repr=False)
    quick: str = ""
    changed: tuple[str, ...] | None = None
    changed_modules: tuple[str, ...] = ()
    driver_stub: tuple[str, ...] = ()


def expected_image(image: Image, *, models: bool = True) -> ExpectedImage:
    """Required properties of an image, from its labels and from the recipe that they name.

    Without ``models``, those of configurations, which quick checks do not need, are left out.

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
            "only images that `sm120kit build` built can be verified",
        )
    if not image.canonical_name:
        raise NotVerified(
            f"the image {image.id} has the label {labels['reference']}, which does not fit its kind, version and context",
            "its labels were edited; build it again",
        )
    recipe = recipes.load_engine(labels["recipe"])
    flashinfer = recipes.load_flashinfer(recipe.flashinfer)
    modules = tuple(filter(None, labels["modules"].split(",")))
    built = [name for name in modules if name in flashinfer.modules]
    wheels, ours = (dict(wheel.split("==", 1) for wheel in labels[key].split(",") if wheel) for key in ("wheels", "ours"))
    served = [each for each in (configurations.readable() if models else ()) if each.engine == recipe.name]
    recorded = backends.load(recipe.name)
    exceptions = contexts.exceptions(recipe)  # not the labels: an image does not exempt its own files
    return ExpectedImage(
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
        overridden=tuple(sorted(recipe.environment.overrides)),
        leave_out=contexts.patterns(exceptions, contexts.LEFT_OUT),
        wrong_record=contexts.patterns(exceptions, contexts.WRONG_RECORD),
        imports=tuple(module for entry in recipe.leave_out for module in entry.imports),
        env=dict(recipe.env),
        serve=recipe.serve,
        arguments={configuration.name: arguments.serve_arguments(configuration) for configuration in served},
        served={configuration.name: _served(configuration, recorded) for configuration in served},
        backends=backends.expected(recipe.name, served),
        b12x=recipe.b12x.model_dump(mode="json") if recipe.b12x else {},
        triton="local" not in labels if triton.record(recipe.name) else None,
    )


def _served(configuration: configurations.Configuration, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the modules that an engine requests for a configuration, beside its arguments."""
    listed = architectures.of_checkpoint(configuration.model.repository)
    return {
        "environment": dict(configuration.environment),
        "architecture": _attention(listed[0]) if listed else None,
        "selected": recorded.get(configuration.name, {}).get("selected", {}),
    }


def _attention(architecture: architectures.Architecture) -> dict[str, Any]:
    """The heads of attention layers, and whether there are layers of linear attention."""
    heads = {name: getattr(architecture, name) for name in ("heads", "kv_heads", "head_dim")}
    return {"attention": heads, "linear_attention": bool(architecture.linear)}
