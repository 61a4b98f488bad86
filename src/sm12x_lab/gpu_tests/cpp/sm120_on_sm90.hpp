// Lets code for SM120 block-scaled kernels run on a Hopper GPU: force-include it before anything else and compile for sm_90a,
//
//   nvcc -gencode arch=compute_90a,code=sm_90a -include sm120_on_sm90.hpp ...
//
// No CUTLASS file is changed. CUTLASS's own headers are included here and only what Hopper lacks is replaced:
//
//   mma.sync block_scale  the operations of mma_sm120.hpp, specialised in full (block_scaled_mma.cuh)
//   16U4_ALIGN8B          tensor maps of packed 4-bit elements: encoded as UINT8 once the rules of the 4-bit type are checked;
//                         the first coordinate and, in maps rewritten on the device, the first extent are halved
//   16U4_ALIGN16B         tensor maps that unpack 4-bit elements: a map of our own in the same 128 bytes, and a copy by the
//                         thread that issues it; ldmatrix b8x16.b4x16_p64 in software
//   clusterlaunchcontrol  the dense scheduler's queries: none succeeds, or W CTAs share all tiles (clc_workers)
//
// Beside that it can delay barrier operations at random (jitter_mask), counts the mma (mma_count) and notes NaN scales that
// reach one (nan_scales). Not covered: clusters larger than one CTA, bulk tensor stores and reductions of 4-bit elements, 6-bit
// elements, sparse mma.
#pragma once

#define SM120_ON_SM90 1

#if defined(CUTLASS_ENABLE_GDC_FOR_SM100) && defined(__CUDA_ARCH__)
#define CUTLASS_GDC_ENABLED  // griddepcontrol, where the SM120 build has it (CUTLASS_ENABLE_GDC_FOR_SM90 would add hints)
#endif

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "block_scaled_mma.cuh"

