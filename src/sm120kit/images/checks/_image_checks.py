"""Verify images (``Image -> VerifiedImage``): run their checks, and tag an image only if none fails.

The checks in ``suites/<kind>/checks.py`` run inside a container, as the image's user and without a network, see
:mod:`sm120kit.images.local_images`; an image must pass the checks of its parent kinds too. Checks that a container cannot run
on itself are in :mod:`sm120kit.images.checks._outside`.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sm120kit.core import reporting
from sm120kit.core.errors import NotVerified
from sm120kit.core.outside import parse_json
from sm120kit.core.record_files import read_record, write_record
from sm120kit.core.workspace import Workspace
from sm120kit.images.checks._expected_image import ExpectedImage, expected_image
from sm120kit.images.checks._outside import outside
from sm120kit.images.checks._suite_programs import CHANGED, files, required_suites, suite_digest
from sm120kit.images.checks.quick import Baseline, find_baseline
from sm120kit.images.image_records import SERVED_PROMPT, Check, CheckResult, Image, Reported, VerifiedImage
from sm120kit.images.local_images import LocalImages

DRIVER_STUB = "driver functions"
"""The fact with the names in the driver's stub, which follow from all libraries of the image."""
Serve = Callable[[VerifiedImage], Reported]
"""Serves a model from an image that passed the other checks, and has no record yet."""


@dataclass(frozen=True)
class CheckReport:
    """Results of the checks of an image; ``facts`` are what they reported, by name.

    ``verified`` is set if none failed.
    """

    image: Image
    checks: tuple[Check, ...]
    facts: dict[str, str]
    verified: VerifiedImage | None


def record_path(workspace: Workspace, image: Image) -> Path:
    """Path of the record of a checked image. It is keyed by content, so that it applies to no other image."""
    return workspace.root / "images" / "verified" / f"{image.content}.json"


def verify_once(image: Image, workspace: Workspace) -> CheckReport:
    """The report of an image that is verified already, after tagging it again, or of the checks that :func:`verify` runs.

    Files that were hashed while the layers were unpacked are not read again, and an image that differs from a checked one in
    Python files only gets quick checks.
    """
    store = LocalImages(workspace)
    try:
        verified = require_verified(image.id, store, workspace)
    except NotVerified:
        return verify(image.id, workspace, read_all=False)
    store.tag(image.id, verified.reference)
    return CheckReport(image, verified.checks, verified.facts, verified)


def verify(reference: str, workspace: Workspace, *, read_all: bool = True, serve: Serve | None = None) -> CheckReport:
    """Check a local image against what its labels and its recipe require; see :class:`ExpectedImage` for ``read_all``."""
    store = LocalImages(workspace)
    image = store.find(reference)
    every = read_all or not find_baseline(image, suite_digest(image.labels["sm120kit.kind"]), workspace)
    return run_checks(image, replace(expected_image(image, models=every), read_all=read_all), store, workspace, serve)


def run_checks(
    image: Image, expected: ExpectedImage, store: LocalImages, workspace: Workspace, serve: Serve | None = None
) -> CheckReport:
    """Run the checks of an image. If none fails, write its record, then tag it with the name in its labels."""
    names, suite = required_suites(expected.kind), suite_digest(expected.kind)
    baseline = None if expected.read_all else find_baseline(image, suite, workspace)
    if baseline:
        names, expected = (*names, CHANGED), _quick(expected, baseline)
    elif not expected.read_all:
        expected = replace(expected, digests=store.digests(image.id))
    inside = _inside(image, names, expected, store)
    if baseline:
        inside = _compared_imports(inside, baseline, expected, store)
    results = [*inside, *_timed(outside(image, expected, store, baseline))]
    report = _report(image, suite, results)
    if serve and report.verified:
        results = [each for each in results if each[0].name != SERVED_PROMPT]
        report = _report(image, suite, [*results, *_timed(map(serve, [report.verified]))])
    if report.verified is None:
        record_path(workspace, image).unlink(missing_ok=True)
    else:
        write_record(record_path(workspace, image), report.verified)
        store.tag(image.id, report.verified.reference)
    return report


def _report(image: Image, suite: str, results: Sequence[Reported]) -> CheckReport:
    checks = tuple(check for check, _ in results)
    facts = {name: fact for _, reported in results for name, fact in reported.items()}
    failed = any(check.verdict is CheckResult.FAILED for check in checks)
    verified = VerifiedImage(image, image.canonical_name, suite, checks, dict(sorted(facts.items())))
    return CheckReport(image, checks, facts, None if failed else verified)


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
) -> Iterator[Reported]:
    """Run the checks inside a container. Yields each with the facts that it reported."""
    with reporting.step(f"checking {image.canonical_name or image.id}"):
        programs = {f"checks/{name}": path.read_bytes() for name, path in files(expected.kind).items()}
        programs["checks/expected.json"] = json.dumps(vars(expected)).encode()
        argv = ["python3", "-B", "/tmp/checks/run.py", "/tmp/checks/expected.json", *names]
        result = store.run(image.id, argv, programs)
    for text in result.stdout.splitlines():
        yield _parsed(text)
    messages = result.stderr.strip().splitlines()
    if result.code != 0:
        last = (messages or ["no message"])[-1]
        yield Check.judged("base", "finished", f"the checks ended with exit code {result.code}: {last}"), {}
    yield Check.judged("base", "stderr", *messages[:3]), {"runtime": result.runtime}


def _timed(results: Iterator[Reported]) -> Iterator[Reported]:
    """Results with the time that each took."""
    started = time.monotonic()
    for check, facts in results:
        yield replace(check, seconds=round(time.monotonic() - started, 1)), facts
        started = time.monotonic()


def _parsed(text: str) -> Reported:
    """The check and its facts in a line that ``suites/run.py`` printed."""
    try:
        line: dict[str, Any] = parse_json(text)
        verdict = CheckResult(line["verdict"])
        return Check(line["suite"], line["name"], verdict, line["detail"], line["seconds"]), line["facts"]
    except (ValueError, KeyError, TypeError):
        return Check.judged("base", "output", f"unexpected output: {text}"), {}


def _quick(expected: ExpectedImage, baseline: Baseline) -> ExpectedImage:
    paths = tuple(sorted(baseline.changed))
    stub = tuple(filter(None, baseline.verified.facts.get(DRIVER_STUB, "").split(", ")))
    return replace(expected, quick=baseline.note, changed=paths, changed_modules=baseline.modules, driver_stub=stub)


def _compared_imports(
    results: Iterable[Reported], baseline: Baseline, expected: ExpectedImage, store: LocalImages
) -> Iterator[Reported]:
    """Results, of which the import of changed modules also passes if it fails in the image of ``baseline`` in the same way."""
    for check, facts in results:
        if (check.suite, check.verdict) == (CHANGED, CheckResult.FAILED):
            (before, _), *_ = _inside(baseline.verified.image, (CHANGED,), expected, store)
            if before.detail == check.detail:
                check = replace(check, verdict=CheckResult.PASSED, detail=f"as in {baseline.verified.image.id}: {check.detail}")
        yield check, facts
