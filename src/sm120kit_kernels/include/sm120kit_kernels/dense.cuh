// Copyright 2026 sm120kit developers
// SPDX-License-Identifier: Apache-2.0

#pragma once

#include "sm120kit_kernels/collectives.cuh"

namespace sm120kit_kernels {

template <class GemmKernel>
struct Dense {
  static Kernel offer() { return {workspace_bytes, launch, static_cast<int>(GemmKernel::SharedStorageSize)}; }

  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<GemmKernel>;
  using Mainloop = typename GemmKernel::CollectiveMainloop;
  using Scales = typename Mainloop::Sm1xxBlkScaledConfig;

  static typename Gemm::Arguments arguments(Problem const& problem, int multiprocessors) {
    auto const [m, n, k] = cute::make_tuple(problem.m, problem.n, problem.k);
    auto const shape = cute::make_shape(m, n, k, 1);
    typename Gemm::Arguments result{
        cutlass::gemm::GemmUniversalMode::kGemm,
        shape,
        {static_cast<typename Mainloop::ArrayElementA const*>(problem.a),
         cutlass::make_cute_packed_stride(typename GemmKernel::StrideA{}, {m, k, 1}),
         static_cast<typename Mainloop::ArrayElementB const*>(problem.b),
         cutlass::make_cute_packed_stride(typename GemmKernel::StrideB{}, {n, k, 1}),
         static_cast<typename Mainloop::ElementSF const*>(problem.a_scales), Scales::tile_atom_to_shape_SFA(shape),
         static_cast<typename Mainloop::ElementSF const*>(problem.b_scales), Scales::tile_atom_to_shape_SFB(shape)},
        {{}, nullptr, {}, static_cast<typename GemmKernel::ElementD*>(problem.d),
         cutlass::make_cute_packed_stride(typename GemmKernel::StrideD{}, {m, n, 1})},
        hardware(multiprocessors)};
    result.epilogue.thread.alpha_ptr = problem.alpha;
    return result;
  }

  static std::size_t workspace_bytes(Problem const& problem, int multiprocessors) {
    return Gemm::get_workspace_size(arguments(problem, multiprocessors));
  }

  static char const* launch(Problem const& problem, int multiprocessors, void* workspace, cudaStream_t stream) {
    return launch_gemm<Gemm>(arguments(problem, multiprocessors), workspace, stream);
  }
};

/// Defines a dense kernel and adds it to the registry.
#define SM120KIT_DENSE(NAME, FORMAT, M, N, K)                                                                             \
  namespace sm120kit_kernels {                                                                                            \
  struct NAME : Collectives<FORMAT, M, N, K, false> {};                                                                   \
  static Registered const NAME##_registered{#NAME, Dense<Named<NAME>>::offer()};                                          \
  }

}  // namespace sm120kit_kernels