namespace sm120_on_sm90 {

static __device__ unsigned long long mma_count;
static __device__ unsigned nan_scales;   // set once an mma has been given a NaN scale
static __device__ unsigned jitter_mask;  // a barrier operation waits up to this many ns; 2^n - 1, 0 for no delay
static __device__ unsigned clc_workers;  // 0: no query succeeds
static __device__ unsigned clc_handed_out, clc_refused;

static __device__ __noinline__ void delay(unsigned mask) {
  unsigned const x = unsigned(clock64()) * 2654435761u ^ (threadIdx.x / 32 * 40503u + blockIdx.x * 69069u);
  __nanosleep((x ^ x >> 15) & mask);
}
__device__ inline void jitter() {
  if (unsigned const mask = *(unsigned volatile*)&jitter_mask) delay(mask);
}

/// Counts an mma and notes NaN among the scales that it uses: of lanes 4g and 4g+1 for A, of lane 4g for B.
template <Scale S, class Register>
__device__ inline void note_mma(Register sfa, Register sfb) {
  if (threadIdx.x % 32 == 0) atomicAdd(&mma_count, 1ull);
  uint32_t const nan = (S == Scale::ue8m0 ? 0xffffffffu : 0x7f7f7f7fu) >> (32 - 8 * sizeof(Register));
  uint32_t const used = S == Scale::ue8m0 ? ~0u : 0x7f7f7f7fu;
  uint32_t const byte = sizeof(Register) == 4 ? 0xffffffffu : (1u << (8 * sizeof(Register) % 32)) - 1;
  auto holds_nan = [&](uint32_t reg) { return (__vcmpeq4(reg & used, nan) & byte) != 0; };
  if ((threadIdx.x % 4 < 2 && holds_nan(sfa)) || (threadIdx.x % 4 == 0 && holds_nan(sfb))) nan_scales = 1;
}

// ---- tensor maps that unpack 4-bit elements: ours, in the 128 bytes of the opaque one

struct alignas(16) UnpackingMap {
  static constexpr uint64_t expected_magic = 0x3c5a0f9618e7d24bu;
  uint64_t magic, clobbered;    // CUTLASS 4.5 clears a bit of the second word of what it takes for the driver's map
  uint64_t address, stride[4];  // strides in bytes, of dimensions 1 to 4
  uint32_t dim[5], box[5], swizzle_128;
};
static_assert(sizeof(UnpackingMap) <= sizeof(CUtensorMap));

/// A word of a map. Maps in global and shared memory change while a kernel runs; kernel parameters allow plain loads only.
__host__ __device__ inline uint64_t word_of_map(void const* map, int index) {
#if defined(__CUDA_ARCH__)
  if (!__isGridConstant(map)) return ((uint64_t volatile const*)map)[index];
#endif
  return ((uint64_t const*)map)[index];
}
__host__ __device__ inline UnpackingMap* unpacking_map(void const* map) {
  return word_of_map(map, 0) == UnpackingMap::expected_magic ? (UnpackingMap*)map : nullptr;
}

/// One thread does what the bulk tensor copy would: 16 elements of 8 bytes go into each slot of 16 bytes, elements outside the
/// tensor as zeros. The packed bytes count for the barrier.
static __device__ __noinline__ void unpacking_copy(UnpackingMap const* where, uint64_t* barrier, void* destination, int32_t c0,
                                                   int32_t c1, int32_t c2, int32_t c3, int32_t c4) {
  UnpackingMap map;
  static_assert(sizeof map % 8 == 0 && offsetof(UnpackingMap, magic) == 0);
  for (unsigned i = 0; i < sizeof map / 8; ++i) ((uint64_t*)&map)[i] = word_of_map(where, i);
  uint32_t const base = uint32_t(__cvta_generic_to_shared(destination));
  uint32_t row = 0;
  for (uint32_t i4 = 0; i4 < map.box[4]; ++i4)
    for (uint32_t i3 = 0; i3 < map.box[3]; ++i3)
      for (uint32_t i2 = 0; i2 < map.box[2]; ++i2)
        for (uint32_t i1 = 0; i1 < map.box[1]; ++i1, ++row) {
          bool const inside = c1 + i1 < map.dim[1] && c2 + i2 < map.dim[2] && c3 + i3 < map.dim[3] && c4 + i4 < map.dim[4];
          uint64_t const source = map.address + (c1 + i1) * map.stride[0] + (c2 + i2) * map.stride[1] +
                                  (c3 + i3) * map.stride[2] + (c4 + i4) * map.stride[3];
          uint64_t slots[8];
#pragma unroll
          for (int s = 0; s < 8; ++s) {
            uint32_t const k = c0 + 16 * s;
            slots[s] = inside && k < map.dim[0] ? *(uint64_t const volatile*)(source + k / 2) : 0;
          }
#pragma unroll
          for (int s = 0; s < 8; ++s) {
            uint32_t address = base + 128 * row + 16 * s;
            if (map.swizzle_128) address ^= (address >> 3) & 0x70;
            asm volatile("st.shared.b64 [%0], %1;" ::"r"(address), "l"(slots[s]) : "memory");
          }
        }
  __threadfence_block();
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(uint32_t(__cvta_generic_to_shared(barrier))),
               "r"(row * map.box[0] / 2)
               : "memory");
}

/// ldmatrix.m8n16.x{Count}.b8x16.b4x16_p64: lanes 8i to 8i+7 give the rows of matrix i; lane 4r+p gets elements 4p to 4p+3 of
/// row r, each in the low bits of a byte.
template <int Count>
__device__ inline void unpacking_ldmatrix(uint32_t row_address, uint32_t (&registers)[Count]) {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    uint32_t const address = __shfl_sync(0xffffffff, row_address, 8 * i + lane / 4) + 2 * (lane % 4);
    uint16_t packed;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(packed) : "r"(address) : "memory");
    uint32_t const x = packed;
    registers[i] = (x & 0xf) | (x & 0xf0) << 4 | (x & 0xf00) << 8 | (x & 0xf000) << 12;
  }
}

}  // namespace sm120_on_sm90

// ---- tensor maps changed on the device: CUTLASS's functions are read under another name; ours tell the two kinds of map apart

