"""Compile kernels of Triton without a GPU: ``compile.py RECORD CAPABILITY [DIRECTORY]``, by a Python that can import them.

RECORD has a line of JSON for each kernel, as ``record/sitecustomize.py`` writes it when a server launches the kernel: function,
signature, constants, attributes and options, as Triton serializes them (``serialize_specialization_data`` in
``triton/runtime/jit.py``). Triton's own ``compile`` looks each up in its cache, compiles it for CAPABILITY, for example 120, or
``SM12x``, that of this machine's GPUs, and stores it. Options that follow from the target are Triton's. Nothing is launched.

Without DIRECTORY, prints JSON: ``kernels`` has the function, the key and the CPU seconds of each; ``failed`` those that could
not be compiled, with the problem; ``entries`` has the files by path, in base64, and names them below PLACE. With DIRECTORY, a
cache, it compiles nothing: ``kernels`` are those that Triton finds there, ``failed`` the others.
"""

import base64
import contextlib
import importlib
import json
import os
import platform
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

PLACE = "/opt/sm120kit/triton_ahead/entries"
OF_TARGET = {"arch", "backend_name", "deprecated_fp8_dot_operand_dtypes", "extern_libs", "max_num_imprecise_acc_default"}
OF_TARGET |= {"ptx_version", "supported_fp8_dtypes", "warp_size"}
"""Options that Triton computes from the target (``CUDABackend.parse_options`` in ``backends/nvidia/compiler.py``)."""
SHARED_MEMORY_BYTES = {90: 232_448, 120: 101_376, 121: 101_376}
"""Limit of shared memory per CTA (CUDA C++ Programming Guide, technical specifications per compute capability)."""
SM12X = {"x86_64": 120, "aarch64": 121}
MAX_PROCESSES = 8
KEPT = (".cubin", ".json")


class Missing(Exception):
    """A kernel is not in the cache."""


class WithoutGpu:
    """A driver of Triton that answers with a GPU of a capability."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def is_active(self):
        return True

    @property
    def utils(self):
        return SimpleNamespace(get_device_properties=lambda device=0: {"max_shared_mem": SHARED_MEMORY_BYTES[self.capability]})


@contextlib.contextmanager
def reported(capability):
    """Let torch, vLLM and Triton report a GPU of a capability while modules are imported; some decide by it."""
    import torch
    from triton.runtime.driver import driver

    pair = divmod(capability, 10)
    driver.set_active(WithoutGpu(capability))
    properties = SimpleNamespace(major=pair[0], minor=pair[1], multi_processor_count=188, name="NVIDIA")
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: pair,
        "get_device_name": lambda device=None: "NVIDIA",
        "get_device_properties": lambda device=None: properties,
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **answers))
        with contextlib.suppress(ImportError):
            from vllm import platforms
            from vllm.platforms.cuda import CudaPlatform
            from vllm.platforms.interface import DeviceCapability

            platforms.current_platform = CudaPlatform()
            answer = classmethod(lambda cls, device_id=0: DeviceCapability(*pair))
            stack.enter_context(mock.patch.object(CudaPlatform, "get_device_capability", answer))
        yield


def function(name):
    """The function of Triton that a module defines under a qualified name, without autotuning and heuristics around it."""
    from triton.runtime import jit

    module, _, qualified = name.partition(":")
    found = importlib.import_module(module)
    for part in qualified.split("."):
        found = getattr(found, part, None)
    while found is not None and not isinstance(found, jit.JITFunction):
        found = getattr(found, "fn", None)
    found = found or getattr(jit, "_triton_jit_function_registry", {}).get(name)  # since 3.7; also what a name hides
    if found is None:
        raise LookupError(f"{module} defines no kernel {qualified}")
    return found


def constant(value):
    """A constant of a kernel, of what was serialized."""
    import triton.language as tl

    if isinstance(value, list):
        return tuple(constant(each) for each in value)
    if isinstance(value, str) and tl.dtype.is_dtype(value):
        return tl.dtype(value)
    if isinstance(value, dict):
        return tl.constexpr(constant(value["constexpr"])) if "constexpr" in value else function(value["jit_function"])
    return value


def tuples(value):
    return tuple(tuples(each) for each in value) if isinstance(value, list) else value


def source(kernel):
    """What Triton compiles, and its options."""
    from triton.compiler import ASTSource

    constants = {tuple(path): constant(value) for path, value in zip(*kernel["constants"], strict=True)}
    attributes = {tuple(path): value for path, value in zip(*kernel["attributes"], strict=True)}
    signature = {name: tuples(kind) for name, kind in kernel["signature"].items()}
    options = {name: tuples(value) for name, value in kernel["options"].items() if name not in OF_TARGET}
    return ASTSource(function(kernel["function"]), signature, constants, attributes), options


def looked_up(kernel, capability, compiles):
    """The key of a kernel in Triton's cache, where it is or is compiled into.

    Raises:
        Missing: it is not there, and must not be compiled.
    """
    import triton
    from triton.compiler import ASTSource

    def missing(*arguments, **named):
        raise Missing

    code, options = source(kernel)
    target = WithoutGpu(capability).get_current_target()
    with mock.patch.object(ASTSource, "make_ir", ASTSource.make_ir if compiles else missing):
        group = triton.compile(code, target=target, options=options).metadata_group
    return Path(next(iter(group.values()))).parent.name


def attempt(kernel, capability, compiles):
    """The kernel's function with its key and CPU seconds, or with the problem."""
    before = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        key = looked_up(kernel, capability, compiles)
    except Exception as problem:
        return {"function": kernel["function"], "problem": f"{type(problem).__name__}: {problem}".splitlines()[0][:300]}
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before[1].ru_utime - before[1].ru_stime  # ptxas
    return {"function": kernel["function"], "key": key, "seconds": round(time.process_time() - before[0] + used, 2)}


