"""Record the kernels of Triton that a start of SGLang 0.5.23 launches, without a GPU.

``start_sglang.py CASE [INTEGER]``, run by a Python that has the locked wheels of SGLang and a torch for the CPU. CASE is a file
of JSON as ``select_backends.py`` reads for one configuration, with ``gpus``, their number, and ``rank``, one of them, by
default the first: collectives between them do nothing. SGLang's own code makes the server from its command line up to the first
request: model, pools, attention, autotuning, CUDA graphs, drafts, sampling. Tensors have shapes, strides and offsets on a GPU
that reports what CASE says, and no memory (``FakeTensorMode``); operators of other libraries return tensors like their first
one; Triton asks a hook for each kernel, which records it as ``image_programs/triton_ahead`` does, and neither compiles nor
launches. Variants of autotuned kernels are all recorded, and functions for torch.compile are called as they are.

What SGLang reads from a GPU's memory has no value: numbers are INTEGER, by default 7. A kernel is as on a GPU where records
with several integers agree. Memory is addressed in multiples of 16 bytes, as by torch's allocator, and pools have the sizes
that the memory of CASE permits before weights. Prints JSON: ``kernels``, ``invented``, places of what has no value, and
``stand_ins``, operators that did nothing.
"""

import argparse
import contextlib
import importlib.machinery
import importlib.util
import json
import os
import runpy
import sys
import tempfile
import traceback
import types
from collections import defaultdict
from pathlib import Path
from unittest import mock

SUITES = Path(__file__).parents[2] / "src" / "sm120kit" / "images" / "checks" / "suites" / "engine"
RECORDER = runpy.run_path(str(Path(__file__).parents[2] / "image_programs" / "triton_ahead" / "record" / "sitecustomize.py"))
STAND_INS = ("sgl_kernel", "deep_gemm", "flash_mla", "deep_ep", "tilelang", "humming", "numba", "decord", "torchvision")
"""Packages with code for GPUs, of which any name is a function that does nothing."""
ARGUMENTS = ("--load-format", "dummy", "--skip-tokenizer-init")
POINTER = 2**20
"""The address of all memory."""

called = {"kernels": set(), "invented": set(), "stand_ins": set()}


def like_first(name, *arguments, out=None, **options):
    """What an operator returns that does nothing: its output, or a tensor like the first."""
    import torch

    called["stand_ins"].add(name)
    if out is not None or name.endswith("add_rmsnorm"):
        return out
    first = next((each for each in arguments if isinstance(each, torch.Tensor)), None)
    if first is None and name.startswith("tilelang."):  # a kernel, or what makes one
        return StandIn(name)
    if name.endswith("_and_mul"):
        return first.new_empty(*first.shape[:-1], first.shape[-1] // 2)
    return None if first is None else torch.empty_like(first)


class StandIn(types.ModuleType):
    """A module, or an operator that does nothing, which has any name."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __getitem__(self, index):
        return self

    def __call__(self, *arguments, **options):
        return like_first(self.__name__, *arguments, **options)


class StandIns:
    """Finds the packages of :data:`STAND_INS`; types of scalars are those of sgl_kernel."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "sgl_kernel.scalar_type":
            (file,) = (each for folder in sys.path if (each := Path(folder, "sgl_kernel", "scalar_type.py")).is_file())
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, cls, is_package=True) if name.split(".")[0] in STAND_INS else None

    @staticmethod
    def create_module(spec):
        module = StandIn(spec.name)
        module.__file__, module.__version__ = f"/{spec.name}", "0.4.10"
        return module

    @staticmethod
    def exec_module(module):
        pass


class Handle:
    """A stream, an event, or a CUDA graph."""

    cuda_stream = stream_id = device_index = 0

    def __init__(self, *arguments, **options):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def wait_stream(self, stream):
        pass

    def pool(self):
        return (0, 0)


