"""Compare two receipts cell by cell: refused if their circumstances differ, with the spread of their rates."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from sm120kit.bench.receipt import Machine, MeasuredCell, Receipt, Served
from sm120kit.core.errors import NotComparable

Spread = tuple[float, float, float]
"""Median, lowest and highest rate in tokens per second."""

GROUPS = ("client", "given", "said", "served", "machine")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class CellDifference:
    """A cell in both receipts: median decode rates in tokens per second, each with its lowest and highest.

    ``between`` names the spread: between the medians of several "starts" of the server if both receipts have several, else
    between "requests". ``beyond_spread`` is true if the two ranges are disjoint, None if one receipt has no rate.
    """

    users: int
    output_tokens: int
    context_tokens: int
    before: Spread | None
    after: Spread | None
    ratio: float | None
    beyond_spread: bool | None
    between: str


@dataclass(frozen=True)
class Comparison:
    """The cells in both receipts. ``differ`` are the ignored circumstances that differ, ``unknown`` those unknown in both."""

    differ: dict[str, tuple[str, str]]
    unknown: tuple[str, ...]
    cells: tuple[CellDifference, ...]


def circumstances(receipt: Receipt) -> dict[str, str]:
    """Every circumstance by name, in groups as ``<group>.<name>``, and whether the receipt is complete."""
    values = asdict(receipt.circumstances)
    plain = {name: value for name, value in values.items() if name not in GROUPS}
    nested = {f"{group}.{name}": value for group in GROUPS for name, value in values[group].items()}
    return {name: _text(value) for name, value in {"complete": receipt.complete, **plain, **nested}.items()}


def _text(value: object) -> str:
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(_text, value)) or "none"
    return str(value)


def briefly(names: Collection[str]) -> str:
    """Names of circumstances in a line; a complete group is named once."""
    groups = {"served": fields(Served), "machine": fields(Machine)}
    members = {group: {f"{group}.{member.name}" for member in group_fields} for group, group_fields in groups.items()}
    complete = {group for group, expected in members.items() if expected <= set(names)}
    rest = [name for name in names if name.partition(".")[0] not in complete]
    return ", ".join([*rest, *(f"{group}.*" for group in sorted(complete))])


def compare(before: Receipt, after: Receipt, ignore: Collection[str]) -> Comparison:
    """Compare the complete cells that both receipts have.

    Raises:
        NotComparable: they differ in a circumstance that is not in ``ignore``, one is partial, or no cell is in both.
    """
    first, second = circumstances(before), circumstances(after)
    differ = {
        name: (first.get(name, UNKNOWN), second.get(name, UNKNOWN))
        for name in sorted(first | second)
        if first.get(name, UNKNOWN) != second.get(name, UNKNOWN) and name != "order_seed"
    }
    refused = {name: values for name, values in differ.items() if name not in ignore}
    if not before.complete and not after.complete and "complete" not in ignore:
        refused["complete"] = ("no", "no")
    if refused:
        differences = "; ".join(f"{name}: {a} / {b}" for name, (a, b) in refused.items())
        raise NotComparable(
            f"the receipts differ in: {differences}", f"to compare them all the same: --ignore {','.join(refused)}"
        )
    cells = _cells(before)
    common = [_difference(key, cells[key], measured) for key, measured in sorted(_cells(after).items()) if key in cells]
    if not common:
        raise NotComparable("the receipts have no cell in common", "compare runs of the same workload")
    unknown = tuple(name for name in sorted(first.keys() & second.keys()) if first[name] == second[name] == UNKNOWN)
    return Comparison(differ, unknown, tuple(common))


def _cells(receipt: Receipt) -> dict[tuple[int, int, int], list[MeasuredCell]]:
    """The complete cells by identity, with one measurement per start."""
    cells: dict[tuple[int, int, int], list[MeasuredCell]] = {}
    for cell in receipt.cells:
        if cell.complete:
            cells.setdefault(cell.key, []).append(cell)
    return cells


def _difference(key: tuple[int, int, int], before: Sequence[MeasuredCell], after: Sequence[MeasuredCell]) -> CellDifference:
    between = "starts" if len(before) > 1 and len(after) > 1 else "requests"
    first, second = _spread(before, between), _spread(after, between)
    ratio = second[0] / first[0] if first and second else None
    beyond = second[1] > first[2] or second[2] < first[1] if first and second else None
    return CellDifference(*key, first, second, ratio, beyond, between)


def _spread(cells: Sequence[MeasuredCell], between: str) -> Spread | None:
    """The spread of the medians of several starts, or of all requests."""
    starts = [[rate for sample in cell.samples if (rate := sample.decode_tok_s) is not None] for cell in cells]
    if between == "starts":
        values = [median(rates) for rates in starts if rates]
    else:
        values = [rate for rates in starts for rate in rates]
    return (median(values), min(values), max(values)) if values else None
