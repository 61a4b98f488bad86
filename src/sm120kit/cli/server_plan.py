"""``sm120kit plan``: what serving a model will need and do, before anything is downloaded."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from sm120kit.bench import roofline
from sm120kit.bench.configured_rates import planned_rates
from sm120kit.bench.roofline import MEAN_ERROR
from sm120kit.cli.options import (
    Draft,
    Html,
    Json,
    PlannedGpu,
    ServerArguments,
    ServeTarget,
    ServingEngine,
    Sources,
    gpu_count,
    option,
)
from sm120kit.core import console
from sm120kit.serving.flight_plan import FlightPlan, PlannedRates, flight_plan
from sm120kit.serving.served_model import ModelToServe, ServeRequest, planned_model


@dataclass(frozen=True)
class PlannedServer:
    """The GPUs, the engine and the revision to plan for."""

    gpu: PlannedGpu = ""
    gpus: Annotated[str, option("--gpus N", "How many GPUs; default: as many as the model needs, or this host has.")] = ""
    engine: ServingEngine = ""
    draft: Draft = ""
    revision: Annotated[str, option("--revision REVISION", "A commit, branch or tag.")] = ""
    root: Annotated[Path, option("--root FILE", "Another host: its doctor --json.")] = Path("/")

    def request(self, config: str, arguments: list[str] | None, sources: Sources) -> ServeRequest:
        """What is to be planned."""
        words = tuple(arguments or ())
        count = gpu_count(self.gpus)
        return ServeRequest(config, self.engine, self.gpu, self.draft, count, words, self.revision, sources.offline)

    def command(self, config: str, arguments: list[str] | None, nodes: int) -> tuple[str, ...]:
        """The command that serves it; addresses and interface of ``nodes`` machines are the user's."""
        spanned = {"--nodes": ",".join(["ADDRESS"] * nodes), "--interface": "INTERFACE"} if nodes > 1 else {}
        numbers = ",".join(map(str, range(gpu_count(self.gpus) or 0))) if nodes == 1 else ""
        named = {"--engine": self.engine, "--draft": self.draft, "--revision": self.revision, "--gpus": numbers, **spanned}
        words = (word for option, value in named.items() if value for word in (option, value))
        return ("sm120kit", "serve", config, *words, *(("--", *arguments) if arguments else ()))


def plan(
    config: ServeTarget,
    arguments: ServerArguments = None,
    *,
    server: PlannedServer,
    sources: Sources,
    html: Html = None,
    json: Json = False,
) -> None:
    """Print what a model needs and how it would be served.

    Downloads nothing. Whether it fits, the engine with its arguments and back-ends, what compiles on first use, the download,
    the expected rate and the command. Reads config.json and the headers of the shards; without the Hub it prints what is not
    known.
    """
    from huggingface_hub import constants

    served = planned_model(server.request(config, arguments, sources), server.root)
    command = server.command(config, arguments, served.configuration.hardware.nodes)
    planned = flight_plan(served, command, Path(constants.HF_HUB_CACHE), _rates(served))
    if json:
        console.json_data(asdict(planned))
        return
    console.table(("field", "value"), list(_rows(planned)))
    console.data("unverified on SM120")


def _rates(served: ModelToServe) -> PlannedRates | None:
    listed = roofline.model_of(served.configuration.model.repository)
    model = listed or (roofline.model_from(served.files) if served.files and served.facts else None)
    return planned_rates(served.configuration, model)


def _rows(plan: FlightPlan) -> Iterator[tuple[str, str]]:
    model, memory, rates = plan.model, plan.memory, plan.rates
    size = f"{model.weight_bytes / 1e9:.1f} GB" if model.weight_bytes else "unknown size"
    yield "model", ", ".join(filter(None, (model.repository, " ".join(model.architectures), model.quantization, size)))
    yield "revision", model.revision
    yield "configuration", f"{plan.configuration or 'unknown'}{', derived' if plan.derived else ''}"
    yield "engine", plan.engine or "unknown"
    machines = f" on {plan.nodes} machines" if plan.nodes > 1 else ""
    yield "GPUs", f"{plan.gpus} x {plan.gpu}{machines}"
    yield "fits", f"{ {True: 'yes', False: 'no', None: 'unknown'}[memory.fits] }: {memory.reason}"
    if memory.context and memory.capacity_tokens != 0:
        yield "context", f"{memory.context:,} tokens" + (f" of {model.context:,}" if model.context else "")
    yield "MTP layers", {None: "unknown", 0: "none"}.get(model.mtp_tensors, f"{model.mtp_tensors} tensors")
    yield "speculation", plan.speculation or "none"
    yield from (("drafter", text) for text in plan.drafters)
    for use, names in plan.backends.selected.items():
        yield f"back-end, {use}", ", ".join(names)
    if plan.backends.source not in ("", plan.configuration):
        yield "", f"back-ends as recorded for {plan.backends.source}"
    yield from (("on first use", text) for text in plan.first_use)
    yield from (("defect", text) for text in plan.defects)
    yield "download", _download(plan)
    if rates:
        expected = f"{rates.expected_low:.0f}" + f" to {rates.expected_high:.0f}" * (rates.expected_high > rates.expected_low)
        bounds = f"roofline {rates.roofline:.0f}, ceiling {rates.ceiling:.0f}"
        yield "expected", f"{expected} tok/s for one request, with a mean error of {MEAN_ERROR:.0%}; {bounds}"
    yield from (("note", text) for text in plan.notes)
    yield from (("unknown", text) for text in plan.unknown if memory.reason not in text)
    yield "arguments", " ".join(plan.arguments)
    yield "command", plan.command


def _download(plan: FlightPlan) -> str:
    missing, free = plan.download.missing_bytes, plan.download.free_bytes
    size = "of unknown size" if missing is None else f"{missing / 1e9:.1f} GB"
    return size + (f"; {free / 1e9:.0f} GB of disk are free" if free is not None else "")
