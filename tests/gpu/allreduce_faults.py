"""Seeded faults that ``image_programs/allreduce.py`` must find, on a machine with several GPUs, FlashInfer and a compiler.

``python3 tests/gpu/allreduce_faults.py WORLD [FAULT ...]``: prints for each fault what was found. Exit code 1 if a fault is
missed or the healthy all-reduce is refused. ``broken-*`` are FlashInfer's debug builds with a mechanism of the protocol off.
With ``ALLREDUCE_ONE_GPU`` in the environment all ranks share one GPU, which runs them in turns.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "image_programs"))

import allreduce

AT = 45
"""The call at which a rank is faulty: in the sums of the second number of rows."""

DEBUG = {
    "broken-double-buffer": (2, {"no_block_epoch": 1}),
    "broken-block-epoch": (2, {"per_block_epoch": 1}),
    "broken-barrier-entry": (4, {"no_barrier_entry_sync": 1}),
    "broken-island": (8, {"stall_ns": 2_000_000, "stall_island": 0}),
}
"""The fewest GPUs whose kernels have the mechanism, and the switches: that for two has neither barriers nor islands."""


def faulty(fault, build):
    """A method with a fault in rank 1, or in the module of all ranks."""

    def method(request, group, cpu_group):
        import torch.distributed as dist

        if fault in DEBUG:
            debug_module(DEBUG[fault][1])
        launch, capturing = build(request, group, cpu_group)
        calls, last = 0, dist.get_rank() == 1

        def reduce(tensor):
            nonlocal calls
            calls += 1
            if last and calls == AT:
                if fault == "stalls":
                    time.sleep(10_000)
                if fault == "dies":
                    os._exit(3)
                if fault == "skips":
                    return tensor
                if fault == "differs":
                    return launch(tensor * 1.5)
            return launch(tensor)

        return reduce, capturing

    return method


def debug_module(switches):
    """Have FlashInfer compile and load a debug build."""
    import flashinfer.comm.pcie_ipc_ar as pcie
    from flashinfer.jit.comm import gen_pcie_ipc_comm_debug_module

    pcie.gen_pcie_ipc_comm_module = lambda: gen_pcie_ipc_comm_debug_module(**{"stall_ns": 0, "stall_island": 0} | switches)


FAULT = os.environ.get("ALLREDUCE_FAULT", "")
if FAULT:  # also in the processes of the ranks, which import this file
    allreduce.METHODS = {name: faulty(FAULT, build) for name, build in allreduce.METHODS.items()}


def found(world, method, fault, dtype):
    """What the program prints with a fault: its lines, and how long that took."""
    os.environ["ALLREDUCE_FAULT"] = fault
    allreduce.METHODS = {name: faulty(fault, build) for name, build in METHODS.items()}
    rows = [int(text) for text in os.environ.get("ALLREDUCE_ROWS", "1,8").split(",")]
    request = {"method": method, "world": world, "hidden": 3072, "rows": rows, "dtype": dtype}
    request |= {"setup_seconds": 150, "step_seconds": 10, "cache": os.environ.get("ALLREDUCE_CACHE") or None}
    if os.environ.get("ALLREDUCE_ONE_GPU"):  # ranks in turns are slow: no tuning, and nothing beside them
        request |= {"tune": False, "beside": 1}
    begin, lines = time.monotonic(), io.StringIO()
    with contextlib.redirect_stdout(lines):
        allreduce.main(json.dumps(request))
    return [json.loads(line) for line in lines.getvalue().splitlines()], time.monotonic() - begin


METHODS = {"pcie-ipc": allreduce.pcie_ipc} if os.environ.get("ALLREDUCE_ONE_GPU") else dict(allreduce.METHODS)


EXPECTED = {"": "finished", "stalls": "stalled", "dies": "died", "skips": "stalled"}
"""How the program must end with a fault; with the others sums are wrong, or it stalls.

Tuning refuses a module that computes wrong sums itself, so let it find a file with a tuning: ALLREDUCE_CACHE.
"""


def main(world, faults):
    """Run each fault, and both methods without one."""
    missed = 0
    for fault in faults:
        if world < DEBUG.get(fault, (2,))[0]:
            print(f"{world} pcie-ipc {fault:22}not in the kernels for {world} GPUs")
            continue
        for method, dtype in (("pcie-ipc", "bfloat16"),) if fault else itertools.product(METHODS, allreduce.ROUNDOFF):
            (*measured, end), seconds = found(world, method, fault, dtype)
            wrong = sum(line["wrong"] + line.get("graph_wrong", 0) for line in measured)
            expected = EXPECTED.get(fault, "")
            right = (end["end"] == expected and not wrong) if expected else bool(wrong) or end["end"] == "stalled"
            missed += not right
            verdict = "as expected" if right else "NOT as expected"
            print(f"{world} {method:9}{dtype:9}{fault or 'healthy':22}{verdict}: {wrong} wrong, {end}, {seconds:.0f} s")
            for line in measured:
                print("    ", json.dumps(line), flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:] or ["", "stalls", "dies", "skips", "differs", *DEBUG]))
