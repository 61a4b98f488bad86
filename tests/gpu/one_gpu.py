"""Several ranks of vLLM, of which it is a plugin, and of SGLang on one GPU each, where ``RANKS_SHARE_GPU`` names a library.

NCCL allows it from 2.30 on: ``NCCL_LIBRARY`` names its ``libnccl.so.2``, which is loaded in the place of PyTorch's. Without it,
gloo takes the place of NCCL in vLLM. vLLM's ranks take the GPUs in turn, SGLang's are all on GPU 0. Ranks wait for each other
in kernels. Without MPS they take turns, which is slow; under MPS their blocks can fill the GPU, and those that they wait for
do not start. Seen to stand still: 40 ranks of vLLM, and three servers of four ranks that may each use a quarter of the GPU
(``RANKS_GPU_PERCENT``), when one loaded its model. One such server at a time answers. Servers of one rank are no clients of
MPS (:func:`alone`): a fault of one client ends all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from typing import Any

MPS = "nvidia-cuda-mps-control"


def variables(gpus: int = 1) -> dict[str, str]:
    """The environment of such an engine on the first GPUs."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    if not (library := os.environ.get("NCCL_LIBRARY", "")):
        return visible | {"RANKS_SHARE_GPU": "gloo", "VLLM_DISABLE_PYNCCL": "1"}
    shared = visible | {"RANKS_SHARE_GPU": "nccl", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2"}
    shared["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = os.environ.get("RANKS_GPU_PERCENT", "25")
    return shared | {"LD_PRELOAD": library, "VLLM_NCCL_SO_PATH": library, "SGLANG_NCCL_SO_PATH": library}


def alone(gpu: int) -> dict[str, str]:
    """The environment of a server of one rank, beside such an engine."""
    return {"CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


def fresh() -> None:
    """A new MPS daemon, where there is one: after a client was killed at work it refuses others."""
    if os.environ.get("NCCL_LIBRARY") and shutil.which(MPS):
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([MPS], input=b"quit -t 5\n", timeout=15, check=False, capture_output=True)
        subprocess.run([MPS, "-d"], timeout=15, check=False)


def install() -> None:
    """Give vLLM's ranks the visible GPUs in turn, which each can reach, as it can reach its own."""
    if not os.environ.get("RANKS_SHARE_GPU"):
        return
    from vllm.config.parallel import ParallelConfig
    from vllm.distributed.device_communicators import custom_all_reduce
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    parallel: Any = ParallelConfig
    gpus = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    parallel.get_local_gpu_index = lambda self, rank, dp_local_rank=None: rank % gpus
    custom_all_reduce._can_p2p = lambda rank, world: True
    platform.is_fully_connected = classmethod(lambda cls, devices: True)
    platform.dist_backend = os.environ["RANKS_SHARE_GPU"]


def install_sglang() -> None:
    """Give each of SGLang's ranks GPU 0."""
    if not os.environ.get("RANKS_SHARE_GPU"):
        return
    from sglang.srt import server_args
    from sglang.srt.distributed.device_communicators import custom_all_reduce_utils

    arguments: Any = server_args.ServerArgs
    original = arguments.check_server_args

    def check(self: Any) -> None:
        original(self)
        self.gpu_id_step = 0

    arguments.check_server_args = check
    custom_all_reduce_utils.can_p2p = lambda rank, world: True
    custom_all_reduce_utils.is_full_nvlink = lambda devices, world: True