def before_sglang(gpu):
    """What SGLang's modules decide or take when they are imported: the GPU, its kernels, operators without shapes only."""
    import torch
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()
    torch.version.cuda = "13.0"
    torch.cuda.init = torch.cuda._lazy_init = lambda *_: None
    torch.cuda.is_initialized = lambda: True
    sys.meta_path.insert(0, StandIns)
    from sglang.kernels.jit import utils
    from sglang.srt.utils import custom_op

    utils.load_jit = utils.compile.load_jit = lambda name, *_, **__: StandIn(f"jit.{name}")
    custom_op.register_custom_op = lambda function=None, **_: function or (lambda each: each)
    import sglang.srt.managers.scheduler  # noqa: F401

    torch.ops.__dict__["sgl_kernel"] = StandIn("torch.ops.sgl_kernel")
    nothing = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    for name in ("stream", "device", "graph", "empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_stream"):
        setattr(torch.cuda, name, nothing)
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated"):
        setattr(torch.cuda, name, lambda *_: 2**30)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.CUDAGraph = Handle
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: Handle()
    torch.cuda.graph_pool_handle = lambda: (0, 0)
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.Tensor.data_ptr = lambda tensor: POINTER + tensor.storage_offset() * tensor.element_size()
    torch.Tensor.unique = lambda tensor, *_, **__: tensor.flatten()[:1]


def without_flashinfer():
    """Let FlashInfer plan and compute nothing."""
    import flashinfer
    import flashinfer.fused_moe
    from flashinfer.autotuner import AutoTuner
    from flashinfer.jit.core import JitSpec
    from flashinfer.mla import _sparse_mla_sm120
    from sglang.srt.layers.moe.moe_runner import flashinfer_cutlass

    AutoTuner.choose_one = lambda tuner, name, runners, *_, **__: (runners[0], -1)
    _sparse_mla_sm120._sparse_mla_sm120_paged_attention = lambda *_, **__: None
    JitSpec.build_and_load = lambda spec, *_, **__: StandIn(spec.name)
    experts = lambda *_, output, **__: output  # noqa: E731
    flashinfer.fused_moe.cutlass_fused_moe = flashinfer_cutlass.flashinfer_cutlass_fused_moe = experts
    for kind in ("Prefill.*Paged", "Prefill.*Ragged", "Decode.*Paged"):
        first, second = kind.split(".*")
        wrapper = getattr(flashinfer, f"Batch{first}With{second}KVCacheWrapper")
        wrapper.begin_forward = wrapper.plan = lambda *_, **__: None
        wrapper.forward = wrapper.run = lambda self, q, *_, **__: q.new_empty(q.shape)
        lse = lambda self, q, *_, **__: (q.new_empty(q.shape), q.new_empty(q.shape[:2]).float())  # noqa: E731
        wrapper.forward_return_lse = wrapper.run_return_lse = lse


def without_b12x():
    """Let SGLang's calls of b12x, where the patches have them, compute nothing."""
    with contextlib.suppress(ImportError):
        from sglang.srt import b12x

        b12x.prepare_experts = lambda layer: None
        b12x.run_experts = lambda layer, dispatched: dispatched.hidden_states.new_empty(dispatched.hidden_states.shape)
        b12x.fp4_gemm = lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[1]).bfloat16()


def without_values(integer):
    """Let what is read from a GPU's memory be ``integer``, 1.0, or a scale of the checkpoint that is right."""
    import torch
    import torch._dynamo.config
    from torch._subclasses import fake_impls, fake_tensor

    def read(mode, operator, tensor):
        place = next(frame for frame in reversed(traceback.extract_stack()) if f"{os.sep}sglang{os.sep}" in frame.filename)
        file = place.filename.rpartition(f"{os.sep}sglang{os.sep}")[2]
        called["invented"].add(f"{file}: {place.line}")
        if tensor.dtype == torch.bool:
            return file.endswith("kv_cache.py")
        return 1.0 if tensor.dtype.is_floating_point else integer

    fake_impls.op_implementations_dict[torch.ops.aten._local_scalar_dense.default] = read
    fake_tensor.init_gpu_context = lambda device: None
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda mode: True)
    torch._dynamo.config.disable = True


