"""What vLLM selects for a command line on a GPU that is not there; for ``../engine/select_backends.py``.

A command line takes vLLM's own way to the model: parser, ``EngineArgs.create_engine_config``, and the model with all its layers
on torch's meta device, on the first of as many processes as it has GPUs.
"""

import enum
import importlib
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import gpu

Selected = dict[str, set[str]]


def prepare() -> None:
    """Import what all configurations share, once."""
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    platforms._current_platform = NonNvmlCudaPlatform()
    communicator = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    NonNvmlCudaPlatform.get_device_communicator_cls = classmethod(lambda cls: communicator)
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # another process would look for a GPU
    import flashinfer  # noqa: F401
    import vllm.engine.arg_utils
    import vllm.model_executor.layers.fused_moe.layer
    import vllm.model_executor.model_loader.utils  # noqa: F401
    from vllm.utils import flashinfer as support

    support.requests = SimpleNamespace(get=None)  # NVIDIA's server of cubins cannot be reached
    for model in ("gpt_oss", "qwen3_5", "qwen3_5_mtp", "minimax_m2", "kimi_k25"):
        importlib.import_module(f"vllm.model_executor.models.{model}")


def parse(argv: list[str]) -> Any:
    """The arguments of ``vllm serve`` after the parser's and the server's validation."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.common import cli_args
    except ModuleNotFoundError:  # before 0.33
        from vllm.entrypoints.openai import cli_args
    parsed = cli_args.make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(argv)
    cli_args.validate_parsed_serve_args(parsed)
    parsed.model = getattr(parsed, "model_tag", None) or parsed.model
    return parsed


def select(argv: list[str]) -> dict[str, list[str]]:
    """The back-ends by use that vLLM selects for a command line. Raises vLLM's own errors."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.usage.usage_lib import UsageContext

    clear_caches()
    config = AsyncEngineArgs.from_cli_args(parse(argv)).create_engine_config(UsageContext.OPENAI_API_SERVER)
    gpus = config.parallel_config.tensor_parallel_size
    selected: Selected = defaultdict(set)
    with set_current_vllm_config(config):
        gpu.fake_process_groups(gpus)
        stand_in_for_other_processes(parallel_state, gpus)
        parallel_state.init_distributed_environment(gpus, 0, "env://", 0, "fake")
        dcp = config.parallel_config.decode_context_parallel_size
        parallel_state.initialize_model_parallel(gpus, decode_context_model_parallel_size=dcp)
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"), gpu.on_meta():
            collect(initialize_model(vllm_config=config), "", selected)
            speculative = config.speculative_config
            if speculative and speculative.draft_model_config:
                draft = draft_config(config)
                with set_current_vllm_config(draft):
                    model = initialize_model(
                        vllm_config=draft, model_config=speculative.draft_model_config, prefix="draft_model"
                    )
                collect(model, "draft: ", selected)
    selected["quantization"].add(str(config.model_config.quantization))
    return {use: sorted(names) for use, names in selected.items()}


def clear_caches() -> None:
    """Let vLLM ask again for what depends on the environment and on the GPU."""
    from vllm.utils import flashinfer as support

    for function in vars(support).values():
        if clear := getattr(function, "cache_clear", None):
            clear()


def stand_in_for_other_processes(parallel_state: Any, count: int) -> None:
    """Answer what vLLM would exchange with the processes of the other GPUs."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    parallel_state.in_the_same_node_as = lambda group, source_rank=0: [True] * count
    MessageQueue.create_from_process_group = staticmethod(lambda *arguments, **options: None)


def draft_config(config: Any) -> Any:
    """The configuration with which vLLM loads the draft model."""
    try:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Proposer
    except ModuleNotFoundError:  # before 0.33
        from vllm.v1.spec_decode.eagle import SpecDecodeBaseProposer as Proposer
    proposer = SimpleNamespace(vllm_config=config, speculative_config=config.speculative_config)
    return Proposer._create_draft_vllm_config(proposer)


def collect(model: Any, prefix: str, selected: Selected) -> None:
    """Add what each layer of a model selected."""
    for module in model.modules():
        for use, name in layer(module):
            selected[prefix + use].add(name)


def layer(module: Any) -> Iterator[tuple[str, str]]:
    """The uses of a layer with the back-end that it selected."""
    kind, values = type(module).__name__, vars(module)
    backend = values.get("attn_backend")
    if isinstance(backend, enum.Enum):
        yield "attention of images", backend.name
    elif backend is not None:
        yield "attention", backend.get_name()
        yield "KV cache", str(values.get("kv_cache_dtype"))
        if backend.get_name() == "FLASHINFER":
            from vllm.utils.flashinfer import can_use_trtllm_attention

            xqa = can_use_trtllm_attention(module.num_heads, module.num_kv_heads)
            yield "attention, decode", "TRTLLM (XQA on SM12x)" if xqa else "FLASHINFER"
    elif getattr(module, "backend_cls", None) is not None:  # sparse attention of DeepSeek V4
        yield "attention", module.backend_cls.get_name()
        if "kv_cache_dtype" in values:
            yield "KV cache", values["kv_cache_dtype"]
    elif hasattr(module, "get_state_shape") and hasattr(module, "get_attn_backend"):
        yield "linear attention", module.get_attn_backend().get_name()
        for name in ("gdn_prefill_backend", "prefill_backend", "decode_backend"):
            if isinstance(chosen := values.get(name), str):
                yield f"linear attention, {name.removeprefix('gdn_').removesuffix('_backend')}", chosen
        rule = values.get("chunk_gated_delta_rule")
        if rule is not None:
            yield "linear attention, prefill", getattr(getattr(rule, "_forward_method", rule), "__name__", type(rule).__name__)
    method = getattr(module, "scheme", None) or getattr(module, "quant_method", None)
    if method is None or type(method).__name__.endswith(("EmbeddingMethod", "KVCacheMethod")):
        return
    chosen = {name: value for name, value in vars(method).items() if isinstance(value, enum.Enum) and name.endswith("_backend")}
    if chosen:
        for value in chosen.values():
            yield "experts", f"{type(value).__name__.removesuffix('MoeBackend')} {value.name}"
        return
    kernels = [vars(method).get(name) for name in ("kernel", "fp8_linear", "w8a8_block_fp8_linear", "w8a16_block_fp8_linear")]
    names = [type(kernel).__name__ for kernel in kernels if kernel is not None]
    backend = vars(method).get("backend")
    if not names and backend is not None:
        names = [str(getattr(backend, "value", backend))]
    use = "experts" if "Experts" in kind or "FusedMoE" in kind else "layers"
    for name in names or [type(method).__name__]:
        yield use, name