def imported(record):
    """Import what the kernels are in, before processes are forked. What cannot be imported is the problem of its kernels."""
    for name in sorted({kernel["function"].partition(":")[0] for kernel in record}):
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def run(record, capability, directory, compiles, processes):
    """The results of all kernels of a record, with ``directory`` as Triton's cache."""
    os.environ["TRITON_CACHE_DIR"] = str(directory)
    with reported(capability):
        imported(record)
        with ProcessPoolExecutor(processes) as pool:
            jobs = [pool.submit(attempt, kernel, capability, compiles) for kernel in record]
            return [job.result() for job in jobs]


def entries(directory):
    """The files of a cache that a launch needs, by path; groups name them where an image has them."""
    found = {}
    for group in sorted(directory.glob("*/__grp__*.json")):
        names = [name for name in sorted(json.loads(group.read_text())["child_paths"]) if name.endswith(KEPT)]
        key = group.parent.name
        found |= {f"{key}/{name}": (group.parent / name).read_bytes() for name in names}
        children = {name: f"{PLACE}/{key}/{name}" for name in names}
        found[f"{key}/{group.name}"] = json.dumps({"child_paths": children}).encode()
    return found


def main():
    record = [json.loads(line) for line in sorted({*Path(sys.argv[1]).read_text().splitlines()})]
    output = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout
    processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    with tempfile.TemporaryDirectory() as scratch:
        compiles = len(sys.argv) < 4
        capability = SM12X[platform.machine()] if sys.argv[2] == "SM12x" else int(sys.argv[2])
        results = run(record, capability, scratch if compiles else sys.argv[3], compiles, processes)
        files = entries(Path(scratch)) if compiles else {}
    answer = {
        "kernels": [result for result in results if "key" in result],
        "failed": [result for result in results if "problem" in result],
        "entries": {path: base64.b64encode(content).decode() for path, content in files.items()},
    }
    with os.fdopen(output, "w") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main()
