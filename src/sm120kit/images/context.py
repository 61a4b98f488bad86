"""Build contexts (``(Artifacts, wheels) -> ImageContext -> Image``): lay out the inputs of an image by hash, and build it.

A context contains every byte that is installed. A build therefore needs no network, and no package host, index setting or
credential can remain in a layer or in the history. The digest of a context identifies the image.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename

from sm120kit.core import archives
from sm120kit.core.data_roots import data_root
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.disk import disk_errors, require_disk
from sm120kit.core.errors import BadInput, BadRecord, CommandFailed, Mismatch, NotAttested, NotFound, NotTrusted
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.temporary import publish_directory
from sm120kit.core.workspace import Workspace, mark_used
from sm120kit.images import b12x
from sm120kit.images.docker import Daemon
from sm120kit.images.records import BuiltWheel, Image, ImageContext, image_name
from sm120kit.recipes import Recipe, bases
from sm120kit.sources.records import LockedWheel

INSTALLER = LockedWheel(
    "pip", "26.3", "pip-26.3-py3-none-any.whl", "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
)
"""Installs the wheels; not part of the image. Pinned, so that the same wheels give the same files."""

LABEL = "sm120kit."
"""Prefix of sm120kit's labels."""

WHEELS = f"{LABEL}wheels"
"""The label that lists the locked wheels."""

LEFT_OUT = f"{LABEL}left-out"
"""The label that lists the files of wheels that an image does not contain, see :func:`patterns`."""

WRONG_RECORD = f"{LABEL}wrong-record"
"""The label that lists the files of wheels that RECORD describes wrongly, see :func:`patterns`."""

LOCAL = f"{LABEL}local"
"""The label that lists local patches, which are in no series; only an image with any has it."""

USAGE = "help.txt"
"""The file in ``engine/`` of a context that the entrypoint prints where there is no driver."""

_ORIGIN: dict[str, type] = {
    **dict.fromkeys(("recipe", "plan", "commit", "tree"), str),
    **dict.fromkeys(("archs", "kernel_groups", "modules", "patches", "inside"), list),
    "pin": dict,
}
"""What ``sm120kit.json`` of a wheel contains, see :func:`sm120kit.wheels.published.wheel_record`."""

NVIDIA = "nvidia-"
"""Prefix of the names of NVIDIA's distributions: gigabytes that seldom change, in layers of their own."""


@dataclass(frozen=True)
class ImageSetup:
    """Kind, recipe and environment of an image, and for an engine its start command ``serve`` and its ``usage``.

    ``labels`` are added to those that follow from the wheels. The default ``version`` is that of our FlashInfer. ``b12x`` is
    the recipe's table of kernels to compile, or empty.
    """

    kind: str
    recipe: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    version: str = ""
    serve: Sequence[str] = ()
    usage: str = ""
    b12x: Mapping[str, Any] = field(default_factory=dict)


def make_context(
    setup: ImageSetup,
    base: str,
    ours: Mapping[Path, str],
    locked: Sequence[tuple[LockedWheel, Path]],
    installer: Path,
    workspace: Workspace,
) -> ImageContext:
    """Lay out all inputs of an image in ``<state>/images/<digest>/context``; an existing context is verified and reused.

    ``ours`` are the wheels that sm120kit built with their sha256, the patched FlashInfer first; ``locked`` are third-party
    wheels with their files. Files are hard links where the file system supports them, else copies.

    Raises:
        NotFound: ``base`` is not a digest or id.
        NotFound: there is no Dockerfile for the kind.
        NotTrusted: a wheel does not have the locked hash.
        BadInput: a wheel of ours lacks its ``sm120kit.json``.
        Mismatch: the existing context was changed.
        ResourceUnavailable, SystemRefused: the context cannot be stored.
    """
    context, text, scripts = describe(setup, base, ours, [wheel for wheel, _ in locked], workspace, INSTALLER)
    target = context.directory.parent
    texts = {name: content.encode() for name, content in {"Dockerfile": text, **scripts}.items()}
    of_nvidia = [pair for pair in locked if pair[0].name.startswith(NVIDIA)]
    directories = {
        "tools": [(INSTALLER, installer)],
        "cuda": of_nvidia,
        "locked": [pair for pair in locked if pair not in of_nvidia],
        "ours": [(wheel.wheel, path) for wheel, path in zip(context.ours, ours, strict=True)],
    }
    texts |= {f"{name}/requirements.txt": _requirements(pairs) for name, pairs in directories.items()}
    files = {f"{name}/{path.name}": (wheel, path) for name, pairs in directories.items() for wheel, path in pairs}
    with workspace.exclusive(f"image-{context.digest}"):
        if (target / "context.json").is_file():
            _require_unchanged(context.directory, texts, files)
            mark_used(target)
        else:
            _write_context(target, context, texts, files)
    return context


