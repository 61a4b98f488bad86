// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0
//
// Kernels that fit into the shared memory of SM120.
//
// CUTLASS chooses the stage count of a mainloop by dividing what the epilogue leaves of shared memory by the bytes of one
// stage. The kernel then allocates more than that: tensor maps, barriers and scheduler storage, and both the tensors and
// the whole are rounded up to their alignment of 1024 bytes. A tile that comes close to the limit ends up above it, compiles,
// and is refused at launch. Here the kernel itself is asked: its SharedStorageSize is what the launch will request.

#pragma once

#include "cutlass/arch/arch.h"
#include "cutlass/gemm/collective/collective_mma_decl.hpp"
#include "cutlass/gemm/kernel/gemm_universal_decl.h"

namespace sm120kit {

namespace detail {

/// The same mainloop with one pipeline stage fewer. Covers all SM120 mainloops whose operands share one stage count.
template <class CollectiveMma>
struct OneStageFewer;

template <template <int, int, class, class> class DispatchPolicy, int Stages, int SchedulerStages, class ClusterShape,
          class KernelSchedule, class... Rest>
struct OneStageFewer<cutlass::gemm::collective::CollectiveMma<
    DispatchPolicy<Stages, SchedulerStages, ClusterShape, KernelSchedule>, Rest...>> {
  static_assert(Stages > 2, "This tile does not fit into the shared memory of SM120 even with two pipeline stages.");
  using type = cutlass::gemm::collective::CollectiveMma<
      DispatchPolicy<Stages - 1, SchedulerStages, ClusterShape, KernelSchedule>, Rest...>;
};

template <class GemmKernel>
constexpr bool fits() {
  return GemmKernel::ArchTag::kMinComputeCapability != 120 ||
         GemmKernel::SharedStorageSize <= cutlass::arch::sm120_smem_capacity_bytes;
}

}  // namespace detail

/// GemmKernel itself if it fits or is not for SM120; else the same kernel with the largest stage count that fits.
/// A kernel that does not fit with two stages is a compile error.
template <class GemmKernel, bool Fits = detail::fits<GemmKernel>()>
struct FittingKernel {
  using type = GemmKernel;
};

template <class ProblemShape, class Mainloop, class Epilogue, class TileScheduler, class Enable>
struct FittingKernel<cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue, TileScheduler, Enable>, false>
    : FittingKernel<cutlass::gemm::kernel::GemmUniversal<ProblemShape, typename detail::OneStageFewer<Mainloop>::type, Epilogue,
                                                         TileScheduler, Enable>> {};

}  // namespace sm120kit