def recorded(*, compile, fn, **_):
    """Record a kernel as the image's recorder does, and let Triton neither compile nor launch it."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, SM120KIT_RECORD_TRITON=folder):
        RECORDER["write"](compile=compile, fn=fn)
        called["kernels"].update(*(file.read_text().splitlines() for file in Path(folder).iterdir()))
    return True


def every_variant(tuner, *arguments, config, **options):
    """Record a variant of an autotuned kernel, instead of measuring it."""
    tuner.fn.run(*arguments, **options | config.all_kwargs())
    return [1.0] * 3


def start(argv, gpus, rank):
    """Make the model worker of one of ``gpus`` as SGLang's scheduler does."""
    import gpu
    import torch
    import torch.distributed
    from sglang.srt.distributed import bootstrap
    from sglang.srt.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from sglang.srt.distributed.device_communicators.shm_broadcast import MessageQueue
    from sglang.srt.managers import scheduler, tp_worker
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_loader import loader
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from torch._subclasses.fake_tensor import FakeTensorMode

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    server = ServerArgs.from_cli_args(parser.parse_args(argv))
    server.resolve_once()
    server.check_server_args()
    gpu.fake_process_groups(gpus, rank)
    torch.get_device_module = lambda *_: torch.cuda
    torch.distributed.barrier = torch.distributed.monitored_barrier = lambda *_, **__: None
    NCCLLibrary.__init__ = lambda library, *_: setattr(library, "_funcs", defaultdict(lambda: lambda *_: 0))
    torch.distributed.all_gather_object = lambda found, own, *_, **__: found.__setitem__(slice(None), [own] * len(found))
    MessageQueue.create_from_process_group = lambda *_: None
    loader.initialize_dummy_weights = scheduler.set_random_seed = tp_worker.set_random_seed = lambda *_: None
    tp_worker.broadcast_pyobj = lambda data, *_, **__: data
    ModelRunner.maybe_init_expert_location_metadata = lambda runner: None  # of experts that move between GPUs
    publish(server, role="scheduler", ranks=scheduler.SpawnRanks(world_rank=rank, dp_rank=None, gpu_id=0))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        made = scheduler.Scheduler.__new__(scheduler.Scheduler)
        made.server_args, made.nccl_port, made.enable_unified_memory, made.enable_overlap = server, 0, False, True
        made.spec_algorithm = scheduler.SpeculativeAlgorithm.from_string(scheduler.get_spec().speculative_algorithm)
        made.init_model_config()
        bootstrap.init_parallel_runtime(server_args=server, device="cuda", dist_port=0)
        bootstrap.init_layer_runtime(model_config=made.model_config)
        made.init_moe_gemm_config()
        made.init_mamba_backend()
        made.init_model_worker()


def main():
    case = json.loads(Path(sys.argv[1]).read_text())
    output = os.dup(1)
    os.dup2(2, 1)
    import gpu
    import select_backends
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    os.environ.update(case["environment"])
    gpu.install(case["gpu"])
    before_sglang(case["gpu"])
    without_flashinfer()
    without_b12x()
    without_values(int(sys.argv[2]) if len(sys.argv) > 2 else 7)
    knobs.runtime.jit_cache_hook, Autotuner._bench = recorded, every_variant
    Autotuner.check_disk_cache = lambda tuner, key, configs, measure: measure()  # not a choice of an earlier run
    with tempfile.TemporaryDirectory() as folder:
        model = str(select_backends.write_model(case["model"], Path(folder)))
        argv = [model if argument == select_backends.MODEL_DIRECTORY else argument for argument in case["argv"]]
        start([*argv, *ARGUMENTS], case["gpus"], case.get("rank", 0))
    with os.fdopen(output, "w") as file:
        json.dump({name: sorted(values) for name, values in called.items()}, file)


if __name__ == "__main__":
    sys.path.insert(0, str(SUITES))
    main()
