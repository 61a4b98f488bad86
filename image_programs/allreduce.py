"""Measure an all-reduce between the GPUs of this machine, in the image of an engine: sums, CUDA graphs, times.

``python3 allreduce.py REQUEST``, where REQUEST is JSON: ``method`` (``nccl`` or ``pcie-ipc``), ``world`` GPUs, ``hidden``
size, ``rows`` of the messages, ``dtype``, ``setup_seconds`` and ``step_seconds``. Prints a line of JSON for each number of
rows, one for a sequence of calls, and one with ``end``: ``finished``, or ``stalled`` or ``died`` with the rank that is behind
and its step. No step may take longer than its limit: a kernel that waits for a rank that does not call waits for ever.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

INPUTS = 20
"""Random inputs of each number of rows, eager and again in a replayed CUDA graph."""
CALLS, REPLAYS = 20, 20
"""Calls in a timed graph, and its timed replays."""
SEQUENCE, SLEEP_CYCLES = 300, 60_000
"""Calls of all sizes in random order without a wait between them, and the longest pause of a rank before one, in GPU cycles."""
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of a sum that is stored in this type, for significands of 8 and 11 bits."""


def nccl(request, group, cpu_group):
    """The engine's default: NCCL in place."""
    import torch.distributed as dist

    def reduce(tensor):
        dist.all_reduce(tensor, group=group)
        return tensor

    return reduce, lambda: None


def pcie_ipc(request, group, cpu_group):
    """FlashInfer's all-reduce by CUDA IPC, tuned for these messages. One stream at a time: see ``rebind_stream``."""
    import flashinfer.comm as comm
    import torch

    hidden, dtype = request["hidden"], getattr(torch, request["dtype"])
    rows = tuple(sorted(request["rows"]))
    workspace = comm.PcieIpcAllReduceWorkspace(
        group=group, max_numel=rows[-1] * hidden, dtype=dtype, tune_batches=rows, tune_cache=request.get("cache")
    )
    workspace.rebind_stream()
    workspace.tune([hidden], dtype=dtype, tune_group=cpu_group)
    workspace.prepare([(count, hidden) for count in rows], dtype=dtype)

    def rebind():
        torch.cuda.synchronize()
        workspace.rebind_stream()

    rebind()
    return workspace.all_reduce, rebind


METHODS = {"nccl": nccl, "pcie-ipc": pcie_ipc}


class Progress:
    """The step of each rank and the number of calls that it has launched, in memory that all processes share."""

    def __init__(self, context, world, steps):
        self.steps = steps
        self.step, self.calls = context.Array("i", world), context.Array("q", world)

    def enter(self, rank, step):
        self.step[rank] = self.steps.index(step)

    def state(self):
        return tuple(self.step), tuple(self.calls)

    def behind(self):
        """The rank that has launched the fewest calls, with its step; None if all have launched as many."""
        order = sorted(range(len(self.calls)), key=lambda rank: (self.step[rank], self.calls[rank]))
        first, last = order[0], order[-1]
        equal = (self.step[first], self.calls[first]) == (self.step[last], self.calls[last])
        return (None if equal else first), self.steps[self.step[first]]


def steps_of(request):
    """The names of the steps, in their order."""
    each = (f"{kind} of {rows} rows" for rows in request["rows"] for kind in ("sums", "graph", "time"))
    return ["start", "set up", *each, "sequence", "end"]


