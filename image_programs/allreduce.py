"""Measure an all-reduce between the GPUs of this machine, in the image of an engine: sums, CUDA graphs, times.

``python3 allreduce.py REQUEST``, where REQUEST is JSON: ``method`` (a key of ``METHODS``), ``world`` GPUs, ``hidden`` size,
``rows`` of the messages, ``dtype``, ``setup_seconds`` and ``step_seconds``; of tests also ``tune``, ``beside`` and
``cache``. Prints a line of JSON for each number of rows, one for a sequence of calls, and one with ``end``: ``finished``, or
``stalled`` or ``died`` with the rank that is behind and its step. No step may take longer than its limit: a kernel that waits
for a rank that does not call waits for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import tempfile
import time

INPUTS = 20
"""Random inputs of each number of rows, eager and again in a replayed CUDA graph."""
CALLS, REPLAYS = 20, 20
"""Calls in a timed graph, and its timed replays."""
SEQUENCE, SLEEP_CYCLES = 200, 60_000
"""Calls of all sizes in random order without a wait between them, and the longest pause of a rank before one, in GPU cycles."""
ALONE, BESIDE = 10, 200
"""Replays of the sequence, alone and while another process uses each GPU, which suspends a rank amid a call."""
ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of a sum that is stored in this type, for significands of 8 and 11 bits."""


def nccl(request, group, cpu_group):
    """NCCL in place."""
    import torch.distributed as dist

    def reduce(tensor):
        dist.all_reduce(tensor, group=group)
        return tensor

    return reduce, contextlib.nullcontext


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
    if request.get("tune", True):
        workspace.tune([hidden], dtype=dtype, tune_group=cpu_group)
    workspace.prepare([(count, hidden) for count in rows], dtype=dtype)

    @contextlib.contextmanager
    def on_another_stream():
        torch.cuda.synchronize()
        workspace.rebind_stream()
        yield
        torch.cuda.synchronize()
        workspace.rebind_stream()

    with on_another_stream():
        pass
    return workspace.all_reduce, on_another_stream


def custom(request, group, cpu_group):
    """The engine's own; what it refuses, such as long messages, NCCL adds, as in the engine."""
    import torch.distributed as dist

    communicator = custom_communicator(cpu_group)
    if communicator is None or communicator.disabled:
        raise RuntimeError("Error: the engine has no custom all-reduce between these GPUs")

    def reduce(tensor):
        result = communicator.custom_all_reduce(tensor) if communicator.should_custom_ar(tensor) else None
        if result is None:
            dist.all_reduce(tensor, group=group)
        return tensor if result is None else result

    return reduce, communicator.capture


def custom_communicator(group):
    """That of vLLM or SGLang, whichever is installed."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
    except ImportError:
        return sglang_communicator(group, device)
    return CustomAllreduce(group, device)


def sglang_communicator(group, device):
    """That of SGLang, which copies between the GPUs before it is used, in turns of its own group of all ranks.

    ``dispatch_custom_allreduce`` has parameters since 0.5.23; 0.5.11 has none (srt/distributed/parallel_state.py).
    """
    import inspect

    import torch.distributed as dist
    from sglang.srt.distributed.device_communicators.custom_all_reduce import dispatch_custom_allreduce
    from sglang.srt.distributed.parallel_state import init_distributed_environment

    rank, world = dist.get_rank(), dist.get_world_size()
    init_distributed_environment(world_size=world, rank=rank, local_rank=device.index, backend=dist.get_backend())
    wanted = {"group": group, "device": device}.items()
    known = inspect.signature(dispatch_custom_allreduce).parameters
    return dispatch_custom_allreduce(**{name: value for name, value in wanted if name in known})(group, device)


METHODS = {"nccl": nccl, "custom": custom, "pcie-ipc": pcie_ipc}
"""By name; ``nccl-LEVEL`` is NCCL with a variable that the container has."""


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
    return ["start", "set up", *each, "sequence", "sequence beside another process", "end"]


def measure(rank, request, init, results, progress, beside):
    """One rank: every step, with the number of wrong sums as this rank sees them."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    progress.enter(rank, "set up")
    # Ranks that share a GPU, for tests: it runs them in turns. NCCL refuses them.
    backend, own = ("nccl", device) if request["world"] <= torch.cuda.device_count() else ("gloo", None)
    dist.init_process_group(backend, init_method=f"file://{init}", rank=rank, world_size=request["world"], device_id=own)
    cpu_group = dist.new_group(backend="gloo")
    name = request["method"]
    build = METHODS["nccl" if name.startswith("nccl-") else name]
    launch, capturing = build(request, dist.group.WORLD, cpu_group)
    dtype = getattr(torch, request["dtype"])

    def reduce(tensor):
        result = launch(tensor)
        progress.calls[rank] += 1
        return result

    def given(rows, number):
        generator = torch.Generator(device).manual_seed(1000 * number + rank)
        return torch.randn(rows, request["hidden"], device=device, generator=generator).to(dtype)

    def expected(tensor):
        """The sum in fp32, and a bound of the error: a rounding of each addition, of at most the sum of the magnitudes."""
        want, size = tensor.float(), tensor.float().abs()
        dist.all_reduce(want)
        dist.all_reduce(size)
        return want, ROUNDOFF[request["dtype"]] * request["world"] * size + 1e-30

    def error(tensor, result):
        want, bound = expected(tensor)
        return torch.nan_to_num((result.float() - want).abs() / bound, nan=float("inf"))

    def judged(errors):
        return int((errors > 1).sum()), float(errors.max())

    for rows in request["rows"]:
        progress.enter(rank, f"sums of {rows} rows")
        found = [judged(error(tensor, reduce(tensor.clone()))) for tensor in (given(rows, seed) for seed in range(INPUTS))]
        torch.cuda.synchronize()
        progress.enter(rank, f"graph of {rows} rows")
        graph, static, out = captured(reduce, capturing, given(rows, 0), 1)
        replayed = []
        for seed in range(INPUTS):
            tensor = given(rows, 100 + seed)
            static.copy_(tensor)
            graph.replay()
            replayed.append(judged(error(tensor, out)))
        progress.enter(rank, f"time of {rows} rows")
        timed, _, _ = captured(reduce, capturing, given(rows, 0) / 1e4, CALLS)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        timed.replay()
        torch.cuda.synchronize()
        dist.barrier(group=cpu_group)
        begin.record()
        for _ in range(REPLAYS):
            timed.replay()
        end.record()
        torch.cuda.synchronize()
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
    inputs = [given(random.Random(number).choice(request["rows"]), 1000 + number) for number in range(SEQUENCE)]
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    sequence = in_sequence(inputs, [expected(tensor) for tensor in inputs], reduce, capturing, wrong, random.Random(rank))

    def replay(times):
        for _ in range(times):
            sequence.replay()
            torch.cuda.synchronize()
            progress.calls[rank] += SEQUENCE

    replay(ALONE)
    progress.enter(rank, "sequence beside another process")
    beside.busy.set()
    while not all(beside.launches):
        time.sleep(0.01)
    replay(request.get("beside", BESIDE))
    results.put({"rank": rank, "sequence": progress.calls[rank], "wrong": int(wrong), "worst": 0.0})
    progress.enter(rank, "end")
    torch.cuda.synchronize()
    results.close()
    results.join_thread()
    os._exit(0)  # without the clean-up of libraries, which may be collective


