"""Accuracy of the client: a server on loopback sends tokens by a schedule, and the client measures their times.

From 10 to 32,000 tokens per second in total: the measured rate of each stream over that of the schedule, and over the rate by
the server's clock at sending, since a server on the same machine is late itself; the median time between tokens and its 99th
percentile over those of that clock; the delay of the first token between server and client; how late the server was, the 99th
percentile of all tokens; the longest time for which the client did not read its streams; its processor time for an event,
parsing included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from sm120kit.bench.client import StreamRequest, stream_all
from sm120kit.core.urls import Endpoint

SERVER = Path(__file__).parents[1] / "support" / "paced_server.py"
FIRST = 0.2
SECONDS = 4
CASES = ((1, 10), (4, 50), (16, 100), (16, 500), (64, 100), (160, 100), (16, 1000), (32, 1000), (64, 500), (320, 100))


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="sm120kit-") as directory,
        subprocess.Popen([sys.executable, SERVER], stdout=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        print(
            "| users x tok/s | rate / schedule, lowest to highest stream | rate / sent | ITL p50 / sent | p99 / sent | "
            "TTFT after sending | server late, p99 | longest lag | CPU for an event |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        try:
            warm_up = {"schedule": {"concurrency": 1, "first": 0, "interval": 0.01, "tokens": 2}}
            stream_all(Endpoint.parse(url), [[StreamRequest(0, "/v1/chat/completions", warm_up)]])
            for concurrency, rate in CASES:
                log = Path(directory) / f"{concurrency}-{rate}"
                tokens = max(20, rate * SECONDS)
                schedule = {"concurrency": concurrency, "first": FIRST, "interval": 1 / rate, "tokens": tokens, "log": str(log)}
                request = StreamRequest(0, "/v1/chat/completions", {"schedule": schedule})
                cpu = time.process_time()
                result = stream_all(Endpoint.parse(url), [[request]] * concurrency)
                event = (time.process_time() - cpu) / concurrency / tokens
                while not log.exists():  # renamed to this name when it is whole
                    time.sleep(0.1)
                logged = json.loads(log.read_text())
                rates = sorted(sample.decode_tok_s or 0 for sample in result.samples)
                sent = sorted((tokens - 1) / (times[-1] - times[0]) for times in logged["sent"])
                p50, p99 = _middle_and_late([gap for sample in result.samples for gap in sample.itl])
                true50, true99 = _middle_and_late(
                    [after - before for times in logged["sent"] for before, after in pairwise(times)]
                )
                late = median(sample.ttft or 0 for sample in result.samples) - median(
                    times[0] - requested for times, requested in zip(logged["sent"], logged["requested"], strict=True)
                )
                print(
                    f"| {concurrency} x {rate} | {rates[0] / rate:.4f} to {rates[-1] / rate:.4f} | "
                    f"{rates[0] / sent[0]:.4f} to {rates[-1] / sent[-1]:.4f} | {p50 / true50:.4f} | "
                    f"{p99 / true99:.4f} | {late * 1000:.2f} ms | {_middle_and_late(logged['late'])[1] * 1000:.2f} ms | "
                    f"{result.lag_seconds * 1000:.1f} ms | {event * 1e6:.0f} us |",
                    flush=True,
                )
        finally:
            server.kill()


def _middle_and_late(gaps: Sequence[float]) -> tuple[float, float]:
    cuts = quantiles(gaps, n=100)
    return cuts[49], cuts[98]


if __name__ == "__main__":
    main()
