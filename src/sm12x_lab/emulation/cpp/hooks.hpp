// Puts the emulated machine below CUTLASS: includes CUTLASS's headers so that their own code runs on the host, and replaces
// only what would be an instruction. No CUTLASS file is changed. Include before any collective.
//
//   barriers     barrier.h is read as if for a device, its inline assembly discarded; the calls that it makes to CUTLASS's
//                synchronisation log at each barrier operation go to the machine
//   tensor maps  tensormap.replace and its fences: the functions of copy_sm90_desc.hpp under their own names
//   copies       the bulk tensor store by its name; detail::CallCOPY of the bulk tensor load, of ldmatrix and stmatrix
//   threads      who a thread is: elect_one_sync and the canonical indices, by their names
//   mma          the block-scaled operations, specialised in full
#pragma once

#include "device.hpp"
#include "instructions.hpp"
#include "tensormap.hpp"

// ---- an operation that is not emulated is a finding, not a printed line
#include <cute/config.hpp>
#undef CUTE_INVALID_CONTROL_PATH
#define CUTE_INVALID_CONTROL_PATH(text) emulate::report().add("not emulated", text)

// ---- the index of a thread: threadIdx, as on a device
#define elect_one_sync hidden_elect_one_sync
#define canonical_lane_idx hidden_canonical_lane_idx
#define canonical_warp_idx hidden_canonical_warp_idx
#define canonical_warp_idx_sync hidden_canonical_warp_idx_sync
#define canonical_warp_group_idx hidden_canonical_warp_group_idx
#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/cutlass.h>
#undef elect_one_sync
#undef canonical_lane_idx
#undef canonical_warp_idx
#undef canonical_warp_idx_sync
#undef canonical_warp_group_idx

namespace cute {
inline uint32_t elect_one_sync() { return threadIdx.x % 32 == 0; }
}  // namespace cute
namespace cutlass {
inline int canonical_lane_idx() { return threadIdx.x % NumThreadsPerWarp; }
inline int canonical_warp_idx() { return threadIdx.x / NumThreadsPerWarp; }
inline int canonical_warp_idx_sync() { return threadIdx.x / NumThreadsPerWarp; }
inline int canonical_warp_group_idx() { return threadIdx.x / NumThreadsPerWarpGroup; }
}  // namespace cutlass

// ---- wmma is of no use here and needs nvcc: read its header as an nvcc too old for it would
#pragma push_macro("__CUDACC_VER_MAJOR__")
#undef __CUDACC_VER_MAJOR__
#define __CUDACC_VER_MAJOR__ 8
#include <cutlass/arch/wmma.h>
#undef __CUDACC_VER_MAJOR__
#pragma pop_macro("__CUDACC_VER_MAJOR__")

// ---- tensor map and bulk store functions: CUTLASS's own are read under another name, ours take their place
#define tma_descriptor_replace_addr_in_global_mem hidden_replace_addr_in_global_mem
#define tma_descriptor_replace_addr_in_shared_mem hidden_replace_addr_in_shared_mem
#define tma_descriptor_replace_dims_strides_in_shared_mem hidden_replace_dims_strides_in_shared_mem
#define tma_descriptor_cp_fence_release hidden_cp_fence_release
#define tma_descriptor_fence_release hidden_fence_release
#define tma_descriptor_fence_acquire hidden_fence_acquire
#define tma_desc_commit_group hidden_commit_group
#define tma_desc_wait_group hidden_wait_group
#define SM90_TMA_STORE hidden_bulk_store
#define tma_store_fence hidden_store_fence
#define tma_store_arrive hidden_store_arrive
#define tma_store_wait hidden_store_wait
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#undef SM90_TMA_STORE
#undef tma_store_fence
#undef tma_store_arrive
#undef tma_store_wait
#undef tma_desc_commit_group
#undef tma_desc_wait_group
#undef tma_descriptor_replace_addr_in_global_mem
#undef tma_descriptor_replace_addr_in_shared_mem
#undef tma_descriptor_replace_dims_strides_in_shared_mem
#undef tma_descriptor_cp_fence_release
#undef tma_descriptor_fence_release
#undef tma_descriptor_fence_acquire

