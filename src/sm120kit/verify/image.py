"""``Image -> VerifiedImage``: an image's container is asked what it is, and only then does the image get its name.

The checks lie in ``tests/image/<kind>/checks.py`` and run inside a container, as the image's user and without a network; an
image passes those of its parents too. What a container cannot know of itself is asked here: its size, its history, its base,
and the device code of the modules, which are read from a copy.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sm120kit.cubin import matching, read
from sm120kit.daemon import Daemon
from sm120kit.errors import NotVerified, UnknownName
from sm120kit.records import Check, Image, Verdict, VerifiedImage
from sm120kit.workspace import Workspace, data_root, digest_of, file_sha256, read_record, write_record

PARENT = {"flashinfer": "base", "engine": "flashinfer", "vllm": "engine", "sglang": "engine"}
"""An image passes the checks of its parents too."""

SIZE_LIMIT_BYTES = {"flashinfer": 3 * 2**30, "vllm": 16 * 2**30, "sglang": 18 * 2**30}
"""Unpacked, base included. More means that something came along that nobody asked for."""

NEEDS_GPU = {
    "flashinfer": ("kernels", "needs an SM12x GPU, on which `sm120kit verify kernels` compares them; unverified on SM120"),
    "engine": ("served_prompt", "needs an SM12x GPU, on which `sm120kit launch` serves a model; unverified on SM120"),
}
"""What the container, which is given no GPU, cannot be asked: by suite, a check and its reason."""

_SECRET = re.compile(r"(?i)(token|secret|password|api_?key|index[_-]url|find[_-]links=|https?_proxy|://[^/\s]+:[^/\s]+@)")


@dataclass(frozen=True)
class Expected:
    """What an image has to be. Everything that its labels claim is compared with what is found inside.

    ``generators`` are FlashInfer's generator functions of the compiled modules, ``kernels`` the patterns of ``expect_kernels``
    with the least number per module, ``left_out`` distributions that are required and not there on purpose, ``overridden``
    those whose version the recipe decides against what others demand.

    Of an engine: ``env`` is set and ``serve`` started in it, and ``arguments`` is what each configuration says after ``serve``,
    without what it calls ``unreleased``.
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
    generators: tuple[str, ...] = ()
    kernels: dict[str, dict[str, int]] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    overridden: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    serve: tuple[str, ...] = ()
    arguments: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unreleased: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """What the checks of an image came to. ``verified`` is there when none failed."""

    image: Image
    checks: tuple[Check, ...]
    said: dict[str, str]
    verified: VerifiedImage | None


def suites(kind: str) -> tuple[str, ...]:
    """The checks that an image of a kind must pass, parents first.

    Raises:
        UnknownName: there is no such kind of image.
    """
    chain = [kind]
    while chain[0] in PARENT:
        chain.insert(0, PARENT[chain[0]])
    for name in chain:
        if not (_root() / name / "checks.py").is_file():
            raise UnknownName(f"there are no checks for images of kind {name!r}", f"in {_root()}")
    return tuple(chain)


def suite_digest(kind: str) -> str:
    """sha256 of the checks of a kind of image."""
    return digest_of([[path, file_sha256(_root() / path)] for path in _files(kind)])


def record_path(workspace: Workspace, image: Image) -> Path:
    """Where the record of a verified image lies: under its content, so that another image never finds it."""
    return workspace.root / "images" / "verified" / f"{image.content}.json"


def verify(
    image: Image,
    reference: str,
    expected: Expected,
    daemon: Daemon,
    workspace: Workspace,
    tell: Callable[[str], None] = lambda line: None,
) -> Report:
    """Run an image's checks. When none fails its record is written, and then it gets the name ``reference``."""
    names, suite = suites(expected.kind), suite_digest(expected.kind)
    checks: list[Check] = []
    said: dict[str, str] = {}
    for check, words in [*_inside(image, names, expected, daemon), *_outside(image, expected, daemon)]:
        tell(f"{check.verdict:8} {check.suite}/{check.name}{': ' * bool(check.detail)}{check.detail}")
        checks.append(check)
        said |= words
    verified = None
    if not any(check.verdict is Verdict.FAILED for check in checks):
        verified = VerifiedImage(image, reference, suite, tuple(checks), dict(sorted(said.items())))
        write_record(record_path(workspace, image), verified)
        daemon.tag(image.id, reference)
    else:
        record_path(workspace, image).unlink(missing_ok=True)
    return Report(image, tuple(checks), said, verified)


