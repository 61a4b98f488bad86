// Stands in for CUTLASS's GemmUniversalAdapter, the one place where every launcher names its finished kernel type.
// Instantiating it reports the kernel as a deprecation warning, whose text holds the numbers of sm120kit_probe::Values:
//   line, pipeline stages, shared memory bytes, schedule, scheduler, MMA k-blocks per tile.
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

template <class Kernel, int line>
struct Adapter {
  using GemmKernel = Kernel;
  using Arguments = typename Kernel::Arguments;
  using ElementA = typename Kernel::ElementA;
  using ElementB = typename Kernel::ElementB;
  using ElementC = typename Kernel::ElementC;
  using ElementD = typename Kernel::ElementD;
  using Mainloop = typename Kernel::CollectiveMainloop;
  using Policy = typename Mainloop::DispatchPolicy;

  static_assert(fact<Values<line, Policy::Stages, static_cast<int>(Kernel::SharedStorageSize), schedule_of<typename Policy::Schedule>,
                            scheduler_of<Kernel>,
                            int(cute::size<2>(typename Kernel::TileShape{})) /
                                int(cute::size<2>(typename Mainloop::TiledMma::AtomShape_MNK{}))>>());

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