namespace cute {
inline void tma_descriptor_replace_addr_in_shared_mem(TmaDescriptor& where, void const* address) {
  auto map = emulate::load_map(&where);
  map.address = reinterpret_cast<std::uint64_t>(address);
  emulate::store_map(&where, map);
}
inline void tma_descriptor_replace_dims_strides_in_shared_mem(TmaDescriptor& where, cute::array<uint32_t, 5> const& dim,
                                                              cute::array<uint64_t, 5> const& stride) {
  auto map = emulate::load_map(&where);
  for (int i = 0; i < 5; ++i) map.dim[i] = dim[i];
  for (int i = 0; i < 4; ++i) map.stride[i] = stride[i + 1];
  emulate::store_map(&where, map);
}
inline void tma_descriptor_cp_fence_release(TmaDescriptor const* global, TmaDescriptor& shared) {
  if (!elect_one_sync()) return;  // the warp does it together, once
  auto map = emulate::load_map(&shared);
  map.rejected = !emulate::obeys_rules(map);
  emulate::store_map(const_cast<TmaDescriptor*>(global), map);
}
struct SM90_TMA_STORE {
  template <class... Coordinate>
  static void copy(void const* map, void const* source, Coordinate const&... coordinate) {
    emulate::bulk_store(map, emulate::machine().shared.address_of(source), {std::int32_t(coordinate)...});
  }
};
inline void tma_store_fence() {}
inline void tma_store_arrive() { emulate::machine().store_commit(); }
template <int Count>
void tma_store_wait() {
  emulate::machine().store_wait(Count);
}
inline void tma_desc_commit_group() { emulate::machine().store_commit(); }
inline void tma_desc_wait_group() { emulate::machine().store_wait(0); }
inline void tma_descriptor_fence_release() {}
inline void tma_descriptor_fence_acquire(TmaDescriptor const*) {}
}  // namespace cute

// ---- barriers
#include <cute/arch/copy_sm100_tma.hpp>
#include <cutlass/arch/config.h>
#include <cutlass/arch/memory_sm75.h>
#include <cutlass/arch/synclog.hpp>

namespace cutlass::arch {
inline void emulated_init(uint32_t address, uint32_t count) { emulate::machine().barrier_init(address, count); }
inline void emulated_wait(uint32_t address, uint32_t parity) { emulate::machine().barrier_wait(address, parity); }
inline void emulated_arrive(uint32_t address) { emulate::machine().barrier_arrive(address); }
inline void emulated_arrive_if(uint32_t address, uint32_t cta, uint32_t predicate) {
  if (cta != 0) emulate::report().add("not emulated", "an arrival in another CTA of a cluster");
  if (predicate) emulate::machine().barrier_arrive(address);
}
inline void emulated_expect(uint32_t address, uint32_t bytes) { emulate::machine().barrier_expect(address, bytes); }
inline void emulated_arrive_expect(uint32_t address, uint32_t bytes) {
  emulate::machine().barrier_expect(address, bytes);
  emulate::machine().barrier_arrive(address);
}
inline void emulated_named(uint32_t threads, uint32_t id) { emulate::machine().named_barrier(id, threads); }
inline void emulated_nothing() {}
inline void emulated_unknown(char const* what) { emulate::report().add("not emulated", what); }
}  // namespace cutlass::arch

#define synclog_emit_cluster_barrier_init(line, address, count) emulated_init(address, count)
#define synclog_emit_cluster_barrier_wait(line, address, phase) emulated_wait(address, phase)
#define synclog_emit_cluster_barrier_test_wait(line, address, phase, predicate) emulated_nothing()
#define synclog_emit_cluster_barrier_try_wait(line, address, phase) emulated_nothing()
#define synclog_emit_cluster_barrier_arrive(line, address) emulated_arrive(address)
#define synclog_emit_cluster_barrier_arrive_cluster(line, address, cta, predicate) emulated_arrive_if(address, cta, predicate)
#define synclog_emit_cluster_transaction_barrier_expect_transaction(line, address, bytes) emulated_expect(address, bytes)
#define synclog_emit_cluster_transaction_barrier_arrive_and_expect_tx(line, address, bytes) \
  emulated_arrive_expect(address, bytes)
#define synclog_emit_cluster_transaction_barrier_complete_transaction(line, address, cta, bytes, predicate) \
  emulated_unknown("complete_tx by a thread")
#define synclog_emit_named_barrier_arrive_and_wait(line, threads, id) emulated_named(threads, id)
#define synclog_emit_named_barrier_arrive(line, threads, id) emulated_unknown("bar.arrive")
#pragma push_macro("asm")
#define asm \
  if constexpr (false) asm
#define __CUDA_ARCH__ 900
#include <cutlass/arch/barrier.h>
#undef __CUDA_ARCH__
#undef asm
#pragma pop_macro("asm")
#undef synclog_emit_cluster_barrier_init
#undef synclog_emit_cluster_barrier_wait
#undef synclog_emit_cluster_barrier_test_wait
#undef synclog_emit_cluster_barrier_try_wait
#undef synclog_emit_cluster_barrier_arrive
#undef synclog_emit_cluster_barrier_arrive_cluster
#undef synclog_emit_cluster_transaction_barrier_expect_transaction
#undef synclog_emit_cluster_transaction_barrier_arrive_and_expect_tx
#undef synclog_emit_cluster_transaction_barrier_complete_transaction
#undef synclog_emit_named_barrier_arrive_and_wait
#undef synclog_emit_named_barrier_arrive

