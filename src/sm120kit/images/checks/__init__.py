"""Verify images (``Image -> VerifiedImage``): run their checks, and tag an image only if none fails.

The checks in ``suites/<kind>/checks.py`` run inside a container, as the image's user and without a network, see
:mod:`sm120kit.images.local_images`; an image must pass the checks of its parent kinds too. Checks that a container cannot run
on itself are in this module: size, history, base, and the device code of the modules, which are read from a copy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sm120kit import engines
from sm120kit.core import reporting
from sm120kit.core.digests import digest_of, file_sha256
from sm120kit.core.errors import BadInput, BadRecord, NotAttested, NotFound, NotVerified
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images import b12x
from sm120kit.images._wheel_layers import VENV
from sm120kit.images.checks.quick import Baseline, find_baseline
from sm120kit.images.image_inputs import context_of
from sm120kit.images.image_records import BuiltWheel, Check, CheckResult, Image, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.kernels.cubin import matching, read
from sm120kit.recipes.schema import FLASHINFER_KEY
from sm120kit.wheels.published_wheels import unverified_cache

COMMON = ("base", "flashinfer", "engine")
"""The suites that an image of an engine must pass before that of the engine. One of FlashInfer must pass the first two."""

CHANGED = "changed"
"""The suite of an image that gets quick checks."""

DRIVER_STUB = "driver functions"
"""The fact with the names in the driver's stub, which follow from all libraries of the image."""

FLASHINFER_LIMIT_BYTES = 3 * 2**30
"""Of an image of FlashInfer, as :attr:`sm120kit.engines.Engine.size_limit_bytes`."""

NEEDS_GPU = {
    "flashinfer": ("kernels", "needs an SM12x GPU, on which `sm120kit verify kernels` compares them; unverified on SM120"),
    "engine": ("served_prompt", "needs an SM12x GPU, on which `sm120kit serve` serves a model; unverified on SM120"),
}
"""Checks that are not run, because the container has no GPU: by suite, name and reason."""

MODULES_REQUESTED, REQUESTED = "modules_requested", "modules requested"
"""The check of an engine that looks up FlashInfer's modules, and its fact that lists them: ``name (use, use); name (use)``."""

_SECRET = re.compile(r"(?i)(token|secret|password|api_?key|index[_-]url|find[_-]links=|https?_proxy|://[^/\s]+:[^/\s]+@)")


