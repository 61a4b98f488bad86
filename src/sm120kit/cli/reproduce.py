"""``sm120kit reproduce``: what the published figures of a configuration are worth on this machine, or by a receipt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sm120kit import console
from sm120kit.cli.options import Json, State, named_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm120kit.bench import Finished
    from sm120kit.bench.receipt import Receipt, Served
    from sm120kit.bench.workload import Cell
    from sm120kit.doctor import Finding
    from sm120kit.reproducing import Bound, Judgement, Rate, Report


def reproduce_(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A configuration by name, or a .toml file.")],
    url: Annotated[str, typer.Option("--url", help="Measure this server, which was started as CONFIG says.")] = "",
    record: Annotated[
        Path | None, typer.Option("--run", metavar="FILE", help="With --url: the record that launch keeps of the server.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="Launch CONFIG with this model, measure, and stop it.")
    ] = None,
    image: Annotated[
        str, typer.Option("--image", metavar="IMAGE", help="With --checkpoint: a verified image; default: the index's.")
    ] = "",
    index: Annotated[Path, typer.Option("--index", metavar="FILE", help="With --checkpoint: the published images.")] = Path(
        "images.json"
    ),
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="With --checkpoint: the port on 127.0.0.1.")] = 8000,
    wait: Annotated[int, typer.Option("--wait", metavar="SECONDS", help="With --checkpoint: to become healthy.")] = 1800,
    restarts: Annotated[
        int, typer.Option("--restarts", min=0, help="With --checkpoint: restart the server so often, and measure again.")
    ] = 0,
    receipts: Annotated[
        list[Path] | None, typer.Option("--receipt", metavar="FILE", help="Measure nothing: judge this receipt, and others.")
    ] = None,
    directory: Annotated[Path, typer.Option("--receipts", metavar="DIR", help="Where receipts are written.")] = Path(),
    quick: Annotated[bool, typer.Option("--quick", help="Only the fewest users, one request for each.")] = False,
    given: Annotated[
        list[str] | None,
        typer.Option("--given", metavar="NAME=VALUE", help="What cannot be seen from here: gpu, engine, power_limit, ..."),
    ] = None,
    all_reduce_us: Annotated[
        float | None,
        typer.Option("--all-reduce-us", min=0.1, help="For the roofline: at 16 KiB, by doctor --measure.", show_default=False),
    ] = None,
    state: State = None,
    json: Json = False,
) -> None:
    """Measure by the published methods and by the honest one, and say what each published figure is worth here.

    Without --url, --checkpoint or --receipt it says what the figures need, and measures nothing. Exit code 0: what can be
    compared was reached, or is as near as restarts are to each other; 95: a figure is below; 96: none can be compared.
    """
    from dataclasses import asdict

    from sm120kit import reproducing, roofline
    from sm120kit.bench import circumstances
    from sm120kit.bench import receipt as reading
    from sm120kit.errors import BelowPublished, NotAsPublished
    from sm120kit.recipe import configuration
    from sm120kit.reproducing import Known, Verdict

    if sum((bool(url), checkpoint is not None, bool(receipts))) > 1:
        raise typer.BadParameter("only one of --url, --checkpoint and --receipt can be meant")
    if record and not url:
        raise typer.BadParameter("is for a server that runs already: name its --url", param_hint="--run")
    if restarts and not checkpoint:
        raise typer.BadParameter("only a server that is launched here can be restarted", param_hint="--restarts")
    if given and receipts:
        raise typer.BadParameter("a receipt says itself what was given when it was made", param_hint="--given")
    wanted = configuration.load(config)
    said = named_values(given or [], "--given")
    made: tuple[Receipt, ...] = tuple(reading.read(path) for path in receipts or ())
    findings: tuple[Finding, ...] = ()
    known = Known(None, all_reduce_us)
    if url or checkpoint:
        asked = reproducing.plan(wanted, quick=quick)

        def work(root: str, served: Served | None, earlier: Sequence[Receipt]) -> tuple[Receipt, ...]:
            with console.progress() as progress:

                def cell_begins(cell: Cell, requests: int) -> Finished:
                    name = f"{cell.users} users, {cell.output_tokens} tokens"
                    console.say(f"{name}: {requests} requests")
                    task = progress.add_task(name, total=requests)
                    return lambda: progress.update(task, advance=1, visible=not progress.tasks[task].finished)

                return reproducing.measure(
                    root,
                    wanted,
                    asked,
                    directory,
                    given=said,
                    served=served,
                    earlier=earlier,
                    restarts=restarts,
                    cell_begins=cell_begins,
                )

        if checkpoint:
            known = Known(roofline.model_in(checkpoint), all_reduce_us)
            root = f"http://127.0.0.1:{port}"
            made = reproducing.launched(
                config,
                checkpoint,
                image,
                index,
                port,
                restarts=restarts,
                wait_seconds=wait,
                state=state,
                tell=console.say,
                work=work,
            )
        else:
            root = url.rstrip("/").removesuffix("/v1")
            made = work(root, circumstances.recorded(record, root) if record else None, ())
        for one in asked:
            console.say(f"receipt: {reproducing.place_of(directory, wanted, one)}")
        findings = reproducing.findings(wanted, root)
    report = reproducing.judge(wanted, made, findings, known)
    if json:
        found = [{**asdict(one), "reference": one.reference.model_dump(), "words": one.words} for one in report.judgements]
        console.json_data({"verdict": report.verdict, **asdict(report), "judgements": found})
    else:
        _show(report)
    if report.verdict is Verdict.BELOW:
        raise BelowPublished(f"{wanted.name}: a published figure was not reached", "the reasons that are known stand above")
    if made and report.verdict is Verdict.NOT_COMPARABLE:
        raise NotAsPublished(
            f"{wanted.name}: no published figure can be compared with what was measured",
            "the fields that differ stand above; what is only unknown can be said: --run RECORD, --given gpu='2x ...'",
        )


def _show(report: Report) -> None:
    console.table(
        ("published", "users", "class", "verdict", "measured", "honest", "roofline", "share of it"),
        (
            (
                f"{one.reference.value:g} tok/s",
                one.reference.users,
                one.reference.reproducibility,
                one.words,
                _rate(one.measured),
                _rate(one.honest),
                _roofline(one.bound),
                _share(one),
            )
            for one in report.judgements
        ),
    )
    found = [_differences(one) for one in report.judgements]
    everywhere = [text for text in found[0] if len(found) > 1 and all(text in texts for texts in found)]
    told = [("every published figure", everywhere)]
    for one, texts in zip(report.judgements, found, strict=True):
        told.append((_name(one), [*(text for text in texts if text not in everywhere), *one.reasons, *_needs(one)]))
    for name, lines in told:
        if lines:
            console.data(f"{name}:")
        for line in lines:
            console.data(f"  {line}")
    for name, said in (("doctor", report.host), ("caveat", report.caveats)):
        for line in said:
            console.data(f"{name}: {line}")


def _name(one: Judgement) -> str:
    users = f"{one.reference.users} user{'s' * (one.reference.users > 1)}"
    return f"{one.reference.value:g} tok/s, {users}; {one.reference.conditions}"


def _differences(one: Judgement) -> list[str]:
    return [f"{found.field}: {found.published} / {found.here}" for found in one.differences]


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return ""
    spread = f" ({rate.lowest:.1f}-{rate.highest:.1f})" if rate.highest > rate.lowest else ""
    return f"{rate.tok_s:.1f}{spread}"


def _roofline(bound: Bound | None) -> str:
    if bound is None:
        return "unknown"
    return f"{bound.roofline:.0f}" + (" if every draft is accepted" if bound.at_most > 1 and bound.acceptance is None else "")


def _share(one: Judgement) -> str:
    """Of the roofline: what was measured, else what was published."""
    if one.bound is None:
        return ""
    value = one.measured.tok_s if one.measured else one.reference.value
    return f"{value / one.bound.roofline:.0%}"


def _needs(one: Judgement) -> list[str]:
    if one.bound is None or one.bound.at_most == 1:
        return []
    return [
        f"at the roofline the published rate takes {one.bound.needs:.1f} of at most {one.bound.at_most} tokens in each step"
    ]
