"""Published figures put to the test: the published method and the honest one are run, and each figure gets its verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sm120kit import bench, doctor, launching
from sm120kit.bench import circumstances, client, receipt, workload
from sm120kit.bench.receipt import Receipt, Served
from sm120kit.bench.workload import Cell, Named
from sm120kit.doctor import Finding
from sm120kit.host import probe
from sm120kit.recipe.configuration import Configuration
from sm120kit.records import Run
from sm120kit.reproducing.differences import Difference
from sm120kit.reproducing.judging import HONEST, Bound, Judgement, Known, Rate, Report, Verdict, judge
from sm120kit.workspace import Workspace

__all__ = ["HONEST", "Bound", "Difference", "Judgement", "Known", "Rate", "Report", "Verdict"]
__all__ += ["findings", "judge", "launched", "measure", "place_of", "plan", "with_server"]


def plan(wanted: Configuration, *, quick: bool = False) -> tuple[Named, ...]:
    """The workloads to run, with the published numbers of users: each published method that we have, then the honest one.

    ``quick``: only the fewest users, and one request for each.
    """
    able = [one for one in wanted.reference if one.workload and not one.differs]
    names = dict.fromkeys(one.workload for one in able if one.workload)
    asked = [_with_users(workload.load(name), {one.users for one in able if one.workload == name}, quick) for name in names]
    users = {one.users for one in able or wanted.reference}
    return (*asked, _with_users(workload.load(HONEST), users, quick))


def _with_users(named: Named, users: set[int], quick: bool) -> Named:
    """The same workload with these users; its hash stays that of the file, since what is asked stays the same."""
    chosen = Named(named.name, named.sha256, named.workload.model_copy(update={"users": tuple(sorted(users))}))
    return workload.quick(chosen) if quick else chosen


def place_of(directory: Path, wanted: Configuration, asked: Named) -> Path:
    """Where the receipt of a workload is kept."""
    return directory / f"{wanted.name}.{asked.name}.json"


def measure(
    url: str,
    wanted: Configuration,
    asked: Sequence[Named],
    directory: Path,
    *,
    given: Mapping[str, str],
    served: Served | None = None,
    earlier: Sequence[Receipt] = (),
    restarts: int = 0,
    cell_begins: Callable[[Cell, int], bench.Finished] = lambda cell, requests: lambda: None,
) -> tuple[Receipt, ...]:
    """Run the workloads one after the other on a server, and keep a receipt of each, written anew after each cell.

    ``earlier`` are their receipts from before a restart, of which there are ``restarts`` in all; see :func:`bench.run`.

    Raises:
        ServerUnreachable: nobody answers, or the server went away; what was measured is kept.
        WrongModel: the server offers several models, and not the configuration's.
        StateUnwritable: the receipts cannot be written.
    """
    offered = client.models(url)
    model = bench.choose_model(url, wanted.model.repository if wanted.model.repository in offered else None)
    for one in asked:
        receipt.require_writable(place_of(directory, wanted, one), "--receipts")
    made = []
    for number, one in enumerate(asked):
        place = place_of(directory, wanted, one)

        def keep(part: Receipt, place: Path = place) -> None:
            receipt.write(place, part)

        made.append(
            bench.run(
                url,
                model,
                one,
                seed=0,
                given=given,
                keep=keep,
                cell_begins=cell_begins,
                served=served,
                earlier=earlier[number] if earlier else None,
                restarts=restarts,
            )
        )
    return tuple(made)


Work = Callable[[str, Served, Sequence[Receipt]], tuple[Receipt, ...]]
"""What is done with a server: its URL, how it was started, and the receipts from before a restart."""


def launched(
    name: str,
    checkpoint: Path,
    image: str,
    index: Path,
    port: int,
    *,
    restarts: int,
    wait_seconds: float,
    state: Path | None,
    tell: Callable[[str], None],
    work: Work,
) -> tuple[Receipt, ...]:
    """The receipts of ``work``, done with the server of a configuration, which is launched before and stopped after.

    Raises:
        Sm120kitError: as :func:`launching.prepare` and :func:`launching.run`.
    """
    workspace = Workspace.open(state)
    prepared = launching.prepare(name, checkpoint, image, index, port, Path("/"), workspace)

    def start(do: Callable[[Run], None]) -> None:
        launching.run(
            prepared, index, workspace, wait_seconds=wait_seconds, tell=tell, progress=lambda seconds, line: None, work=do
        )

    return with_server(start, work, restarts)


def with_server(start: Callable[[Callable[[Run], None]], object], work: Work, restarts: int = 0) -> tuple[Receipt, ...]:
    """The receipts of ``work``; ``start`` is given what to do with a healthy server, stops it, and is called anew."""
    made: tuple[Receipt, ...] = ()

    def do(run: Run) -> None:
        nonlocal made
        made = work(run.url, circumstances.served(run), made)

    for _ in range(restarts + 1):
        start(do)
    return made


def findings(wanted: Configuration, url: str) -> tuple[Finding, ...]:
    """What doctor says of this host for the configuration, when the server is on it."""
    return doctor.diagnose(probe(Path("/")), doctor.checks_for(wanted)) if circumstances.is_local(url) else ()