def verified(reference: str, daemon: Daemon, workspace: Workspace) -> VerifiedImage:
    """The record of an image that passed the checks of today.

    Raises:
        NoSuchImage: it is not here.
        NotVerified: it was never verified, was changed since, or the checks were.
    """
    image = daemon.find(reference)
    record = record_path(workspace, image)
    if not record.is_file():
        raise NotVerified(
            f"{reference} is not an image that passed its checks: its content is {image.content}",
            f"sm120kit verify image {reference}",
        )
    found = read_record(VerifiedImage, record)
    kind = image.labels.get("sm120kit.kind", "")
    if found.suite != suite_digest(kind):
        message = f"the checks for {kind} images changed since {reference} passed them"
        raise NotVerified(message, f"sm120kit verify image {reference}")
    return found


def _inside(
    image: Image, names: tuple[str, ...], expected: Expected, daemon: Daemon
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """The checks that run in a container, with what each says."""
    files = {f"checks/{path}": (_root() / path).read_bytes() for path in _files(expected.kind)}
    files["checks/expected.json"] = json.dumps(expected.__dict__).encode()
    ran = daemon.run(image.id, ["python3", "-B", "/tmp/checks/run.py", "/tmp/checks/expected.json", *names], files)
    for text in ran.stdout.splitlines():
        try:
            line: dict[str, Any] = json.loads(text)
            yield Check(line["suite"], line["name"], Verdict(line["verdict"]), line["detail"]), line["said"]
        except (ValueError, KeyError, TypeError):
            yield _failed("output", f"says on its own: {text}"), {}
    if ran.code != 0:
        last = (ran.stderr.strip().splitlines() or ["nothing"])[-1]
        yield _failed("finished", f"the checks ended with exit code {ran.code}: {last}"), {}
    complaints = ran.stderr.strip().splitlines()
    yield (_failed("stderr", "; ".join(complaints[:3])) if complaints else Check("base", "stderr", Verdict.PASSED)), {}


def _outside(image: Image, expected: Expected, daemon: Daemon) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """The checks that a container cannot answer."""
    limit = SIZE_LIMIT_BYTES.get(expected.kind, 0)
    size = f"{image.bytes / 2**20:.0f} MiB"
    yield _check("size", image.bytes <= limit, f"{size} unpacked, at most {limit / 2**20:.0f} MiB are allowed"), {"size": size}
    wheels = f"LABEL sm120kit.wheels={image.labels.get('sm120kit.wheels')}"  # of which one may be called tokenizers
    leaks = [step for step in daemon.history(image.id) if _SECRET.search(step) and not step.endswith(wheels)]
    yield _check("history", not leaks, f"a setting or secret in the history: {'; '.join(leaks)[:200]}"), {}
    base = daemon.base_of(image)
    if base is None:
        yield Check("base", "base", Verdict.NOT_RUN, "the base image is not here"), {}
    else:
        rests = image.layers[: len(base.layers)] == base.layers
        yield _check("base", rests, "its lowest layers are not those of the base that it names"), {}
    site = daemon.run(image.id, ["python3", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], {}).stdout.strip()
    yield from _device_code(image, site, expected, daemon)
    yield from _rebuilt(image, site, expected, daemon)
    for suite, (name, why) in NEEDS_GPU.items():
        if suite in suites(expected.kind):
            yield Check(suite, name, Verdict.NOT_RUN, why), {}


def _device_code(image: Image, site: str, expected: Expected, daemon: Daemon) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Archs and kernels of every module of FlashInfer that was compiled ahead, from the cubins themselves."""
    if not expected.modules:
        return
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as scratch:
        place = Path(scratch)
        wrong: list[str] = []
        archs: set[str] = set()
        count = 0
        if not daemon.fetch(image.id, f"{site}/flashinfer/data/aot", place):
            wrong.append("there is no flashinfer/data/aot")
        for library in sorted(place.rglob("*.so")):
            cubins = read(library)
            archs |= {cubin.arch for cubin in cubins}
            count += sum(len(cubin.kernels) for cubin in cubins)
            for pattern, least in expected.kernels.get(library.stem, {}).items():
                found = len(matching(pattern, cubins))
                if found < least:
                    wrong.append(f"{library.stem}: {found} kernels like {pattern}, at least {least} are expected")
        missing = sorted({*expected.modules} - {library.stem for library in place.rglob("*.so")})
        wrong += [f"{name} is not there" for name in missing]
        wrong += _foreign(archs, expected)
    yield (
        Check("flashinfer", "device_code", Verdict.FAILED if wrong else Verdict.PASSED, "; ".join(wrong)),
        {"archs": ", ".join(sorted(archs)), "kernels": str(count)},
    )


def _rebuilt(image: Image, site: str, expected: Expected, daemon: Daemon) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """The modules of the engine's own wheel that were built from source: the bytes that it names, with code for SM12x."""
    version = expected.distributions.get(expected.kind, "")
    if "+sm120kit." not in version:
        return
    with tempfile.TemporaryDirectory(prefix="sm120kit-") as scratch:
        place = Path(scratch)
        if not daemon.fetch(image.id, f"{site}/{expected.kind}-{version}.dist-info/sm120kit.json", place):
            yield (
                Check("engine", "rebuilt", Verdict.FAILED, f"{expected.kind} {version} does not say what is replaced in it"),
                {},
            )
            return
        replaced: dict[str, dict[str, str]] = json.loads((place / "sm120kit.json").read_text())["replaced"]
        modules = {member: hashes["here"] for member, hashes in sorted(replaced.items()) if member.endswith(".so")}
        wrong: list[str] = []
        count = 0
        for member, sha256 in modules.items():
            library = place / Path(member).name
            if not daemon.fetch(image.id, f"{site}/{member}", place) or file_sha256(library) != sha256:
                wrong.append(f"{member} is not the file that was built")
                continue
            cubins = read(library)
            count += sum(len(cubin.kernels) for cubin in cubins)
            wrong += [f"{member}: {problem}" for problem in _foreign({cubin.arch for cubin in cubins}, expected)]
    if modules:
        verdict = Verdict.FAILED if wrong else Verdict.PASSED
        yield (
            Check("engine", "rebuilt", verdict, "; ".join(wrong)),
            {"rebuilt": ", ".join(modules), "kernels rebuilt": str(count)},
        )


def _foreign(archs: set[str], expected: Expected) -> list[str]:
    """What is wrong with the archs that were found: any that was not asked for."""
    # A family target is listed without its letter by some toolkits, see sm120kit.cubin.
    asked = {arch.rstrip("af") for arch in expected.archs}
    foreign = sorted(arch for arch in archs if arch.rstrip("af") not in asked and not arch.startswith("compute_"))
    return [f"device code for {arch}, which is not asked for" for arch in foreign]


def _check(name: str, holds: bool, otherwise: str) -> Check:
    return Check("base", name, Verdict.PASSED) if holds else _failed(name, otherwise)


def _failed(name: str, detail: str) -> Check:
    return Check("base", name, Verdict.FAILED, detail)


def _root() -> Path:
    return data_root() / "tests" / "image"


def _files(kind: str) -> list[str]:
    folders = [_root() / name for name in suites(kind)]
    found = [path for folder in folders for path in (folder / "checks.py", folder / "allowed.toml") if path.is_file()]
    return ["run.py", "standin.py", *(str(path.relative_to(_root())) for path in found)]
