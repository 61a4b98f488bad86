"""Differences between a result and the published setup, which make a published figure not comparable."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from sm120kit import recipes
from sm120kit.bench import workload as workloads
from sm120kit.bench.result_file import MeasuredCase, Result
from sm120kit.engines import parser
from sm120kit.recipes.configurations import UNPINNED, Configuration, Reference

UNKNOWN = "unknown"
SAMPLES = 3
"""Successful requests that a verdict requires: one shows neither its spread nor that it is an outlier."""
ENOUGH = 0.5
"""Share of the requested tokens below which answers are too short for the published method."""


@dataclass(frozen=True)
class SetupDifference:
    """A field that a figure depends on: its published value, and ``here`` its value in the result."""

    field: str
    published: str
    here: str


def of_reference(configuration: Configuration, reference: Reference) -> Iterator[SetupDifference]:
    """Why a figure cannot be compared with any result: its method has no workload, or it is of another configuration."""
    if reference.workload is None:
        yield SetupDifference("method", reference.method, "no workload measures that")
    if reference.differs:
        yield SetupDifference("configuration", reference.differs, configuration.name)


def of_result(configuration: Configuration, reference: Reference, result: Result) -> Iterator[SetupDifference]:
    """Differences in machine, model, engine and workload. A required value that is unknown is a difference, too."""
    yield from _gpus(configuration, result)
    yield from _power_limit(configuration, result)
    yield from of_model(configuration, result)
    yield from _engine(configuration, result)
    yield from _arguments(configuration, result)
    if reference.workload is not None:
        yield from _workload(reference.workload, result)


def of_cases(result: Result, cases: Sequence[MeasuredCase]) -> Iterator[SetupDifference]:
    """Differences in the cases with the published concurrency."""
    samples = [sample for case in cases for sample in case.samples if not sample.error]
    if not samples:
        failed = next(sample.error for case in cases for sample in case.samples)
        yield SetupDifference("requests", "successful", f"all failed: {failed}")
        return
    if len(samples) < SAMPLES:
        yield SetupDifference("samples", f"at least {SAMPLES} successful requests", str(len(samples)))
    counts = [sample.completion_tokens for sample in samples if sample.completion_tokens is not None]
    if len(counts) < len(samples):
        yield SetupDifference("tokens", "counted", "the server does not count them")
        return
    requested = cases[0].output_tokens
    if median(counts) < ENOUGH * requested:
        yield SetupDifference("output tokens", str(requested), f"{median(counts):.0f}")
    if result.environment.thinking == "off" and any(len(s.chunk_seconds) > s.answer_chunks for s in samples):
        yield SetupDifference("thinking", "off", "the server sends reasoning")


def gpu_model(configuration: Configuration) -> str:
    """The GPU's name in a configuration, without remarks after a comma or parenthesis."""
    return re.split(r"[,(]", configuration.hardware.gpu)[0].strip()


def gpu_names(result: Result) -> tuple[str, ...] | None:
    """The machine's GPUs: as detected, else as the user stated them, such as ``gpu=2x RTX PRO 6000``."""
    about = result.environment
    if about.machine.gpus is not None:
        return about.machine.gpus
    stated = re.fullmatch(r"(?:([0-9]{1,3})\s*x\s*)?(.+)", about.given.get("gpu", ""))
    return (stated[2].strip(),) * int(stated[1] or 1) if stated else None


def _gpus(configuration: Configuration, result: Result) -> Iterator[SetupDifference]:
    model, count = gpu_model(configuration), configuration.hardware.gpus
    published = f"{count} x {model}"
    names = gpu_names(result)
    if names is None:
        yield SetupDifference("gpus", published, UNKNOWN)
        return
    fitting = [name for name in names if model in name or name in model]
    if not fitting:
        yield SetupDifference("gpus", published, ", ".join(sorted(set(names))) or "none")
    # Launch uses as many GPUs as the configuration sets; how many another server uses is unknown.
    elif len(fitting) < count or (len(fitting) > count and result.environment.served.configuration != configuration.name):
        yield SetupDifference("gpus", published, f"{len(fitting)} x {model}")


def _power_limit(configuration: Configuration, result: Result) -> Iterator[SetupDifference]:
    published = re.search(r"(\d+) W\b", configuration.hardware.gpu)
    about = result.environment
    limits = {watts for watts in about.machine.power_limits_watts or () if watts is not None}
    if not limits and "power_limit" in about.given:
        limits = {float(number) for number in re.findall(r"[0-9]+(?:\.[0-9]+)?", about.given["power_limit"])}
    if published and limits and any(abs(watts - float(published[1])) > 1 for watts in limits):
        yield SetupDifference("power limit", f"{published[1]} W", ", ".join(f"{watts:g} W" for watts in sorted(limits)))


def of_model(configuration: Configuration, result: Result) -> Iterator[SetupDifference]:
    """Differences in the model, its quantization and its revision."""
    about, model = result.environment, configuration.model
    if about.model.rstrip("/").rpartition("/")[2].lower() != model.repository.rpartition("/")[2].lower():
        yield SetupDifference("model", model.repository, about.model)
    if "quantization" in about.given and about.given["quantization"].lower() not in model.quantization.lower():
        yield SetupDifference("quantization", model.quantization, about.given["quantization"])
    revision = about.served.revision or about.given.get("revision")
    if model.revision != UNPINNED and revision != model.revision:
        yield SetupDifference("revision", model.revision, revision or UNKNOWN)


def _engine(configuration: Configuration, result: Result) -> Iterator[SetupDifference]:
    about = result.environment
    engine = about.served.engine or about.given.get("engine")
    if engine is None and "version" in about.reported:
        if about.reported["version"].partition("+")[0] != recipes.load_engine(configuration.engine).version:
            yield SetupDifference("engine", configuration.engine, f"version {about.reported['version']}")
    elif engine != configuration.engine:
        yield SetupDifference("engine", configuration.engine, engine or UNKNOWN)


def _arguments(configuration: Configuration, result: Result) -> Iterator[SetupDifference]:
    """Differences in the server's arguments, if its command line is known: speculation, KV cache, limits."""
    served = result.environment.served.argv
    if served is None:
        return
    arguments, argv = configuration.words, parser.words(configuration.engine, served)
    for index, flag in enumerate(arguments):
        if not flag.startswith("--"):
            continue
        value = arguments[index + 1] if index + 1 < len(arguments) and not arguments[index + 1].startswith("--") else ""
        position = argv.index(flag) if flag in argv else None
        if position is None:
            yield SetupDifference("arguments", f"{flag} {value}".strip(), "absent")
            continue
        measured = argv[position + 1] if value and position + 1 < len(argv) else ""
        if measured != value:
            yield SetupDifference("arguments", f"{flag} {value}".strip(), f"{flag} {measured}".strip())


def _workload(name: str, result: Result) -> Iterator[SetupDifference]:
    about, published = result.environment, workloads.load(name)
    if about.thinking != published.workload.thinking:
        yield SetupDifference("thinking", published.workload.thinking, about.thinking)
    if about.workload_sha256 != published.sha256:
        changed = f"{name} with other contents" if about.workload == name else about.workload
        yield SetupDifference("workload", name, changed)
