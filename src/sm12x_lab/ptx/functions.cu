// The instructions of SM120 that Hopper lacks, as functions for a warp of sm_90a. Compiled to PTX; rewritten kernels call them.
//
// Written from the PTX ISA: "Matrix Fragments for mma.m16n8k32" and "... m16n8k64", "Block Scaling for mma.sync", cvt, ldmatrix, stmatrix;
// model.py has an independent model. lane = 4 g + p:
//   A  a0 (row g, k from s p)  a1 (row g+8, same)  a2 (row g, k + half)  a3 (row g+8, k + half); m16n8k64: s = 8, half = 32,
//      elements of 4 bits; m16n8k32: s = 4, half = 16, elements in bytes, e2m1 in bits 2 to 5, e2m3 and e3m2 in bits 0 to 5
//   B  b0, b1: the same for column g
//   C  c0 c1 (row g, columns 2p, 2p+1)  c2 c3 (row g+8)
// Scales: thread selector t and byte selector j. For A, lane 4g + 2t holds those of row g and lane 4g + 2t + 1 those of row g+8;
// for B, lane 4g + t those of column g. The scales of ascending k are the bytes from j on.
//
// Arithmetic, where the ISA leaves order and rounding open: the sum of all scaled products and C is exact, and is rounded once, to
// nearest even. NaN is 0x7fffffff, or 0x7fff in f16.
#include <cuda_fp16.h>

#include <cstdint>

#include "../gpu_tests/cpp/block_scaled_mma.cuh"

namespace {

constexpr unsigned warp = 0xffffffff;

__device__ __forceinline__ uint32_t lane_id() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

// Formats in the order of rewrite.py: e4m3, e5m2, e2m3, e3m2, e2m1.
struct Format {
  int exponent, mantissa, bias;
};
__device__ __forceinline__ Format format_of(uint32_t type) {
  switch (type) {
    case 0:
      return {4, 3, 7};
    case 1:
      return {5, 2, 15};
    case 2:
      return {2, 3, 1};
    case 3:
      return {3, 2, 3};
    default:
      return {2, 1, 1};
  }
}

/// An element of a code in the low bits.
__device__ __forceinline__ double value_of(uint32_t code, uint32_t type) {
  Format const f = format_of(type);
  int const bits = f.exponent + f.mantissa;
  uint32_t const magnitude = code & ((1u << bits) - 1);
  bool const nan = (type == 0 && magnitude == 0x7f) || (type == 1 && magnitude > 0x7c);
  double value = __longlong_as_double((long long)magnitude << (52 - f.mantissa)) *
                 __longlong_as_double((long long)(2046 - f.bias) << 52);
  if (type == 1 && magnitude == 0x7c) value = __longlong_as_double(0x7ff0000000000000);
  if (nan) value = __longlong_as_double(0x7ff8000000000000);
  return code >> bits & 1 ? -value : value;
}

__device__ __forceinline__ double ue8m0(uint32_t code) {
  return code == 255 ? __longlong_as_double(0x7ff8000000000000) : __longlong_as_double((long long)(code + 896) << 52);
}
__device__ __forceinline__ double ue4m3(uint32_t code) { return value_of(code & 0x7f, 0); }

__device__ __forceinline__ uint32_t rounded(double value) {
  return isnan(value) ? 0x7fffffffu : __float_as_uint(__double2float_rn(value));
}
__device__ __forceinline__ uint32_t rounded_half(double value) {
  return isnan(value) ? 0x7fffu : __half_as_ushort(__double2half(value));
}

/// x + y exactly: the rounded sum and its error (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B).
struct Pair {
  double sum, error;
};
__device__ __forceinline__ Pair exactly(double x, double y) {
  double const sum = x + y, part = sum - x;
  return {sum, (x - (sum - part)) + (y - part)};
}

/// The exact sum of at most N doubles, as terms of ascending magnitude that do not overlap (Shewchuk, "Adaptive Precision
/// Floating-Point Arithmetic", 1997, theorem 10). `plain` is the ordinary sum, which is right where it is infinite or NaN.
template <int N>
struct ExactSum {
  double term[N] = {}, plain = 0;
  int count = 0;

  __device__ __forceinline__ void add(double x) {
    plain += x;
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (i < count) {
        Pair const p = exactly(x, term[i]);
        term[i] = p.error, x = p.sum;
      }
    term[count++] = x;
  }