def measure(rank, request, init, results, progress):
    """One rank: every step, with the number of wrong sums as this rank sees them."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    progress.enter(rank, "set up")
    dist.init_process_group("nccl", init_method=f"file://{init}", rank=rank, world_size=request["world"], device_id=device)
    cpu_group = dist.new_group(backend="gloo")
    launch, rebind = METHODS[request["method"]](request, dist.group.WORLD, cpu_group)
    dtype = getattr(torch, request["dtype"])

    def reduce(tensor):
        result = launch(tensor)
        progress.calls[rank] += 1
        return result

    def given(rows, number):
        generator = torch.Generator(device).manual_seed(1000 * number + rank)
        return torch.randn(rows, request["hidden"], device=device, generator=generator).to(dtype)

    def error(tensor, result):
        """The largest error over its bound: a rounding of each addition, of at most the sum of the magnitudes."""
        want, size = tensor.float(), tensor.float().abs()
        dist.all_reduce(want)
        dist.all_reduce(size)
        bound = ROUNDOFF[request["dtype"]] * request["world"] * size + 1e-30
        return torch.nan_to_num((result.float() - want).abs() / bound, nan=float("inf"))

    def judged(errors):
        return int((errors > 1).sum()), float(errors.max())

    for rows in request["rows"]:
        progress.enter(rank, f"sums of {rows} rows")
        found = [judged(error(tensor, reduce(tensor.clone()))) for tensor in (given(rows, seed) for seed in range(INPUTS))]
        torch.cuda.synchronize()
        progress.enter(rank, f"graph of {rows} rows")
        graph, static, out = captured(reduce, rebind, given(rows, 0), 1)
        replayed = []
        for seed in range(INPUTS):
            tensor = given(rows, 100 + seed)
            static.copy_(tensor)
            graph.replay()
            replayed.append(judged(error(tensor, out)))
        rebind()
        progress.enter(rank, f"time of {rows} rows")
        timed, _, _ = captured(reduce, rebind, given(rows, 0) / 1e4, CALLS)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        timed.replay()
        torch.cuda.synchronize()
        dist.barrier(group=cpu_group)
        begin.record()
        for _ in range(REPLAYS):
            timed.replay()
        end.record()
        torch.cuda.synchronize()
        rebind()
        results.put(
            {
                "rank": rank,
                "rows": rows,
                "wrong": sum(wrong for wrong, _ in found),
                "graph_wrong": sum(wrong for wrong, _ in replayed),
                "worst": max(largest for _, largest in (*found, *replayed)),
                "microseconds": 1000 * begin.elapsed_time(end) / (CALLS * REPLAYS),
            }
        )
        dist.barrier(group=cpu_group)
    progress.enter(rank, "sequence")
    results.put({"rank": rank, **in_sequence(rank, request["rows"], given, reduce, error)})
    progress.enter(rank, "end")
    torch.cuda.synchronize()
    results.close()
    results.join_thread()
    os._exit(0)  # without the clean-up of libraries, which may be collective


def in_sequence(rank, sizes, given, reduce, error):
    """Wrong sums of calls that follow each other at once, while each rank pauses at random: a rank may be a call ahead."""
    import random

    import torch

    order, pauses = random.Random(0), random.Random(rank)
    inputs = [given(order.choice(sizes), 1000 + number) for number in range(SEQUENCE)]
    torch.cuda.synchronize()
    outputs = []
    for tensor in inputs:
        if pauses.random() < 0.5:
            torch.cuda._sleep(pauses.randrange(SLEEP_CYCLES))
        outputs.append(reduce(tensor.clone()))
    torch.cuda.synchronize()
    errors = [error(tensor, output) for tensor, output in zip(inputs, outputs, strict=True)]
    return {
        "sequence": SEQUENCE,
        "wrong": sum(int((each > 1).sum()) for each in errors),
        "worst": max(float(each.max()) for each in errors),
    }


def captured(reduce, rebind, static, calls):
    """A CUDA graph of ``calls`` calls on a stream of its own, with its input and its last output."""
    import torch

    torch.cuda.synchronize()
    rebind()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    held = static.clone()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            out = reduce(held.clone() if calls == 1 else held)
    torch.cuda.synchronize()
    rebind()
    return graph, held, out


def run(request):
    """Start a process for each rank, print what they measure, and end them when one stalls or dies."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    progress, results = Progress(context, request["world"], steps_of(request)), context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (request, f"{directory}/init", results, progress)
        ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(request["world"])]
        for process in ranks:
            process.start()
        try:
            return followed(request, ranks, progress, results)
        finally:
            for process in ranks:
                process.kill()
                process.join()


def followed(request, ranks, progress, results):
    """Print results until all ranks have ended; the last line, with how that was."""
    measured, state, since = {}, None, time.monotonic()
    while True:
        time.sleep(0.05)
        while not results.empty():
            line = results.get()
            each = measured.setdefault(line.get("rows"), [])
            each.append(line)
            if len(each) == request["world"]:
                print(json.dumps(merged(each)), flush=True)
        if failed := [rank for rank, process in enumerate(ranks) if process.exitcode]:
            rank = failed[0]
            return {"end": "died", "rank": rank, "step": progress.steps[progress.step[rank]], "exit": ranks[rank].exitcode}
        if all(process.exitcode == 0 for process in ranks) and results.empty():
            return {"end": "finished"}
        if progress.state() != state:
            state, since = progress.state(), time.monotonic()
        limit = request["setup_seconds"] if min(state[0]) < 2 else request["step_seconds"]
        if time.monotonic() - since > limit:
            rank, step = progress.behind()
            return {"end": "stalled", "rank": rank, "step": step, "seconds": limit}


def merged(lines):
    """One line for all ranks: the most wrong sums, and the slowest."""
    worst = max(lines, key=lambda line: (line["wrong"] + line.get("graph_wrong", 0), line["worst"]))
    return {name: max(line[name] for line in lines) for name in worst} | {"rank": worst["rank"]}


def main(text):
    """Measure, print the end, and exit: 0 if all steps finished."""
    end = run(json.loads(text))
    print(json.dumps(end), flush=True)
    return 0 if end["end"] == "finished" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
