"""``sm120kit tune``: find the fastest all-reduce that works between the GPUs of a configuration."""

import os
from pathlib import Path
from typing import Annotated

from sm120kit import serving
from sm120kit.cli.options import ConfigName, Html, ImageIndex, Json, Sources, option
from sm120kit.cli.serve import Image
from sm120kit.core import console
from sm120kit.recipes import arguments, configurations
from sm120kit.serving import allreduce, launch, model_download
from sm120kit.serving.allreduce import DEFAULT, AllReduceRecord
from sm120kit.serving.resolve import ServerLocation, resolve


def tune(
    config: ConfigName,
    *,
    model: Annotated[Path | None, option("--model DIR", "A model folder, for its config.json; default: from the Hub.")] = None,
    image: Image = "",
    images: ImageIndex,
    sources: Sources,
    html: Html = None,
    json: Json = False,
) -> None:
    """Find the fastest all-reduce that works between the GPUs of a configuration.

    Runs each in the configuration's image: sums against NCCL, CUDA graphs, calls of different sizes while ranks pause, times.
    One that computes wrong sums, stalls for 30 s or ends is named and not used. `sm120kit serve` uses the result.
    """
    configuration = configurations.load(config, arguments.problems)
    allreduce.measurable(configuration)
    workspace = sources.workspace()
    resolved = resolve(configuration, image, images.source(), ServerLocation(serving.free_port(), allreduce=DEFAULT), workspace)
    launch.require_daemon(resolved, workspace)
    if model is None:
        needed = model_download.plan(configuration, "", offline=False)
        model_download.preview(needed)
        model = model_download.cache_folder(needed.repository, needed.commit)
    hidden, sizes = allreduce.hidden_size(model), allreduce.rows(configuration)
    # No run has this record: it only names the containers, which other launches see by their labels.
    label = workspace.root / "runs" / f"tune-{configuration.name}-{os.getpid()}.json"
    service = launch.labelled_service(launch.idle_service(resolved, model, workspace), configuration, label)
    request = allreduce.AllReduceRequest(len(service.gpus), hidden, sizes)
    measured, known = [], allreduce.methods(configuration)
    for method in allreduce.measurable(configuration):
        with console.step(f"measure {method} on {len(service.gpus)} GPUs, {len(sizes)} sizes"):
            measured.append(allreduce.measure(service, label, method, known[method].environment, request))
    assert resolved.image is not None
    found = tuple(measured)
    allreduce.record_file(configuration, workspace).unlink(missing_ok=True)  # if none works, no earlier result may be used
    record = AllReduceRecord(resolved.image.image.content, resolved.gpu_names, hidden, found, allreduce.best(found))
    path = allreduce.store(record, configuration, workspace)
    if json:
        console.json_data(record)
    else:
        _show(record)
        console.data(f"serve {configuration.name} uses {record.best}")
        console.info(f"record: {path}")
        console.data("unverified on SM120")


def _show(record: AllReduceRecord) -> None:
    times = {(timing.rows, each.method): f"{timing.microseconds:.1f} us" for each in record.measured for timing in each.timings}
    names = [each.method for each in record.measured]
    cells = ((rows, *(times.get((rows, name), "") for name in names)) for rows in sorted({rows for rows, _ in times}))
    console.table(("message, bf16", *names), [(f"{rows:,} x {record.hidden:,}", *row) for rows, *row in cells])
    for each in record.measured:
        if each.problem:
            console.warn(f"{each.method}: {each.problem}")
