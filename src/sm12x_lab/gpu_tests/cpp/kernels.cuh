// The kernel under test, one configuration per program: its types and how to launch it.
//
// -DDTYPE=nvfp4|mxfp4|mxfp8|fp8xmxfp4 (activations x weights)  -DTILE_M -DTILE_N -DTILE_K (elements)  -DGROUPED=0|1
// -DPINGPONG=0|1  -DSWAP=0|1  -DFINALIZE=0|1  -DOUTPUT=bf16|f16  -DSTREAMK=0|1  -DSTAGES=n (0: automatic)
//
// What FlashInfer can launch is launched by FlashInfer's own launcher. It has no MXFP4, no pingpong and, before 0.7, no dense
// swap, and chooses the stage count itself: for these the same types are built here and handed the same arguments. So is
// MXFP8, whose kernels FlashInfer 0.7 wraps in one that refuses to run anywhere but on SM12x.
#pragma once

#if FINALIZE  // FlashInfer has names of its own spelt like that
#define FINALIZED 1
#define FUSION_NAME FINALIZE
#else
#define FINALIZED 0
#define FUSION_NAME NONE
#endif
#undef FINALIZE
#if PINGPONG
#define PINGPONG_SCHEDULE 1
#else
#define PINGPONG_SCHEDULE 0
#endif
#undef PINGPONG

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp4.h>
#include <cuda_fp8.h>

#include "problem.cuh"

#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_tma_ws_launcher.inl"

#include "cutlass/util/packed_stride.hpp"
#include "flashinfer/gemm/fp4_gemm_cutlass_template_sm120.h"

#define flashinfer_type_bf16 __nv_bfloat16
#define flashinfer_type_f16 half
#define paste_(a, b) a##b
#define paste(a, b) paste_(a, b)
#define FLASHINFER_OUTPUT paste(flashinfer_type_, OUTPUT)
#define is_nvfp4_nvfp4 1
#define is_nvfp4_mxfp4 0
#define is_nvfp4_mxfp8 0
#define is_nvfp4_fp8xmxfp4 0
#define bool_0 false
#define bool_1 true

// From 0.7 on FlashInfer chooses schedules and scheduler of its dense NVFP4 kernels itself: they are taken from its own macro.
#if paste(is_nvfp4_, DTYPE) && !GROUPED && !PINGPONG_SCHEDULE && STAGES == 0 && \
    __has_include("flashinfer/gemm/mxfp8_gemm_template_sm120.h")
#define OWN_DENSE 1
#define OWN_DENSE_GEMM_(T, M, N, K, SWAPPED, SCHEDULER) Fp4Gemm_##T##_##M##_##N##_##K##SWAPPED##SCHEDULER
#define OWN_DENSE_GEMM(...) OWN_DENSE_GEMM_(__VA_ARGS__)
#define INSTANTIATE_DENSE(...) INSTANTIATE_FP4_GEMM_KERNEL_LAUNCHER(__VA_ARGS__)
#if STREAMK
#define SCHEDULER_NAME _StreamK
#else
#define SCHEDULER_NAME
#endif
namespace flashinfer::gemm {
template <class>
std::size_t not_launched(...) {
  return 0;
}
#define runFp4GemmImpl not_launched  // else each program would have the kernels of both schedulers
INSTANTIATE_DENSE(FLASHINFER_OUTPUT, TILE_M, TILE_N, TILE_K, 1, 1, 1, _1SM, paste(bool_, SWAP))
#undef runFp4GemmImpl
}  // namespace flashinfer::gemm
#else
#define OWN_DENSE 0
#endif

