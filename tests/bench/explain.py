"""Processor time of ``explain`` for 10 MB of three logs, and its ratio to reading their lines in lower case.

    python tests/bench/explain.py

The samples of all rules, repeated: each line has a finding. The healthy logs of the tests, repeated: most of their lines were
chosen because they resemble failures. One line of a server's statistics, with a different number each time.
"""

from __future__ import annotations

import io
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from sm120kit.hosts import log_rules

SIZE = 10_000_000
HEALTHY = Path(__file__).parents[1] / "unit" / "data" / "healthy_logs.toml"
LINE = "INFO 11-21 12:00:00 [loggers.py:123] Engine 000: Avg generation throughput: {}.0 tokens/s, Running: 1 reqs\n"


def repeated(lines: list[str]) -> bytes:
    text = ("\n".join(lines) + "\n").encode()
    return (text * (SIZE // len(text) + 1))[:SIZE]


def seconds(run: Callable[[], object]) -> float:
    """The lowest processor time of three runs."""
    times = []
    for _ in range(3):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times)


def main() -> None:
    logs = {
        "samples of all rules": repeated([rule.sample for rule in log_rules.rules()]),
        "healthy logs": repeated([line for log in tomllib.loads(HEALTHY.read_text())["log"] for line in log["lines"]]),
        "statistics": "".join(map(LINE.format, range(SIZE // len(LINE)))).encode(),
    }
    print(f"{len(log_rules.rules())} rules, {SIZE / 1e6:.0f} MB each")
    for name, log in logs.items():
        explained = seconds(lambda log=log: log_rules.explain(io.BytesIO(log)))  # type: ignore[misc]
        read = seconds(lambda log=log: [line.lower() for line in log.splitlines()])  # type: ignore[misc]
        print(f"{name}: {explained:.2f} s, {explained / read:.0f} times the time of reading lines")


if __name__ == "__main__":
    main()