def describe(
    setup: ImageSetup,
    base: str,
    ours: Mapping[Path, str],
    locked: Sequence[LockedWheel],
    workspace: Workspace,
    installer: LockedWheel | None = None,
) -> tuple[ImageContext, str, dict[str, str]]:
    """The context of an image without writing it, its Dockerfile, and the scripts of the Dockerfile by path in the context.

    With an ``installer``, it is for a build by the Dockerfile, else for :mod:`sm120kit.images.assembly`, which takes settings
    from the Dockerfile and writes the same files. Inputs, labels and name follow the same rules; digests differ.

    Raises:
        NotFound, BadInput: as for :func:`make_context`.
    """
    require_pinned(base)
    text, scripts = programs(setup)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", archives.SOURCE_DATE_EPOCH))
    built = tuple(_built_wheel(path, sha256) for path, sha256 in ours.items())
    version = setup.version or built[0].wheel.version
    arguments = {"BASE": base, "SOURCE_DATE_EPOCH": str(epoch)}
    builder = "docker" if installer else "layers"
    wheels = tuple(locked)
    labels = _labels(setup, base, version, built, wheels) | {
        "org.opencontainers.image.created": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **({} if installer else {f"{LABEL}builder": builder}),
    }
    digest = digest_of([text, scripts, arguments, labels, [wheel.wheel.sha256 for wheel in built], wheels, installer])
    reference = image_name(setup.kind, version, digest, local=LOCAL in labels)
    context = ImageContext(
        directory=workspace.root / "images" / digest / "context",
        digest=digest,
        kind=setup.kind,
        base=base,
        reference=reference,
        arguments=arguments,
        labels=labels | {f"{LABEL}context": digest, f"{LABEL}reference": reference},
        installer=installer,
        locked=wheels,
        ours=built,
        builder=builder,
    )
    return context, text, scripts


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


def _labels(
    setup: ImageSetup, base: str, version: str, built: Sequence[BuiltWheel], locked: Sequence[LockedWheel]
) -> dict[str, str]:
    """The labels that follow from the inputs of an image."""
    origin = built[0].origin
    labels = {
        "org.opencontainers.image.title": f"sm120kit {setup.kind}",
        "org.opencontainers.image.description": f"{setup.recipe} for NVIDIA SM12x, patched and compiled ahead",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.revision": origin["commit"],
        "org.opencontainers.image.base.digest": f"sha256:{base.rpartition('sha256:')[2]}",
        f"{LABEL}kind": setup.kind,
        f"{LABEL}recipe": setup.recipe,
        **{f"{LABEL}{key}": origin[key] for key in ("plan", "commit", "tree")},
        f"{LABEL}archs": ",".join(origin["archs"]),
        f"{LABEL}modules": ",".join(origin["modules"]),
        f"{LABEL}patches": ",".join(
            f"{patch['project']}/{patch['slug']}@{patch['sha256'][:12]}" for patch in origin["patches"]
        ),
        WHEELS: listed_wheels(locked),
        f"{LABEL}ours": ",".join(f"{wheel.wheel.name}=={wheel.wheel.version}" for wheel in built),
        **setup.labels,
    }
    if local := local_patches(built):
        labels[LOCAL] = ",".join(local)
    if "@" in base:
        labels["org.opencontainers.image.base.name"] = base.partition("@")[0]
    return labels


def _write_context(
    target: Path, context: ImageContext, texts: Mapping[str, bytes], files: Mapping[str, tuple[LockedWheel, Path]]
) -> None:
    """Write a context with its record below ``target``, in one step. Wheels that are not ours must have the locked hash."""
    built = {wheel.wheel for wheel in context.ours}
    for wheel, path in files.values():
        if wheel not in built and file_sha256(path) != wheel.sha256:
            raise NotTrusted(f"{path} is not {wheel.name} {wheel.version} with sha256 {wheel.sha256}", "fetch it again")
    require_disk(target, sum(path.stat().st_size for _, path in files.values()), "the build context")
    with publish_directory(target) as temporary:
        directory = temporary / "context"
        directory.mkdir()
        for name, content in texts.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)
        for name, (_, path) in files.items():
            try:
                os.link(path, directory / name)
            except OSError:  # another file system, or one without hard links
                shutil.copyfile(path, directory / name)
        write_record(temporary / "context.json", context)


def programs(setup: ImageSetup) -> tuple[str, dict[str, str]]:
    """The Dockerfile of an image, and the scripts that it runs, by their path in the context."""
    dockerfiles = data_root() / "dockerfiles"
    engine = bool(setup.serve)
    name = "engine" if engine else setup.kind
    last = dockerfiles / f"{name}.Dockerfile"
    if not last.is_file():
        known = sorted(path.stem for path in dockerfiles.glob("*.Dockerfile"))
        raise NotFound(f"there is no Dockerfile for {name!r}", f"in {dockerfiles}: {', '.join(known)}")
    subdirectories = ("tools", "engine") if engine else ("tools",)
    paths = {f"{name}/{path.name}": path for name in subdirectories for path in sorted((dockerfiles / name).iterdir())}
    scripts = {name: path.read_text() for name, path in paths.items() if path.is_file()}  # pip adds __pycache__
    if absent := setup.labels.get(LEFT_OUT):
        scripts["tools/leave_out.txt"] = absent.replace(",", "\n") + "\n"
    text = (dockerfiles / "wheels.Dockerfile").read_text() + last.read_text()
    if setup.env:
        text += "ENV " + " \\\n    ".join(f"{name}={_quoted(value)}" for name, value in setup.env.items()) + "\n"
    if engine:
        scripts[f"engine/{USAGE}"] = setup.usage
        if setup.b12x:
            scripts[b12x.PROGRAM] = (dockerfiles / b12x.PROGRAM).read_text()
            scripts[b12x.REQUEST] = json.dumps(setup.b12x, sort_keys=True)
        text += f"ENTRYPOINT {json.dumps(entrypoint(setup.serve))}\n"
    return text, scripts


