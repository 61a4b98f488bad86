"""In what a receipt is not of what was published: a figure of other circumstances proves nothing, in either direction."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from sm120kit import recipe
from sm120kit.bench import workload as workloads
from sm120kit.bench.receipt import Measured, Receipt
from sm120kit.recipe.configuration import UNPINNED, Configuration, Reference

UNKNOWN = "unknown"
ENOUGH = 0.5
"""Of the tokens asked for: below this share answers were too short to be the published method's."""


@dataclass(frozen=True)
class Difference:
    """A field that a figure depends on: what was published, and what was measured or asked here."""

    field: str
    published: str
    here: str


def of_reference(wanted: Configuration, one: Reference) -> Iterator[Difference]:
    """Why no receipt at all can be compared: nobody knows how it was measured, or the configuration is not its own."""
    if one.workload is None:
        yield Difference("method", one.method, "no workload does that")
    if one.differs:
        yield Difference("configuration", one.differs, wanted.name)


def of_receipt(wanted: Configuration, one: Reference, receipt: Receipt) -> Iterator[Difference]:
    """Machine, model, engine and workload. What is unknown here and matters is a difference, too."""
    yield from _gpus(wanted, receipt)
    yield from _power_limit(wanted, receipt)
    yield from _model(wanted, receipt)
    yield from _engine(wanted, receipt)
    yield from _arguments(wanted, receipt)
    if one.workload is not None:
        yield from _workload(one.workload, receipt)


def of_cells(one: Reference, receipt: Receipt, cells: tuple[Measured, ...]) -> Iterator[Difference]:
    """What was measured with the published number of users, if it was."""
    if not cells:
        users = sorted({cell.users for cell in receipt.cells if cell.complete})
        yield Difference("users", str(one.users), ", ".join(map(str, users)) or "no complete cell")
        return
    samples = [sample for cell in cells for sample in cell.samples if not sample.error]
    if not samples:
        failed = next(sample.error for cell in cells for sample in cell.samples)
        yield Difference("requests", "ended well", f"all failed: {failed}")
        return
    counts = [sample.completion_tokens for sample in samples if sample.completion_tokens is not None]
    if len(counts) < len(samples):
        yield Difference("tokens", "counted", "the server does not count them")
        return
    asked = cells[0].output_tokens
    if median(counts) < ENOUGH * asked:
        yield Difference("output tokens", str(asked), f"{median(counts):.0f}")
    if receipt.circumstances.thinking == "off" and any(len(s.chunk_seconds) > s.answer_chunks for s in samples):
        yield Difference("thinking", "off", "the server sends reasoning all the same")


def kind(wanted: Configuration) -> str:
    """The GPU's name in a configuration, without what is said about it."""
    return re.split(r"[,(]", wanted.hardware.gpu)[0].strip()


def gpu_names(receipt: Receipt) -> tuple[str, ...] | None:
    """The machine's GPUs: as they were seen, else as the user said, such as ``gpu=2x RTX PRO 6000``."""
    about = receipt.circumstances
    if about.machine.gpus is not None:
        return about.machine.gpus
    said = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", about.given.get("gpu", ""))
    return (said[2].strip(),) * int(said[1] or 1) if said else None


def _gpus(wanted: Configuration, receipt: Receipt) -> Iterator[Difference]:
    model, count = kind(wanted), wanted.hardware.gpus
    published = f"{count} x {model}"
    names = gpu_names(receipt)
    if names is None:
        yield Difference("gpus", published, UNKNOWN)
        return
    fitting = [name for name in names if model in name or name in model]
    if not fitting:
        yield Difference("gpus", published, ", ".join(sorted(set(names))) or "none")
    # Launch chooses as many as the configuration asks for; of other servers it is not known.
    elif len(fitting) < count or (len(fitting) > count and receipt.circumstances.served.configuration != wanted.name):
        yield Difference("gpus", published, f"{len(fitting)} x {model}")


def _power_limit(wanted: Configuration, receipt: Receipt) -> Iterator[Difference]:
    published = re.search(r"(\d+) W\b", wanted.hardware.gpu)
    about = receipt.circumstances
    limits = {watts for watts in about.machine.power_limits_watts or () if watts is not None}
    if not limits and "power_limit" in about.given:
        limits = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", about.given["power_limit"])}
    if published and limits and any(abs(watts - float(published[1])) > 1 for watts in limits):
        yield Difference("power limit", f"{published[1]} W", ", ".join(f"{watts:g} W" for watts in sorted(limits)))


def _model(wanted: Configuration, receipt: Receipt) -> Iterator[Difference]:
    about, model = receipt.circumstances, wanted.model
    if about.model.rstrip("/").rpartition("/")[2].lower() != model.repository.rpartition("/")[2].lower():
        yield Difference("model", model.repository, about.model)
    if "quantization" in about.given and about.given["quantization"].lower() not in model.quantization.lower():
        yield Difference("quantization", model.quantization, about.given["quantization"])
    revision = about.served.revision or about.given.get("revision")
    if model.revision != UNPINNED and revision != model.revision:
        yield Difference("revision", model.revision, revision or UNKNOWN)


def _engine(wanted: Configuration, receipt: Receipt) -> Iterator[Difference]:
    about = receipt.circumstances
    engine = about.served.engine or about.given.get("engine")
    if engine is None and "version" in about.said:
        if about.said["version"].partition("+")[0] != recipe.load_engine(wanted.engine).version:
            yield Difference("engine", wanted.engine, f"version {about.said['version']}")
    elif engine != wanted.engine:
        yield Difference("engine", wanted.engine, engine or UNKNOWN)


def _arguments(wanted: Configuration, receipt: Receipt) -> Iterator[Difference]:
    """Arguments of the server's command line, where it is known: speculation, KV cache, limits."""
    argv = receipt.circumstances.served.argv
    if argv is None:
        return
    words = wanted.arguments
    for at, flag in enumerate(words):
        if not flag.startswith("--"):
            continue
        value = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else ""
        found = argv.index(flag) if flag in argv else None
        here = "" if found is None else argv[found + 1] if value and found + 1 < len(argv) else ""
        if found is None or here != value:
            yield Difference("arguments", f"{flag} {value}".strip(), "not there" if found is None else f"{flag} {here}".strip())


def _workload(name: str, receipt: Receipt) -> Iterator[Difference]:
    about, asked = receipt.circumstances, workloads.load(name)
    if about.thinking != asked.workload.thinking:
        yield Difference("thinking", asked.workload.thinking, about.thinking)
    if about.workload_sha256 != asked.sha256:
        changed = f"{name} with other contents" if about.workload == name else about.workload
        yield Difference("workload", name, changed)
