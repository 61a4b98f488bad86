// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0

#pragma once

#include <cstdio>

#include "sm120kit_kernels/collectives.cuh"

namespace sm120kit_kernels {

/// The arguments of CUTLASS for each group, as arrays in device memory. Written on the device, from row offsets that the host
/// never sees, so that a launch neither waits nor changes when it is recorded in a CUDA graph.
template <class GemmKernel>
struct Groups {
  using Mainloop = typename GemmKernel::CollectiveMainloop;
  using A = typename Mainloop::ArrayElementA;
  using B = typename Mainloop::ArrayElementB;
  using ScaleFactor = typename Mainloop::ElementSF;
  using D = typename GemmKernel::ElementD;

  typename GemmKernel::ProblemShape::UnderlyingProblemShape* shapes;
  A const** a;
  B const** b;
  ScaleFactor const** a_scales;
  ScaleFactor const** b_scales;
  D** d;
  typename GemmKernel::InternalStrideA* a_strides;
  typename GemmKernel::InternalStrideB* b_strides;
  typename GemmKernel::InternalStrideD* d_strides;
  typename Mainloop::InternalLayoutSFA* a_scale_layouts;
  typename Mainloop::InternalLayoutSFB* b_scale_layouts;

  /// Cut the arrays out of memory that starts at `base`; returns the bytes they take.
  std::size_t place(void* base, int groups) {
    std::size_t at = 0;
    auto cut = [&](auto*& array) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(static_cast<char*>(base) + at);
      at += (sizeof(*array) * groups + 255) / 256 * 256;
    };
    cut(shapes), cut(a), cut(b), cut(a_scales), cut(b_scales), cut(d);
    cut(a_strides), cut(b_strides), cut(d_strides), cut(a_scale_layouts), cut(b_scale_layouts);
    return at;
  }
};

/// One thread per group.
template <class GemmKernel>
__global__ void describe_groups(Problem problem, Groups<GemmKernel> groups) {
  using Types = Groups<GemmKernel>;
  using Scales = typename Types::Mainloop::Sm1xxBlkScaledConfig;
  int const group = blockIdx.x * blockDim.x + threadIdx.x;
  if (group >= problem.groups) {
    return;
  }
  auto const padded = [](std::int64_t rows, int block) { return (rows + block - 1) / block * block; };
  std::int64_t const scales_per_row = padded(problem.k, 4 * Scales::SFVecSize) / Scales::SFVecSize;
  std::int64_t scale_row = 0;
  for (int before = 0; before < group; ++before) {
    scale_row += padded(problem.offsets[before + 1] - problem.offsets[before], 128);
  }
  std::int64_t const row = problem.offsets[group];
  int const m = problem.offsets[group + 1] - problem.offsets[group];
  bool const first = group > 0 || row == 0;
  bool const last = group + 1 < problem.groups || row + m == problem.m;
  if (!first || !last || m < 0 || row < 0 || row + m > problem.m || scale_row + padded(m, 128) > problem.a_scale_rows) {
    // The host never sees the offsets, so this is the only place that can refuse them before memory is overwritten.
    printf("sm120kit_kernels: group %d has rows %lld to %lld of %d, and scale factors from row %lld of %lld\n", group,
           static_cast<long long>(row), static_cast<long long>(row + m), problem.m, static_cast<long long>(scale_row),
           static_cast<long long>(problem.a_scale_rows));
    __trap();
  }
  auto const bytes = [](void const* base, std::int64_t values, int bits) { return static_cast<char const*>(base) + values * bits / 8; };
  constexpr int kBits = cutlass::sizeof_bits<typename GemmKernel::ElementA>::value;
  groups.shapes[group] = cute::make_shape(m, problem.n, problem.k);
  groups.a[group] = reinterpret_cast<typename Types::A const*>(bytes(problem.a, row * problem.k, kBits));
  groups.b[group] = reinterpret_cast<typename Types::B const*>(bytes(problem.b, std::int64_t(group) * problem.n * problem.k, kBits));
  groups.a_scales[group] = static_cast<typename Types::ScaleFactor const*>(problem.a_scales) + scale_row * scales_per_row;
  groups.b_scales[group] =
      static_cast<typename Types::ScaleFactor const*>(problem.b_scales) + group * padded(problem.n, 128) * scales_per_row;
  groups.d[group] = static_cast<typename Types::D*>(problem.d) + row * problem.n;
  groups.a_strides[group] = cutlass::make_cute_packed_stride(typename GemmKernel::InternalStrideA{}, {m, problem.k, 1});
  groups.b_strides[group] = cutlass::make_cute_packed_stride(typename GemmKernel::InternalStrideB{}, {problem.n, problem.k, 1});
  groups.d_strides[group] = cutlass::make_cute_packed_stride(typename GemmKernel::InternalStrideD{}, {m, problem.n, 1});
  auto const shape = cute::make_shape(m, problem.n, problem.k, 1);
  groups.a_scale_layouts[group] = Scales::tile_atom_to_shape_SFA(shape);
  groups.b_scale_layouts[group] = Scales::tile_atom_to_shape_SFB(shape);
}

template <class GemmKernel>
struct Grouped {
  static Kernel offer() { return {workspace_bytes, launch, static_cast<int>(GemmKernel::SharedStorageSize)}; }

  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;

  static typename Gemm::Arguments arguments(Problem const& problem, Groups<GemmKernel> const& groups, int multiprocessors) {
    typename Gemm::Arguments result{
        cutlass::gemm::GemmUniversalMode::kGrouped,
        {problem.groups, groups.shapes, nullptr},
        {groups.a, groups.a_strides, groups.b, groups.b_strides, groups.a_scales, groups.a_scale_layouts, groups.b_scales,
         groups.b_scale_layouts},
        {{}, nullptr, nullptr, groups.d, groups.d_strides},
        hardware(multiprocessors)};
    result.epilogue.thread.alpha_ptr = problem.alpha;
    result.epilogue.thread.dAlpha = {cute::_0{}, cute::_0{}, 1};
    return result;
  }

  static std::size_t workspace_bytes(Problem const& problem, int multiprocessors) {
    Groups<GemmKernel> groups;
    std::size_t const arrays = groups.place(nullptr, problem.groups);
    return arrays + Gemm::get_workspace_size(arguments(problem, groups, multiprocessors));
  }

  static char const* launch(Problem const& problem, int multiprocessors, void* workspace, cudaStream_t stream) {
    Groups<GemmKernel> groups;
    std::size_t const arrays = groups.place(workspace, problem.groups);
    constexpr int kThreads = 128;
    describe_groups<GemmKernel><<<(problem.groups + kThreads - 1) / kThreads, kThreads, 0, stream>>>(problem, groups);
    cudaError_t const error = cudaGetLastError();
    if (error != cudaSuccess) {
      return cudaGetErrorString(error);
    }
    return launch_gemm<Gemm>(arguments(problem, groups, multiprocessors), static_cast<char*>(workspace) + arrays, stream);
  }
};

/// Defines a grouped kernel and adds it to the registry.
#define SM120KIT_GROUPED(NAME, FORMAT, M, N, K)                                                                           \
  namespace sm120kit_kernels {                                                                                            \
  struct NAME : Collectives<FORMAT, M, N, K, true> {};                                                                    \
  static Registered const NAME##_registered{#NAME, Grouped<Named<NAME>>::offer()};                                        \
  }

}  // namespace sm120kit_kernels
