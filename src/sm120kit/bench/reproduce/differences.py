"""Differences between a receipt and the published setup, which make a published figure not comparable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from sm120kit import recipes
from sm120kit.bench import workload as workloads
from sm120kit.bench.receipt import MeasuredCell, Receipt
from sm120kit.engines import parser
from sm120kit.recipes.configurations import UNPINNED, Configuration, Reference

UNKNOWN = "unknown"
SAMPLES = 3
"""Successful requests that a verdict requires: one shows neither its spread nor that it is an outlier."""
ENOUGH = 0.5
"""Share of the requested tokens below which answers are too short for the published method."""


@dataclass(frozen=True)
class SetupDifference:
    """A field that a figure depends on: its published value, and ``here`` its value in the receipt."""

    field: str
    published: str
    here: str


def of_reference(configuration: Configuration, reference: Reference) -> Iterator[SetupDifference]:
    """Why a figure cannot be compared with any receipt: its method has no workload, or it is of another configuration."""
    if reference.workload is None:
        yield SetupDifference("method", reference.method, "no workload measures that")
    if reference.differs:
        yield SetupDifference("configuration", reference.differs, configuration.name)


def of_receipt(configuration: Configuration, reference: Reference, receipt: Receipt) -> Iterator[SetupDifference]:
    """Differences in machine, model, engine and workload. A required value that is unknown is a difference, too."""
    yield from _gpus(configuration, receipt)
    yield from _power_limit(configuration, receipt)
    yield from of_model(configuration, receipt)
    yield from _engine(configuration, receipt)
    yield from _arguments(configuration, receipt)
    if reference.workload is not None:
        yield from _workload(reference.workload, receipt)


def of_cells(reference: Reference, receipt: Receipt, cells: tuple[MeasuredCell, ...]) -> Iterator[SetupDifference]:
    """Differences in the cells with the published number of users."""
    if not cells:
        users = sorted({cell.users for cell in receipt.cells if cell.complete})
        yield SetupDifference("users", str(reference.users), ", ".join(map(str, users)) or "no complete cell")
        return
    samples = [sample for cell in cells for sample in cell.samples if not sample.error]
    if not samples:
        failed = next(sample.error for cell in cells for sample in cell.samples)
        yield SetupDifference("requests", "successful", f"all failed: {failed}")
        return
    if len(samples) < SAMPLES:
        yield SetupDifference("samples", f"at least {SAMPLES} successful requests", str(len(samples)))
    counts = [sample.completion_tokens for sample in samples if sample.completion_tokens is not None]
    if len(counts) < len(samples):
        yield SetupDifference("tokens", "counted", "the server does not count them")
        return
    requested = cells[0].output_tokens
    if median(counts) < ENOUGH * requested:
        yield SetupDifference("output tokens", str(requested), f"{median(counts):.0f}")
    if receipt.circumstances.thinking == "off" and any(len(s.chunk_seconds) > s.answer_chunks for s in samples):
        yield SetupDifference("thinking", "off", "the server sends reasoning")


def gpu_model(configuration: Configuration) -> str:
    """The GPU's name in a configuration, without remarks after a comma or parenthesis."""
    return re.split(r"[,(]", configuration.hardware.gpu)[0].strip()


def gpu_names(receipt: Receipt) -> tuple[str, ...] | None:
    """The machine's GPUs: as detected, else as the user stated them, such as ``gpu=2x RTX PRO 6000``."""
    about = receipt.circumstances
    if about.machine.gpus is not None:
        return about.machine.gpus
    stated = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", about.given.get("gpu", ""))
    return (stated[2].strip(),) * int(stated[1] or 1) if stated else None


def _gpus(configuration: Configuration, receipt: Receipt) -> Iterator[SetupDifference]:
    model, count = gpu_model(configuration), configuration.hardware.gpus
    published = f"{count} x {model}"
    names = gpu_names(receipt)
    if names is None:
        yield SetupDifference("gpus", published, UNKNOWN)
        return
    fitting = [name for name in names if model in name or name in model]
    if not fitting:
        yield SetupDifference("gpus", published, ", ".join(sorted(set(names))) or "none")
    # Launch uses as many GPUs as the configuration sets; how many another server uses is unknown.
    elif len(fitting) < count or (len(fitting) > count and receipt.circumstances.served.configuration != configuration.name):
        yield SetupDifference("gpus", published, f"{len(fitting)} x {model}")


def _power_limit(configuration: Configuration, receipt: Receipt) -> Iterator[SetupDifference]:
    published = re.search(r"(\d+) W\b", configuration.hardware.gpu)
    about = receipt.circumstances
    limits = {watts for watts in about.machine.power_limits_watts or () if watts is not None}
    if not limits and "power_limit" in about.given:
        limits = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", about.given["power_limit"])}
    if published and limits and any(abs(watts - float(published[1])) > 1 for watts in limits):
        yield SetupDifference("power limit", f"{published[1]} W", ", ".join(f"{watts:g} W" for watts in sorted(limits)))


def of_model(configuration: Configuration, receipt: Receipt) -> Iterator[SetupDifference]:
    """Differences in the model, its quantization and its revision."""
    about, model = receipt.circumstances, configuration.model
    if about.model.rstrip("/").rpartition("/")[2].lower() != model.repository.rpartition("/")[2].lower():
        yield SetupDifference("model", model.repository, about.model)
    if "quantization" in about.given and about.given["quantization"].lower() not in model.quantization.lower():
        yield SetupDifference("quantization", model.quantization, about.given["quantization"])
    revision = about.served.revision or about.given.get("revision")
    if model.revision != UNPINNED and revision != model.revision:
        yield SetupDifference("revision", model.revision, revision or UNKNOWN)


def _engine(configuration: Configuration, receipt: Receipt) -> Iterator[SetupDifference]:
    about = receipt.circumstances
    engine = about.served.engine or about.given.get("engine")
    if engine is None and "version" in about.reported:
        if about.reported["version"].partition("+")[0] != recipes.load_engine(configuration.engine).version:
            yield SetupDifference("engine", configuration.engine, f"version {about.reported['version']}")
    elif engine != configuration.engine:
        yield SetupDifference("engine", configuration.engine, engine or UNKNOWN)


def _arguments(configuration: Configuration, receipt: Receipt) -> Iterator[SetupDifference]:
    """Differences in the server's arguments, if its command line is known: speculation, KV cache, limits."""
    served = receipt.circumstances.served.argv
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


def _workload(name: str, receipt: Receipt) -> Iterator[SetupDifference]:
    about, published = receipt.circumstances, workloads.load(name)
    if about.thinking != published.workload.thinking:
        yield SetupDifference("thinking", published.workload.thinking, about.thinking)
    if about.workload_sha256 != published.sha256:
        changed = f"{name} with other contents" if about.workload == name else about.workload
        yield SetupDifference("workload", name, changed)
