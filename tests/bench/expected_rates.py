"""Fit the expected rate to the published ones, and write its errors to docs/measurements/rates.md.

    python tests/bench/expected_rates.py

Deterministic, a few seconds. Prints the fitted costs, which are constants of sm120kit.bench.roofline.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from published_rates import PAGE, by_machine, by_table, error_left_out, fit, generated, tables


def main() -> None:
    """Print the fit, and rewrite the page."""
    fitted = [table for table in tables() if table.fitted]
    best = fit([table.name for table in fitted])
    print(f"floor of a layer {best.layer_seconds * 1e6:.0f} us, waits {best.wait_seconds * 1e6:.0f} us", end="")
    print(f", bandwidth of GB10 {best.gb10_share:.2f} of its published one")
    print(f"mean absolute error: roofline {fmean(table.error(None) for table in fitted):.1%}", end="")
    print(f", expected {error_left_out(by_table):.1%} with each table left out", end="")
    print(f", {error_left_out(by_machine):.1%} with each machine left out")
    PAGE.write_text(generated(PAGE.read_text()))


if __name__ == "__main__":
    main()
