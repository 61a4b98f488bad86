// Lets a plain C++ compiler read the engine's CUDA headers, and reports the resources of every kernel type in them.
// Included before anything else. Nothing here is ever run or linked: the compiler only checks and instantiates.
#pragma once

#include <cuda_runtime.h>

// Built-in names of nvcc that host code of CUTLASS uses.
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
void __syncthreads();
int __syncthreads_and(int);
void __syncwarp(unsigned = 0xffffffffu);
void __trap();
int __float_as_int(float);
float __int_as_float(int);
namespace cutlass::arch {
int LaneId();
int SmId();
}  // namespace cutlass::arch

#include "cutlass/gemm/device/gemm_universal_adapter.h"