def entrypoint(serve: Sequence[str]) -> list[str]:
    """The entrypoint of an engine's image: ``dockerfiles/engine/serve.py`` with the start command."""
    return ["python", "/opt/sm120kit/serve.py", *serve]


def _quoted(value: str) -> str:
    """A value in the syntax of a Dockerfile's ENV."""
    return json.dumps(value, ensure_ascii=False).replace("$", "\\$")


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


def require_pinned(base: str) -> None:
    """Require that a base is given by digest or id, because a tag can move.

    Raises:
        NotFound: it is neither ``name@sha256:<64 digits>`` nor the id of a local image, ``sha256:<64 digits>``.
    """
    digest = base.rpartition("sha256:")[2]
    if not (base.startswith("sha256:") or "@sha256:" in base) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise NotFound(
            f"the base {base!r} is not given by digest",
            f"one of {', '.join(bases.names())}, name@sha256:<64 digits>, or the id of a local image as `docker image inspect "
            "--format {{.Id}} NAME` prints it",
        )


def require_base(base: str, daemon: Daemon, report: Callable[[str], None]) -> None:
    """Require that the daemon has a base; one that is named by digest is pulled.

    Raises:
        NotFound: neither the daemon nor a registry has it.
    """
    if daemon.inspect(base) is not None:
        return
    if base.startswith("sha256:"):
        raise NotFound(f"the daemon has no base {base}", "import or pull it, or pass a base as name@sha256:...")
    report(f"pulling the base {base}")
    daemon.pull(base, report)


def build(
    context: ImageContext, daemon: Daemon, workspace: Workspace, *, network: str, report: Callable[[str], None]
) -> tuple[Image, bool]:
    """Build the image of a context, unless the daemon still has it. Returns the image and whether it was built.

    The image is not tagged; verification does that.

    Raises:
        NotFound: neither the daemon nor a registry has the base.
        CommandFailed: a step failed, or the image does not have the labels of the context.
    """
    record = workspace.root / "images" / context.digest / "image.json"
    with workspace.exclusive(f"image-{context.digest}"):
        if record.is_file():
            recorded = read_record(Image, record)
            if daemon.inspect(recorded.id) == recorded:
                return recorded, False
        require_base(context.base, daemon, report)
        built = daemon.inspect(daemon.build(context, network, report))
        if built is None or {key: built.labels.get(key) for key in context.labels} != context.labels:
            raise CommandFailed("the image in the daemon lacks labels of its build", "look at the daemon's log")
        with disk_errors(record):
            write_record(record, built)
    return built, True


def _requirements(wheels: Sequence[tuple[LockedWheel, Path]]) -> bytes:
    """A requirements file of wheels with hashes."""
    return "".join(sorted(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel, _ in wheels)).encode()


def _require_unchanged(directory: Path, texts: Mapping[str, bytes], files: Mapping[str, tuple[LockedWheel, Path]]) -> None:
    """Require that an existing context has exactly the files that this run would write.

    Raises:
        Mismatch: a file was changed, added or removed.
    """
    existing = {
        str(path.relative_to(directory)): path for path in directory.rglob("*") if not path.is_dir() or path.is_symlink()
    }
    changed = sorted({*existing} ^ {*texts, *files})
    for name in sorted({*existing} - {*changed}):
        path = existing[name]
        if name in texts:
            same = not path.is_symlink() and path.read_bytes() == texts[name]
        else:
            wheel, source = files[name]
            same = not path.is_symlink() and (path.samefile(source) or file_sha256(path) == wheel.sha256)
        changed += [] if same else [name]
    if changed:
        raise Mismatch(
            f"{directory / changed[0]} was changed since it was written for the build",
            f"find out why; to write the context again, remove it: rm -r {directory.parent}",
        )


def _built_wheel(wheel: Path, sha256: str) -> BuiltWheel:
    """Read the ``sm120kit.json`` of a wheel that sm120kit built."""
    try:
        with archives.open_wheel(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".dist-info/sm120kit.json"))
            origin: dict[str, Any] = parse_json(archives.read_member(archive, member))
        absent = [key for key, kind in _ORIGIN.items() if not (isinstance(origin, dict) and isinstance(origin.get(key), kind))]
        if absent:
            raise ValueError(f"its sm120kit.json has no {absent[0]}")
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadInput(f"{wheel} is not a wheel that sm120kit built: {error}", "sm120kit build builds one") from error
    name, version, *_ = parse_wheel_filename(wheel.name)
    return BuiltWheel(LockedWheel(name, str(version), wheel.name, sha256), origin)
