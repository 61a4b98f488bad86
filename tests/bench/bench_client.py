"""How truly the client measures: a server on loopback sends tokens by a schedule, the client says what rate that was.

Ratios of measured to true rate per stream, from 10 to 32,000 tokens per second in total, and of the median time between
tokens to the true one; how far the time to the first token is off, how late the client looked at its streams, and what share
of a core it took.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from sm120kit.bench.client import Ask, stream_all

SERVER = Path(__file__).parents[1] / "integration" / "schedule_server.py"
FIRST = 0.2
SECONDS = 4


def main() -> None:
    with subprocess.Popen([sys.executable, SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        url = f"http://127.0.0.1:{int(server.stdout.readline())}"
        print(
            "users  tok/s each  in total  measured/true lowest  highest  ITL p50/true  TTFT off by at most  longest lag  core"
        )
        try:
            for users, rate in ((1, 10), (4, 50), (16, 100), (16, 500), (16, 1000), (32, 1000)):
                schedule = {"first": FIRST, "interval": 1 / rate, "tokens": max(20, rate * SECONDS)}
                ask = Ask(0, "/v1/chat/completions", {"schedule": schedule})
                began, cpu = time.perf_counter(), time.process_time()
                seen = stream_all(url, [[ask]] * users)
                core = (time.process_time() - cpu) / (time.perf_counter() - began)
                rates = [sample.decode_tok_s or 0 for sample in seen.samples]
                between = median(gap for sample in seen.samples for gap in sample.itl) * rate
                late = max(abs((sample.ttft or 0) - FIRST) for sample in seen.samples)
                print(
                    f"{users:5}  {rate:10}  {users * rate:8}  {min(rates) / rate:20.4f}  {max(rates) / rate:7.4f}  "
                    f"{between:12.4f}  {late * 1000:16.1f} ms  {seen.lag_seconds * 1000:8.1f} ms  {core:4.2f}"
                )
        finally:
            server.kill()


if __name__ == "__main__":
    main()
