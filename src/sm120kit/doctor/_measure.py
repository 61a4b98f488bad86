"""Copies between GPUs, read back, and collectives: ``python _measure.py copies|collective KIND COUNT OUTPUT``.

A program of its own, which needs torch only and may hang: whoever starts it limits its time. It writes what it is about to do
to OUTPUT before it does it, and then what it found, one JSON object per line. KIND is ``cuda``, or ``cpu`` to try the program
where there is no GPU.
"""

# mypy: disable-error-code="no-untyped-call,attr-defined"

import json
import os
import sys
import tempfile
import time
from itertools import combinations

import torch
import torch.distributed
import torch.multiprocessing

VERIFIED_BYTES = (4099, 1 << 18, 1 << 26)
COPIED_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
REDUCED_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}
SMALL_BYTES = 16 << 10
ROUNDS = {"cuda": (100, 10), "cpu": (2, 2)}


def say(**facts: object) -> None:
    with open(sys.argv[4], "ab", buffering=0) as output:  # noqa: PTH123
        output.write((json.dumps(facts) + "\n").encode())  # whole lines, though several ranks write


def place(kind: str, number: int) -> torch.device:
    return torch.device(kind, number) if kind == "cuda" else torch.device("cpu")


def wait(kind: str, count: int) -> None:
    for number in range(count if kind == "cuda" else 0):
        torch.cuda.synchronize(number)


def wrong_bytes(source: torch.device, target: torch.device) -> int:
    """Copy known bytes from one GPU to another, read them back through the host, and count those that differ."""
    wrong = 0
    for size in VERIFIED_BYTES:
        pattern = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        received = torch.zeros(size, dtype=torch.uint8, device=target)
        received.copy_(pattern.to(source))
        wrong += int((received.cpu() != pattern).sum())
    return wrong


def rate(kind: str, count: int, pairs: list[tuple[int, int]], rounds: int = 10) -> float:
    """GB/s of all pairs together, each copying from its first to its second GPU at the same time."""
    lanes = []
    for one, other in pairs:
        ends = [torch.zeros(COPIED_BYTES[kind], dtype=torch.uint8, device=place(kind, end)) for end in (one, other)]
        streams = [torch.cuda.Stream(end) for end in (one, other)] if kind == "cuda" else []
        lanes.append((ends, streams))
    started = 0.0
    for turn in range(2 + rounds):
        if turn == 2:
            wait(kind, count)
            started = time.perf_counter()
        for (source, target), streams in lanes:
            for stream in streams:
                torch.cuda.set_stream(stream)
            target.copy_(source, non_blocking=True)
    wait(kind, count)
    return len(pairs) * rounds * COPIED_BYTES[kind] / (time.perf_counter() - started) / 1e9


def copies(kind: str, count: int) -> None:
    for one, other in combinations(range(count), 2):
        say(about=f"copies between GPU {one} and GPU {other}")
        ways = [(one, other), (other, one)]
        wrong = sum(wrong_bytes(place(kind, source), place(kind, target)) for source, target in ways)
        say(pair=[one, other], wrong=wrong, one_way=rate(kind, count, ways[:1]), both_ways=rate(kind, count, ways))
    half = count // 2
    if half > 1:
        say(about="copies of all GPUs at once")
        say(together=rate(kind, count, [(one, one + half) for one in range(half)]) / half)


def rank_wait(kind: str) -> None:
    """Wait for this rank's GPU only: to wait for the others would start CUDA on them."""
    if kind == "cuda":
        torch.cuda.synchronize()


def rank_main(rank: int, kind: str, count: int, meeting: str) -> None:
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count
    )
    if rank == 0:
        say(about=f"the first all-reduce of {count} ranks")
    wrong = 0
    for size in (SMALL_BYTES, REDUCED_BYTES[kind]):
        base = torch.arange(size // 4, dtype=torch.float32) % 1000
        value = (base + rank).to(place(kind, rank))
        torch.distributed.all_reduce(value)
        wrong += int((value.cpu() != base * count + sum(range(count))).sum())
    say(rank=rank, wrong=wrong)
    times = []
    for size, rounds in zip((SMALL_BYTES, REDUCED_BYTES[kind]), ROUNDS[kind], strict=True):
        value = torch.zeros(size // 4, device=place(kind, rank))
        started = 0.0
        for turn in range(5 + rounds):
            if turn == 5:
                rank_wait(kind)
                started = time.perf_counter()
            torch.distributed.all_reduce(value)
        rank_wait(kind)
        times.append((time.perf_counter() - started) / rounds)
    if rank == 0:
        say(small_us=times[0] * 1e6, bus=2 * (count - 1) / count * REDUCED_BYTES[kind] / times[1] / 1e9)
    torch.distributed.destroy_process_group()


def main(what: str, kind: str, count: int) -> None:
    torch.set_num_threads(1)
    say(torch=torch.__version__, devices=torch.cuda.device_count())
    if kind == "cuda" and torch.cuda.device_count() < count:
        sys.exit(f"torch {torch.__version__} sees {torch.cuda.device_count()} of {count} GPUs")
    if what == "copies":
        copies(kind, count)
    else:
        say(about=f"the start of {count} ranks")
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(rank_main, (kind, count, os.path.join(directory, "meeting")), count)  # noqa: PTH118
    say(done=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
