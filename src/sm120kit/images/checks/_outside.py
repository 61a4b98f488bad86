"""Checks that a container cannot run on itself: size, history, entrypoint, device code."""

import re
from collections.abc import Iterator, Mapping, Sequence

from sm120kit import engines
from sm120kit.images._wheel_layers import VENV
from sm120kit.images.checks import _device_code
from sm120kit.images.checks._expected_image import ExpectedImage
from sm120kit.images.checks.quick import Baseline
from sm120kit.images.image_records import Check, CheckResult, Image
from sm120kit.images.local_images import LocalImages

NEEDS_GPU = {
    "flashinfer": ("kernels", "needs an SM12x GPU, on which `sm120kit verify kernels` compares them; unverified on SM120"),
    "engine": ("served_prompt", "needs an SM12x GPU, on which `sm120kit serve` serves a model; unverified on SM120"),
}
"""Checks that are not run, because the container has no GPU: by suite, name and reason."""

_SECRET = re.compile(r"(?i)(token|secret|password|api_?key|index[_-]url|find[_-]links=|https?_proxy|://[^/\s]+:[^/\s]+@)")


def outside(
    image: Image, expected: ExpectedImage, store: LocalImages, baseline: Baseline | None
) -> Iterator[tuple[Check, Mapping[str, str]]]:
    """Run the checks that a container cannot run on itself: size, history, entrypoint, device code.

    Device code and entrypoint of an image that differs from ``baseline`` in Python files only are not checked.
    """
    limit = engines.of_recipe(expected.kind).size_limit_bytes
    size = f"{image.bytes / 2**20:.0f} MiB"
    too_large = [f"{size} unpacked, at most {limit / 2**20:.0f} MiB are allowed"] if image.bytes > limit else []
    yield Check.judged("base", "size", *too_large), {"size": size}
    leaks = "; ".join(suspect_steps(store.history(image.id), image, expected))[:200]
    yield Check.judged("base", "history", *([f"a setting or secret in the history: {leaks}"] if leaks else [])), {}
    site = f"/{VENV}/lib/python{image.labels.get('sm120kit.python', '')}/site-packages"
    if baseline:
        for left in baseline.left("flashinfer/device_code", "engine/b12x_code", "engine/entrypoint"):
            yield left, {}
    else:
        yield from _device_code.compiled(image, site, expected, store)
        if expected.serve:
            yield _entrypoint(image, expected, store)
    yield from _device_code.rebuilt(image, site, expected, store)
    for suite, (name, reason) in NEEDS_GPU.items():
        yield Check(suite, name, CheckResult.NOT_RUN, reason), {}


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
    return Check.judged("engine", "entrypoint", *problems), {}