  /// The sum rounded to odd: rounding it again to at most 51 bits is rounding the exact sum once.
  __device__ __forceinline__ double odd() const {
    if (!isfinite(plain)) return plain;
    double sum = 0, error = 0;
#pragma unroll
    for (int i = N - 1; i >= 0; --i)
      if (error == 0) {
        Pair const p = exactly(sum, term[i]);
        sum = p.sum, error = p.error;
      }
    long long const bits = __double_as_longlong(sum);
    return error == 0 || (bits & 1) ? sum : __longlong_as_double(bits + ((error < 0) == (sum < 0) ? 1 : -1));
  }
};

struct Scales {
  uint32_t row[2], column[2];
};
__device__ __forceinline__ Scales scales_of(uint32_t sfa, uint32_t byte_a, uint32_t thread_a, uint32_t sfb, uint32_t byte_b,
                                            uint32_t thread_b) {
  uint32_t const lane = lane_id(), quad = lane & ~3u, p = lane & 3;
  Scales s;
  for (int i = 0; i < 2; ++i) {
    s.row[i] = __shfl_sync(warp, sfa, quad + 2 * (thread_a & 1) + i) >> (8 * (byte_a & 3));
    s.column[i] = __shfl_sync(warp, sfb, 8 * p + 4 * i + (thread_b & 3)) >> (8 * (byte_b & 3));
  }
  return s;
}

using sm120_on_sm90::detail::e2m1_bytes;

/// m16n8k64 of e2m1; Vectors scales along k.
template <int Vectors, bool Ue4m3>
__device__ __forceinline__ uint4 mma_k64(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, float c0,
                                         float c1, float c2, float c3, Scales const& s) {
  uint32_t const lane = lane_id(), quad = lane & ~3u, p = lane & 3;
  uint32_t const a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  float const c[4] = {c0, c1, c2, c3};
  uint32_t bytes_a[4][2], bytes_b[2][2];
  for (int i = 0; i < 4; ++i) bytes_a[i][0] = e2m1_bytes(a[i] & 0xffff), bytes_a[i][1] = e2m1_bytes(a[i] >> 16);
  for (int i = 0; i < 2; ++i) bytes_b[i][0] = e2m1_bytes(b[i] & 0xffff), bytes_b[i][1] = e2m1_bytes(b[i] >> 16);
  int dot[2][2][Vectors] = {};  // in quarters
#pragma unroll
  for (int q = 0; q < 4; ++q)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        int const vector = (32 * half + 8 * q) * Vectors / 64;
        int row[2], column[2];
        for (int i = 0; i < 2; ++i) {
          row[i] = __shfl_sync(warp, bytes_a[2 * half + i][word], quad + q);
          column[i] = __shfl_sync(warp, bytes_b[half][word], 8 * p + 4 * i + q);
        }
        for (int r = 0; r < 2; ++r)
          for (int n = 0; n < 2; ++n) dot[r][n][vector] = __dp4a(row[r], column[n], dot[r][n][vector]);
      }
  uint32_t d[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    ExactSum<Vectors + 1> sum;
#pragma unroll
    for (int v = 0; v < Vectors; ++v) {
      uint32_t const row = s.row[i / 2] >> (8 * v) & 0xff, column = s.column[i % 2] >> (8 * v) & 0xff;
      double const scale = Ue4m3 ? ue4m3(row) * ue4m3(column) : ue8m0(row) * ue8m0(column);
      sum.add(0.25 * dot[i / 2][i % 2][v] * scale);
    }
    sum.add(c[i]);
    d[i] = rounded(sum.odd());
  }
  return {d[0], d[1], d[2], d[3]};
}

/// Four sums, and the errors of their roundings: pairs of e5m2 have products of 70 bits.
struct Sums {
  double value[4], error[4];

  /// A sum times a power of two, and C.
  __device__ __forceinline__ double with(int i, double scale, double c) const {
    ExactSum<3> sum;
    sum.add(value[i] * scale), sum.add(isfinite(value[i]) ? error[i] * scale : 0), sum.add(c);
    return sum.odd();
  }
};