def in_sequence(inputs, expected, reduce, capturing, wrong, pauses):
    """A CUDA graph of calls that follow each other at once, while each rank pauses at random, and adds its wrong sums."""
    import torch

    def calls():
        outputs = []
        for tensor in inputs:
            if pauses.random() < 0.2:
                torch.cuda._sleep(pauses.randrange(SLEEP_CYCLES))
            outputs.append(reduce(tensor.clone()))
        for output, (want, bound) in zip(outputs, expected, strict=True):
            wrong.add_((~((output.float() - want).abs() <= bound)).sum())  # also of NaN

    return graph_of(calls, capturing)[0]


def captured(reduce, capturing, static, calls):
    """A CUDA graph of ``calls`` calls, with its input and its last output."""
    held = static.clone()

    def repeated():
        for _ in range(calls):
            out = reduce(held.clone() if calls == 1 else held)
        return out

    graph, out = graph_of(repeated, capturing)
    return graph, held, out


def graph_of(calls, capturing):
    """A CUDA graph of what a function launches, on a stream of its own, and what it returns."""
    import torch

    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with capturing(), torch.cuda.graph(graph, stream=stream):
        out = calls()
    torch.cuda.synchronize()
    return graph, out


class Beside:
    """Whether a process beside each rank is to use its GPU, and how often it has."""

    def __init__(self, context, world):
        self.busy, self.launches = context.Event(), context.Array("q", world)


def use_gpu(rank, beside):
    """Multiply matrices on a rank's GPU without a pause. The GPU runs the processes in turns, so that each is suspended."""
    import torch

    torch.cuda.set_device(rank % torch.cuda.device_count())
    matrix = torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    beside.busy.wait()
    while True:
        for _ in range(10):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()
        beside.launches[rank] += 1


def run(request):
    """Start a process for each rank, print what they measure, and end them when one stalls or dies."""
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    progress, results = Progress(context, request["world"], steps_of(request)), context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        beside = Beside(context, request["world"])
        arguments = (request, f"{directory}/init", results, progress, beside)
        ranks = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(request["world"])]
        others = [context.Process(target=use_gpu, args=(rank, beside)) for rank in range(request["world"])]
        for process in (*ranks, *others):
            process.start()
        try:
            return followed(request, ranks, others, progress, results)
        finally:
            for process in (*ranks, *others):
                process.kill()
                process.join()


def followed(request, ranks, others, progress, results):
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
        if ended := [(rank, each.exitcode) for group in (ranks, others) for rank, each in enumerate(group) if each.exitcode]:
            rank, code = ended[0]
            return {"end": "died", "rank": rank, "step": progress.steps[progress.step[rank]], "exit": code}
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