namespace verify {

using namespace cute;

namespace dtype {
using namespace cutlass;
struct nvfp4 {
  using Activation = nv_float4_t<float_e2m1_t>;
  using Weight = nv_float4_t<float_e2m1_t>;
  static constexpr Element activation = Element::e2m1, weight = Element::e2m1;
  static constexpr Scale scale = Scale::ue4m3;
  static constexpr int vector = 16, mma_k = 64;
};
struct mxfp4 : nvfp4 {
  using Activation = mx_float4_t<float_e2m1_t>;
  using Weight = mx_float4_t<float_e2m1_t>;
  static constexpr Scale scale = Scale::ue8m0;
  static constexpr int vector = 32;
};
struct mxfp8 : mxfp4 {
  using Activation = mx_float8_t<float_e4m3_t>;
  using Weight = mx_float8_t<float_e4m3_t>;
  static constexpr Element activation = Element::e4m3, weight = Element::e4m3;
  static constexpr int mma_k = 32;
};
struct fp8xmxfp4 : mxfp8 {
  using Weight = mx_float4_t<float_e2m1_t>;
  static constexpr Element weight = Element::e2m1;
};
}  // namespace dtype

using Type = dtype::DTYPE;
constexpr bool mixed = Type::activation != Type::weight;
constexpr bool is_nvfp4 = std::is_same_v<Type, dtype::nvfp4>;
constexpr OutputType output_type = OUTPUT;

using Input = tensorrt_llm::kernels::cutlass_kernels::TmaWarpSpecializedGroupedGemmInput;
using ElementD = typename tensorrt_llm::kernels::cutlass_kernels::TllmToCutlassTypeAdapter<FLASHINFER_OUTPUT>::type;
using TileShape = Shape<Int<TILE_M>, Int<TILE_N>, Int<TILE_K>>;
using ClusterShape = Shape<_1, _1, _1>;

constexpr int alignment(Element e) { return e == Element::e4m3 ? 16 : mixed ? 128 : 32; }
using PairA = conditional_t<SWAP, Type::Weight, Type::Activation>;
using PairB = conditional_t<SWAP, Type::Activation, Type::Weight>;
constexpr Element element_a = SWAP ? Type::weight : Type::activation, element_b = SWAP ? Type::activation : Type::weight;
using TagC = conditional_t<SWAP, Input::LayoutC_T, Input::LayoutC>;
template <class Layout>
using Tag = conditional_t<GROUPED, Layout*, Layout>;

// ---- types, as FlashInfer's launchers make them

#if OWN_DENSE
using AnyKernel =
    typename flashinfer::gemm::OWN_DENSE_GEMM(FLASHINFER_OUTPUT, TILE_M, TILE_N, TILE_K, paste(bool_, SWAP),
                                              SCHEDULER_NAME)::GemmKernel;
#else
#if FINALIZED
using FusionOp =
    conditional_t<SWAP,
                  cutlass::epilogue::fusion::ScaledAccPerRowBiasPerColScaleScatter<TagC, ElementD, float, ElementD, float>,
                  cutlass::epilogue::fusion::ScaledAccPerColBiasPerRowScaleScatter<TagC, ElementD, float, ElementD, float>>;
using StoredD = void;
#else
using FusionOp = cutlass::epilogue::fusion::LinearCombination<ElementD, float, conditional_t<GROUPED, ElementD, void>, float>;
using StoredD = ElementD;
#endif
using EpilogueSchedule = conditional_t<
    !PINGPONG_SCHEDULE,
    conditional_t<GROUPED, cutlass::epilogue::TmaWarpSpecialized, cutlass::epilogue::collective::EpilogueScheduleAuto>,
    conditional_t<GROUPED, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>>;
using KernelSchedule = conditional_t<!PINGPONG_SCHEDULE, cutlass::gemm::collective::KernelScheduleAuto,
                                     conditional_t<GROUPED, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong,
                                                   cutlass::gemm::KernelTmaWarpSpecializedPingpong>>;
constexpr int alignment_c = GROUPED && Type::activation == Element::e2m1 ? 32 : GROUPED ? 16 : 8;  // of C, which is never read

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, conditional_t<GROUPED, ElementD, void>, Tag<TagC>,
    alignment_c, StoredD, Tag<TagC>, 8, EpilogueSchedule, FusionOp>::CollectiveOp;

using StageCount = conditional_t<
    STAGES != 0, cutlass::gemm::collective::StageCount<STAGES>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>>;
using Mainloop =
    typename cutlass::gemm::collective::CollectiveBuilder<cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp,
                                                          PairA, Tag<cutlass::layout::RowMajor>, alignment(element_a), PairB,
                                                          Tag<cutlass::layout::ColumnMajor>, alignment(element_b), float,
                                                          TileShape, ClusterShape, StageCount, KernelSchedule>::CollectiveOp;

using AnyKernel =
    cutlass::gemm::kernel::GemmUniversal<conditional_t<GROUPED, Input::ProblemShape, Shape<int, int, int, int>>, Mainloop,
                                         Epilogue, conditional_t<STREAMK, cutlass::gemm::StreamKScheduler, void>>;
#endif
#if __has_include("sm120kit/stage_count.hpp")  // the patched launchers take a stage less where the automatic count does not fit
using Kernel = typename sm120kit::FittingKernel<AnyKernel>::type;
#else
using Kernel = AnyKernel;
#endif
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
static_assert(Kernel::SharedStorageSize <= 101376, "the kernel does not fit into the shared memory of SM120");

constexpr int stages = Kernel::CollectiveMainloop::DispatchPolicy::Stages;
using ScaleConfig = typename Kernel::CollectiveMainloop::Sm1xxBlkScaledConfig;
using ScaleLayout = typename ScaleConfig::LayoutSF;

}  // namespace verify