@dataclass(frozen=True)
class ExpectedImage:
    """Required properties of an image, from its labels and recipe. The checks compare them with the installed files.

    ``generators`` are the calls of FlashInfer's generators of the compiled modules; ``kernels`` the patterns of
    ``expect_kernels`` with the minimum count per module; ``complete`` whether the modules are those of the kernel group
    ``all``; ``left_out`` distributions that are required by others and deliberately absent; ``overridden`` those whose version
    the recipe sets against the requirements of others; ``leave_out`` patterns of the files that are absent, by
    distribution, and ``imports`` the Python modules that must be importable without them; ``wrong_record`` patterns of
    files of which RECORD has another hash, as in their upstream wheel.

    For an engine: ``env`` must be set in the container, ``serve`` is the start command, and ``arguments`` are the arguments of
    each configuration after ``serve``; ``served`` its environment, quantization, and the architecture of its model, which is
    None if it is not recorded; ``backends`` what it selects on SM12x, see :func:`sm120kit.images.backends.expected`; ``b12x``
    the kernels of b12x that are compiled into the image.

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
    left_out: tuple[str, ...] = ()
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
    read_all: bool = True
    digests: dict[str, str] = field(default_factory=dict, repr=False)
    quick: str = ""
    changed: tuple[str, ...] | None = None
    changed_modules: tuple[str, ...] = ()
    driver_stub: tuple[str, ...] = ()


@dataclass(frozen=True)
class CheckReport:
    """Results of the checks of an image; ``facts`` are what they reported, by name.

    ``verified`` is set if none failed.
    """

    image: Image
    checks: tuple[Check, ...]
    facts: dict[str, str]
    verified: VerifiedImage | None


def suites(kind: str) -> tuple[str, ...]:
    """Names of the suites that an image of a kind must pass, parents first.

    Raises:
        NotFound: no such kind of image.
    """
    chain = COMMON[:2] if kind == FLASHINFER_KEY else (*COMMON, kind)
    for name in chain:
        if not (_suite(name) / "checks.py").is_file():
            raise NotFound(f"there are no checks for images of kind {name!r}", f"in {_suite(name)}")
    return chain


def suite_digest(kind: str) -> str:
    """sha256 of the programs of the checks for a kind of image."""
    return digest_of([[name, file_sha256(path)] for name, path in _files(kind).items()])


def record_path(workspace: Workspace, image: Image) -> Path:
    """Path of the record of a checked image. It is keyed by content, so that it applies to no other image."""
    return workspace.root / "images" / "verified" / f"{image.content}.json"


def verify(
    image: Image,
    reference: str,
    expected: ExpectedImage,
    store: LocalImages,
    workspace: Workspace,
    report: Callable[[str], None] = lambda line: None,
) -> CheckReport:
    """Run the checks of an image. If none fails, write its record, then tag it as ``reference``.

    See :class:`ExpectedImage` for ``read_all``.
    """
    names, suite = suites(expected.kind), suite_digest(expected.kind)
    baseline = None if expected.read_all else find_baseline(image, suite, workspace)
    if baseline:
        names, expected = (*names, CHANGED), _quick(expected, baseline)
    elif not expected.read_all:
        expected = replace(expected, digests=store.digests(image.id))
    inside = [*_inside(image, names, expected, store)]
    if baseline:
        inside = [*_compared_imports(inside, baseline, expected, store)]
    checks: list[Check] = []
    facts: dict[str, str] = {}
    for check, reported in [
        *inside,
        *_modules_ahead(inside, expected),
        *_outside(image, expected, store, workspace, baseline),
    ]:
        report(f"{check.verdict:8} {check.suite}/{check.name}{': ' * bool(check.detail)}{check.detail}")
        checks.append(check)
        facts |= reported
    verified = None
    failed = any(check.verdict is CheckResult.FAILED for check in checks)
    if not failed:
        verified = VerifiedImage(image, reference, suite, tuple(checks), dict(sorted(facts.items())))
        write_record(record_path(workspace, image), verified)
        store.tag(image.id, reference)
    else:
        record_path(workspace, image).unlink(missing_ok=True)
    return CheckReport(image, tuple(checks), facts, verified)


def require_verified(reference: str, store: LocalImages, workspace: Workspace) -> VerifiedImage:
    """The record of a local image that passed the current checks.

    Raises:
        NotFound: the store has no such image.
        NotVerified: it was never verified, or the image or its checks changed since.
    """
    image = store.find(reference)
    record = record_path(workspace, image)
    if not record.is_file():
        raise NotVerified(
            f"{reference} is not an image that passed its checks: its content is {image.content}",
            f"sm120kit verify image {reference}",
        )
    verified = read_record(VerifiedImage, record)
    kind = image.labels.get("sm120kit.kind", "")
    if verified.suite != suite_digest(kind):
        message = f"the checks for {kind} images changed since {reference} passed them"
        raise NotVerified(message, f"sm120kit verify image {reference}")
    return verified


def _inside(
    image: Image,
    names: tuple[str, ...],
    expected: ExpectedImage,
    store: LocalImages,
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Run the checks inside a container. Yields each with the facts that it reported."""
    with reporting.step(f"checking {image.canonical_name or image.id}"):
        files = {f"checks/{name}": path.read_bytes() for name, path in _files(expected.kind).items()}
        files["checks/expected.json"] = json.dumps({**expected.__dict__, "owners": store.owners(image.id)}).encode()
        argv = ["python3", "-B", "/tmp/checks/run.py", "/tmp/checks/expected.json", *names]
        result = store.run(image.id, argv, files)
    for text in result.stdout.splitlines():
        yield _parsed(text)
    messages = result.stderr.strip().splitlines()
    if result.code != 0:
        last = (messages or ["no message"])[-1]
        yield _failed("finished", f"the checks ended with exit code {result.code}: {last}"), {}
    facts = {"runtime": result.runtime}
    yield _failed("stderr", "; ".join(messages[:3])) if messages else Check("base", "stderr", CheckResult.PASSED), facts


def _parsed(text: str) -> tuple[Check, Mapping[str, str]]:
    """The check and its facts in a line that ``suites/run.py`` printed."""
    try:
        line: dict[str, Any] = parse_json(text)
        return Check(line["suite"], line["name"], CheckResult(line["verdict"]), line["detail"]), line["facts"]
    except (ValueError, KeyError, TypeError):
        return _failed("output", f"unexpected output: {text}"), {}


