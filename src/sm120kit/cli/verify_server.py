"""``sm120kit verify server``: probe a running server for answers that are wrong without an error."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from sm120kit import bench, kld, probes
from sm120kit.bench import MeasuredServer
from sm120kit.cli.options import Html, Json, Overwrite, ServerAccess, argument, option
from sm120kit.core import console
from sm120kit.core.disk import require_new, require_writable
from sm120kit.core.errors import CheckFailed, ServerFailed
from sm120kit.core.record_files import write_record
from sm120kit.core.urls import Endpoint, is_url, read_key
from sm120kit.kld import SavedReference
from sm120kit.probes import ServerProbe, ServerVerification, VerifiedServer

BRIEF_SECONDS = 30.0
OWN_SECONDS = 5.0
"""Part of the time limit in which the program starts, and writes the record."""


@dataclass(frozen=True)
class ProbedServer(ServerAccess):
    """The server and what it is compared with."""

    served_model_name: Annotated[str, option("--served-model-name NAME", "The model; default: the server's only model.")] = ""
    reference: Annotated[
        str,
        option(
            "--reference URL|FILE",
            "Compare with a server of the same model, such as one without speculation, or with a file of kld --save.",
        ),
    ] = ""
    reference_api_key: Annotated[
        str, option("--reference-api-key KEY|@FILE", "API key for the server of --reference; --api-key is not sent there.")
    ] = ""

    def compared(self) -> tuple[Endpoint, str] | SavedReference | None:
        """The reference.

        Raises:
            Sm120kitError: the reference does not answer, or the file is none.
        """
        if not self.reference:
            return None
        if not is_url(self.reference):
            return kld.SavedReference(Path(self.reference))
        url, _, model = self.reference.partition("#")
        endpoint = Endpoint.parse(url, read_key(self.reference_api_key, "--reference-api-key"))
        return endpoint, bench.choose_model(endpoint, model or None)


@dataclass(frozen=True)
class VerificationOptions:
    """Which probes run, for how long, and where the record goes."""

    probe: Annotated[list[str] | None, option("--probe NAME", "Only this probe; repeatable; default: all.")] = None
    seconds: Annotated[float, option("--seconds N", "Time limit of the whole command.", min=10, max=3600)] = 120
    output: Annotated[Path, option("--output -o FILE", "The record, with all requests and answers.")] = Path(
        "verification.json"
    )
    overwrite: Overwrite = False
    html: Html = None
    json: Json = False


def verify_server(
    url: Annotated[str, argument("URL", "The root of an OpenAI-compatible server.")],
    *,
    server: ProbedServer,
    options: VerificationOptions,
) -> None:
    """Probe a running server for answers that are wrong without an error.

    Sends some 150 short requests of its own texts to this server, and to that of --reference only. A probe finds `ok`, `wrong`,
    or that it cannot judge, with the reason. Exit code 51 if one finds something wrong.
    """
    until = time.monotonic() + options.seconds - OWN_SECONDS
    chosen = probes.selected(options.probe or [])
    require_writable(options.output)
    require_new(options.output, "--output", options.overwrite)
    endpoint, reference = server.endpoint(url), server.compared()
    probed = probes.VerifiedServer(endpoint, bench.choose_model(endpoint, server.served_model_name or None), reference)
    verification = _verified(probed, chosen, until - time.monotonic(), options.output)
    if options.json:
        console.json_data(asdict(verification))
    else:
        show(verification)
    require_no_fault(verification, f"all requests and answers: {options.output}")


def _verified(server: VerifiedServer, chosen: tuple[ServerProbe, ...], seconds: float, output: Path) -> ServerVerification:
    with console.progress() as progress:
        task = progress.add_task("probes", total=len(chosen) + (server.reference is not None))

        def on_result(partial: ServerVerification) -> None:
            progress.update(task, completed=len(partial.probes))
            if partial.complete or partial.probes[-1].exchanges:  # a large record takes most of a second
                write_record(output, partial)

        return probes.verify(server, chosen, seconds, on_result=on_result)


def show(verification: ServerVerification) -> None:
    """Print what was probed, and the verdicts."""
    version = verification.reported.get("version", "unknown")
    console.data(f"{verification.model} at {verification.url}, version {version}; {verification.started_utc}")
    console.table(("probe", "verdict", "saw"), ((each.probe, each.verdict.value, each.saw) for each in verification.probes))
    for each in verification.probes:
        console.data(f"{each.probe} cannot see {each.cannot_see}")


def require_no_fault(verification: ServerVerification, hint: str) -> None:
    """Require that no probe found something wrong.

    Raises:
        CheckFailed: one did.
    """
    if verification.wrong:
        found = "; ".join(f"{each.probe}: {each.saw}" for each in verification.wrong)
        raise CheckFailed(f"{verification.url} answers wrongly: {found}", hint)


def brief_probe(force: bool) -> Callable[[MeasuredServer], dict[str, str]]:
    """What probes a server briefly before it is measured, and returns the verdicts.

    Raises:
        CheckFailed: the server answers wrongly, and ``force`` is false.
    """

    def probe(server: MeasuredServer) -> dict[str, str]:
        try:
            found = probes.verify(probes.VerifiedServer(server.endpoint, server.model), probes.QUICK, BRIEF_SECONDS)
        except ServerFailed:
            return {}  # the measurement reports it
        if not force:
            require_no_fault(found, "sm120kit verify server runs all probes; --force measures it, and stores the verdict")
        return {each.probe: f"{each.verdict.value}: {each.saw}" for each in found.probes}

    return probe