#if GROUPED
namespace tensorrt_llm::kernels::cutlass_kernels_oss {
#define is_mixed_nvfp4 0
#define is_mixed_mxfp4 0
#define is_mixed_mxfp8 0
#define is_mixed_fp8xmxfp4 1
#define INSTANTIATE(...) INSTANTIATE_TMA_WARP_SPECIALIZED_MOE_GEMM(__VA_ARGS__)
#if paste(is_nvfp4_, DTYPE) && !PINGPONG_SCHEDULE && STAGES == 0
INSTANTIATE(Sm120, SafeFP4, SafeFP4, FLASHINFER_OUTPUT, void, EpilogueOpDefault, FUSION_NAME, TILE_M, TILE_N, TILE_K, 1, 1, 1,
            false, false, false, paste(bool_, SWAP));
#define LAUNCHER_TYPES SafeFP4, SafeFP4
#elif paste(is_mixed_, DTYPE) && !PINGPONG_SCHEDULE && STAGES == 0
INSTANTIATE(Sm120, __nv_fp8_e4m3, SafeFP4, FLASHINFER_OUTPUT, void, EpilogueOpDefault, FUSION_NAME, TILE_M, TILE_N, TILE_K, 1,
            1, 1, true, false, false, paste(bool_, SWAP));
#define LAUNCHER_TYPES __nv_fp8_e4m3, SafeFP4
#endif
}  // namespace tensorrt_llm::kernels::cutlass_kernels_oss
#endif

