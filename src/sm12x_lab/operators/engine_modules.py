"""Modules of vLLM and SGLang as a program of one GPU uses them: found by name, configured, and required to detect SM12x."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import reference
import torch
from report import Unusable

Tensor = torch.Tensor


def vllm(module: str, name: str = "") -> Any:
    """A module of vLLM, or what it calls ``name``."""
    found = importlib.import_module(f"vllm.{module}" if module else "vllm")
    return getattr(found, name) if name else found


def is_chosen(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern)


@contextlib.contextmanager
def configured(moe_backend: str = "auto") -> Iterator[Any]:
    """The configuration of vLLM that layers are created and called with."""
    config = vllm("config", "VllmConfig")(kernel_config=vllm("config", "KernelConfig")(moe_backend=moe_backend))
    with vllm("config", "set_current_vllm_config")(config):
        parallel = vllm("distributed.parallel_state")
        if not parallel.model_parallel_is_initialized():
            rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
            parallel.init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            parallel.initialize_model_parallel(1, 1)
            vllm("v1.worker.workspace", "init_workspace_manager")(torch.device(reference.DEVICE))
        with vllm("forward_context", "set_forward_context")(None, config):
            yield config


def created(make: Callable[[], Any]) -> Any:
    """A layer with its weights uninitialized in the GPU's memory; NaN where the type has it."""
    with torch.device(reference.DEVICE):
        layer = make()
    for parameter in layer.parameters():
        parameter.data.view(torch.uint8).fill_(0xFF)
    return layer


def processed(layer: Any) -> Any:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def called(layer: Any, x: Tensor) -> Tensor:
    result = layer(x)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def refused(operator: str, case: str, error: Exception) -> reference.OperatorRow:
    why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return reference.OperatorRow(operator, case, "refused", why=why)


def require_vllm() -> None:
    """Fail unless vLLM can be imported and detects SM12x: on another GPU it selects other kernels."""
    try:
        capability = vllm("platforms", "current_platform").get_device_capability()
    except ImportError as error:
        raise Unusable(f"vLLM cannot be imported by {sys.executable}: {error}") from error
    if capability is None or capability.major != 12:
        raise Unusable(f"vLLM detects {capability}, not 12.x; on a Hopper GPU, use sm12x-lab run")
    print(f"vLLM {vllm('').__version__} detects compute capability {capability.major}.{capability.minor}", flush=True)


def sglang(module: str, name: str = "") -> Any:
    """A module of SGLang's runtime, or what it calls ``name``."""
    found = importlib.import_module(f"sglang.srt.{module}")
    return getattr(found, name) if name else found


def require_sglang() -> None:
    """Fail unless SGLang can be imported and the GPU is SM12x: on another GPU it selects other kernels."""
    try:
        version = importlib.import_module("sglang").__version__
        is_sm120 = sglang("utils.common", "is_sm120_supported")()
    except ImportError as error:
        raise Unusable(f"SGLang cannot be imported by {sys.executable}: {error}") from error
    if not is_sm120:
        raise Unusable("SGLang does not detect SM12x; on a Hopper GPU, use sm12x-lab run")
    print(f"SGLang {version} detects compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))}", flush=True)