#define prefetch_tma_descriptor original_prefetch_tma_descriptor
#define tma_descriptor_replace_addr_in_global_mem original_replace_addr_in_global_mem
#define tma_descriptor_replace_addr_in_shared_mem original_replace_addr_in_shared_mem
#define tma_descriptor_replace_dims_strides_in_shared_mem original_replace_dims_strides_in_shared_mem
#include <cute/arch/copy_sm90_desc.hpp>
#undef prefetch_tma_descriptor
#undef tma_descriptor_replace_addr_in_global_mem
#undef tma_descriptor_replace_addr_in_shared_mem
#undef tma_descriptor_replace_dims_strides_in_shared_mem

namespace cute {
CUTE_HOST_DEVICE void prefetch_tma_descriptor(TmaDescriptor const* map) {
  if (!sm120_on_sm90::unpacking_map(map)) original_prefetch_tma_descriptor(map);
}
CUTE_HOST_DEVICE void tma_descriptor_replace_addr_in_global_mem(TmaDescriptor const* map, void const* const address) {
  if (auto* ours = sm120_on_sm90::unpacking_map(map))
    ours->address = reinterpret_cast<uint64_t>(address);
  else
    original_replace_addr_in_global_mem(map, address);
}
CUTE_HOST_DEVICE void tma_descriptor_replace_addr_in_shared_mem(TmaDescriptor& map, void const* const address) {
  if (auto* ours = sm120_on_sm90::unpacking_map(&map))
    ours->address = reinterpret_cast<uint64_t>(address);
  else
    original_replace_addr_in_shared_mem(map, address);
}
CUTE_HOST_DEVICE void tma_descriptor_replace_dims_strides_in_shared_mem(TmaDescriptor& map,
                                                                        cute::array<uint32_t, 5> const& shape,
                                                                        cute::array<uint64_t, 5> const& stride) {
  if (auto* ours = sm120_on_sm90::unpacking_map(&map)) {
    for (int i = 0; i < 5; ++i) ours->dim[i] = shape[i];
    for (int i = 0; i < 4; ++i) ours->stride[i] = stride[i + 1];
  } else {
    original_replace_dims_strides_in_shared_mem(map, shape, stride);
  }
}
}  // namespace cute

// ---- jitter: CUTLASS calls its synchronisation log at each barrier operation

#include <cutlass/cutlass.h>
#include <cutlass/arch/synclog.hpp>
namespace cutlass::arch {
__device__ inline void sm120_on_sm90_jitter() { sm120_on_sm90::jitter(); }
}  // namespace cutlass::arch
#define synclog_emit_cluster_barrier_wait(...) sm120_on_sm90_jitter()
#define synclog_emit_cluster_barrier_try_wait(...) sm120_on_sm90_jitter()
#define synclog_emit_cluster_barrier_arrive(...) sm120_on_sm90_jitter()
#define synclog_emit_cluster_barrier_arrive_cluster(...) sm120_on_sm90_jitter()
#define synclog_emit_cluster_transaction_barrier_arrive_and_expect_tx(...) sm120_on_sm90_jitter()
#define synclog_emit_named_barrier_arrive_and_wait(...) sm120_on_sm90_jitter()
#include <cutlass/arch/barrier.h>
#undef synclog_emit_cluster_barrier_wait
#undef synclog_emit_cluster_barrier_try_wait
#undef synclog_emit_cluster_barrier_arrive
#undef synclog_emit_cluster_barrier_arrive_cluster
#undef synclog_emit_cluster_transaction_barrier_arrive_and_expect_tx
#undef synclog_emit_named_barrier_arrive_and_wait

// ---- tensor maps encoded on the host

#include <cutlass/cuda_host_adapter.hpp>