namespace verify {

/// Throws when CUTLASS refuses.
inline void launch(Gemm& gemm, typename Gemm::Arguments const& arguments, void* workspace, std::size_t workspace_size,
                   bool pdl) {
  auto accept = [](cutlass::Status status, char const* what) {
    if (status != cutlass::Status::kSuccess)
      throw std::runtime_error(std::string(what) + ": " + cutlass::cutlassGetStatusString(status));
  };
  if (Gemm::get_workspace_size(arguments) > workspace_size) throw std::runtime_error("the workspace is too small");
  accept(gemm.can_implement(arguments), "can_implement");
  accept(gemm.initialize(arguments, workspace, nullptr), "initialize");
  accept(gemm.run(nullptr, nullptr, pdl), "run");
}

#if GROUPED

/// `c` are the addresses of C, of the form of D, or null; then beta is 0. FlashInfer's launcher has no C.
inline void launch_grouped(Input const& input, int groups, int sm_count, void const** c, float beta) {
#ifdef LAUNCHER_TYPES
  if (c == nullptr) {
    using namespace tensorrt_llm::kernels::cutlass_kernels_oss;
    tma_warp_specialized_generic_moe_gemm_kernelLauncher<
        cutlass::arch::Sm120, LAUNCHER_TYPES, FLASHINFER_OUTPUT, void, tensorrt_llm::cutlass_extensions::EpilogueOpDefault,
        Input::EpilogueFusion::FUSION_NAME, TileShape, ClusterShape, mixed, false, false, bool(SWAP)>(
        input, groups, sm_count, nullptr, nullptr, nullptr, make_shape(1, 1, _1{}), make_shape(1, 1, _1{}));
    return;
  }
#endif
  using MainloopArguments = typename Kernel::MainloopArguments;
  auto as = [](auto kind, auto* pointer) { return reinterpret_cast<decltype(kind)>(pointer); };
  MainloopArguments mainloop{};
  void *act = input.ptr_act, *weight = input.ptr_weight;
  void *sf_act = input.fpX_block_scaling_factors_act, *sf_weight = input.fpX_block_scaling_factors_weight;
  mainloop.ptr_A = as(mainloop.ptr_A, SWAP ? weight : act);
  mainloop.ptr_B = as(mainloop.ptr_B, SWAP ? act : weight);
  mainloop.dA = as(mainloop.dA, SWAP ? input.stride_weight : input.stride_act);
  mainloop.dB = as(mainloop.dB, SWAP ? input.stride_act : input.stride_weight);
  mainloop.ptr_SFA = as(mainloop.ptr_SFA, SWAP ? sf_weight : sf_act);
  mainloop.ptr_SFB = as(mainloop.ptr_SFB, SWAP ? sf_act : sf_weight);
  mainloop.layout_SFA = as(mainloop.layout_SFA,
                           SWAP ? input.fpX_block_scaling_factors_stride_weight : input.fpX_block_scaling_factors_stride_act);
  mainloop.layout_SFB = as(mainloop.layout_SFB,
                           SWAP ? input.fpX_block_scaling_factors_stride_act : input.fpX_block_scaling_factors_stride_weight);
  typename Kernel::EpilogueArguments epilogue{};
  auto& thread = epilogue.thread;
  thread.alpha_ptr_array = input.alpha_scale_ptr_array;
#if FINALIZED
  auto const& f = input.fused_finalize_epilogue;
  thread.dAlpha = {_0{}, _0{}, 1};
  thread.bias_ptr = as(thread.bias_ptr, f.ptr_bias);
  thread.scale_ptr_array = f.ptr_router_scales;
  thread.ptr_out = static_cast<ElementD*>(f.ptr_final_output);
#if SWAP
  thread.dOut = f.stride_final_output_transposed;
#else
  thread.dOut = f.stride_final_output;
#endif
  thread.ptr_index = f.ptr_source_token_index;
  thread.index_modulo = f.num_rows_in_final_output;
  thread.shape_override = f.shape_override;
  thread.use_reduction = f.use_reduction;
#else
  thread.beta = c == nullptr ? 0 : beta;
  thread.dAlpha = {_0{}, _0{}, 1};
  epilogue.ptr_C = reinterpret_cast<decltype(epilogue.ptr_C)>(c);
  epilogue.dC = reinterpret_cast<decltype(epilogue.dC)>(input.stride_d);
  epilogue.ptr_D = reinterpret_cast<decltype(epilogue.ptr_D)>(input.ptr_d);
  epilogue.dD = reinterpret_cast<decltype(epilogue.dD)>(input.stride_d);
#endif
  cutlass::KernelHardwareInfo hardware;
  hardware.device_id = 0;
  hardware.sm_count = sm_count;
  typename Kernel::TileScheduler::Arguments scheduler{1, Kernel::TileScheduler::RasterOrderOptions::AlongN};
  Gemm gemm;
  launch(gemm, {cutlass::gemm::GemmUniversalMode::kGrouped, input.shape_info, mainloop, epilogue, hardware, scheduler},
         input.gemm_workspace, input.gemm_workspace_size, input.enable_pdl);
}

#else

struct DenseInput {
  int m, n, k, batches;  // tokens, features
  void const *activations, *weights;
  unsigned char const *activation_scales, *weight_scales;
  int scale_k;  // the k for which the layout of the activations' scales is made
  float const* alpha;
  void* output;
};

/// By FlashInfer's own function, or with the arguments that it makes.
inline void launch_dense(DenseInput const& input, void* workspace, std::size_t workspace_size) {
  int const m = SWAP ? input.n : input.m, n = SWAP ? input.m : input.n;
  if constexpr (is_nvfp4 && (OWN_DENSE || !SWAP)) {
    if (input.scale_k == input.k) {
      flashinfer::gemm::runFp4GemmImpl<Gemm>(
          input.output, SWAP ? input.weights : input.activations, SWAP ? input.activations : input.weights,
          SWAP ? input.weight_scales : input.activation_scales, SWAP ? input.activation_scales : input.weight_scales,
          input.alpha, m, n, input.k, input.batches, static_cast<char*>(workspace), workspace_size, nullptr, "");
      return;
    }
  }
  typename Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.problem_shape = make_shape(m, n, input.k, input.batches);
  auto& mainloop = arguments.mainloop;
  using SF = remove_pointer_t<decltype(mainloop.ptr_SFA)>;
  mainloop.ptr_A = static_cast<decltype(mainloop.ptr_A)>(SWAP ? input.weights : input.activations);
  mainloop.ptr_B = static_cast<decltype(mainloop.ptr_B)>(SWAP ? input.activations : input.weights);
  mainloop.ptr_SFA = reinterpret_cast<SF*>(SWAP ? input.weight_scales : input.activation_scales);
  mainloop.ptr_SFB = reinterpret_cast<SF*>(SWAP ? input.activation_scales : input.weight_scales);
  mainloop.dA = cutlass::make_cute_packed_stride(typename Kernel::StrideA{}, make_shape(m, input.k, input.batches));
  mainloop.dB = cutlass::make_cute_packed_stride(typename Kernel::StrideB{}, make_shape(n, input.k, input.batches));
  mainloop.layout_SFA = ScaleConfig::tile_atom_to_shape_SFA(make_shape(m, n, SWAP ? input.k : input.scale_k, input.batches));
  mainloop.layout_SFB = ScaleConfig::tile_atom_to_shape_SFB(make_shape(m, n, SWAP ? input.scale_k : input.k, input.batches));
  arguments.epilogue.thread.alpha_ptr = input.alpha;
  arguments.epilogue.ptr_D = static_cast<ElementD*>(input.output);
  arguments.epilogue.dD = cutlass::make_cute_packed_stride(typename Kernel::StrideD{}, make_shape(m, n, input.batches));
  arguments.epilogue.dC = arguments.epilogue.dD;
  if constexpr (!std::is_const_v<decltype(arguments.scheduler.max_swizzle_size)>) arguments.scheduler.max_swizzle_size = 1;
  if constexpr (!std::is_const_v<decltype(arguments.scheduler.raster_order)>)
    arguments.scheduler.raster_order = decltype(arguments.scheduler.raster_order)::Heuristic;
  arguments.hw_info.cluster_shape = dim3(1, 1, 1);
  arguments.hw_info.cluster_shape_fallback = dim3(1, 1, 1);
  Gemm gemm;
  launch(gemm, arguments, workspace, workspace_size, true);
}

#endif

}  // namespace verify

// What the launchers' headers need to link.
#include "nv_internal/cpp/common/logger.cpp"
#include "nv_internal/cpp/common/stringUtils.cpp"
#include "nv_internal/cpp/common/tllmException.cpp"
