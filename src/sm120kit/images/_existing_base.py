"""An existing image as the base of another: read through its registry's API or from a container daemon, without a builder.

Its programs run in a container of :mod:`sm120kit.images.local_images` only, never on this machine itself.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import TypeAdapter

from sm120kit.core.disk import require_disk
from sm120kit.core.errors import DaemonUnreachable, NotFound, RegistryFailed, RequirementMissing
from sm120kit.core.outside import parse_json
from sm120kit.images import loading
from sm120kit.images._assembly import ImageBase
from sm120kit.images.distribution import RegistryClient
from sm120kit.images.docker import Daemon
from sm120kit.images.local_images import LocalImages
from sm120kit.images.oci import Layout
from sm120kit.recipes.recipe_records import Closure
from sm120kit.sources.debian import ARCHITECTURES

_INSPECT = """
import json, os, shutil, sys, sysconfig
try:
    import venv
except ImportError:
    venv = None
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION")
except (OSError, ValueError):
    libc = None
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2],
    "interpreter": sys.executable,
    "glibc": (libc or "").partition(" ")[2],
    "has_venv": venv is not None,
    "has_compiler": bool(shutil.which("c++")),
    "has_headers": os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")),
}))
"""
_PYTHON = {"PYTHONPATH": "", "PYTHONHOME": "", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
"""Environment of the image's Python: the same bytecode in every process, whatever the image sets."""


@dataclass(frozen=True)
class BasePrograms:
    """What an image has for wheels: ``python`` is its version as in ``3.11``, ``glibc`` is empty without glibc."""

    python: str
    interpreter: str
    glibc: str
    has_venv: bool
    has_compiler: bool
    has_headers: bool


def fetch(reference: str, layout: Layout) -> str:
    """The manifest, in ``layout``, of an image that is given by digest or by the id that the daemon has.

    It is tagged with ``reference`` there. An image that the layout has is not fetched again.

    Raises:
        NotFound: neither daemon nor registry has it, or not for this machine.
        NotTrusted: another image was delivered.
        RegistryFailed, DaemonUnreachable: the registry, or for an id the daemon, does not respond.
        ResourceUnavailable, SystemRefused: it cannot be stored.
    """
    image = layout.find(reference)
    if image is None:
        name, _, digest = reference.rpartition("@")
        manifest = loading.read(layout, daemon, reference) if (daemon := _daemon_with(reference, required=not name)) else ""
        image = layout.find(manifest or _pull(name, digest, layout))
    assert image is not None
    if reference != image.digest and not any(
        reference in tags for listed, tags in layout.images() if listed.digest == image.digest
    ):
        layout.tag(image.digest, reference)
    return image.digest


def require_available(reference: str, layout: Layout) -> None:
    """Require that the daemon has a base that is given by its id, unless ``layout`` has it; before anything else is fetched.

    Raises:
        NotFound, DaemonUnreachable, RequirementMissing: see :func:`fetch`.
    """
    if "@" not in reference and layout.find(reference) is None:
        _daemon_with(reference, required=True)


def _daemon_with(reference: str, *, required: bool) -> Daemon | None:
    """The daemon if it has an image; None without a daemon unless it is ``required``."""
    try:
        daemon = Daemon()
        inspected = daemon.inspect(reference)
    except (DaemonUnreachable, RequirementMissing):
        if required:
            raise
        return None
    if inspected is None and required:
        raise NotFound(f"neither state directory nor daemon has a base {reference}", "pass it as name@sha256:...")
    return daemon if inspected else None


def _pull(name: str, digest: str, layout: Layout) -> str:
    try:
        with RegistryClient(name) as client:
            remote = client.image(digest, f"linux/{ARCHITECTURES[platform.machine()]}")
            require_disk(layout.directory, 4 * sum(layer.size for layer in remote.layers), f"the base {name}")
            return client.pull(layout, remote).digest
    except RegistryFailed as error:
        raise RegistryFailed(f"the base {name}@{digest}: {error.message}", error.hint) from error


@contextmanager
def image_base(manifest: str, store: LocalImages) -> Iterator[ImageBase]:
    """What an image is built on, for an image of the state directory. Its Python can be started while the block runs.

    Raises:
        RequirementMissing: this system does not permit to run programs in it.
        RequirementMissing: it has no Python.
    """
    layout = store.layout
    programs = inspect(manifest, store)
    config = layout.config(manifest)
    with store.prefix(manifest, _PYTHON) as prefix:
        yield ImageBase(
            layout.layers(manifest),
            config,
            {name: store.read(manifest, f"etc/{name}").decode() for name in ("passwd", "group")},
            (*prefix, programs.interpreter),
            programs.interpreter,
        )


def inspect(manifest: str, store: LocalImages) -> BasePrograms:
    """Inspect the Python of an image.

    Raises:
        RequirementMissing: this system does not permit to run programs in it.
        RequirementMissing: it has no Python.
    """
    done = store.run(manifest, ["python3", "-c", _INSPECT], {})
    if done.code != 0:
        raise RequirementMissing(
            f"the base has no Python 3 that works: {(done.stderr.strip().splitlines() or ['it has no python3'])[-1]}",
            "name a base with Python, as debian-12, or omit --base",
        )
    try:
        return TypeAdapter(BasePrograms).validate_python(parse_json(done.stdout))
    except ValueError as error:  # pydantic's are ValueErrors
        raise RequirementMissing(
            f"what the base's Python prints is not what it was asked for: {done.stdout[:100]!r}",
            "name a base whose python3 is Python's own, as debian-12, or omit --base",
        ) from error


def require_suitable(base: str, programs: BasePrograms, closure: Closure, *, compiles: bool) -> None:
    """Require what the wheels of a closure need, and with ``compiles`` also what compilers of kernels need.

    Raises:
        RequirementMissing: with everything that is missing.
    """
    problems = []
    needed = _version(".".join(closure.platform.split("_")[1:3]))  # manylinux_2_35_x86_64
    if programs.python != closure.python:
        problems.append(f"Python {programs.python}, the lock is for Python {closure.python}")
    if not programs.has_venv:
        problems.append("no module venv")
    if _version(programs.glibc) < needed:
        shown = ".".join(map(str, needed))
        problems.append(f"glibc {programs.glibc}, the wheels need {shown}" if programs.glibc else "no glibc")
    if compiles and not programs.has_compiler:
        problems.append("no C++ compiler c++, with which engines compile kernels at run time")
    if compiles and not programs.has_headers:
        problems.append("no headers of Python, with which engines compile kernels at run time")
    if problems:
        raise RequirementMissing(
            f"the base {base} has {'; '.join(problems)}", "name a base that has it, or omit --base: that of the recipe has it"
        )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"(?<![^.])[0-9]{1,9}(?![^.])", text))
