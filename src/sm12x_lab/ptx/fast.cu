// MMAs of functions.cu on the tensor cores of Hopper, for `verify run --fast`: the same names and layouts, other arithmetic.
//
// Elements are f16, which holds each of their values; ue4m3 scales are multiplied in, which is exact too; ue8m0 scales multiply the
// sum of their vector. Products are exact, and added in fp32 in the order and with the alignment of Hopper's tensor cores: results
// differ from those of functions.cu by at most 2^-20 of the sum of the magnitudes of products and accumulator.
#include <cstdint>

namespace {

constexpr unsigned warp = 0xffffffff;

__device__ __forceinline__ uint32_t lane_id() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// Two f16 times two others.
__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}
constexpr uint32_t two_to_7 = 0x58005800, two_to_12 = 0x6c006c00, two_to_14 = 0x74007400;

/// m16n8k16. A lane's pairs of A and B may be of any k, as long as they are of the same.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// Elements i and i + 4 of eight e2m1, times 2^-14: in f16 their bits are an exponent that is less by 14.
__device__ __forceinline__ uint32_t small_e2m1(uint32_t codes, int i) {
  uint32_t const pair = codes >> (4 * i);
  return (pair & 0x00070007) << 9 | (pair & 0x00080008) << 12;
}

/// Bytes 2i and 2i + 1 of a register as f16; formats in the order of rewrite.py: e4m3, e5m2, e2m3, e3m2, e2m1.
__device__ __forceinline__ uint32_t halves(uint32_t codes, int i, uint32_t type) {
  uint32_t const bytes = codes >> (16 * i), pair = (bytes & 0xff) | (bytes & 0xff00) << 8, sign = (pair & 0x00200020) << 10;
  uint32_t result;
  uint16_t const both = uint16_t(bytes);
  switch (type) {
    case 0:
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(both));
      return result;
    case 1:
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(result) : "h"(both));
      return result;
    case 2:
      return times(sign | (pair & 0x001f001f) << 7, two_to_14);
    case 3:
      return times(sign | (pair & 0x001f001f) << 8, two_to_12);
    default:
      return times(sign | (pair & 0x001c001c) << 7, two_to_14);
  }
}

/// A scale of ue4m3 times 2^7, twice.
__device__ __forceinline__ uint32_t ue4m3(uint32_t code) {
  uint32_t result;
  uint16_t const both = uint16_t((code & 0x7f) * 0x101);
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(both));
  return times(result, two_to_7);
}

__device__ __forceinline__ double ue8m0(uint32_t code) {
  return code == 255 ? __longlong_as_double(0x7ff8000000000000) : __longlong_as_double((long long)(code + 896) << 52);
}

/// The scales of rows g and g + 8 of A, and of columns 2p and 2p + 1 of B, from the byte of the selector on.
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

__device__ __forceinline__ uint32_t bits(double value) { return isnan(value) ? 0x7fffffffu : __float_as_uint(float(value)); }

__device__ __forceinline__ void multiply_bytes(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                               uint32_t b1, uint32_t type_a, uint32_t type_b) {
  mma(d, halves(a0, 0, type_a), halves(a1, 0, type_a), halves(a0, 1, type_a), halves(a1, 1, type_a), halves(b0, 0, type_b),
      halves(b0, 1, type_b));
  mma(d, halves(a2, 0, type_a), halves(a3, 0, type_a), halves(a2, 1, type_a), halves(a3, 1, type_a), halves(b1, 0, type_b),
      halves(b1, 1, type_b));
}

}  // namespace

#define FUNCTION extern "C" __device__ __noinline__
#define A_B uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1
#define C_F32 float c0, float c1, float c2, float c3
#define SCALES uint32_t sfa, uint32_t byte_a, uint32_t thread_a, uint32_t sfb, uint32_t byte_b, uint32_t thread_b

FUNCTION uint4 sm120_mma_e2m1_4x_ue4m3(A_B, C_F32, SCALES) {
  uint32_t const lane = lane_id(), quad = lane & ~3u, p = lane & 3;
  uint32_t const a[2][2] = {{a0, a1}, {a2, a3}}, b[2] = {b0, b1};
  uint32_t rows[2], column = __shfl_sync(warp, sfb, quad + (thread_b & 3)) >> (8 * (byte_b & 3));
  for (int i = 0; i < 2; ++i) rows[i] = __shfl_sync(warp, sfa, quad + 2 * (thread_a & 1) + i) >> (8 * (byte_a & 3));
  float d[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t const shift = 8 * (2 * half + p / 2);  // of the scale of this lane's elements
    uint32_t const row[2] = {ue4m3(rows[0] >> shift), ue4m3(rows[1] >> shift)}, of_b = ue4m3(column >> shift);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t x[2][2], y[2];
      for (int j = 0; j < 2; ++j) {
        for (int r = 0; r < 2; ++r) x[j][r] = times(times(small_e2m1(a[half][r], i + j), two_to_7), row[r]);
        y[j] = times(times(small_e2m1(b[half], i + j), two_to_7), of_b);
      }
      mma(d, x[0][0], x[0][1], x[1][0], x[1][1], y[0], y[1]);
    }
  }
  float const c[4] = {c0, c1, c2, c3};
  return {bits(d[0] + c[0]), bits(d[1] + c[1]), bits(d[2] + c[2]), bits(d[3] + c[3])};
}

FUNCTION uint4 sm120_mma_e2m1_2x_ue8m0(A_B, C_F32, SCALES) {
  Scales const s = scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b);
  uint32_t const a[2][2] = {{a0, a1}, {a2, a3}}, b[2] = {b0, b1};
  double sum[4] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float d[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t x[2][2], y[2];
      for (int j = 0; j < 2; ++j) {
        for (int r = 0; r < 2; ++r) x[j][r] = times(small_e2m1(a[half][r], i + j), two_to_14);
        y[j] = times(small_e2m1(b[half], i + j), two_to_14);
      }
      mma(d, x[0][0], x[0][1], x[1][0], x[1][1], y[0], y[1]);
    }
    for (int i = 0; i < 4; ++i)
      sum[i] += d[i] * (ue8m0(s.row[i / 2] >> (8 * half) & 0xff) * ue8m0(s.column[i % 2] >> (8 * half) & 0xff));
  }
  return {bits(sum[0] + c0), bits(sum[1] + c1), bits(sum[2] + c2), bits(sum[3] + c3)};
}

FUNCTION uint4 sm120_mma_bytes_1x_ue8m0(A_B, C_F32, SCALES, uint32_t type_a, uint32_t type_b) {
  float d[4] = {};
  multiply_bytes(d, a0, a1, a2, a3, b0, b1, type_a, type_b);
  Scales const s = scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b);
  float const c[4] = {c0, c1, c2, c3};
  uint32_t result[4];
  for (int i = 0; i < 4; ++i)
    result[i] = bits(d[i] * (ue8m0(s.row[i / 2] & 0xff) * ue8m0(s.column[i % 2] & 0xff)) + c[i]);
  return {result[0], result[1], result[2], result[3]};
}

FUNCTION uint4 sm120_mma_bytes_f32(A_B, C_F32, uint32_t type_a, uint32_t type_b) {
  float d[4] = {};
  multiply_bytes(d, a0, a1, a2, a3, b0, b1, type_a, type_b);
  return {bits(d[0] + c0), bits(d[1] + c1), bits(d[2] + c2), bits(d[3] + c3)};
}