/// The sums of products of m16n8k32, without scales and C.
__device__ __forceinline__ Sums sums_k32(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1,
                                         uint32_t type_a, uint32_t type_b) {
  uint32_t const lane = lane_id(), quad = lane & ~3u, p = lane & 3;
  uint32_t const a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  int const shift_a = type_a == 4 ? 2 : 0, shift_b = type_b == 4 ? 2 : 0;
  Sums sums = {};
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll 1
    for (int q = 0; q < 4; ++q) {
      uint32_t row[2], column[2];
      for (int i = 0; i < 2; ++i) {
        row[i] = __shfl_sync(warp, a[2 * half + i], quad + q);
        column[i] = __shfl_sync(warp, b[half], 8 * p + 4 * i + q);
      }
#pragma unroll 1
      for (int byte = 0; byte < 4; ++byte) {
        double x[2], y[2];
        for (int i = 0; i < 2; ++i) {
          x[i] = value_of((row[i] >> (8 * byte) & 0xff) >> shift_a, type_a);
          y[i] = value_of((column[i] >> (8 * byte) & 0xff) >> shift_b, type_b);
        }
        for (int i = 0; i < 4; ++i) {
          Pair const p = exactly(sums.value[i], x[i / 2] * y[i % 2]);
          sums.value[i] = p.sum, sums.error[i] += p.error;
        }
      }
    }
  return sums;
}

/// The code of `type` nearest to x, ties to even; beyond the largest value and for NaN the largest.
__device__ __forceinline__ uint32_t narrow(float x, uint32_t type, uint32_t relu) {
  Format const f = format_of(type);
  int const bits = f.exponent + f.mantissa;
  uint32_t const largest = (1u << bits) - 1;
  if (isnan(x)) return largest;
  uint32_t const sign = __float_as_uint(x) >> 31;
  if (relu && sign) return 0;
  float const magnitude = fabsf(x);
  if (magnitude >= float(value_of(largest, type))) return sign << bits | largest;
  int const exponent = max(int(__float_as_uint(magnitude) >> 23) - 127, 1 - f.bias);
  float const steps = magnitude * __int_as_float((127 + f.mantissa - exponent) << 23);  // in units of the last place
  return sign << bits | (uint32_t(rintf(steps)) + (uint32_t(exponent + f.bias - 1) << f.mantissa));
}

__device__ __forceinline__ uint32_t exponent_of(float x, uint32_t up, uint32_t finite) {
  uint32_t const u = __float_as_uint(x) & 0x7fffffff;
  if (u > 0x7f800000) return 255;
  uint32_t e = u >> 23;
  if (up && (u & 0x7fffff) && u > 0x400000 && u < 0x7f800000) ++e;
  return e == 255 && finite ? 254 : e;
}

}  // namespace

#define FUNCTION extern "C" __device__ __noinline__
#define A_B uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1
#define C_F32 float c0, float c1, float c2, float c3
#define SCALES uint32_t sfa, uint32_t byte_a, uint32_t thread_a, uint32_t sfb, uint32_t byte_b, uint32_t thread_b

FUNCTION uint4 sm120_mma_e2m1_4x_ue4m3(A_B, C_F32, SCALES) {
  return mma_k64<4, true>(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b));
}
FUNCTION uint4 sm120_mma_e2m1_4x_ue8m0(A_B, C_F32, SCALES) {
  return mma_k64<4, false>(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b));
}
FUNCTION uint4 sm120_mma_e2m1_2x_ue8m0(A_B, C_F32, SCALES) {
  return mma_k64<2, false>(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3, scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b));
}
FUNCTION uint4 sm120_mma_bytes_1x_ue8m0(A_B, C_F32, SCALES, uint32_t type_a, uint32_t type_b) {
  Sums const sums = sums_k32(a0, a1, a2, a3, b0, b1, type_a, type_b);
  Scales const s = scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b);
  float const c[4] = {c0, c1, c2, c3};
  uint32_t d[4];
  for (int i = 0; i < 4; ++i)
    d[i] = rounded(sums.with(i, ue8m0(s.row[i / 2] & 0xff) * ue8m0(s.column[i % 2] & 0xff), c[i]));
  return {d[0], d[1], d[2], d[3]};
}
FUNCTION uint4 sm120_mma_bytes_f32(A_B, C_F32, uint32_t type_a, uint32_t type_b) {
  Sums const sums = sums_k32(a0, a1, a2, a3, b0, b1, type_a, type_b);
  return {rounded(sums.with(0, 1, c0)), rounded(sums.with(1, 1, c1)), rounded(sums.with(2, 1, c2)), rounded(sums.with(3, 1, c3))};
}
FUNCTION uint2 sm120_mma_bytes_f16(A_B, uint32_t c01, uint32_t c23, uint32_t type_a, uint32_t type_b) {
  Sums const sums = sums_k32(a0, a1, a2, a3, b0, b1, type_a, type_b);
  uint32_t const c[2] = {c01, c23};
  uint32_t d[2];
  for (int i = 0; i < 2; ++i) {
    uint32_t half[2];
    for (int j = 0; j < 2; ++j)
      half[j] = rounded_half(sums.with(2 * i + j, 1, double(__half2float(__ushort_as_half(c[i] >> (16 * j) & 0xffff)))));
    d[i] = half[0] | half[1] << 16;
  }
  return {d[0], d[1]};
}