def _quick(expected: ExpectedImage, baseline: Baseline) -> ExpectedImage:
    paths = tuple(sorted(baseline.changed | baseline.metadata))
    stub = tuple(filter(None, baseline.verified.facts.get(DRIVER_STUB, "").split(", ")))
    return replace(expected, quick=baseline.note, changed=paths, changed_modules=baseline.modules, driver_stub=stub)


def _compared_imports(
    results: Sequence[tuple[Check, Mapping[str, str]]], baseline: Baseline, expected: ExpectedImage, store: LocalImages
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Results, of which the import of changed modules also passes if it fails in the image of ``baseline`` in the same way."""
    for check, facts in results:
        if (check.suite, check.verdict) == (CHANGED, CheckResult.FAILED):
            (before, _), *_ = _inside(baseline.verified.image, (CHANGED,), expected, store)
            if before.detail == check.detail:
                check = replace(check, verdict=CheckResult.PASSED, detail=f"as in {baseline.verified.image.id}: {check.detail}")
        yield check, facts


def _outside(
    image: Image, expected: ExpectedImage, store: LocalImages, workspace: Workspace, baseline: Baseline | None
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Run the checks that a container cannot run on itself: size, history, base, device code.

    Device code and entrypoint of an image that differs from ``baseline`` in Python files only are not checked.
    """
    engine = engines.find(expected.kind)
    limit = engine.size_limit_bytes if engine else FLASHINFER_LIMIT_BYTES
    size = f"{image.bytes / 2**20:.0f} MiB"
    yield _check("size", image.bytes <= limit, f"{size} unpacked, at most {limit / 2**20:.0f} MiB are allowed"), {"size": size}
    leaks = suspect_steps(store.history(image.id), image, expected)
    yield _check("history", not leaks, f"a setting or secret in the history: {'; '.join(leaks)[:200]}"), {}
    base = store.base_of(image)
    digest = image.labels.get("org.opencontainers.image.base.digest", "")
    layers = base.layers if base else (digest,) if digest in image.layers else ()  # a base that is a layer has its digest
    if not layers:
        yield Check("base", "base", CheckResult.NOT_RUN, "the base image is not where this image is"), {}
    else:
        same = image.layers[: len(layers)] == layers
        yield _check("base", same, "its lowest layers are not those of the base that its labels name"), {}
    if baseline:
        site = f"/{VENV}/lib/python{image.labels['sm120kit.python']}/site-packages"
    else:
        program = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = store.run(image.id, ["python3", "-c", program], {}).stdout.strip()
    if baseline:
        for left in baseline.left("flashinfer/device_code", "engine/b12x_code", "engine/entrypoint"):
            yield left, {}
    else:
        yield from _compiled(image, site, expected, store, workspace)
    with workspace.scratch() as directory:
        yield from _rebuilt(image, site, expected, store, directory)
    for statement in signature(image, workspace):
        yield statement, {}
    if expected.serve and not baseline:
        yield _entrypoint(image, expected, store)
    for suite, (name, reason) in NEEDS_GPU.items():
        if suite in suites(expected.kind):
            yield Check(suite, name, CheckResult.NOT_RUN, reason), {}


def _compiled(
    image: Image, site: str, expected: ExpectedImage, store: LocalImages, workspace: Workspace
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    with workspace.scratch() as directory:
        yield from _device_code(image, site, expected, store, directory)
    if expected.b12x:
        with workspace.scratch() as directory:
            yield _b12x_code(image, store, directory)


def signature(image: Image, workspace: Workspace) -> tuple[Check, ...]:
    """A statement for each cache from which a wheel of the image is, if the wheel's signature was not verified."""
    wheels: tuple[BuiltWheel, ...] = ()
    with suppress(NotAttested):
        wheels = context_of(image, workspace).ours
    caches = {unverified_cache(built.wheel.sha256, workspace) for built in wheels} - {""}
    detail = "a wheel is from the cache {}, and its signature was not verified"
    return tuple(Check("base", "signature", CheckResult.NOT_RUN, detail.format(cache)) for cache in sorted(caches))


def unsigned_checks(results: Sequence[Check]) -> tuple[Check, ...]:
    """The results of :func:`signature` in those of an image."""
    return tuple(check for check in results if (check.suite, check.name) == ("base", "signature"))


def _modules_ahead(
    results: Sequence[tuple[Check, Mapping[str, str]]], expected: ExpectedImage
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Check that the modules that an engine requests are those of the image, which FlashInfer finds (``compiled_ahead``).

    An image with a part of the kernels compiles the others on first use, and they are only listed.
    """
    for check, facts in results:
        if check.name == MODULES_REQUESTED and check.verdict is CheckResult.PASSED:
            listed = facts.get(REQUESTED, "").split("; ")
            misses = "; ".join(text for text in listed if text and text.partition(" ")[0] not in expected.modules)
            failed = bool(expected.complete and misses)
            verdict = CheckResult.FAILED if failed else CheckResult.PASSED
            problem = f"not compiled ahead of time: {misses}" if failed else ""
            yield Check(check.suite, "modules_ahead", verdict, problem), {"modules compiled on first use": misses or "none"}


def suspect_steps(history: Sequence[str], image: Image, expected: ExpectedImage) -> list[str]:
    """The steps in the history of an image that show a setting or a secret. Names of wheels such as tokenizers do not."""
    wheels = f"LABEL sm120kit.wheels={image.labels.get('sm120kit.wheels')}"
    layers = {f"sm120kit: {name} {version}" for name, version in expected.distributions.items()}
    return [step for step in history if _SECRET.search(step) and step not in layers and not step.endswith(wheels)]


def _entrypoint(image: Image, expected: ExpectedImage, store: LocalImages) -> tuple[Check, Mapping[str, str]]:
    """Check that the entrypoint ends with the recipe's command, and prints help and version in a container without a GPU."""
    problems: list[str] = []
    argv = list(store.settings(image.id).get("Entrypoint") or ())
    if argv[-len(expected.serve) :] != list(expected.serve):
        problems.append(f"it is {argv}, the recipe serves with {' '.join(expected.serve)}")
    version = expected.distributions.get(expected.kind, "")
    for option, text in (("--help", expected.serve[0]), ("--version", version)):
        result = store.run(image.id, [*argv, option], {}) if argv else None
        if result is None or result.code != 0 or text not in result.stdout:
            problems.append(f"{option} does not print {text}: {result.stderr.strip()[-200:] if result else 'no entrypoint'}")
    verdict = CheckResult.FAILED if problems else CheckResult.PASSED
    return Check("engine", "entrypoint", verdict, "; ".join(problems)), {}


def _device_code(
    image: Image, site: str, expected: ExpectedImage, store: LocalImages, directory: Path
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Check archs and kernels of all FlashInfer modules compiled ahead of time, read from their cubins."""
    if not expected.modules:
        return
    problems: list[str] = []
    archs: set[str] = set()
    count = 0
    if not store.fetch(image.id, f"{site}/flashinfer/data/aot", directory):
        problems.append("flashinfer/data/aot is missing")
    for library in sorted(directory.rglob("*.so")):
        cubins = read(library)
        archs |= {cubin.arch for cubin in cubins}
        count += sum(len(cubin.kernels) for cubin in cubins)
        for pattern, least in expected.kernels.get(library.stem, {}).items():
            matches = len(matching(pattern, cubins))
            if matches < least:
                problems.append(f"{library.stem}: {matches} kernels match {pattern}, at least {least} are expected")
    missing = sorted({*expected.modules} - {library.stem for library in directory.rglob("*.so")})
    problems += [f"{name} is missing" for name in missing]
    problems += _foreign(archs, expected)
    yield (
        Check("flashinfer", "device_code", CheckResult.FAILED if problems else CheckResult.PASSED, "; ".join(problems)),
        {"archs": ", ".join(sorted(archs)), "kernels": str(count)},
    )


def _b12x_code(image: Image, store: LocalImages, directory: Path) -> tuple[Check, Mapping[str, str]]:
    """Check the kernels of b12x that were compiled into the image: as recorded, for sm_120a, with FP4 instructions, and with at
    most the shared memory of SM120."""
    problems: list[str] = []
    store.fetch(image.id, b12x.DIRECTORY, directory)
    entries = {str(path.relative_to(directory / "b12x" / "entries")): path for path in directory.rglob("*.o")}
    try:
        recorded = read_record(dict[str, b12x.Entry], directory / "b12x" / "kernels.json", "a list of kernels of b12x")
    except (OSError, BadRecord) as error:
        recorded = {}
        problems.append(str(error).replace(f"{directory}/b12x", b12x.DIRECTORY))
    if {*entries} != {*recorded}:
        problems.append(f"{len({*entries} ^ {*recorded})} entries are not those of {b12x.DIRECTORY}/kernels.json")
    count = 0
    for path, entry in sorted(entries.items()):
        try:
            kernels = [kernel for cubin in read(entry) for kernel in cubin.kernels]
        except BadInput as error:
            problems.append(f"{path}: {error.message}")
            continue
        count += len(kernels)
        compiled = recorded.get(path)
        if compiled is None or file_sha256(entry) != compiled.sha256:
            problems.append(f"{path} is not the file that was compiled")
        elif why := compiled.too_big(kernels):
            problems.append(f"{path}: {why}")
        if not kernels or any(kernel.arch != b12x.ARCH or not kernel.fp4_mma for kernel in kernels):
            problems.append(f"{path} has a kernel for another arch than {b12x.ARCH}, or without FP4 instructions")
    if problems or not recorded:
        detail = "; ".join(problems[:5]) or f"{b12x.DIRECTORY}/kernels.json lists no kernel"
        return Check("engine", "b12x_code", CheckResult.FAILED, detail), {}
    largest = max(launch.shared_bytes for entry in recorded.values() for launch in entry.launches)
    shared = f"at most {largest:,} bytes of dynamic shared memory"
    facts = {"b12x kernels": f"{count} for {b12x.ARCH}, all with FP4 tensor core instructions, {shared}"}
    return Check("engine", "b12x_code", CheckResult.PASSED), facts


def _rebuilt(
    image: Image, site: str, expected: ExpectedImage, store: LocalImages, directory: Path
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Check the replaced files of repacked wheels: sha256 as recorded, modules with device code for SM12x only."""
    repacked = {name: version for name, version in sorted(expected.distributions.items()) if "+sm120kit." in version}
    repacked.pop("flashinfer-python", None)
    if not repacked:
        return
    problems: list[str] = []
    replaced: dict[str, str] = {}
    for name, version in repacked.items():
        if not store.fetch(image.id, f"{site}/{name.replace('-', '_')}-{version}.dist-info/sm120kit.json", directory):
            problems.append(f"{name} {version} does not record its replaced files")
            continue
        try:
            hashes = parse_json((directory / "sm120kit.json").read_text())["replaced"]
            recorded: dict[str, str] = {member: hashes[member]["here"] for member in sorted(hashes)}
        except (ValueError, LookupError, TypeError):
            recorded = {}
        if not recorded:
            problems.append(f"{name} {version} records no replaced file")
        replaced |= recorded
    count = 0
    for member, sha256 in replaced.items():
        file = directory / Path(member).name
        present = store.fetch(image.id, f"{site}/{member}", directory)
        if (file_sha256(file) if present else "") != sha256:
            problems.append(f"{member} is not the file that was built")
        elif file.suffix == ".so":
            cubins = read(file)
            count += sum(len(cubin.kernels) for cubin in cubins)
            problems += [f"{member}: {problem}" for problem in _foreign({cubin.arch for cubin in cubins}, expected)]
    result = CheckResult.FAILED if problems else CheckResult.PASSED
    facts = {"replaced files": ", ".join(replaced), "kernels rebuilt": str(count)} if replaced else {}
    yield Check("engine", "rebuilt", result, "; ".join(problems)), facts


def _foreign(archs: set[str], expected: ExpectedImage) -> list[str]:
    """Problems with the archs of device code: each that was not requested."""
    # A family target is listed without its letter by some toolkits, see sm120kit.kernels.cubin.
    requested = {arch.rstrip("af") for arch in expected.archs}
    foreign = sorted(arch for arch in archs if arch.rstrip("af") not in requested and not arch.startswith("compute_"))
    return [f"device code for {arch}, which was not requested" for arch in foreign]


def _check(name: str, passed: bool, problem: str) -> Check:
    return Check("base", name, CheckResult.PASSED) if passed else _failed(name, problem)


def _failed(name: str, detail: str) -> Check:
    return Check("base", name, CheckResult.FAILED, detail)


def _root() -> Path:
    return Path(__file__).parent / "suites"


def _suite(name: str) -> Path:
    """The directory of a suite: of an engine that names its own, that."""
    engine = engines.find(name)
    return engine.suite if engine and engine.suite else _root() / name


def _files(kind: str) -> dict[str, Path]:
    """The programs of the checks for a kind of image, by their path in the container."""
    programs = {name: _root() / name for name in ("run.py", "driver_stub.py")}
    listed = (
        (name, path) for name in (*suites(kind), CHANGED) for path in _suite(name).iterdir() if path.suffix in (".py", ".toml")
    )
    return programs | {f"{name}/{path.name}": path for name, path in sorted(listed)}
