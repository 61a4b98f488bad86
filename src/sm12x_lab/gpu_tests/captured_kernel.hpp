// Included first by programs whose kernel is that of a build, from captured PTX: they have a kernel of the same name that traps, so
// that neither it nor its reference to CUTLASS's code is compiled. The preloaded driver has the captured kernel in its place.
#pragma once

#define device_kernel original_device_kernel
#include "cutlass/device_kernel.h"
#undef device_kernel

namespace cutlass {
template <typename Operator>
CUTLASS_GLOBAL __launch_bounds__(Operator::MaxThreadsPerBlock, Operator::MinBlocksPerMultiprocessor) void device_kernel(
    CUTLASS_GRID_CONSTANT typename Operator::Params const) {
  __trap();
}
}  // namespace cutlass
