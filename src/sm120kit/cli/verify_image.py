"""``sm120kit verify image``: run the checks of an image, of which the last serves a model."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import typer

from sm120kit import probes, serving
from sm120kit.cli.image import show_report
from sm120kit.cli.options import ImageIndex, Json, Sources, argument, configuration_names, option
from sm120kit.cli.serve import HOST, ModelSource, show_derived, show_problems
from sm120kit.core import console
from sm120kit.core.errors import CheckFailed, ServerFailed, Sm120kitError
from sm120kit.core.urls import Endpoint
from sm120kit.images import checks, published_images
from sm120kit.images.image_records import SERVED_PROMPT, Check, CheckResult, Image, Reported, VerifiedImage
from sm120kit.images.local_images import LocalImages
from sm120kit.images.published_images import Source
from sm120kit.probes import ProbeVerdict, ServerVerification
from sm120kit.serving import Run, answer, launch
from sm120kit.serving.launch import LaunchOptions, PreparedLaunch
from sm120kit.serving.resolve import ServerLocation, resolve
from sm120kit.serving.served_model import ServeRequest, served_model


@dataclass(frozen=True)
class ModelFromImage(ModelSource):
    """The model that an image serves as its last check."""

    serve: Annotated[
        str, option("--serve CONFIG", "Then serve CONFIG, probe the server, stop it.", autocompletion=configuration_names)
    ] = ""
    wait: Annotated[int, option("--wait SECONDS", "With --serve: time limit to become healthy.", min=1)] = 1800

    def prepare(self, image: Image, source: Source, sources: Sources) -> PreparedLaunch:
        """The launch of an image whose checks have not run; refuses what ``serve`` refuses before a start."""
        workspace = sources.workspace()
        served = served_model(ServeRequest(self.serve, offline=sources.offline), HOST, planned=False)
        if served.derived:
            show_derived(served)
        if self.model:
            launch.require_model(served.configuration, self.model)
        resolved = resolve(served.configuration, image, source, ServerLocation(serving.free_port()), workspace)
        launch.require_daemon(resolved, workspace)
        folder, facts = self.folder(served, resolved.gpus, planned=False, offline=sources.offline)
        prepared = launch.prepare(resolved, folder, workspace, facts)
        show_problems(prepared, "" if served.derived else self.serve, HOST)
        return prepared


def verify_image(
    reference: Annotated[str, argument("IMAGE", "An image by id, tag or digest.")],
    *,
    images: ImageIndex,
    served: ModelFromImage,
    sources: Sources,
    json: Json = False,
) -> None:
    """Run the checks of an image and tag it if all pass.

    The image is in the state directory. With --serve, an image that passed them serves a model on this host's GPUs, as `serve
    --verify` does, and is not tagged if it answers wrongly. Exit code 1 if a check fails.
    """
    if bool(served.model) + bool(served.revision) > bool(served.serve):
        raise typer.BadParameter("--serve CONFIG takes a model folder or a revision", param_hint="--model, --revision")
    workspace, source, serve = sources.workspace(), images.source(), None
    if images.trust:
        published_images.require_signed(reference, source, workspace)
        console.info(f"signature verified: the image is listed in {images.index}")
    if served.serve:
        prepared = served.prepare(LocalImages(workspace).find(reference), source, sources)
        serve = partial(_served_prompt, prepared, LaunchOptions(workspace, served.wait))
    report = checks.verify(reference, workspace, serve=serve)
    show_report(report, json=json)
    for check in report.checks:
        if serve and check.name == SERVED_PROMPT and check.verdict is CheckResult.NOT_RUN:
            raise CheckFailed(f"the other checks passed; {check.name} was not run: {check.detail}", "the image is tagged")


def _served_prompt(prepared: PreparedLaunch, options: LaunchOptions, image: VerifiedImage) -> Reported:
    """Start a server, probe it and stop it."""
    found: list[ServerVerification] = []

    def work(run: Run) -> None:
        endpoint = Endpoint.parse(run.url, serving.api_key(prepared.configuration))
        found.append(probes.verify(probes.VerifiedServer(endpoint, answer.request(endpoint).model)))

    try:
        launch.run(replace(prepared, image=image), options, work)
    except Sm120kitError as error:
        verdict = CheckResult.FAILED if isinstance(error, ServerFailed) else CheckResult.NOT_RUN
        return Check("engine", SERVED_PROMPT, verdict, error.message), {}
    verdicts = found[0].verdicts
    check = Check.judged("engine", SERVED_PROMPT, *(f"{probe.probe}: {probe.saw}" for probe in found[0].wrong))
    if {*verdicts.values()} == {ProbeVerdict.UNKNOWN.value}:
        check = replace(check, verdict=CheckResult.NOT_RUN, detail="no probe could judge the server")
    return check, {"served": f"{prepared.configuration.name}: {', '.join(map(' '.join, verdicts.items()))}"}