namespace sm120_on_sm90 {

/// The rules of cuTensorMapEncodeTiled for 4-bit types (CUDA driver API, cuda.h 13.0). A broken one is printed.
inline bool obeys_rules(bool unpacks, cuuint32_t rank, void const* address, cuuint64_t const* dim, cuuint64_t const* stride,
                        cuuint32_t const* box, cuuint32_t const* element_stride, CUtensorMapInterleave interleave,
                        CUtensorMapSwizzle swizzle) {
  bool good = true;
  auto rule = [&](bool holds, char const* text, unsigned long long value) {
    if (holds) return;
    good = false;
    std::fprintf(stderr, "sm120_on_sm90: tensor map of %s refused: %s, is %llu\n", unpacks ? "16U4_ALIGN16B" : "16U4_ALIGN8B",
                 text, value);
  };
  unsigned const align = unpacks ? 32 : 16;
  rule(rank >= 1 && rank <= 5, "rank must be 1 to 5", rank);
  rule(reinterpret_cast<uint64_t>(address) % align == 0, "the address must be a multiple of 16, or 32 when unpacking",
       reinterpret_cast<uint64_t>(address));
  rule(dim[0] % (unpacks ? 128 : 2) == 0, "globalDim[0] must be a multiple of 2, or 128 when unpacking", dim[0]);
  rule(interleave == CU_TENSOR_MAP_INTERLEAVE_NONE, "interleaving is not emulated", interleave);
  for (cuuint32_t i = 0; i < rank; ++i) {
    rule(dim[i] >= 1 && dim[i] <= (1ull << 32), "globalDim must be 1 to 2^32", dim[i]);
    rule(box[i] >= 1 && box[i] <= 256, "boxDim must be 1 to 256", box[i]);
    rule(element_stride[i] == 1, "element strides are not emulated", element_stride[i]);
    if (i + 1 < rank) rule(stride[i] % align == 0, "globalStrides must be multiples of 16, or 32 when unpacking", stride[i]);
    if (i + 1 < rank) rule(stride[i] < (1ull << 40), "globalStrides must be less than 2^40", stride[i]);
  }
  rule(box[0] / 2 % 16 == 0, "the bytes of boxDim[0] must be a multiple of 16", box[0] / 2);
  if (unpacks) {
    rule(box[0] == 128, "boxDim[0] must be 128", box[0]);
    rule(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || swizzle == CU_TENSOR_MAP_SWIZZLE_128B, "the swizzle must be none or 128B",
         swizzle);
  } else {
    unsigned const span = swizzle == CU_TENSOR_MAP_SWIZZLE_32B ? 32 : swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
    rule(swizzle == CU_TENSOR_MAP_SWIZZLE_NONE || box[0] / 2 <= span, "the inner box must fit into the swizzle's span",
         box[0] / 2);
  }
  return good;
}

inline CUresult checked_cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                               cuuint64_t const* dim, cuuint64_t const* stride, cuuint32_t const* box,
                                               cuuint32_t const* element_stride, CUtensorMapInterleave interleave,
                                               CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                               CUtensorMapFloatOOBfill fill) {
  bool const unpacks = type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B;
  if (type != CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B && !unpacks) {
    return cutlass::call_cuTensorMapEncodeTiled(map, type, rank, address, dim, stride, box, element_stride, interleave, swizzle,
                                                promotion, fill);
  }
  if (!obeys_rules(unpacks, rank, address, dim, stride, box, element_stride, interleave, swizzle))
    return CUDA_ERROR_INVALID_VALUE;
  if (unpacks) {
    UnpackingMap ours{};
    ours.magic = UnpackingMap::expected_magic;
    ours.address = reinterpret_cast<uint64_t>(address);
    ours.swizzle_128 = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
    for (cuuint32_t i = 0; i < 5; ++i) {
      ours.dim[i] = i < rank ? uint32_t(dim[i]) : 1;
      ours.box[i] = i < rank ? box[i] : 1;
      if (i + 1 < rank) ours.stride[i] = stride[i];
    }
    std::memcpy(map, &ours, sizeof ours);
    return CUDA_SUCCESS;
  }
  cuuint64_t bytes[5];
  cuuint32_t box_bytes[5];
  for (cuuint32_t i = 0; i < rank; ++i) bytes[i] = i == 0 ? dim[0] / 2 : dim[i], box_bytes[i] = i == 0 ? box[0] / 2 : box[i];
  return cutlass::call_cuTensorMapEncodeTiled(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, rank, address, bytes, stride, box_bytes,
                                              element_stride, interleave, swizzle, promotion, fill);
}
template <class... Arguments>
CUresult checked_cuTensorMapEncodeIm2col(Arguments... arguments) {
  return cutlass::call_cuTensorMapEncodeIm2col(arguments...);
}

}  // namespace sm120_on_sm90

