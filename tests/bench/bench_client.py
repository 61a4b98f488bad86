"""Accuracy of the client: a server on loopback sends tokens by a schedule, and the client measures their times.

From 10 to 32,000 tokens per second in total: the measured rate of each stream over that of the schedule; the median time
between tokens over that of the schedule, and percentiles of it over those of the server's clock, since a server on the same
machine is late itself; the delay of the first token between server and client; the longest time for which the client did not
read its streams, and its share of a core.
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

SERVER = Path(__file__).parents[1] / "support" / "schedule_server.py"
FIRST = 0.2
SECONDS = 4


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="sm120kit-") as directory,
        subprocess.Popen([sys.executable, SERVER], stdout=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        print(
            "users  tok/s each  in total  rate/true lowest  highest  ITL p50/true  p50/sent  p99/sent  TTFT over sent  "
            "longest lag  core"
        )
        try:
            stream_all(
                Endpoint.parse(url), [[StreamRequest(0, "/v1/chat/completions", {})]]
            )  # what is imported and compiled only once
            for users, rate in ((1, 10), (4, 50), (16, 100), (16, 500), (16, 1000), (32, 1000), (64, 100), (160, 100)):
                log = Path(directory) / f"{users}-{rate}"
                schedule = {"first": FIRST, "interval": 1 / rate, "tokens": max(20, rate * SECONDS), "log": str(log)}
                request = StreamRequest(0, "/v1/chat/completions", {"schedule": schedule})
                began, cpu = time.perf_counter(), time.process_time()
                result = stream_all(Endpoint.parse(url), [[request]] * users)
                core = (time.process_time() - cpu) / (time.perf_counter() - began)
                time.sleep(2)  # the server writes its log a second after the answers
                rates = [sample.decode_tok_s or 0 for sample in result.samples]
                logged = [json.loads(line) for line in log.read_text().splitlines()]
                p50, p99 = _middle_and_late([gap for sample in result.samples for gap in sample.itl])
                true50, true99 = _middle_and_late([b - a for times in logged for a, b in pairwise(times["sent"])])
                late = median(sample.ttft or 0 for sample in result.samples) - median(
                    times["sent"][0] - times["requested"] for times in logged
                )
                print(
                    f"{users:5}  {rate:10}  {users * rate:8}  {min(rates) / rate:16.4f}  {max(rates) / rate:7.4f}  "
                    f"{p50 * rate:12.4f}  {p50 / true50:8.4f}  {p99 / true99:8.4f}  {late * 1000:11.2f} ms  "
                    f"{result.lag_seconds * 1000:8.1f} ms  {core:4.2f}"
                )
        finally:
            server.kill()


def _middle_and_late(gaps: Sequence[float]) -> tuple[float, float]:
    cuts = quantiles(gaps, n=100)
    return cuts[49], cuts[98]


if __name__ == "__main__":
    main()
