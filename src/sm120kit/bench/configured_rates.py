"""Rates of a configuration: those to expect before it is measured, and how far a measured rate is from the expected one."""

from collections.abc import Sequence

from sm120kit.bench.roofline import (
    MEAN_ERROR,
    GpuKind,
    RooflineModel,
    Work,
    ceiling,
    expected_step,
    gpu_kind,
    model_of,
    roofline,
    tokens_per_step,
)
from sm120kit.recipes.configurations import Configuration
from sm120kit.serving.flight_plan import PlannedRates

NEAR = 2 * MEAN_ERROR
"""Deviation from the expected rate up to which a rate is as expected. All published tables but one deviate less on average."""


def modelled(
    configuration: Configuration, detected: Sequence[str] = (), model: RooflineModel | None = None
) -> tuple[RooflineModel, GpuKind] | None:
    """The model, by default that of the configuration, and the first known one of ``detected`` GPUs, else the configuration's.

    None if model or GPU are not modelled, and for several machines: the network between them is not modelled.
    """
    if configuration.hardware.nodes > 1:
        return None
    served = model or model_of(configuration.model.repository)
    gpu = next(filter(None, map(gpu_kind, [*detected, configuration.hardware.gpu])), None)
    return (served, gpu) if served and gpu else None


def work(configuration: Configuration, concurrency: int, context_tokens: int = 0) -> Work:
    """The load of requests in parallel on the GPUs of a configuration."""
    cache_bytes = 1.0 if (configuration.option("--kv-cache-dtype") or "").startswith("fp8") else 2.0
    drafts = drafts_per_step(configuration)
    return Work(concurrency, context_tokens, drafts, configuration.hardware.gpus, cache_bytes)


def drafts_per_step(configuration: Configuration) -> int:
    """Draft tokens per step. SGLang's number of draft tokens includes the verified token, its number of steps does not."""
    if steps := configuration.option_for("draft_steps"):
        return configuration.served_by.integer(steps) or 0
    return configuration.speculation.draft_tokens if configuration.speculation else 0


def planned_rates(
    configuration: Configuration, model: RooflineModel | None = None, concurrency: int = 1
) -> PlannedRates | None:
    """The total rates without context; None if the model or the GPU is not modelled."""
    if (setup := modelled(configuration, model=model)) is None:
        return None
    load = work(configuration, concurrency)
    least = concurrency / expected_step(*setup, load).seconds
    return PlannedRates(least, (1 + load.drafts) * least, roofline(*setup, load, 1.0), ceiling(*setup, load))


def statement(model: RooflineModel, gpu: GpuKind, load: Work, acceptance: float | None, tok_s: float) -> str:
    """How far a rate of all requests in parallel is from the expected one, and which term dominates the expected step.

    ``acceptance`` is the measured one of drafts, None if it is unknown: then the tokens that the rate takes in each step.
    """
    step = expected_step(model, gpu, load)
    term, part = step.dominant
    of_step = f"expected step of {step.seconds * 1e3:.1f} ms, {part:.0%} of it {term}"
    if load.drafts and acceptance is None:
        needs, most = tok_s / load.concurrency * step.seconds, 1 + load.drafts
        excess = ": impossible" if needs > most * (1 + NEAR) else ""
        return f"{tok_s:.4g} tok/s take {needs:.1f} of at most {most} tokens in an {of_step}{excess}"
    expected = load.concurrency * tokens_per_step(load.drafts, acceptance or 0.0) / step.seconds
    share = tok_s / expected
    relation = f"within {NEAR:.0%}" if abs(share - 1) <= NEAR else "below that" if share < 1 else "above that"
    within_error = f"the expected {expected:.4g} with a mean error of {MEAN_ERROR:.0%}"
    return f"{tok_s:.4g} tok/s, {share:.2f} of {within_error}: {relation}; {of_step}"
