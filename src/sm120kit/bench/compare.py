"""Two receipts side by side: refused when their circumstances differ, and a difference is one only beyond the spread."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from sm120kit.bench.receipt import Machine, Measured, Receipt, Served
from sm120kit.errors import NotComparable

Spread = tuple[float, float, float]
"""Median, lowest and highest rate in tokens per second."""

GROUPS = ("client", "given", "said", "served", "machine")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Difference:
    """One cell in both receipts: median decode rates in tokens per second, each with its lowest and highest.

    ``between`` is of what they are the spread: "starts" of the server, by the median of each, when both receipts have several,
    else "requests". ``beyond_spread`` is whether the two ranges have nothing in common; None where a side knows no rate.
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
    """What two receipts have in common. ``differ`` are the ignored circumstances that do, ``unknown`` those unknown in both."""

    differ: dict[str, tuple[str, str]]
    unknown: tuple[str, ...]
    cells: tuple[Difference, ...]


def circumstances(receipt: Receipt) -> dict[str, str]:
    """Every circumstance by name, those of a group as ``<group>.<name>``; and whether the receipt is complete."""
    said = asdict(receipt.circumstances)
    plain = {name: value for name, value in said.items() if name not in GROUPS}
    nested = {f"{group}.{name}": value for group in GROUPS for name, value in said[group].items()}
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
    """Names of circumstances in a line; a group of which all are there is named once."""
    groups = {"served": fields(Served), "machine": fields(Machine)}
    whole = {group: {f"{group}.{one.name}" for one in parts} for group, parts in groups.items()}
    found = {group for group, parts in whole.items() if parts <= set(names)}
    rest = [name for name in names if name.partition(".")[0] not in found]
    return ", ".join([*rest, *(f"{group}.*" for group in sorted(found))])


def compare(before: Receipt, after: Receipt, ignore: Collection[str]) -> Comparison:
    """The cells that both have, of those that are complete.

    Raises:
        NotComparable: they differ in a circumstance that is not in ``ignore``, one is partial, or no cell is in both.
    """
    was, now = circumstances(before), circumstances(after)
    differ = {
        name: (was.get(name, UNKNOWN), now.get(name, UNKNOWN))
        for name in sorted(was | now)
        if was.get(name, UNKNOWN) != now.get(name, UNKNOWN) and name not in ("order_seed",)
    }
    refused = {name: values for name, values in differ.items() if name not in ignore}
    if not before.complete and not after.complete and "complete" not in ignore:
        refused["complete"] = ("no", "no")
    if refused:
        told = "; ".join(f"{name}: {a} / {b}" for name, (a, b) in refused.items())
        raise NotComparable(
            f"the receipts are not of the same: {told}", f"if that is what you compare: --ignore {','.join(refused)}"
        )
    cells = _cells(before)
    found = [_difference(key, cells[key], now_cells) for key, now_cells in sorted(_cells(after).items()) if key in cells]
    if not found:
        raise NotComparable("the receipts have no cell in common", "compare runs of the same workload")
    unknown = tuple(name for name in sorted(was.keys() & now.keys()) if was[name] == now[name] == UNKNOWN)
    return Comparison(differ, unknown, tuple(found))


def _cells(receipt: Receipt) -> dict[tuple[int, int, int], list[Measured]]:
    """The complete cells, each after every start."""
    found: dict[tuple[int, int, int], list[Measured]] = {}
    for cell in receipt.cells:
        if cell.complete:
            found.setdefault(cell.key, []).append(cell)
    return found


def _difference(key: tuple[int, int, int], before: Sequence[Measured], after: Sequence[Measured]) -> Difference:
    between = "starts" if len(before) > 1 and len(after) > 1 else "requests"
    was, now = _spread(before, between), _spread(after, between)
    ratio = now[0] / was[0] if was and now else None
    beyond = now[1] > was[2] or now[2] < was[1] if was and now else None
    return Difference(*key, was, now, ratio, beyond, between)


def _spread(cells: Sequence[Measured], between: str) -> Spread | None:
    """Of the medians of several starts, or of all requests."""
    starts = [[rate for sample in cell.samples if (rate := sample.decode_tok_s) is not None] for cell in cells]
    if between == "starts":
        values = [median(rates) for rates in starts if rates]
    else:
        values = [rate for rates in starts for rate in rates]
    return (median(values), min(values), max(values)) if values else None
