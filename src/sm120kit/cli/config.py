"""``sm120kit config``: list, show and check configurations."""

from typing import Annotated

from sm120kit.cli import config_list
from sm120kit.cli.options import ConfigName, Json, argument, configuration_names, option
from sm120kit.core import console
from sm120kit.core.data_roots import find, origin, user_repository
from sm120kit.hosts.facts import probe
from sm120kit.images import backends
from sm120kit.recipes import arguments, configurations, reported
from sm120kit.recipes.configurations import Configuration, Container, Hardware, Reference
from sm120kit.serving import fit
from sm120kit.serving.derived_configuration import planned_gpus, present_gpus

MOST_GPUS = 64
"""GPUs of a machine that is named by its kind only."""


def host_gpus() -> Hardware | None:
    """The SM12x GPUs of this host."""
    return present_gpus(probe())


def list_(
    gpu: Annotated[str, option("--gpu KIND", "Those for rtx-pro-6000, rtx-5090 or dgx-spark; default: this host's GPUs.")] = "",
    every: Annotated[bool, option("--all", "All, and those of old engines by name.")] = False,
    json: Json = False,
) -> None:
    """List the configurations.

    Those for the GPUs of this host, grouped by their number, each with a published figure; without SM12x GPUs, the models for
    each kind of GPU. In a repository of `sm120kit init`, also where each comes from, and what overrides what.
    """
    listed = list(configurations.readable())
    gpus = planned_gpus(gpu, MOST_GPUS) if gpu else None if every or json else host_gpus()
    if gpus:
        listed = [each for each in listed if config_list.fit(each, gpus)]
    origins = {name: origin(configurations.KIND, find(configurations.KIND, f"{name}.toml")) for name in configurations.names()}
    if json:
        console.json_data([config.model_dump(mode="json") | {"from": origins[config.name]} for config in listed])
        return
    own = {name: where for name, where in origins.items() if where != "built-in"} if user_repository() else {}
    if not (gpus or every or own):
        for line in config_list.kinds(listed):
            console.data(line)
        return
    for line in config_list.lines(listed, own):
        console.data(line)
    console.data("tok/s as published; *: with another setup, see `sm120kit config show CONFIG`")


def show(name: ConfigName, json: Json = False) -> None:
    """Show a configuration and its published figures."""
    from sm120kit.bench.configured_rates import planned_rates

    config = configurations.load(name)
    if json:
        console.json_data(config.model_dump(mode="json"))
        return
    console.data(f"{config.name}: {config.summary}\n")
    model, hardware = config.model, config.hardware
    size = f"{model.gigabytes:g} GB" if model.gigabytes else ""
    rows = [
        ("model", ", ".join(filter(None, (model.repository, model.quantization, size)))),
        ("revision", ": ".join(filter(None, (model.revision, model.why_unpinned)))),
        ("hardware", f"{hardware.gpus} x {hardware.gpu}"),
        ("engine", config.engine + " (historical)" * config.historical),
        *[("published for", config.original)] * bool(config.original),
        ("arguments", " ".join(config.arguments)),
        *((f"environment {key}", value) for key, value in config.environment.items()),
        ("container", _container(config.container)),
    ]
    if without := config.no_speculation:
        rows.append(("no speculation", f"{without.because}: {without.reason}"))
    if bounds := planned_rates(config):
        text = f"{bounds.roofline:.0f} tok/s at concurrency 1 and depth 0, ceiling {bounds.ceiling:.0f}"
        rows.append(("roofline", text + _drafts(config)))
    planned = fit.planned(config)
    rows.append(("memory", "; ".join(planned.lines()[1:]) if planned else "unknown: sizes are not recorded"))
    if config.host:
        rows.append(("required checks", f"no problem in {', '.join(config.host)}"))
    rows += [("deviation", f"{change.field}: {change.reason}") for change in config.deviations]
    refusals = backends.refused_options(config)
    for each in reported.ablations(config):
        refusal = refusals.get(each.name)
        known = f"{config.engine} refuses it: {refusal}" if refusal else f"{each.effect}; {each.source}"
        rows.append((f"ablation: {each.name}", f"{each.text}: {known}"))
    if recorded := fit.recorded_model(model.repository, model.gigabytes or 0):
        defects = reported.defects(config, recorded.model_type, recorded.quantization + model.quantization)
        rows += [("known defect", each.text) for each in defects]
    rows += [("excluded", f"{bad.distribution} {bad.version}: {bad.reason}") for bad in config.known_bad]
    console.table(("field", "value"), rows)
    if not config.reference:
        return
    console.table(
        ("published", "concurrency", "class", "method", "conditions", "source"),
        ((_figure(r), r.concurrency, r.reproducibility, r.method, _conditions(r), r.source) for r in config.reference),
    )
    console.data("unverified on SM120: none of these figures was measured with sm120kit")


def check(
    names: Annotated[
        list[str] | None,
        argument("CONFIG", "Configurations, by name or file; default: all.", autocompletion=configuration_names),
    ] = None,
) -> None:
    """Validate configurations.

    All problems of a file are reported at once. Arguments must be options of the engine's own parser: where these were not
    recorded, the file is "not checked".
    """
    for name in names or configurations.names():
        config = configurations.load(name, arguments.problems)
        unchecked = f"not checked {config.name}: the options of {config.engine} were not recorded"
        console.data(f"ok {config.name}" if arguments.are_known(config) else unchecked)


def _container(container: Container) -> str:
    parts = ["--ipc=host" if container.ipc_host else f"{container.shm_gib} GiB of shared memory"]
    if container.ulimits:
        parts.append(f"ulimits {' '.join(f'{name}={value}' for name, value in container.ulimits.items())}")
    return "; ".join([*parts, f"caches {' '.join(container.caches) or 'none'}"])


def _drafts(configuration: Configuration) -> str:
    return ", if every draft is accepted" if configuration.speculation else ""


def _conditions(reference: Reference) -> str:
    missing = f"; not in this configuration: {reference.differs}" if reference.differs else ""
    return reference.conditions + missing


def _figure(reference: Reference) -> str:
    spread = f" ± {reference.spread:g}" if reference.spread else ""
    return f"{config_list.text(reference)}{spread} {reference.unit}"
