// A kernel of CUTLASS's own SM120 block-scaled builder, with a plain bf16 epilogue, to be inspected by the host compiler or
// compiled by nvcc. One translation unit instantiates sm120kit_prove::Probe once for each tile.
#pragma once

#include <cute/algorithm/tensor_algorithms.hpp>  // CUTLASS's mainloop for FP4 weights beside FP8 uses it without including it
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

namespace sm120kit_prove {

using namespace cutlass;

template <class A_, class B_, int alignment_a_, int alignment_b_>
struct Operands {
  using A = A_;
  using B = B_;
  static constexpr int alignment_a = alignment_a_, alignment_b = alignment_b_;  // elements
};
using nvfp4 = Operands<nv_float4_t<float_e2m1_t>, nv_float4_t<float_e2m1_t>, 32, 32>;
using mxfp4 = Operands<mx_float4_t<float_e2m1_t>, mx_float4_t<float_e2m1_t>, 32, 32>;
using mxfp8 = Operands<mx_float8_t<float_e4m3_t>, mx_float8_t<float_e4m3_t>, 16, 16>;
using fp8xmxfp4 = Operands<mx_float8_t<float_e4m3_t>, mx_float4_t<float_e2m1_t>, 16, 128>;  // FP4 is unpacked on its way

template <class Types, bool grouped, int m, int n, int k>
struct Built {
  template <class Layout>
  using Tag = std::conditional_t<grouped, Layout*, Layout>;
  using TileShape = cute::Shape<cute::Int<m>, cute::Int<n>, cute::Int<k>>;
  using ClusterShape = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using ProblemShape =
      std::conditional_t<grouped, gemm::GroupProblemShape<cute::Shape<int, int, int>>, cute::Shape<int, int, int, int>>;
  using Epilogue = typename epilogue::collective::CollectiveBuilder<
      arch::Sm120, arch::OpClassBlockScaledTensorOp, TileShape, ClusterShape, epilogue::collective::EpilogueTileAuto, float, float,
      void, Tag<layout::RowMajor>, 8, bfloat16_t, Tag<layout::RowMajor>, 8,
      std::conditional_t<grouped, epilogue::PtrArrayTmaWarpSpecializedCooperative,
                         epilogue::TmaWarpSpecializedCooperative>>::CollectiveOp;
  using Mainloop = typename gemm::collective::CollectiveBuilder<
      arch::Sm120, arch::OpClassBlockScaledTensorOp, typename Types::A, Tag<layout::RowMajor>, Types::alignment_a,
      typename Types::B, Tag<layout::ColumnMajor>, Types::alignment_b, float, TileShape, ClusterShape,
      gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      gemm::collective::KernelScheduleAuto>::CollectiveOp;
  using Kernel = gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue, void, void>;
};

// Reports types as the text of a deprecation warning, as sm120kit_probe reports numbers.
template <int line, class Mainloop>
[[deprecated]] constexpr bool mainloop() {
  return true;
}
template <int line, class LayoutSFA, class LayoutSFB>
[[deprecated]] constexpr bool scale_factors() {
  return true;
}

template <int line, template <class> class Adapter, class Types, bool grouped, int m, int n, int k>
struct Probe {
  using Kernel = typename Built<Types, grouped, m, n, k>::Kernel;
  using Mainloop = typename Kernel::CollectiveMainloop;
#ifndef __CUDACC__
  static_assert(mainloop<line, Mainloop>());
  static_assert(scale_factors<line, typename Mainloop::SmemLayoutSFA, typename Mainloop::SmemLayoutSFB>());
#endif
  // What a launcher does: it makes the kernel's parameters on the host and its code for the device.
  static Status launch(typename Kernel::Arguments const& arguments, void* workspace, cudaStream_t stream) {
    Adapter<Kernel> adapter;
    if (Status status = adapter.initialize(arguments, workspace, stream); status != Status::kSuccess) {
      return status;
    }
    return adapter.run(stream);
  }
};

}  // namespace sm120kit_prove