#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(function) sm120_on_sm90::checked_##function

// ---- bulk tensor loads

#include <cute/tensor.hpp>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/mma_sm120.hpp>
#include <cute/atom/copy_traits_sm90_tma.hpp>

namespace cute {

namespace detail {
template <>
struct CallCOPY<SM90_TMA_LOAD_OP> {
  template <class... Coordinate>
  CUTE_HOST_DEVICE void operator()(TmaDescriptor const* map, uint64_t* barrier, uint64_t cache_hint, void* destination,
                                   Coordinate const&... coordinate) const {
#if defined(__CUDA_ARCH__)
    if (auto* ours = sm120_on_sm90::unpacking_map(map)) {
      int32_t const c[5] = {int32_t(coordinate)...};
      return sm120_on_sm90::unpacking_copy(ours, barrier, destination, c[0], c[1], c[2], c[3], c[4]);
    }
#endif
    SM90_TMA_LOAD::copy(map, barrier, cache_hint, destination, int32_t(coordinate)...);
  }
};
}  // namespace detail

template <class... Args>
struct TMA_LOAD_Unpack<SM90_TMA_LOAD_OP, Args...> {
  template <class TS, class SLayout, class TD, class DLayout>
  CUTE_HOST_DEVICE friend constexpr void copy_unpack(Copy_Traits<SM90_TMA_LOAD_OP, Args...> const& traits,
                                                     Tensor<TS, SLayout> const& src, Tensor<TD, DLayout>& dst) {
    static_assert(is_smem<TD>::value, "a bulk tensor load goes to shared memory");
    auto coordinate = [&] {
      auto elements = src.data().coord_;
      if constexpr (sizeof_bits_v<typename TD::value_type> == 4)  // packed: the map counts bytes
        return replace<0>(elements, int32_t(get<0>(elements)) / 2);
      else
        return elements;
    }();
    void* destination = cute::raw_pointer_cast(dst.data());
    return detail::explode_tuple(detail::CallCOPY<SM90_TMA_LOAD_OP>{}, traits.opargs_, tuple_seq<decltype(traits.opargs_)>{},
                                 make_tuple(destination), seq<0>{}, coordinate, tuple_seq<decltype(coordinate)>{});
  }
};

namespace detail {

// Extents for maps rewritten on the device: more specialised than CUTLASS's overload for copy traits.
template <class Iterator, class GLayout, class Op, class Bits, class Aux, class ShapeT, size_t TmaRank>
CUTE_HOST_DEVICE constexpr void fill_tma_gmem_shape_stride(Copy_Traits<Op, Bits, Aux> const&,
                                                           Tensor<ViewEngine<Iterator>, GLayout> const& gtensor,
                                                           cute::array<ShapeT, TmaRank>& shape,
                                                           cute::array<uint64_t, TmaRank>& stride) {
  fill_tma_gmem_shape_stride(gtensor, cute::stride(typename Aux::TmaGmemBasis{}), shape, stride);
  using Element = remove_cv_t<typename ViewEngine<Iterator>::value_type>;
  if constexpr (is_same_v<Element, float_e2m1_t> || is_same_v<Element, type_erased_dynamic_float4_t>) shape[0] /= 2;
}

#define SM120_ON_SM90_LDMATRIX(OPERATION, COUNT)                                                     \
  template <>                                                                                        \
  struct CallCOPY<OPERATION> {                                                                       \
    template <class Row, class... Register>                                                          \
    CUTE_HOST_DEVICE void operator()(Row const& row, Register&... registers) const {                 \
      uint32_t loaded[COUNT] = {};                                                                   \
      CUTE_ON_DEVICE(sm120_on_sm90::unpacking_ldmatrix<COUNT>(cast_smem_ptr_to_uint(&row), loaded)); \
      int i = 0;                                                                                     \
      ((registers = loaded[i++]), ...);                                                              \
    }                                                                                                \
  };
#if defined(__CUDA_ARCH__)
#define CUTE_ON_DEVICE(...) __VA_ARGS__
#else
#define CUTE_ON_DEVICE(...)
#endif
SM120_ON_SM90_LDMATRIX(SM100_SU4_DU8x16_x1_LDSM_N, 1)
SM120_ON_SM90_LDMATRIX(SM100_SU4_DU8x16_x2_LDSM_N, 2)
SM120_ON_SM90_LDMATRIX(SM100_SU4_DU8x16_x4_LDSM_N, 4)
#undef SM120_ON_SM90_LDMATRIX

}  // namespace detail

// ---- mma

#define SM120_ON_SM90_MMA(OPERATION, A, B, SF, VECTOR, SFREG, ...)                                                             \
  template <>                                                                                                                  \
  struct SM120::BLOCKSCALED::OPERATION<float_##A##_t, float_##B##_t, float, float_##SF##_t, VECTOR> {                          \
    using DRegisters = float[4];                                                                                               \
    using ARegisters = uint32_t[4];                                                                                            \
    using BRegisters = uint32_t[2];                                                                                            \
    using CRegisters = float[4];                                                                                               \
    using SFARegisters = SFREG[1];                                                                                             \
    using SFBRegisters = SFREG[1];                                                                                             \
    static constexpr int SFBits = 8 * sizeof(SFREG);                                                                           \
    using RegTypeSF = SFREG;                                                                                                   \
    CUTE_HOST_DEVICE static void fma(float& d0, float& d1, float& d2, float& d3, uint32_t const& a0, uint32_t const& a1,       \
                                     uint32_t const& a2, uint32_t const& a3, uint32_t const& b0, uint32_t const& b1,           \
                                     float const& c0, float const& c1, float const& c2, float const& c3, SFREG const& sfa,     \
                                     SFREG const& sfb) {                                                                       \
      CUTE_ON_DEVICE(sm120_on_sm90::note_mma<sm120_on_sm90::Scale::SF>(sfa, sfb);                                              \
                     auto const result = sm120_on_sm90::__VA_ARGS__({{a0, a1, a2, a3}, {b0, b1}, sfa, sfb, {c0, c1, c2, c3}}); \
                     d0 = result.d[0]; d1 = result.d[1]; d2 = result.d[2]; d3 = result.d[3];)                                  \
    }                                                                                                                          \
  };
