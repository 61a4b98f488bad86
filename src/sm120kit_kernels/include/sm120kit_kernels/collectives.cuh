// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0
//
// CUTLASS's own collectives for SM120, put together for one format and one tile. The tile's K counts elements.

#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/packed_stride.hpp"
#include "sm120kit/stage_count.hpp"
#include "sm120kit_kernels/kernels.hpp"

namespace sm120kit_kernels {

/// 16 values of e2m1 share a scale factor of type ue4m3.
struct Nvfp4 {
  using Operand = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
};
/// 32 values of e2m1 share a power of two.
struct Mxfp4 {
  using Operand = cutlass::mx_float4_t<cutlass::float_e2m1_t>;
};
/// 32 values of e4m3 share a power of two.
struct Mxfp8 {
  using Operand = cutlass::mx_float8_t<cutlass::float_e4m3_t>;
};

template <class Format, int M, int N, int K, bool Grouped>
struct Collectives {
  using Operand = typename Format::Operand;
  using Element = typename Operand::DataType;
  using ScaleFactor = typename Operand::ScaleFactorType;
  using Output = cutlass::bfloat16_t;
  using Tile = cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  template <class Layout>
  using Tag = cute::conditional_t<Grouped, Layout*, Layout>;
  // TMA requires rows of A, B and D to start at multiples of 16 bytes.
  static constexpr int kAlignment = 128 / cutlass::sizeof_bits<Element>::value;
  static constexpr int kOutputAlignment = 128 / cutlass::sizeof_bits<Output>::value;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Tag<cutlass::layout::RowMajor>, kOutputAlignment,
      Output, Tag<cutlass::layout::RowMajor>, kOutputAlignment, cutlass::epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, Operand, Tag<cutlass::layout::RowMajor>, kAlignment,
      Operand, Tag<cutlass::layout::ColumnMajor>, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::collective::KernelScheduleAuto>::CollectiveOp;
  using Shape = cute::conditional_t<Grouped, cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>,
                                    cute::Shape<int, int, int, int>>;
  /// The largest stage count that fits.
  using Kernel = typename sm120kit::FittingKernel<cutlass::gemm::kernel::GemmUniversal<Shape, Mainloop, Epilogue>>::type;
  static_assert(Kernel::SharedStorageSize <= 101376, "a CTA of SM120 has 101,376 bytes of shared memory");
};

/// A kernel under a name of its own, which its device code then carries, by which a library can be searched for it.
/// Its parameters are a type of their own, and Name is a template parameter, because nvcc 13.0 does not manage to write down
/// inherited ones in the stub that launches the kernel.
template <class Name>
struct Named : Name::Kernel {
  using Arguments = typename Name::Kernel::Arguments;
  struct Params : Name::Kernel::Params {};
  static Params to_underlying_arguments(Arguments const& arguments, void* workspace) {
    return {Name::Kernel::to_underlying_arguments(arguments, workspace)};
  }
};

inline cutlass::KernelHardwareInfo hardware(int multiprocessors) {
  cutlass::KernelHardwareInfo info;
  info.sm_count = multiprocessors;
  return info;
}

/// Check, set up and launch. The answer is nullptr or the reason, in static storage.
template <class Gemm>
char const* launch_gemm(typename Gemm::Arguments const& arguments, void* workspace, cudaStream_t stream) {
  cutlass::Status status = Gemm::can_implement(arguments);
  if (status != cutlass::Status::kSuccess) {
    return "CUTLASS refuses this problem: shapes or alignment";
  }
  Gemm gemm;
  status = gemm.initialize(arguments, workspace, stream);
  if (status == cutlass::Status::kSuccess) {
    status = gemm.run(stream);
  }
  if (status == cutlass::Status::kSuccess) {
    return nullptr;
  }
  cudaError_t const error = cudaGetLastError();
  return error == cudaSuccess ? cutlass::cutlassGetStatusString(status) : cudaGetErrorString(error);
}

}  // namespace sm120kit_kernels
