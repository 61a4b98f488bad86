"""``(Artifacts, wheels) -> ImageContext -> Image``: what goes into an image, laid out by hash, and the build of it.

A context holds every byte that is installed, so a build needs no network, and no package host, index setting or credential can
stay behind in a layer or its history. Its digest names the image.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename
from pydantic import ValidationError

from sm120kit.daemon import Daemon
from sm120kit.errors import BadArtifact, HashMismatch, ImageBuildFailed, NoSuchImage, NotAttested, UnknownName
from sm120kit.records import BuiltWheel, Image, ImageContext, LockedWheel
from sm120kit.workspace import (
    Workspace,
    data_root,
    digest_of,
    disk_errors,
    file_sha256,
    publish_directory,
    read_record,
    require_disk,
    write_record,
)

INSTALLER = LockedWheel(
    "pip", "26.3", "pip-26.3-py3-none-any.whl", "f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13"
)
"""What installs the wheels: pinned, so that the same wheels give the same files; not in the image."""

LABEL = "sm120kit."
"""How our labels begin."""

_NVIDIA = "nvidia-"
"""How the names of NVIDIA's distributions begin: gigabytes that change seldom, in a layer of their own."""

_EPOCH = 315532800
"""1980-01-01, the first moment a wheel's member can have: files do not depend on when they are installed."""


@dataclass(frozen=True)
class Setup:
    """What an image is: its ``kind``, of which recipe, which environment it sets, and for an engine what it starts.

    ``labels`` are added to those that follow from what goes in. Without a ``version`` it has that of our FlashInfer.
    """

    kind: str
    recipe: str
    labels: Mapping[str, str]
    env: Mapping[str, str]
    version: str = ""
    serve: Sequence[str] = ()


def make_context(
    setup: Setup,
    base: str,
    ours: Sequence[Path],
    locked: Sequence[tuple[LockedWheel, Path]],
    installer: Path,
    workspace: Workspace,
) -> ImageContext:
    """Lay out everything that an image is made of in ``<state>/images/<digest>/context``; what is there already stays.

    ``ours`` are the wheels built here, the patched FlashInfer first; ``locked`` are those of others, each a file that has the
    locked hash. Where the file system can, all are linked and not copied.

    Raises:
        NoSuchImage: ``base`` is not named by digest or id.
        UnknownName: there is no Dockerfile of that kind.
        HashMismatch: a wheel is not what is locked.
        BadArtifact: a wheel of ours does not say what it is.
        NotEnoughDisk, StateUnwritable: it cannot be stored.
    """
    require_pinned(base)
    text, scripts = _dockerfile(setup)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH", _EPOCH))
    built = tuple(_built(path) for path in ours)
    origin, version = built[0].origin, setup.version or built[0].wheel.version
    arguments = {"BASE": base, "SOURCE_DATE_EPOCH": str(epoch)}
    said = {
        "org.opencontainers.image.title": f"sm120kit {setup.kind}",
        "org.opencontainers.image.description": f"{setup.recipe} for NVIDIA SM12x, patched and compiled ahead",
        "org.opencontainers.image.version": version,
        "org.opencontainers.image.revision": origin["commit"],
        "org.opencontainers.image.created": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "org.opencontainers.image.base.digest": f"sha256:{base.rpartition('sha256:')[2]}",
        f"{LABEL}kind": setup.kind,
        f"{LABEL}recipe": setup.recipe,
        **{f"{LABEL}{key}": origin[key] for key in ("plan", "commit", "tree")},
        f"{LABEL}archs": ",".join(origin["archs"]),
        f"{LABEL}modules": ",".join(origin["modules"]),
        f"{LABEL}patches": ",".join(f"{one['project']}/{one['slug']}@{one['sha256'][:12]}" for one in origin["patches"]),
        f"{LABEL}wheels": ",".join(f"{wheel.name}=={wheel.version}" for wheel, _ in locked),
        f"{LABEL}ours": ",".join(f"{one.wheel.name}=={one.wheel.version}" for one in built),
        **setup.labels,
    }
    if "@" in base:
        said["org.opencontainers.image.base.name"] = base.partition("@")[0]
    wheels = tuple(wheel for wheel, _ in locked)
    digest = digest_of([text, scripts, arguments, said, [one.wheel.sha256 for one in built], wheels, INSTALLER])
    reference = f"sm120kit/{setup.kind}:{version.partition('+')[0]}-sm120kit.{digest[:12]}"
    said |= {f"{LABEL}context": digest, f"{LABEL}reference": reference}
    target = workspace.root / "images" / digest
    context = ImageContext(
        directory=target / "context",
        digest=digest,
        kind=setup.kind,
        base=base,
        reference=reference,
        arguments=arguments,
        labels=said,
        installer=INSTALLER,
        locked=wheels,
        ours=built,
    )
    with workspace.locked(f"image-{digest}"):
        if not (target / "context.json").is_file():
            for wheel, path in [*locked, (INSTALLER, installer)]:
                if file_sha256(path) != wheel.sha256:
                    raise HashMismatch(
                        f"{path} is not {wheel.name} {wheel.version} with sha256 {wheel.sha256}", "fetch it again"
                    )
            total = sum(path.stat().st_size for path in [*ours, *(path for _, path in locked)])
            require_disk(target, total, "the build context")
            with publish_directory(target) as beside:
                place = beside / "context"
                place.mkdir()
                (place / "Dockerfile").write_text(text)
                for name, content in scripts.items():
                    (place / name).parent.mkdir(exist_ok=True)
                    (place / name).write_text(content)
                _wheels(place / "tools", [(INSTALLER, installer)])
                _wheels(place / "cuda", [pair for pair in locked if pair[0].name.startswith(_NVIDIA)])
                _wheels(place / "locked", [pair for pair in locked if not pair[0].name.startswith(_NVIDIA)])
                _wheels(place / "ours", [(one.wheel, path) for one, path in zip(built, ours, strict=True)])
                write_record(beside / "context.json", context)
    return context