SM120_ON_SM90_MMA(SM120_16x8x64_TN_VS, e2m1, e2m1, ue4m3, 16, uint32_t, mma_m16n8k64<sm120_on_sm90::Scale::ue4m3, 16>)
SM120_ON_SM90_MMA(SM120_16x8x64_TN_VS, e2m1, e2m1, ue8m0, 16, uint32_t, mma_m16n8k64<sm120_on_sm90::Scale::ue8m0, 16>)
SM120_ON_SM90_MMA(SM120_16x8x64_TN_VS, e2m1, e2m1, ue8m0, 32, uint16_t, mma_m16n8k64<sm120_on_sm90::Scale::ue8m0, 32>)
SM120_ON_SM90_MMA(SM120_16x8x32_TN_VS, e4m3, e4m3, ue8m0, 32, uint8_t,
                  mma_m16n8k32<sm120_on_sm90::Element::e4m3, sm120_on_sm90::Element::e4m3>)
SM120_ON_SM90_MMA(SM120_16x8x32_TN_VS, e4m3, e2m1, ue8m0, 32, uint8_t,
                  mma_m16n8k32<sm120_on_sm90::Element::e4m3, sm120_on_sm90::Element::e2m1>)
SM120_ON_SM90_MMA(SM120_16x8x32_TN_VS, e2m1, e4m3, ue8m0, 32, uint8_t,
                  mma_m16n8k32<sm120_on_sm90::Element::e2m1, sm120_on_sm90::Element::e4m3>)
