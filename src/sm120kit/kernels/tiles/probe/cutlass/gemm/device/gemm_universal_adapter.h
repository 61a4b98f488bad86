// Stands in for CUTLASS's GemmUniversalAdapter, the one place where every launcher names its finished kernel type.
// Instantiating it reports the kernel as a deprecation warning, whose text holds the numbers of sm120kit_probe::Values:
//   line, pipeline stages, shared memory bytes, schedule, scheduler, MMA k-blocks per tile,
//   tile M, N, K, types of A, B and D, scale vector, scale granularity M, N, K, whether grouped, whether D is column-major.
// Kernels for other architectures than SM120 report nothing.
// The launcher's own code then uses the kernel's parameters and its device code, as the real adapter does.
#pragma once

#include <type_traits>

#include "cutlass/cutlass.h"
#include "cutlass/device_kernel.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace sm120kit_probe {

template <int... values>
struct Values;

template <class Found>
[[deprecated]] constexpr bool fact() {
  return true;
}

// 1 cooperative, 2 pingpong, 0 something else
template <class Schedule>
constexpr int schedule_of =
    std::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedCooperative, Schedule> ||
            std::is_base_of_v<cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative, Schedule>
        ? 1
    : std::is_base_of_v<cutlass::gemm::KernelTmaWarpSpecializedPingpong, Schedule> ||
            std::is_base_of_v<cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong, Schedule>
        ? 2
        : 0;

// 1 stream-k, 0 persistent
template <class Kernel, class = void>
constexpr int scheduler_of = 0;
template <class Kernel>
constexpr int scheduler_of<Kernel, std::void_t<typename Kernel::TileSchedulerTag>> =
    std::is_same_v<typename Kernel::TileSchedulerTag, cutlass::gemm::StreamKScheduler>;

template <class Element>
constexpr int type_code() {
  if constexpr (std::is_void_v<Element>) {
    return 0;
  } else if constexpr (cutlass::sizeof_bits_v<Element> == 4) {
    return 1;
  }
  return std::is_same_v<Element, cutlass::float_e4m3_t>   ? 2
         : std::is_same_v<Element, cutlass::float_e5m2_t> ? 3
         : std::is_same_v<Element, cutlass::half_t>       ? 4
         : std::is_same_v<Element, cutlass::bfloat16_t>   ? 5
                                                          : 0;
}

// Elements of K that share a scale factor of the instruction; 0 without one
template <class Mainloop, class = void>
constexpr int vector_of = 0;
template <class Mainloop>
constexpr int vector_of<Mainloop, std::void_t<decltype(Mainloop::SFVecSize)>> = Mainloop::SFVecSize;

// Rows of A, rows of B and elements of K that share a scale in fp32; 0 without one
template <class Mainloop, class = void>
struct Granularity {
  static constexpr int m = 0, n = 0, k = 0;
};
template <class Mainloop>
struct Granularity<Mainloop, std::void_t<decltype(Mainloop::ScaleGranularityM)>> {
  static constexpr int m = Mainloop::ScaleGranularityM, n = Mainloop::ScaleGranularityN, k = Mainloop::ScaleGranularityK;
};

template <class Kernel, int line>
constexpr bool report() {
  if constexpr (Kernel::ArchTag::kMinComputeCapability == 120) {
    using Mainloop = typename Kernel::CollectiveMainloop;
    using Policy = typename Mainloop::DispatchPolicy;
    using Tile = typename Kernel::TileShape;
    using Scales = Granularity<Mainloop>;
    using StrideD = std::remove_pointer_t<typename Kernel::CollectiveEpilogue::StrideD>;
    return fact<Values<line, Policy::Stages, static_cast<int>(Kernel::SharedStorageSize), schedule_of<typename Policy::Schedule>,
                       scheduler_of<Kernel>,
                       int(cute::size<2>(Tile{})) / int(cute::size<2>(typename Mainloop::TiledMma::AtomShape_MNK{})),
                       int(cute::size<0>(Tile{})), int(cute::size<1>(Tile{})), int(cute::size<2>(Tile{})),
                       type_code<typename Kernel::ElementA>(), type_code<typename Kernel::ElementB>(),
                       type_code<typename Kernel::ElementD>(),
                       vector_of<Mainloop>, Scales::m, Scales::n, Scales::k,
                       std::is_pointer_v<typename Kernel::CollectiveEpilogue::StrideD>,
                       cute::is_constant<1, decltype(cute::get<0>(StrideD{}))>::value>>();
  }
  return true;
}

template <class Kernel, int line>
struct Adapter {
  using GemmKernel = Kernel;
  using Arguments = typename Kernel::Arguments;
  using ElementA = typename Kernel::ElementA;
  using ElementB = typename Kernel::ElementB;
  using ElementC = typename Kernel::ElementC;
  using ElementD = typename Kernel::ElementD;
  using CollectiveMainloop = typename Kernel::CollectiveMainloop;
  using CollectiveEpilogue = typename Kernel::CollectiveEpilogue;
  using EpilogueOutputOp = typename CollectiveEpilogue::ThreadEpilogueOp;

  static_assert(report<Kernel, line>());

  static size_t get_workspace_size(Arguments const& arguments) { return Kernel::get_workspace_size(arguments); }
  static cutlass::Status can_implement(Arguments const& arguments) {
    return Kernel::can_implement(arguments) ? cutlass::Status::kSuccess : cutlass::Status::kInvalid;
  }
  cutlass::Status initialize(Arguments const& arguments, void* workspace = nullptr, cudaStream_t stream = nullptr) {
    (void)Kernel::to_underlying_arguments(arguments, workspace);
    (void)&Kernel::operator();
    return Kernel::initialize_workspace(arguments, workspace, stream);
  }
  template <class... Rest>
  cutlass::Status run(Rest&&...) {
    return cutlass::Status::kSuccess;
  }
};

}  // namespace sm120kit_probe

namespace cutlass::gemm::device {
template <class Kernel>
using GemmUniversalAdapter = sm120kit_probe::Adapter<Kernel, 0>;
}
