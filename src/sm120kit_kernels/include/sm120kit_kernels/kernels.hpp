// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0
//
// What a compiled kernel offers to its callers. Plain C++: no CUTLASS, no torch, no tvm-ffi.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

namespace sm120kit_kernels {

/// D[m,n] = alpha * A[m,k] * B[n,k]^T, all pointers on the device. A and B are rows of K, two FP4 values per byte (the lower
/// nibble first) or one FP8 value per byte; D is rows of N, bfloat16. Scale factors lie in 128x4 blocks, rows padded to a
/// multiple of 128 and factors along K to a multiple of 4.
///
/// Grouped: B, B's scale factors and alpha hold `groups` problems one after the other, group g has the rows offsets[g] to
/// offsets[g + 1] of A and D, and A's scale factors of each group start at a row of their own that is a multiple of 128.
struct Problem {
  void const* a;
  void const* b;
  void const* a_scales;
  void const* b_scales;
  float const* alpha;
  std::int32_t const* offsets;  // grouped only: groups + 1 values
  void* d;
  int m;
  int n;
  int k;
  int groups;                // 1 for a dense kernel
  std::int64_t a_scale_rows;  // grouped only: rows of A's scale factors that there are
};

/// One kernel. `workspace_bytes` of device memory, aligned to 256, are the caller's until the launch has ended.
/// `launch` returns nullptr or what went wrong; it does not wait for the kernel.
struct Kernel {
  std::size_t (*workspace_bytes)(Problem const&, int multiprocessors);
  char const* (*launch)(Problem const&, int multiprocessors, void* workspace, cudaStream_t);
  int shared_bytes;
};

/// Kernels by name, such as nvfp4_dense_128x128x128. Each translation unit of kernels/ adds its own.
inline std::map<std::string, Kernel>& registry() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

struct Registered {
  Registered(char const* name, Kernel kernel) { registry().emplace(name, kernel); }
};

}  // namespace sm120kit_kernels
