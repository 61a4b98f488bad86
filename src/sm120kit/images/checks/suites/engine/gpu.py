"""A stand-in for an SM12x GPU, for the selection of back-ends in a process without a driver; nothing is computed on it.

:func:`install` answers the queries of torch and Triton for a GPU. Modules are created on torch's meta device.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

SHARED_MEMORY = 101376
"""Bytes of shared memory of a block that SM12x can have: 99 KiB (CUDA C++ programming guide, technical specifications)."""


class Handle:
    """A stream or an event."""

    cuda_stream = 0

    def __init__(self, *arguments: object, **options: object) -> None:
        pass


def install(table: Mapping[str, Any]) -> None:
    """Answer the queries of torch and Triton for GPUs of this kind, eight of them. Before an engine is imported.

    ``table`` has the name of the GPU, its compute capability, number of multiprocessors, and memory in 10^9 bytes.
    """
    import torch
    import triton
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget

    gpu = SimpleNamespace(**{"integrated": False, **table, "capability": tuple(table["capability"])})
    memory = int(gpu.memory_gb * 1e9)
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        total_memory=memory,
        is_integrated=gpu.integrated,
        warp_size=32,
        L2_cache_size=2**27,
        max_threads_per_multi_processor=1536,
        regs_per_multiprocessor=2**16,
        shared_memory_per_block_optin=SHARED_MEMORY,
        shared_memory_per_multiprocessor=SHARED_MEMORY + 1024,
        uuid="0",
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "_device_count_nvml": lambda: 8,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: gpu.name,
        "get_arch_list": lambda: ["sm_120"],
        "mem_get_info": lambda device=None: (memory, memory),
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "Stream": Handle,
        "Event": Handle,
        "current_stream": lambda device=None: Handle(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.accelerator.current_device_index = lambda: 0
    capability = 10 * gpu.capability[0] + gpu.capability[1]
    shared = {"max_shared_mem": SHARED_MEMORY, "multiprocessor_count": gpu.multiprocessors, "warpSize": 32}
    active = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cuda", 0),
        get_device_capability=lambda device=None: gpu.capability,
        utils=SimpleNamespace(get_device_properties=lambda device=None: shared),
    )
    backends["nvidia"].driver.is_active = staticmethod(lambda: True)
    triton.runtime.driver.set_active(active)


def on_meta() -> Any:
    """A context in which torch creates tensors on its meta device, also those on CUDA devices and in pinned host memory."""
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            options = dict(kwargs or {})
            device = options.get("device")
            if options.pop("pin_memory", False) or isinstance(device, int) or "cuda" in str(device):
                options["device"] = "meta"
            if getattr(function, "__name__", "") == "get_cuda_view_from_cpu_tensor":  # of vLLM, for tables in host memory
                return args[0]
            return function(*args, **options)

    return OnMeta()


def fake_process_groups(size: int, rank: int = 0) -> None:
    """Make this process one of ``size`` processes, whose collectives do nothing."""
    import torch.distributed as distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    new_group = distributed.new_group

    def fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **options: Any) -> Any:
        return new_group(ranks, backend="fake")

    distributed.new_group = fake_group


def forked(answers: dict[str, Callable[[], dict[str, Any]]], at_once: int) -> dict[str, dict[str, Any]]:
    """Answers by name, each from a process of its own, of which some run at once."""
    results: dict[str, dict[str, Any]] = {}
    running: dict[str, tuple[int, int]] = {}

    def finish() -> None:
        name = next(iter(running))
        child, reading = running.pop(name)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(child, 0)
        results[name] = json.loads(text) if text else {"refusal": "the process ended without an answer", "selected": {}}

    for name, answer in answers.items():
        if len(running) == at_once:
            finish()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:  # an exception must not return into the caller's frames, which are the parent's
                text = json.dumps(answer())
                with os.fdopen(writing, "w") as pipe:
                    pipe.write(text)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        os.close(writing)
        running[name] = child, reading
    while running:
        finish()
    return results
