"""Verify and time copies and all-reduce between GPUs: ``python transfers.py copies|collective KIND COUNT OUTPUT``.

A standalone program that needs torch only. It may hang, so the caller limits its time. It appends JSON objects to OUTPUT, one
per line: ``step`` before each step, then the step's result. COUNT is the number of GPUs. KIND is ``cuda``, or ``cpu`` to run
the program without a GPU.
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
"""Timed all-reduces of ``SMALL_BYTES`` and of ``REDUCED_BYTES``."""
COPY_WARM_UP, REDUCE_WARM_UP = 2, 5
"""Rounds before the timed ones."""


def emit(**values: object) -> None:
    with open(sys.argv[4], "ab", buffering=0) as output:  # noqa: PTH123
        output.write((json.dumps(values) + "\n").encode())  # one write per line, because several ranks append


def device(kind: str, number: int) -> torch.device:
    return torch.device(kind, number) if kind == "cuda" else torch.device("cpu")


def synchronize(kind: str, count: int) -> None:
    for number in range(count if kind == "cuda" else 0):
        torch.cuda.synchronize(number)


def wrong_bytes(source: torch.device, target: torch.device) -> int:
    """Copy a known pattern from one GPU to another, read it back through the host, and count the bytes that differ."""
    wrong = 0
    for size in VERIFIED_BYTES:
        pattern = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
        received = torch.zeros(size, dtype=torch.uint8, device=target)
        received.copy_(pattern.to(source))
        wrong += int((received.cpu() != pattern).sum())
    return wrong


def rate(kind: str, count: int, pairs: list[tuple[int, int]], rounds: int = 10) -> float:
    """Total GB/s of concurrent copies, one for each (source, target) pair of GPU numbers."""
    transfers = []
    for pair in pairs:
        buffers = [torch.zeros(COPIED_BYTES[kind], dtype=torch.uint8, device=device(kind, number)) for number in pair]
        streams = [torch.cuda.Stream(number) for number in pair] if kind == "cuda" else []
        transfers.append((buffers, streams))
    started = 0.0
    for turn in range(COPY_WARM_UP + rounds):
        if turn == COPY_WARM_UP:
            synchronize(kind, count)
            started = time.perf_counter()
        for (source, target), streams in transfers:
            for stream in streams:
                torch.cuda.set_stream(stream)
            target.copy_(source, non_blocking=True)
    synchronize(kind, count)
    return len(pairs) * rounds * COPIED_BYTES[kind] / (time.perf_counter() - started) / 1e9


def copies(kind: str, count: int) -> None:
    for first, second in combinations(range(count), 2):
        emit(step=f"copies between GPU {first} and GPU {second}")
        directions = [(first, second), (second, first)]
        wrong = sum(wrong_bytes(device(kind, source), device(kind, target)) for source, target in directions)
        emit(
            pair=[first, second],
            wrong=wrong,
            one_way=rate(kind, count, directions[:1]),
            both_ways=rate(kind, count, directions),
        )


def synchronize_rank(kind: str) -> None:
    """Wait for this rank's GPU only: synchronizing the other GPUs would create CUDA contexts on them."""
    if kind == "cuda":
        torch.cuda.synchronize()


def rank_main(rank: int, kind: str, count: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl" if kind == "cuda" else "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count
    )
    if rank == 0:
        emit(step=f"the first all-reduce of {count} ranks")
    wrong = 0
    for size in (SMALL_BYTES, REDUCED_BYTES[kind]):
        base = torch.arange(size // 4, dtype=torch.float32) % 1000
        value = (base + rank).to(device(kind, rank))
        torch.distributed.all_reduce(value)
        wrong += int((value.cpu() != base * count + sum(range(count))).sum())
    emit(rank=rank, wrong=wrong)
    times = []
    for size, rounds in zip((SMALL_BYTES, REDUCED_BYTES[kind]), ROUNDS[kind], strict=True):
        value = torch.zeros(size // 4, device=device(kind, rank))
        started = 0.0
        for turn in range(REDUCE_WARM_UP + rounds):
            if turn == REDUCE_WARM_UP:
                synchronize_rank(kind)
                started = time.perf_counter()
            torch.distributed.all_reduce(value)
        synchronize_rank(kind)
        times.append((time.perf_counter() - started) / rounds)
    if rank == 0:
        emit(small_us=times[0] * 1e6, bus=2 * (count - 1) / count * REDUCED_BYTES[kind] / times[1] / 1e9)
    torch.distributed.destroy_process_group()


def main(mode: str, kind: str, count: int) -> None:
    torch.set_num_threads(1)
    emit(torch=torch.__version__, devices=torch.cuda.device_count())
    if kind == "cuda" and torch.cuda.device_count() < count:
        sys.exit(f"torch {torch.__version__} detects {torch.cuda.device_count()} of {count} GPUs")
    if mode == "copies":
        copies(kind, count)
    else:
        emit(step=f"the start of {count} ranks")
        with tempfile.TemporaryDirectory() as directory:
            torch.multiprocessing.spawn(rank_main, (kind, count, os.path.join(directory, "rendezvous")), count)  # noqa: PTH118
    emit(done=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