/// cvt to e2m1x2, e2m3x2, e3m2x2.
FUNCTION uint32_t sm120_to_narrow(float high, float low, uint32_t type, uint32_t relu) {
  return narrow(high, type, relu) << (type == 4 ? 4 : 8) | narrow(low, type, relu);
}
/// cvt from e2m1x2, e2m3x2, e3m2x2 to f16x2.
FUNCTION uint32_t sm120_from_narrow(uint32_t codes, uint32_t type, uint32_t relu) {
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    uint32_t half = __half_as_ushort(__double2half(value_of(type == 4 ? codes >> (4 * i) & 15 : codes >> (8 * i) & 63, type)));
    if (relu && half >> 15) half = 0;
    result |= half << (16 * i);
  }
  return result;
}
/// cvt to ue8m0x2: the exponent, truncated or rounded up.
FUNCTION uint32_t sm120_to_ue8m0(float high, float low, uint32_t up, uint32_t finite) {
  return exponent_of(high, up, finite) << 8 | exponent_of(low, up, finite);
}
/// cvt from ue8m0x2 to bf16x2.
FUNCTION uint32_t sm120_from_ue8m0(uint32_t codes) {
  uint32_t result = 0;
  for (int i = 0; i < 2; ++i) {
    uint32_t const code = codes >> (8 * i) & 255;
    result |= (code == 255 ? 0x7fffu : code == 0 ? 0x40u : code << 7) << (16 * i);
  }
  return result;
}

/// ldmatrix.m8n16 of rows of 16 elements of 4 or 6 bits: lanes 8i to 8i+7 have the addresses of the rows of matrix i; lane
/// 4r + p gets elements 4p to 4p+3 of row r, each in the low bits of a byte.
FUNCTION uint4 sm120_ldmatrix_m8n16(uint32_t address, uint32_t count, uint32_t bits) {
  uint32_t const lane = lane_id();
  uint32_t registers[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    if (i >= count) break;
    uint32_t const at = __shfl_sync(warp, address, 8 * i + lane / 4) + bits / 2 * (lane % 4);
    uint32_t packed = 0;
    for (uint32_t j = 0; j < bits / 2; ++j) {
      uint32_t byte;
      asm volatile("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(at + j) : "memory");
      packed |= byte << (8 * j);
    }
    for (uint32_t j = 0; j < 4; ++j) registers[i] |= (packed >> (bits * j) & ((1u << bits) - 1)) << (8 * j);
  }
  return {registers[0], registers[1], registers[2], registers[3]};
}

/// ldmatrix.m16n16.trans of rows of 16 elements of 4, 6 or 8 bits: lanes 16i to 16i+15 have the addresses of the rows of matrix
/// i; lane 4g + p gets, in registers 2i and 2i+1, elements g and g+8 of rows 4p to 4p+3, each in the low bits of a byte.
FUNCTION uint4 sm120_ldmatrix_m16n16(uint32_t address, uint32_t count, uint32_t bits) {
  uint32_t const lane = lane_id(), p = lane & 3;
  uint32_t registers[4] = {};
#pragma unroll
  for (uint32_t i = 0; i < 2; ++i) {
    if (i >= count) break;
    for (uint32_t row = 0; row < 4; ++row) {
      uint32_t const at = __shfl_sync(warp, address, 16 * i + 4 * p + row);
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        uint32_t const first = bits * (lane / 4 + 8 * half);  // bit of the row; an element may be in two bytes
        uint32_t low, high;
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(low) : "r"(at + first / 8) : "memory");
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(high) : "r"(at + (first + bits - 1) / 8) : "memory");
        registers[2 * i + half] |= ((low | high << 8) >> first % 8 & ((1u << bits) - 1)) << (8 * row);
      }
    }
  }
  return {registers[0], registers[1], registers[2], registers[3]};
}

