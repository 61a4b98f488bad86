"""The inputs of an image (``(Artifacts, wheels) -> ImageContext``): wheels by hash, labels, settings, programs.

Everything that is installed is known by digest before the first layer is written; the digest of all inputs identifies an
image.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from sm120kit.core import archives
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import digest_of
from sm120kit.core.errors import BadInput, BadRecord, NotAttested
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import _b12x as b12x
from sm120kit.images import _triton as triton
from sm120kit.images.image_records import BuiltWheel, Image, ImageContext, image_name
from sm120kit.recipes import EngineRecipe, Recipe
from sm120kit.sources.source_records import LockedWheel

LABEL = "sm120kit."
"""Prefix of sm120kit's labels."""

WHEELS = f"{LABEL}wheels"
"""The label that lists the locked wheels."""

MODULES = f"{LABEL}modules"
"""The label that lists the modules of FlashInfer that are compiled ahead of time."""

LEFT_OUT = f"{LABEL}left-out"
"""The label that lists the files of wheels that an image does not contain, see :func:`patterns`."""

WRONG_RECORD = f"{LABEL}wrong-record"
"""The label that lists the files of wheels that RECORD describes wrongly, see :func:`patterns`."""

LOCAL = f"{LABEL}local"
"""The label that lists local patches, which are in no series; only an image with any has it."""

PROGRAMS = "image_programs"
"""Where the data of sm120kit has the programs of images."""

USAGE = "help.txt"
"""The file that the entrypoint prints where there is no driver."""

HOME = "/home/sm120kit"
"""The home of the user who runs programs in the image."""

_ENV = {"CUDA_HOME": "/opt/cuda", "LD_LIBRARY_PATH": "/opt/cuda/lib", "NVIDIA_VISIBLE_DEVICES": "all"}
"""``/opt/cuda/lib`` has libraries of CUDA 13 only: FlashInfer's modules need them also where torch brings those of CUDA 12."""

_SECOND = 10**9
_HEALTH_CHECK = {
    "Test": ["CMD", "python", "/opt/sm120kit/healthy.py"],
    "Interval": 30 * _SECOND,
    "Timeout": 10 * _SECOND,
    "StartPeriod": 3600 * _SECOND,
    "Retries": 3,
}

_ORIGIN: dict[str, type] = {
    **dict.fromkeys(("recipe", "plan", "commit", "tree"), str),
    **dict.fromkeys(("archs", "kernel_groups", "modules", "patches", "inside"), list),
    "pin": dict,
}
"""What ``sm120kit.json`` of a wheel contains, see :func:`sm120kit.wheels._published_wheels.wheel_record`."""

NVIDIA = "nvidia-"
"""Prefix of the names of NVIDIA's distributions: gigabytes that seldom change, in layers of their own."""


@dataclass(frozen=True)
class ImageSetup:
    """Kind, recipe and environment of an engine's image, with its start command ``serve`` and its ``usage``.

    ``labels`` are added to those that follow from the wheels. ``b12x`` is the recipe's table of kernels to compile, or empty,
    ``triton`` its record of kernels.
    ``files`` are texts that are added, by path below ``/opt/sm120kit/files``.
    """

    kind: str
    recipe: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    version: str
    serve: Sequence[str]
    usage: str = ""
    b12x: Mapping[str, Any] = field(default_factory=dict)
    triton: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


def describe(
    setup: ImageSetup, base: str, ours: Mapping[Path, str], locked: Sequence[LockedWheel], workspace: Workspace
) -> tuple[ImageContext, dict[str, Any], dict[str, str]]:
    """The inputs of an image, its settings (:func:`settings`) and its programs (:func:`programs`).

    ``base`` is ``name@sha256:...``. ``ours`` are the wheels that sm120kit built with their sha256, the patched FlashInfer
    first; ``locked`` are the others.

    Raises:
        BadInput: a patched wheel lacks its ``sm120kit.json``.
    """
    built = tuple(_built_wheel(path, sha256) for path, sha256 in ours.items())
    of_setup, scripts = settings(setup), programs(setup)
    wheels = tuple(locked)
    labels = _labels(setup, base, built, wheels) | {
        "org.opencontainers.image.created": f"{datetime.fromtimestamp(archives.SOURCE_DATE_EPOCH, UTC):%Y-%m-%dT%H:%M:%SZ}",
    }
    digest = digest_of(
        [of_setup, scripts, base, archives.SOURCE_DATE_EPOCH, labels, [wheel.wheel.sha256 for wheel in built], wheels]
    )
    reference = image_name(setup.kind, setup.version, digest, local=LOCAL in labels)
    labels |= {f"{LABEL}context": digest, f"{LABEL}reference": reference}
    return ImageContext(digest, setup.kind, base, reference, labels, wheels, built), of_setup, scripts


def local_patches(built: Sequence[BuiltWheel]) -> tuple[str, ...]:
    """The local patches in wheels that sm120kit built, each as ``project/name@sha256``, cut to 12 digits."""
    applied = (patch for wheel in built for patch in wheel.origin.get("local", ()))
    return tuple(f"{patch['project']}/{patch['slug']}@{patch['sha256'][:12]}" for patch in applied)


def listed_wheels(locked: Sequence[LockedWheel]) -> str:
    """The value of the label :data:`WHEELS`."""
    return ",".join(f"{wheel.name}=={wheel.version}" for wheel in locked)


def patterns(labels: Mapping[str, str], label: str) -> dict[str, tuple[str, ...]]:
    """Shell-style patterns of files of wheels, relative to site-packages, in a label: by distribution."""
    listed: dict[str, tuple[str, ...]] = {}
    for entry in filter(None, labels.get(label, "").split(",")):
        name, _, pattern = entry.partition(":")
        listed[name] = (*listed.get(name, ()), pattern)
    return listed