#if CUDA_BARRIER_ENABLED != 1
#error "barrier.h was read before this file: its barriers would do nothing"
#endif

// ---- copies and mma
#include <cute/tensor.hpp>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm90.hpp>
#include <cute/arch/mma_sm120.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>

inline std::size_t __cvta_generic_to_shared(void const* pointer) { return emulate::machine().shared.address_of(pointer); }

namespace emulate {

/// Addresses of the barriers, by which a copy finds its stage. Set by the driver.
struct Stages {
  std::uint32_t first_full = 0, first_empty = 0;
  int count = 0;
  int of_full(std::uint32_t address) const {
    if (address < first_full || (address - first_full) % 8 != 0 || int((address - first_full) / 8) >= count) return -1;
    return int((address - first_full) / 8);
  }
  int of_empty(std::uint32_t address) const {
    if (address < first_empty || (address - first_empty) % 8 != 0 || int((address - first_empty) / 8) >= count) return -1;
    return int((address - first_empty) / 8);
  }
};
inline Stages& stages() {
  static Stages the;
  return the;
}

template <class Lane, class Perform>
void with_warp(char const* instruction, Lane& mine, Perform perform) {
  machine().together(threadIdx.x / 32, threadIdx.x % 32, instruction, &mine, perform);
}

/// What one lane brings to a shuffle, and takes away.
template <class T>
struct ShuffleLane {
  T value;
  int from;
  T got;
};
template <class T>
T shuffle(char const* instruction, T value, int from) {
  ShuffleLane<T> mine{value, from, value};
  with_warp(instruction, mine, [](std::array<ShuffleLane<T>*, 32> const& lanes) {
    for (auto* lane : lanes)
      if (lane->from >= 0 && lane->from < 32) lane->got = lanes[lane->from]->value;
  });
  return mine.got;
}

/// What one lane brings to a ballot, and takes away.
struct BallotLane {
  bool predicate;
  unsigned got;
};

template <int Count, Matrix Kind, class... D>
void call_ldmatrix(void const* row, D&... registers) {
  LdmatrixLane mine{machine().shared.address_of(row), {}};
  with_warp(Kind == Matrix::unpacked ? "ldmatrix.b4x16_p64" : "ldmatrix", mine,
            [](std::array<LdmatrixLane*, 32> const& lanes) { ldmatrix<Count, Kind>(lanes); });
  int i = 0;
  ((registers = mine.registers[i++]), ...);
}

template <int Count, Matrix Kind, class... S>
void call_stmatrix(void* row, S const&... registers) {
  LdmatrixLane mine{machine().shared.address_of(row), {registers...}};
  with_warp("stmatrix", mine, [](std::array<LdmatrixLane*, 32> const& lanes) { stmatrix<Count, Kind>(lanes); });
}

template <int K, Element A, Element B, Scale S, int Vector>
struct MmaOperation {
  template <class SFA, class SFB>
  static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                  uint32_t b1, float c0, float c1, float c2, float c3, SFA sfa, SFB sfb) {
    MmaLane mine{{a0, a1, a2, a3}, {b0, b1}, sfa, sfb, {c0, c1, c2, c3}, {}};
    with_warp("mma", mine, [](std::array<MmaLane*, 32> const& lanes) {
      block_scaled_mma<K, A, B, S, Vector>(lanes);
      ++machine().mma_count;
    });
    d0 = mine.d[0], d1 = mine.d[1], d2 = mine.d[2], d3 = mine.d[3];
  }
};

}  // namespace emulate

inline void __syncthreads() { emulate::machine().named_barrier(0, blockDim.x); }
template <class T>
T __shfl_sync(unsigned, T value, int from, int) {
  return emulate::shuffle("shfl.idx", value, from);
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by, int) {
  return emulate::shuffle("shfl.up", value, int(threadIdx.x % 32) - int(by));
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by, int) {
  return emulate::shuffle("shfl.down", value, int(threadIdx.x % 32 + by));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int by, int) {
  return emulate::shuffle("shfl.bfly", value, int(threadIdx.x % 32) ^ by);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  emulate::BallotLane mine{predicate != 0, 0};
  emulate::with_warp("vote.ballot", mine, [](std::array<emulate::BallotLane*, 32> const& lanes) {
    unsigned all = 0;
    for (int lane = 0; lane < 32; ++lane) all |= unsigned(lanes[lane]->predicate) << lane;
    for (auto* lane : lanes) lane->got = all;
  });
  return mine.got;
}