/// stmatrix.m16n8.trans: lanes 8i to 8i+7 have the addresses of the rows of matrix i, of 16 bytes; bytes 0 and 1 of register i of
/// lane 4g + p are byte g of rows 2p and 2p+1, bytes 2 and 3 are byte g+8 of these.
FUNCTION uint32_t sm120_stmatrix_m16n8(uint32_t address, uint32_t count, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  uint32_t const lane = lane_id(), registers[4] = {r0, r1, r2, r3};
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    if (i >= count) break;
    for (uint32_t byte = 0; byte < 4; ++byte) {
      uint32_t const at = __shfl_sync(warp, address, 8 * i + 2 * (lane & 3) + byte % 2) + lane / 4 + byte / 2 * 8;
      asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(registers[i] >> (8 * byte)) : "memory");
    }
  }
  return 0;
}

/// clusterlaunchcontrol.try_cancel with .multicast::cluster::all: the refusal arrives in each CTA of the cluster.
FUNCTION uint32_t sm120_refuse_cancel_in_cluster(uint32_t response, uint32_t barrier) {
  uint32_t count;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(count));
  for (uint32_t rank = 0; rank < count; ++rank) {
    uint32_t there, its_barrier;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(response), "r"(rank));
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(its_barrier) : "r"(barrier), "r"(rank));
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(there), "r"(0) : "memory");
    asm volatile("fence.acq_rel.cluster;" ::: "memory");
    asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 16;" ::"r"(its_barrier) : "memory");
  }
  return 0;
}

/// A tensor map of a type that unpacks, in the 128 bytes of the driver's. driver_shim.c writes it, tensormap.replace changes it.
/// The first words are unused: CUTLASS 4.5 clears a bit of what it takes for the driver's second word.
struct UnpackingMap {
  uint64_t unused[2], address, stride[4];  // strides in bytes, of dimensions 1 to 4
  uint32_t dim[5], box[5], swizzle_128, bits;
};

/// One thread does what the bulk tensor copy would: 16 elements go into each slot of 16 bytes, elements outside the tensor as
/// zeros. The packed bytes count for the barrier.
FUNCTION uint32_t sm120_unpacking_copy(uint64_t where, uint32_t destination, uint32_t barrier, int32_t c0, int32_t c1, int32_t c2,
                                       int32_t c3, int32_t c4) {
  union {
    UnpackingMap map;
    uint32_t words[sizeof(UnpackingMap) / 4];
  };
  uint32_t parameter;  // kernel parameters allow plain loads only; maps in other memory change while a kernel runs
  asm("{ .reg .pred p; isspacep.param p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(parameter) : "l"(where));
#pragma unroll
  for (unsigned i = 0; i < sizeof(UnpackingMap) / 4; ++i) {
    if (parameter)
      words[i] = ((uint32_t const*)where)[i];
    else
      words[i] = ((uint32_t const volatile*)where)[i];
  }
  uint32_t row = 0;
  for (uint32_t i4 = 0; i4 < map.box[4]; ++i4)
    for (uint32_t i3 = 0; i3 < map.box[3]; ++i3)
      for (uint32_t i2 = 0; i2 < map.box[2]; ++i2)
        for (uint32_t i1 = 0; i1 < map.box[1]; ++i1, ++row) {
          bool const inside = c1 + i1 < map.dim[1] && c2 + i2 < map.dim[2] && c3 + i3 < map.dim[3] && c4 + i4 < map.dim[4];
          uint64_t const source = map.address + (c1 + i1) * map.stride[0] + (c2 + i2) * map.stride[1] +
                                  (c3 + i3) * map.stride[2] + (c4 + i4) * map.stride[3];
          for (uint32_t k = 0; k < map.box[0]; k += 16) {
            uint32_t slot[3] = {};
            uint32_t const column = c0 + k;
            if (inside && column < map.dim[0]) {
              uint32_t const volatile* packed = (uint32_t const volatile*)(source + (uint64_t)column * map.bits / 8);
              slot[0] = packed[0], slot[1] = packed[1];
              if (map.bits == 6) slot[2] = packed[2];
            }
            uint32_t address = destination + map.box[0] * row + k;
            if (map.swizzle_128) address ^= (address >> 3) & 0x70;
            asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(slot[0]), "r"(slot[1]), "r"(slot[2]), "r"(0)
                         : "memory");
          }
        }
  __threadfence_block();
  asm volatile("mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(row * map.box[0] * map.bits / 8)
               : "memory");
  return 0;
}
