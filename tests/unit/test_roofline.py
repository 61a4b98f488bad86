"""The roofline: numbers computed by hand, monotony, and models from a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_folders import Shapes, folder

from sm120kit.bench import roofline
from sm120kit.bench.roofline import GPUS, GpuKind, Pass, RooflineModel, Work, all_reduce_seconds
from sm120kit.core.errors import BadInput
from sm120kit.recipes import architectures, configurations
from sm120kit.recipes.architectures import Weights
from sm120kit.recipes.load import read_entries
from sm120kit.serving.checkpoint import LocalFiles
from sm120kit.serving.kv_cache import KvCache, Vectors

GPU = GpuKind("made up", (), bandwidth=1e12, fp4_flops=1e15, source="")
MAIN = Pass(fixed_bytes=8e9, expert_bytes=1e8, layers=10, experts=4, active=1, parameters=10e9)
RECORDED = read_entries(Weights, "weights", "checkpoint")
DRAFT = Pass(fixed_bytes=1e9, expert_bytes=1e8, layers=1, experts=4, active=1, parameters=1e9)
MODEL = RooflineModel(
    hidden=1024,
    layers=10,
    main=MAIN,
    draft=DRAFT,
    draft_layers=1,
    cache=KvCache(((Vectors(2, 200), 10),)),
    cache_layers=10,
    state_bytes=0.5e9,
    weight_bytes=0,
)


def test_single_user_on_a_gpu_by_hand() -> None:
    step = roofline.step(MODEL, GPU, Work(concurrency=1, context_tokens=1_000_000, drafts=0, gpus=1, cache_bytes=2))
    # 8 GB and one expert of 0.1 GB in 10 layers; 2 x 10 x 2 x 100 elements of 2 bytes a million times; 0.5 GB in and out.
    assert (step.weights, step.cache, step.states) == pytest.approx((9e-3, 8e-3, 1e-3))
    assert (step.drafting, step.all_reduces) == (0, 0)
    assert step.arithmetic == pytest.approx(20e9 / 1e15)
    assert step.seconds == pytest.approx(18e-3)
    assert roofline.roofline(MODEL, GPU, Work(1, 1_000_000, 0, 1), 1.0) == pytest.approx(1 / 18e-3)


def test_speculation_reads_more_experts_and_the_draft_head_by_hand() -> None:
    work = Work(concurrency=1, context_tokens=0, drafts=2, gpus=1)
    step = roofline.step(MODEL, GPU, work)
    # Three tokens select 4 x (1 - 0.75^3) = 2.3125 experts in each of 10 layers; two draft passes of 1.1 GB.
    assert step.weights == pytest.approx(8e-3 + 10 * 2.3125e-4)
    assert step.drafting == pytest.approx(2 * 1.1e-3)
    assert roofline.tokens_per_step(2, 0.5) == 2
    assert roofline.roofline(MODEL, GPU, work, 0.5) == pytest.approx(2 / step.seconds)
    # At best all tokens select the same expert and every draft is accepted.
    assert roofline.ceiling(MODEL, GPU, work) == pytest.approx(3 / (9e-3 + 2.2e-3 + 1e-3))


def test_all_reduces_by_hand() -> None:
    work = Work(concurrency=8, context_tokens=0, drafts=0, gpus=4)
    # 8 tokens of 1024 elements of 2 bytes are 16 KiB, for which 7.7 us are published; two in each of 10 layers.
    assert roofline.step(MODEL, GPU, work).all_reduces == pytest.approx(20 * 7.7e-6)
    assert roofline.step(MODEL, GPU, work, favourable=True).all_reduces == 0
    assert roofline.step(MODEL, GPU, replace(work, drafts=1)).all_reduces == pytest.approx(
        20 * 9.0667e-6 + 2 * 7.7e-6, rel=1e-4
    )


def test_all_reduce_times_between_published_sizes() -> None:
    sizes = (1, 1024, 16384, 16384 + 24576, 1 << 20, 1 << 21)
    assert [all_reduce_seconds(size, 4) * 1e6 for size in sizes] == pytest.approx([6.1, 6.1, 7.7, 9.75, 85.2, 170.4])
    assert all_reduce_seconds(1024, 1) == 0
    assert all_reduce_seconds(1024, 8) == pytest.approx(26.2e-6)
    assert all_reduce_seconds(1 << 20, 8) == pytest.approx(85.2e-6)


def test_step_is_bound_by_slow_arithmetic() -> None:
    slow = replace(GPU, fp4_flops=1e12)
    step = roofline.step(MODEL, slow, Work(concurrency=64, context_tokens=0, drafts=0, gpus=1))
    assert step.seconds == step.arithmetic == pytest.approx(2 * 10e9 * 64 / 1e12)


works = st.builds(
    Work,
    concurrency=st.integers(1, 64),
    context_tokens=st.integers(0, 100_000),
    drafts=st.integers(0, 6),
    gpus=st.sampled_from([1, 2, 4, 8]),
)


@given(works, st.sampled_from(RECORDED), st.floats(0, 1))
def test_rates_are_monotonic(work: Work, weights: Weights, acceptance: float) -> None:
    model, gpu = roofline.model_of(weights.repository), GPUS[1]
    assert model

    def rate(**changed: Any) -> float:
        return roofline.roofline(model, gpu, replace(work, **changed), acceptance)

    here = rate()
    assert rate(concurrency=work.concurrency + 1) > here  # more in all
    more = roofline.step(model, gpu, replace(work, concurrency=work.concurrency + 1))
    assert more.seconds >= roofline.step(model, gpu, work).seconds  # not more for each
    assert rate(context_tokens=work.context_tokens + 1000) < here or model.cache_elements(work.gpus) == 0
    assert rate(cache_bytes=1.0) >= here
    assert roofline.roofline(model, GPUS[0], work, acceptance) <= here
    assert here <= roofline.ceiling(model, gpu, work)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Sehyo/Qwen3.5-397B-A17B-NVFP4", 17),
        ("txn545/Qwen3.5-122B-A10B-NVFP4", 10),
        ("Qwen/Qwen3.5-27B-FP8", 27),
        ("lukealonso/MiniMax-M2.5-NVFP4", 10),
        ("moonshotai/Kimi-K2.5", 32),
        ("festr2/GLM-5-NVFP4-MTP", 40),
        ("nvidia/Qwen3.6-35B-A3B-NVFP4", 3),
    ],
)
def test_active_parameters_match_the_model_name(name: str, billions: int) -> None:
    found = architectures.of_checkpoint(name)
    assert found
    architecture, weights = found
    # Names count the embedding, of which a token reads one row.
    embedding = architecture.hidden * architecture.vocabulary
    active = (roofline.model(architecture, weights.bits).main.parameters + embedding) / 1e9
    assert active == pytest.approx(billions, abs=1.1, rel=0.05)


def test_bytes_match_published_checkpoints() -> None:
    published = [each for each in RECORDED if each.gigabytes]
    for each in published:
        model = roofline.model_of(each.repository)
        assert model and model.weight_bytes / 1e9 == pytest.approx(each.gigabytes, rel=0.07), each.repository
    assert len(published) >= 8


NOT_MODELLED = ("gpt-oss", "deepseek-v4", "gemma-4", "glm-5.3", "mimo", "minimax-m3", "nemotron", "qwen3.8-flash-next")
"""What an architecture cannot express: windows, compressed caches, Mamba, sparse attention over K and V, n-gram tables."""


def test_every_configuration_has_a_roofline() -> None:
    """The network between several machines is not modelled."""
    for name in configurations.names():
        configuration = configurations.load(name)
        if configuration.hardware.nodes > 1:
            continue
        assert roofline.gpu_kind(configuration.hardware.gpu), name
        assert bool(roofline.model_of(configuration.model.repository)) != name.startswith(NOT_MODELLED), name


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1597.6),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 1792.1),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 1792.1),
        ("NVIDIA GeForce RTX 5090", 1792.1),
        ("NVIDIA GB10", 273.0),
    ],
)
def test_bandwidths(text: str, gigabytes: float) -> None:
    gpu = roofline.gpu_kind(text)
    assert gpu
    assert gpu.bandwidth / 1e9 == pytest.approx(gigabytes, abs=0.1)


def test_unknown_gpu_has_no_roofline() -> None:
    assert roofline.gpu_kind("NVIDIA H200") is None


def test_ceiling_of_prefill_refuses_a_cached_one() -> None:
    model = roofline.model_of("txn545/Qwen3.5-122B-A10B-NVFP4")
    assert model
    allowed = 2 * GPUS[1].fp4_flops / (roofline.FLOPS_PER_PARAMETER * model.main.parameters)
    assert 21_791 < allowed < 2_000_000  # 8K in 0.45 s is in the same file as the prefix cache's 2,000,000
    assert allowed == pytest.approx(2 * 2000e12 / (2 * 9.01e9), rel=0.01)


def test_bad_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipes").mkdir()
    monkeypatch.setenv("SM120KIT_DATA", str(tmp_path))
    good = '[[checkpoint]]\nrepository = "a/b"\nbits = { experts = 4.5 }\nsource = "s"\n'
    for text, message in (
        (good.replace("experts", "expert"), "bits.expert"),
        (good.replace("4.5", "64"), "bits.experts"),
        ("checkpoint = ", "not TOML"),
    ):
        (tmp_path / "recipes/weights.toml").write_text(text)
        with pytest.raises(BadInput, match=message):
            architectures.weights_of("a/b")


@pytest.mark.parametrize(
    "odd",
    [
        {"layer_types": 3},
        {"layer_types": [["full_attention"]]},
        {"first_k_dense_replace": 5},
        {"num_hidden_layers": 10**30},
        {"hidden_size": 10**30},
    ],
    ids=str,
)
def test_sizes_that_no_model_has_are_no_architecture(odd: dict[str, Any]) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    assert architectures.architecture_of(sizes | experts, with_mtp=True)
    assert architectures.architecture_of(sizes | experts | odd, with_mtp=True) is None


# ---- a model folder

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "vocab_size": 100,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "attn_output_gate": True,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_ssm_dtype": "float32",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "mtp_num_hidden_layers": 1,
}


def layer(prefix: str, *, linear: bool, packed: bool) -> Shapes:
    """The tensors of one layer: experts in NVFP4 where ``packed``, all else in BF16."""
    shapes: Shapes = {f"{prefix}.mlp.gate.weight": ("BF16", (4, 64)), f"{prefix}.input_layernorm.weight": ("BF16", (64,))}
    matrices = {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}
    for name, (n, k) in matrices.items():
        shapes[f"{prefix}.mlp.shared_expert.{name}.weight"] = ("BF16", (n, k))
        for expert in range(4):
            weight = f"{prefix}.mlp.experts.{expert}.{name}.weight"
            shapes[weight] = ("U8", (n, k // 2)) if packed else ("BF16", (n, k))
            if packed:
                shapes[f"{weight}_scale"] = ("F8_E4M3", (n, k // 16))
    if linear:
        rows = {"in_proj_qkv": 128, "in_proj_z": 64, "in_proj_ba": 8, "out_proj": 64}
        return shapes | {f"{prefix}.linear_attn.{name}.weight": ("BF16", (n, 64)) for name, n in rows.items()}
    rows = {"q_proj": 512, "k_proj": 64, "v_proj": 64, "o_proj": 256}
    return shapes | {f"{prefix}.self_attn.{name}.weight": ("BF16", (n, 64)) for name, n in rows.items()}


def read(path: Path) -> RooflineModel | None:
    return roofline.model_from(LocalFiles(path))


def test_model_from_a_folder(tmp_path: Path) -> None:
    language: Shapes = {"model.language_model.embed_tokens.weight": ("BF16", (100, 64)), "lm_head.weight": ("BF16", (100, 64))}
    for number in range(4):
        language |= layer(f"model.language_model.layers.{number}", linear=number < 3, packed=True)
    vision: Shapes = {"model.visual.blocks.0.mlp.gate_proj.weight": ("BF16", (64, 64))}
    mtp = layer("mtp.layers.0", linear=False, packed=False) | {"mtp.fc.weight": ("BF16", (64, 128))}
    model = read(folder(tmp_path / "m", {"text_config": TEXT}, language | vision, mtp))
    assert model and model.draft
    expert = 3 * 64 * 32
    attention, linear, shared, router, head = 64 * 896, 64 * 264, expert, 64 * 4, 64 * 100
    fixed = attention + 3 * linear + 4 * shared + 4 * router + head
    assert model.main.fixed_bytes == 2 * fixed
    assert model.main.expert_bytes == expert * 4.5 / 8
    assert model.main.parameters == fixed + 4 * 2 * expert
    assert (model.main.layers, model.main.experts, model.main.active) == (4, 4, 2)
    drafting = attention + shared + router + 64 * 128
    # The MTP tensors include norms, a few parameters that the formulas do not count.
    assert model.draft.fixed_bytes == pytest.approx(2 * (drafting + head), rel=0.01)
    assert model.draft.expert_bytes == pytest.approx(2 * expert, rel=0.01)
    assert model.cache_elements(1) == 2 * 1 * 2 * 32
    assert model.state_bytes == 3 * 4 * 16 * 16 * 4


@pytest.mark.parametrize(
    "changed",
    [
        {"index_topk": 2048},
        {"sliding_window": 128},
        {"layer_types": ["chunked"] * 4},
        {"vocab_size": None},
        {"hybrid_override_pattern": "*M-E"},
        {"attention_chunk_size": 8192},
        {"cla_share_factor": 2},
    ],
)
def test_unsupported_folder_has_no_roofline(tmp_path: Path, changed: dict[str, Any]) -> None:
    model = folder(tmp_path / "m", {"text_config": TEXT | changed}, {"lm_head.weight": ("BF16", (100, 64))})
    assert read(model) is None


def test_latent_attention_and_dense_layers_of_a_folder(tmp_path: Path) -> None:
    text = {
        "hidden_size": 64,
        "intermediate_size": 256,
        "vocab_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    }
    tensors: Shapes = {"lm_head.weight": ("F8_E4M3", (100, 64))}
    model = read(folder(tmp_path / "m", text, tensors))
    assert model and model.draft is None and model.attended is None
    attention = 64 * (16 + 8 + 4) + 4 * (16 * 12 + 8 * 16) + 4 * 8 * 64
    shared, dense, router, head = 3 * 64 * 64, 3 * 64 * 256, 64 * 4, 6400
    assert model.main.fixed_bytes == 2 * (3 * attention + 2 * shared + dense + 2 * router) + head
    assert model.cache_elements(8) == 3 * (8 + 4)
    index = {"index_topk": 1000, "index_n_heads": 2, "index_head_dim": 8}
    sparse = read(folder(tmp_path / "s", text | index, tensors))
    assert sparse
    assert sparse.main.fixed_bytes - model.main.fixed_bytes == 2 * 3 * (16 * 2 * 8 + 64 * (8 + 2))
    work = Work(concurrency=1, context_tokens=4000, drafts=0, gpus=1)
    whole, selected = (roofline.step(sparse, GPU, work, favourable=best).cache for best in (False, True))
    assert whole == roofline.step(model, GPU, work).cache == pytest.approx(4 * selected)
