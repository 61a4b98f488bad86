"""Two receipts side by side: refused when their circumstances differ, and a difference is one only beyond the spread."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from statistics import median

from sm120kit.bench.receipt import Measured, Receipt
from sm120kit.errors import NotComparable


@dataclass(frozen=True)
class Difference:
    """One cell in both receipts: median decode rates in tokens per second, each with its lowest and highest.

    ``beyond_spread`` is whether the two ranges have nothing in common; None where a side knows no rate.
    """

    users: int
    output_tokens: int
    context_tokens: int
    before: tuple[float, float, float] | None
    after: tuple[float, float, float] | None
    ratio: float | None
    beyond_spread: bool | None


def circumstances(receipt: Receipt) -> dict[str, str]:
    """Every circumstance by name; what the user gave as ``given.<name>``."""
    plain = {name: value for name, value in asdict(receipt.circumstances).items() if name not in ("client", "given")}
    nested = {
        f"{group}.{name}": value
        for group in ("client", "given")
        for name, value in getattr(receipt.circumstances, group).items()
    }
    return {name: str(value) for name, value in {**plain, **nested}.items()}


def compare(before: Receipt, after: Receipt, ignore: Collection[str]) -> tuple[dict[str, tuple[str, str]], list[Difference]]:
    """The ignored circumstances that differ, and the cells that both have.

    Raises:
        NotComparable: they differ in a circumstance that is not in ``ignore``, one is partial, or no cell is in both.
    """
    was, now = circumstances(before), circumstances(after)
    differ = {
        name: (was.get(name, "unknown"), now.get(name, "unknown"))
        for name in sorted(was | now)
        if was.get(name) != now.get(name) and name not in ("order_seed",)
    }
    if refused := {name: values for name, values in differ.items() if name not in ignore}:
        told = "; ".join(f"{name}: {a} / {b}" for name, (a, b) in refused.items())
        raise NotComparable(f"the receipts differ in {told}", f"if that is what you compare: --ignore {','.join(refused)}")
    cells = {_key(cell): cell for cell in before.cells}
    found = [_difference(cells[_key(cell)], cell) for cell in after.cells if _key(cell) in cells]
    if not found:
        raise NotComparable("the receipts have no cell in common", "compare runs of the same workload")
    return differ, sorted(found, key=lambda one: (one.users, one.output_tokens, one.context_tokens))


def _key(cell: Measured) -> tuple[int, int, int]:
    return cell.users, cell.output_tokens, cell.context_tokens


def _difference(before: Measured, after: Measured) -> Difference:
    was, now = _spread(before), _spread(after)
    ratio = now[0] / was[0] if was and now else None
    beyond = now[1] > was[2] or now[2] < was[1] if was and now else None
    return Difference(*_key(after), was, now, ratio, beyond)


def _spread(cell: Measured) -> tuple[float, float, float] | None:
    rates = [rate for sample in cell.samples if (rate := sample.decode_tok_s) is not None]
    return (median(rates), min(rates), max(rates)) if rates else None