#undef SM120_ON_SM90_MMA
#undef CUTE_ON_DEVICE

}  // namespace cute

// ---- cluster launch control, for clusters of one CTA

#include <cutlass/gemm/kernel/sm100_tile_scheduler.hpp>

namespace sm120_on_sm90 {

/// Four words in place of the opaque response: the CTA's coordinates and whether it is one.
__device__ inline uint4 next_cta() {
  unsigned const total = gridDim.x * gridDim.y * gridDim.z, workers = min(clc_workers, total);
  if (workers == 0) return {0, 0, 0, 0};
  unsigned const next = workers + atomicAdd(&clc_handed_out, 1);
  if (next < total) return {next % gridDim.x, next / gridDim.x % gridDim.y, next / gridDim.x / gridDim.y, 1};
  if (atomicAdd(&clc_refused, 1) == workers - 1) {  // every worker has had its refusal: ready for the next launch
    clc_refused = 0;
    __threadfence();
    clc_handed_out = 0;
  }
  return {0, 0, 0, 0};
}
__device__ inline bool starts_with_work() {
  return clc_workers == 0 || blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z) < clc_workers;
}

}  // namespace sm120_on_sm90

namespace cutlass::gemm::kernel::detail {

#define SM120_ON_SM90_CLC(STAGES)                                                                                              \
  template <>                                                                                                                  \
  CUTLASS_HOST_DEVICE void PersistentTileSchedulerSm100<cute::Shape<cute::_1, cute::_1, cute::_1>, STAGES>::issue_clc_query(   \
      PipelineState<STAGES> state, uint32_t barrier, CLCResponse* response) {                                                  \
    SM120_ON_SM90_DEVICE(                                                                                                      \
        uint4 const next = sm120_on_sm90::next_cta();                                                                          \
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(cute::cast_smem_ptr_to_uint(&response[state.index()])),  \
                     "r"(next.x), "r"(next.y), "r"(next.z), "r"(next.w) : "memory");                                           \
        __threadfence_block();                                                                                                 \
        asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], 16;" ::"r"(barrier) : "memory");)                 \
  }                                                                                                                            \
  template <>                                                                                                                  \
  CUTLASS_DEVICE auto                                                                                                          \
  PersistentTileSchedulerSm100<cute::Shape<cute::_1, cute::_1, cute::_1>, STAGES>::work_tile_info_from_clc_response(           \
      uint32_t address) -> WorkTileInfo {                                                                                      \
    uint4 response{};                                                                                                          \
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"                                                                    \
                 : "=r"(response.x), "=r"(response.y), "=r"(response.z), "=r"(response.w)                                      \
                 : "r"(address)                                                                                                \
                 : "memory");                                                                                                  \
    WorkTileInfo tile{};                                                                                                       \
    tile.M_idx = response.x;                                                                                                   \
    tile.N_idx = response.y;                                                                                                   \
    tile.L_idx = response.z;                                                                                                   \
    tile.is_valid_tile = response.w != 0;                                                                                      \
    return tile;                                                                                                               \
  }                                                                                                                            \
  template <>                                                                                                                  \
  template <class Cluster>                                                                                                     \
  CUTLASS_DEVICE auto PersistentTileSchedulerSm100<cute::Shape<cute::_1, cute::_1, cute::_1>, STAGES>::initial_work_tile_info( \
      Cluster) -> WorkTileInfo {                                                                                               \
    return swizzle_and_rasterize(blockIdx.x, blockIdx.y, blockIdx.z, sm120_on_sm90::starts_with_work(), 0, 0);                 \
  }
#if defined(__CUDA_ARCH__)
#define SM120_ON_SM90_DEVICE(...) __VA_ARGS__
#else
#define SM120_ON_SM90_DEVICE(...)
#endif
SM120_ON_SM90_CLC(2)
SM120_ON_SM90_CLC(3)
#undef SM120_ON_SM90_CLC
#undef SM120_ON_SM90_DEVICE

}  // namespace cutlass::gemm::kernel::detail
