"""``sm120kit image``, ``verify image``, ``publish`` and ``pull``: images that pass their checks, and where they can be had."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import ContextOnly, Json, Mirror, Network, Offline, State

if TYPE_CHECKING:
    from sm120kit.records import ImageContext
    from sm120kit.verify.image import Report

Index = Annotated[Path, typer.Option("--index", metavar="FILE", help="The list of published images.")]
Trust = Annotated[Path | None, typer.Option("--trust", metavar="KEY", help="Only what the holder of this public key signed.")]
PLATFORM = "linux/amd64"


def image_(
    engine: Annotated[str, typer.Argument(help="An engine, engine@version, recipe name or recipe file.")],
    base: Annotated[str, typer.Option("--base", metavar="NAME@DIGEST|ID", help="The base image, never by a tag alone.")] = "",
    closure: Annotated[
        Path | None,
        typer.Option("--closure", metavar="FILE", help="Of FlashInfer: third-party wheels, by hash, as a closure in a lock."),
    ] = None,
    arch: Annotated[list[str] | None, typer.Option("--arch", help="sm_120f, sm_120a or sm_121a; may be repeated.")] = None,
    kernels: Annotated[str | None, typer.Option("--kernels", metavar="GROUP", help="A kernel group of the recipe.")] = None,
    network: Network = "none",
    context_only: ContextOnly = False,
    mirror: Mirror = None,
    offline: Offline = False,
    state: State = None,
    json: Json = False,
) -> None:
    """Build an image of an engine. It has no name before `sm120kit verify image` gives it one."""
    import time

    from sm120kit import delivery, engines, recipe
    from sm120kit.pipeline import Options
    from sm120kit.workspace import Workspace

    started = time.monotonic()
    options = Options(Workspace.open(state), mirror, offline)
    if isinstance(recipe.load_any(engine), recipe.EngineRecipe):
        if closure or arch:
            raise typer.BadParameter("an engine's recipe and lock say for which archs and of which wheels its image is")
        built = engines.build(engine, options, group=kernels, tell=console.say)
        found = delivery.engine_image(built, options, base, network=network, context_only=context_only, tell=console.say)
    elif closure is None:
        raise typer.BadParameter("an image of FlashInfer needs --closure: its recipe does not say which wheels go with it")
    else:
        found = delivery.image(
            engine,
            options,
            base,
            delivery.read_closure(closure),
            archs=[recipe.parse_arch(text) for text in arch or ()],
            group=kernels,
            network=network,
            context_only=context_only,
            tell=console.say,
        )
    if found.image is None:
        show_context(found.context)
        return
    if json:
        console.json_data({"image": found.image.id, "content": found.image.content, "context": found.context.digest})
        return
    seconds = time.monotonic() - started
    console.say(f"{'built' if found.ran else 'nothing to do for'} {found.context.reference} in {seconds:.1f} s")
    console.say(f"it has no name before it passes its checks: sm120kit verify image {found.image.id}")
    console.data(found.image.id)


def show_context(context: ImageContext) -> None:
    """Where a ready build context lies, and what is left to do."""
    console.say("left to do, where a container daemon is: the same command without --context-only")
    console.data(str(context.directory))


def verify_image(
    reference: Annotated[str, typer.Argument(metavar="IMAGE", help="An image by id, tag or digest.")],
    trust: Trust = None,
    index: Index = Path("images.json"),
    state: State = None,
    json: Json = False,
) -> None:
    """Ask an image's container what it is, and give the image its name when every check holds. Exit code 1 when one fails."""
    from sm120kit import delivery
    from sm120kit.workspace import Workspace

    if trust:
        delivery.require_signed(reference, index, trust)
        console.say(f"signed: it is the image that {index} lists")
    report = delivery.verify(reference, Workspace.open(state))
    show_report(report, json=json)


def show_report(report: Report, *, json: bool) -> None:
    """What an image's checks came to. Exit code 1 when one failed."""
    import dataclasses

    from sm120kit.records import Verdict

    if json:
        console.json_data(dataclasses.asdict(report))
    else:
        console.table(
            ("check", "verdict", "detail"),
            ((f"{check.suite}/{check.name}", check.verdict, check.detail) for check in report.checks),
        )
        console.table(("said", ""), report.said.items())
    failed = [check for check in report.checks if check.verdict is Verdict.FAILED]
    if failed or report.verified is None:
        count = f"{len(failed)} of {len(report.checks)} checks failed"
        console.error(f"{count}; the image got no name", "correct it and build again")
        raise typer.Exit(1)
    console.say("unverified on SM120: no kernel was run")
    if not json:
        console.data(report.verified.reference)


def publish(
    reference: Annotated[str, typer.Argument(metavar="IMAGE", help="An image that passed its checks.")],
    repository: Annotated[str, typer.Argument(metavar="REPOSITORY", help="registry/name, without a tag.")],
    index: Index = Path("images.json"),
    key: Annotated[Path | None, typer.Option("--key", metavar="FILE", help="Sign with this private key, PEM.")] = None,
    state: State = None,
    json: Json = False,
) -> None:
    """Push an image that passed its checks and list it, by digest, with SBOM and provenance. A taken tag is refused."""
    from sm120kit import delivery
    from sm120kit.workspace import Workspace

    with console.status() as show:
        entry = delivery.publish(reference, repository, index, Workspace.open(state), show, key=key)
    assert entry.attested is not None
    if json:
        console.json_data(
            {"repository": entry.repository, "tag": entry.tag, "digest": entry.digest, "attested": entry.attested}
        )
        return
    console.say(f"listed in {index}")
    beside = f"{entry.attested.sbom.path} and {entry.attested.statement.path}"
    console.say(f"beside it {beside}, {'signed' if entry.attested.signed else 'not signed: --key signs'}")
    console.data(f"{entry.repository}@{entry.digest}")


def pull(
    name: Annotated[str, typer.Argument(metavar="RECIPE|TAG|BUILD", help="What the index lists.")] = "",
    index: Index = Path("images.json"),
    platform: Annotated[str, typer.Option("--platform", help="Operating system and machine.")] = PLATFORM,
    trust: Trust = None,
    check: Annotated[bool, typer.Option("--check", help="Only ask whether everything in the index can still be had.")] = False,
    state: State = None,
) -> None:
    """Pull an image by the digest in the index, and keep it only when it is the one that passed its checks."""
    from sm120kit import delivery
    from sm120kit.errors import BadIndex
    from sm120kit.workspace import Workspace

    if check:
        listed, gone = delivery.unresolved(index)
        console.table(
            ("image", "digest", "there"),
            ((f"{one.repository}:{one.tag}", one.digest, "no" if one in gone else "yes") for one in listed),
        )
        if gone:
            console.error(f"{len(gone)} of {len(listed)} images cannot be had any more", "publish them again")
            raise typer.Exit(1)
        return
    if not name:
        raise BadIndex("no image is named", "name a recipe, tag or build id, or give --check")
    with console.status() as show:
        pulled = delivery.pull(name, index, platform, Workspace.open(state), show, trusted=trust)
    if not trust:
        console.say(f"no signature was asked for, {index} was believed: --trust KEY asks")
    if pulled.changes:
        console.say("\n  ".join(["new since the last pull of its recipe:", *pulled.changes]))
    elif pulled.changes is not None:
        console.say("unchanged since the last pull of its recipe")
    console.data(pulled.verified.reference)