namespace cute {

#define EMULATE_MMA(OP, K, A, B, SF, VEC, SFREG)                                                                            \
  template <>                                                                                                               \
  struct SM120::BLOCKSCALED::OP<float_##A##_t, float_##B##_t, float, float_##SF##_t, VEC>                                   \
      : emulate::MmaOperation<K, emulate::Element::A, emulate::Element::B, emulate::Scale::SF, VEC> {                       \
    using DRegisters = float[4];                                                                                            \
    using ARegisters = uint32_t[4];                                                                                         \
    using BRegisters = uint32_t[2];                                                                                         \
    using CRegisters = float[4];                                                                                            \
    using SFARegisters = SFREG[1];                                                                                          \
    using SFBRegisters = SFREG[1];                                                                                          \
    static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0, uint32_t const& a1, uint32_t const& a2, \
                    uint32_t const& a3, uint32_t const& b0, uint32_t const& b1, float const& c0, float const& c1,           \
                    float const& c2, float const& c3, SFREG const& sfa, SFREG const& sfb) {                                 \
      emulate::MmaOperation<K, emulate::Element::A, emulate::Element::B, emulate::Scale::SF, VEC>::fma(                     \
          d0, d1, d2, d3, a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, sfa, sfb);                                                \
    }                                                                                                                       \
  };
EMULATE_MMA(SM120_16x8x64_TN_VS, 64, e2m1, e2m1, ue4m3, 16, uint32_t)
EMULATE_MMA(SM120_16x8x64_TN_VS, 64, e2m1, e2m1, ue8m0, 32, uint16_t)
EMULATE_MMA(SM120_16x8x32_TN_VS, 32, e4m3, e4m3, ue8m0, 32, uint8_t)
EMULATE_MMA(SM120_16x8x32_TN_VS, 32, e4m3, e2m1, ue8m0, 32, uint8_t)
EMULATE_MMA(SM120_16x8x32_TN_VS, 32, e2m1, e4m3, ue8m0, 32, uint8_t)
#undef EMULATE_MMA

namespace detail {
#define EMULATE_LDMATRIX(OP, COUNT, KIND)                                       \
  template <>                                                                   \
  struct CallCOPY<OP> {                                                         \
    template <class Row, class... D>                                            \
    void operator()(Row const& row, D&... registers) const {                    \
      emulate::call_ldmatrix<COUNT, emulate::Matrix::KIND>(&row, registers...); \
    }                                                                           \
  };
EMULATE_LDMATRIX(SM75_U32x1_LDSM_N, 1, plain)
EMULATE_LDMATRIX(SM75_U32x2_LDSM_N, 2, plain)
EMULATE_LDMATRIX(SM75_U32x4_LDSM_N, 4, plain)
EMULATE_LDMATRIX(SM75_U16x4_LDSM_T, 2, transposed)
EMULATE_LDMATRIX(SM100_SU4_DU8x16_x1_LDSM_N, 1, unpacked)
EMULATE_LDMATRIX(SM100_SU4_DU8x16_x2_LDSM_N, 2, unpacked)
EMULATE_LDMATRIX(SM100_SU4_DU8x16_x4_LDSM_N, 4, unpacked)
#undef EMULATE_LDMATRIX

#define EMULATE_STMATRIX(OP, KIND)                                                   \
  template <>                                                                        \
  struct CallCOPY<OP> {                                                              \
    template <class Row>                                                             \
    void operator()(uint32_t const& first, uint32_t const& second, Row& row) const { \
      emulate::call_stmatrix<2, emulate::Matrix::KIND>(&row, first, second);         \
    }                                                                                \
  };
EMULATE_STMATRIX(SM90_U32x2_STSM_N, plain)
EMULATE_STMATRIX(SM90_U16x4_STSM_T, transposed)
#undef EMULATE_STMATRIX

template <>
struct CallCOPY<SM90_TMA_LOAD_OP> {
  template <class... Coordinate>
  void operator()(TmaDescriptor const* map, uint64_t* barrier, uint64_t, void* destination,
                  Coordinate const&... coordinate) const {
    auto& shared = emulate::machine().shared;
    std::uint32_t const at = shared.address_of(barrier);
    emulate::bulk_copy(emulate::load_map(map), shared.address_of(destination), at, emulate::stages().of_full(at),
                       {std::int32_t(coordinate)...});
  }
};
}  // namespace detail

}  // namespace cute