def _dockerfile(setup: Setup) -> tuple[str, dict[str, str]]:
    """The Dockerfile of an image, and the scripts that it runs, by their place in the context."""
    place = data_root() / "dockerfiles"
    engine = bool(setup.serve)
    name = "engine" if engine else setup.kind
    last = place / f"{name}.Dockerfile"
    if not last.is_file():
        known = sorted(path.stem for path in place.glob("*.Dockerfile"))
        raise UnknownName(f"there is no Dockerfile for {name!r}", f"in {place}: {', '.join(known)}")
    folders = {"tools": place / "tools"} | ({"engine": place / "engine"} if engine else {})
    scripts = {f"{name}/{path.name}": path.read_text() for name, folder in folders.items() for path in sorted(folder.iterdir())}
    text = (place / "wheels.Dockerfile").read_text() + last.read_text()
    if setup.env:
        text += "ENV " + " \\\n    ".join(f"{name}={_quoted(value)}" for name, value in setup.env.items()) + "\n"
    if engine:
        text += f"ENTRYPOINT {json.dumps(list(setup.serve))}\n"
    return text, scripts


def _quoted(value: str) -> str:
    """A value as a Dockerfile's ENV reads it."""
    return json.dumps(value, ensure_ascii=False).replace("$", "\\$")


def made_of(image: Image, workspace: Workspace) -> ImageContext:
    """The record of what an image was made of, which is where it was made.

    Raises:
        NotAttested: there is none here, or one of an older form.
    """
    record = workspace.root / "images" / image.labels.get(f"{LABEL}context", "none") / "context.json"
    try:
        return read_record(ImageContext, record)
    except (OSError, ValidationError) as error:
        raise NotAttested(
            f"what {image.labels.get(f'{LABEL}reference', image.id)} was made of is not recorded here: {record}: "
            f"{error.strerror if isinstance(error, OSError) else 'written by an older sm120kit'}",
            "publish it where `sm120kit image` made it; remove the directory of an old record and make it again",
        ) from error


def require_pinned(base: str) -> None:
    """A base must be named by what it is, not by a tag that can move.

    Raises:
        NoSuchImage: it is neither ``name@sha256:<64 digits>`` nor the id of a local image, ``sha256:<64 digits>``.
    """
    digest = base.rpartition("sha256:")[2]
    if not (base.startswith("sha256:") or "@sha256:" in base) or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise NoSuchImage(
            f"the base {base!r} is not named by digest",
            "name@sha256:<64 digits>, or the id of a local image as `docker image inspect --format {{.Id}} NAME` prints it",
        )


def build(
    context: ImageContext, daemon: Daemon, workspace: Workspace, *, network: str, tell: Callable[[str], None]
) -> tuple[Image, bool]:
    """Build a context's image, and whether that was needed: one that the daemon still has is not built again.

    The image has no name yet; it gets one when it is verified.

    Raises:
        NoSuchImage: the base is neither here nor in its registry.
        ImageBuildFailed: a step failed, or the image does not say what it was made of.
    """
    record = workspace.root / "images" / context.digest / "image.json"
    with workspace.locked(f"image-{context.digest}"):
        if record.is_file():
            known = read_record(Image, record)
            if daemon.inspect(known.id) == known:
                return known, False
        if daemon.inspect(context.base) is None:
            if context.base.startswith("sha256:"):
                raise NoSuchImage(f"the base {context.base} is not here", "import or pull it, or name one by name@sha256:...")
            tell(f"pulling the base {context.base}")
            daemon.pull(context.base, tell)
        built = daemon.inspect(daemon.build(context, network, tell))
        if built is None or {key: built.labels.get(key) for key in context.labels} != context.labels:
            raise ImageBuildFailed("the daemon's image does not carry the labels it was given", "look at the daemon's log")
        with disk_errors(record):
            write_record(record, built)
    return built, True


def _wheels(place: Path, wheels: Sequence[tuple[LockedWheel, Path]]) -> None:
    """Put wheels into a directory, with a requirements file that names them by hash."""
    place.mkdir(exist_ok=True)
    for _, path in wheels:
        try:
            os.link(path, place / path.name)
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(path, place / path.name)
    lines = sorted(f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel, _ in wheels)
    (place / "requirements.txt").write_text("".join(lines))


def _built(wheel: Path) -> BuiltWheel:
    """What a wheel that was built here says of itself."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".dist-info/sm120kit.json"))
            origin: dict[str, Any] = json.loads(archive.read(member))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadArtifact(f"{wheel} is not a wheel that sm120kit built: {error}", "sm120kit build makes one") from error
    name, version, *_ = parse_wheel_filename(wheel.name)
    return BuiltWheel(LockedWheel(name, str(version), wheel.name, file_sha256(wheel)), origin)