def exceptions(recipe: Recipe) -> dict[str, str]:
    """Labels of the files of wheels that are not installed as they are, or not compared with RECORD."""
    tables = ((LEFT_OUT, recipe.leave_out), (WRONG_RECORD, recipe.wrong_record))
    return {
        label: ",".join(f"{entry.distribution}:{files}" for entry in entries for files in entry.files)
        for label, entries in tables
        if entries
    }


def _labels(setup: ImageSetup, base: str, built: Sequence[BuiltWheel], locked: Sequence[LockedWheel]) -> dict[str, str]:
    """The labels that follow from the inputs of an image."""
    origin = built[0].origin
    labels = {
        "org.opencontainers.image.title": f"sm120kit {setup.kind}",
        "org.opencontainers.image.description": f"{setup.recipe} for NVIDIA SM12x, patched and compiled ahead",
        "org.opencontainers.image.version": setup.version,
        "org.opencontainers.image.revision": origin["commit"],
        "org.opencontainers.image.base.name": base.partition("@")[0],
        "org.opencontainers.image.base.digest": base.partition("@")[2],
        f"{LABEL}kind": setup.kind,
        f"{LABEL}recipe": setup.recipe,
        **{f"{LABEL}{key}": origin[key] for key in ("plan", "commit", "tree")},
        f"{LABEL}archs": ",".join(origin["archs"]),
        MODULES: ",".join(origin["modules"]),
        f"{LABEL}patches": ",".join(
            f"{patch['project']}/{patch['slug']}@{patch['sha256'][:12]}" for patch in origin["patches"]
        ),
        WHEELS: listed_wheels(locked),
        f"{LABEL}ours": ",".join(f"{wheel.wheel.name}=={wheel.wheel.version}" for wheel in built),
        **setup.labels,
    }
    if local := local_patches(built):
        labels[LOCAL] = ",".join(local)
    return labels


def settings(setup: ImageSetup) -> dict[str, Any]:
    """What the ``config`` of an image adds to that of its base (OCI image-spec, config.md), without labels and ``PATH``.

    All caches lie in the user's home, also where a container runs as a user whom the image does not name.
    """
    env = {"HOME": HOME, "USER": "sm120kit", **_ENV, **setup.env}
    return {
        "Env": [f"{name}={value}" for name, value in env.items()],
        "User": "1000:1000",
        "WorkingDir": HOME,
        "Entrypoint": entrypoint(setup.serve),
        "Healthcheck": _HEALTH_CHECK,
    }


def programs(setup: ImageSetup) -> dict[str, str]:
    """The files that an image has in ``/opt/sm120kit``, by their path there."""
    compilers = [*([b12x.PROGRAM, b12x.OF_1_5] if setup.b12x else []), *([triton.PROGRAM] if setup.triton else [])]
    names = ("healthy.py", "serve.py", triton.RECORDER, *compilers)
    request = {b12x.REQUEST: json.dumps(setup.b12x, sort_keys=True)} if setup.b12x else {}
    request |= {triton.RECORD: setup.triton} if setup.triton else {}
    files = {f"files/{path}": text for path, text in setup.files.items()}
    return {name: (data_root() / PROGRAMS / name).read_text() for name in names} | {USAGE: setup.usage} | request | files


def entrypoint(serve: Sequence[str]) -> list[str]:
    """The entrypoint of an image: ``image_programs/serve.py`` with the start command."""
    return ["python", "/opt/sm120kit/serve.py", *serve]


def server_program(recipe: EngineRecipe) -> tuple[str, ...]:
    """The command that starts a server in its image: by the entrypoint, if that adds kernels to caches, which are mounts."""
    return tuple(entrypoint(recipe.serve)) if recipe.b12x or triton.record(recipe.name) else recipe.serve


def context_of(image: Image, workspace: Workspace) -> ImageContext:
    """The recorded build context of a local image. Only the state directory of the build has it.

    Raises:
        NotAttested: there is no record, or one of an older version.
    """
    record = workspace.root / "images" / image.labels.get(f"{LABEL}context", "none") / "context.json"
    try:
        return read_record(ImageContext, record)
    except (OSError, BadRecord) as error:
        raise NotAttested(
            f"there is no record of the build of {image.labels.get(f'{LABEL}reference', image.id)}: {record}: "
            f"{error.strerror if isinstance(error, OSError) else 'written by an older sm120kit'}",
            "publish it with the state directory of its build; if the record is old, remove its directory and build again",
        ) from error


def built_locally(image: Image, workspace: Workspace) -> bool:
    """Whether the state directory has a record that this image was built with it."""
    record = workspace.root / "images" / image.labels.get(f"{LABEL}context", "none") / "image.json"
    try:
        return read_record(Image, record).content == image.content
    except (OSError, BadRecord):
        return False


def _built_wheel(wheel: Path, sha256: str) -> BuiltWheel:
    """Read the ``sm120kit.json`` of a wheel that sm120kit built."""
    try:
        with archives.open_wheel(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".dist-info/sm120kit.json"))
            origin: dict[str, Any] = parse_json(archives.read_member(archive, member))
        absent = [key for key, kind in _ORIGIN.items() if not (isinstance(origin, dict) and isinstance(origin.get(key), kind))]
        if absent:
            raise ValueError(f"its sm120kit.json has no {absent[0]}")
    except (OSError, ValueError) as error:
        raise BadInput(f"{wheel} is not a wheel that sm120kit built: {error}", "sm120kit build builds one") from error
    name, version, *_ = parse_wheel_filename(wheel.name)
    return BuiltWheel(LockedWheel(name, str(version), wheel.name, sha256), origin)
