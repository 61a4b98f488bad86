// MMAs of functions.cu on the tensor cores of Hopper, for `verify run --fast`: the same names and layouts, other arithmetic.
//
// Elements are f16 or bf16, which hold each of their values; ue4m3 scales are multiplied in, which is exact too; ue8m0 scales multiply
// the sum of their vector. Products are exact, and added in fp32 in the order and with the alignment of Hopper's tensor cores: results
// differ from those of functions.cu by at most 2^-20 of the sum of the magnitudes of products and accumulator.
#include <cstdint>

namespace {

constexpr unsigned warp = 0xffffffff;

__device__ __forceinline__ uint32_t lane_id() {
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}

/// m16n8k16 of f16 or bf16. A lane's pairs of A and B may be of any k, as long as they are of the same.
#define MMA(name, type)                                                                                                                  \
  __device__ __forceinline__ void name(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {    \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." type "." type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                                                 \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                                                                         \
  }
MMA(mma, "f16")
MMA(mma_bf16, "bf16")

/// Elements i and i + 4 of eight e2m1 in a format with the given bits of mantissa, in which their exponent is less by its bias - 1.
template <int mantissa>
__device__ __forceinline__ uint32_t small_e2m1(uint32_t codes, int i) {
  uint32_t const pair = codes >> (4 * i);
  return (pair & 0x00070007) << (mantissa - 1) | (pair & 0x00080008) << 12;
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

/// The two bytes of each half of a register as f16; formats in the order of rewrite.py: e4m3, e5m2, e2m3, e3m2, e2m1.
template <int N>
__device__ __forceinline__ void halves(uint32_t const (&codes)[N], uint32_t type, uint32_t (&result)[N][2]) {
  if (type == 0) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i)
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result[i / 2][i % 2]) : "h"(uint16_t(codes[i / 2] >> (16 * (i % 2)))));
  } else if (type == 1) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i)
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(result[i / 2][i % 2]) : "h"(uint16_t(codes[i / 2] >> (16 * (i % 2)))));
  } else {
    uint32_t const magnitude = type == 4 ? 0x001c001c : 0x001f001f, factor = type == 3 ? 0x6c006c00 : 0x74007400;  // 2^12, 2^14
    uint32_t const shift = type == 3 ? 8 : 7;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      uint32_t const pair = __byte_perm(codes[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
      result[i / 2][i % 2] = times((pair & 0x00200020) << 10 | (pair & magnitude) << shift, factor);
    }
  }
}

/// A scale of ue4m3 times 2^119 in bf16, twice.
__device__ __forceinline__ uint32_t ue4m3(uint32_t code) {
  uint32_t half;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(half) : "h"(uint16_t(code & 0x7f)));
  float value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}" : "=f"(value) : "r"(half));
  uint32_t result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %1;" : "=r"(result) : "f"(value * 0x1p119f));
  return result;
}
__device__ __forceinline__ uint32_t times_bf16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
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

/// c plus d times 2^up times the scales (ue8m0) of row and column, whose vector has this number.
__device__ __forceinline__ void add_scaled(float (&c)[4], float const (&d)[4], Scales const& s, int vector, int up) {
  uint32_t row[2], column[2], most = 0;
  for (int i = 0; i < 2; ++i) {
    row[i] = s.row[i] >> (8 * vector) & 0xff, column[i] = s.column[i] >> (8 * vector) & 0xff;
    most = max(most, max(row[i] - 64, column[i] - 64));
  }
  if (most < 96) {  // neither NaN nor a product that fp32 lacks
    for (int i = 0; i < 4; ++i) c[i] = fmaf(d[i], __uint_as_float((row[i / 2] + column[i % 2] + up - 127) << 23), c[i]);
  } else {
    for (int i = 0; i < 4; ++i) c[i] = float(double(d[i]) * double(1 << up) * (ue8m0(row[i / 2]) * ue8m0(column[i % 2])) + c[i]);
  }
}

__device__ __forceinline__ uint4 bits(float const (&c)[4]) {
  return {__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]), __float_as_uint(c[3])};
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
  float d[4] = {}, c[4] = {c0, c1, c2, c3};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t const shift = 8 * (2 * half + p / 2);  // of the scale of this lane's elements
    uint32_t const row[2] = {ue4m3(rows[0] >> shift), ue4m3(rows[1] >> shift)}, of_b = ue4m3(column >> shift);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      uint32_t x[2][2], y[2];
      for (int j = 0; j < 2; ++j) {
        for (int r = 0; r < 2; ++r) x[j][r] = times_bf16(small_e2m1<7>(a[half][r], i + j), row[r]);
        y[j] = times_bf16(small_e2m1<7>(b[half], i + j), of_b);
      }
      mma_bf16(d, x[0][0], x[0][1], x[1][0], x[1][1], y[0], y[1]);
    }
  }
  for (int i = 0; i < 4; ++i) c[i] = fmaf(d[i], 0x1p14f, c[i]);
  return bits(c);
}

FUNCTION uint4 sm120_mma_e2m1_2x_ue8m0(A_B, C_F32, SCALES) {
  Scales const s = scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b);
  uint32_t const a[2][2] = {{a0, a1}, {a2, a3}}, b[2] = {b0, b1};
  float c[4] = {c0, c1, c2, c3};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float d[4] = {};  // exact
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      mma(d, small_e2m1<10>(a[half][0], i), small_e2m1<10>(a[half][1], i), small_e2m1<10>(a[half][0], i + 1),
          small_e2m1<10>(a[half][1], i + 1), small_e2m1<10>(b[half], i), small_e2m1<10>(b[half], i + 1));
    add_scaled(c, d, s, half, 28);
  }
  return bits(c);
}

namespace {

__device__ __forceinline__ void multiply_bytes(float (&d)[4], A_B, uint32_t type_a, uint32_t type_b) {
  uint32_t a[4][2], b[2][2];
  halves({a0, a1, a2, a3}, type_a, a);
  halves({b0, b1}, type_b, b);
  mma(d, a[0][0], a[1][0], a[0][1], a[1][1], b[0][0], b[0][1]);
  mma(d, a[2][0], a[3][0], a[2][1], a[3][1], b[1][0], b[1][1]);
}

}  // namespace

FUNCTION uint4 sm120_mma_bytes_1x_ue8m0(A_B, C_F32, SCALES, uint32_t type_a, uint32_t type_b) {
  float d[4] = {}, c[4] = {c0, c1, c2, c3};
  multiply_bytes(d, a0, a1, a2, a3, b0, b1, type_a, type_b);
  add_scaled(c, d, scales_of(sfa, byte_a, thread_a, sfb, byte_b, thread_b), 0, 0);
  return bits(c);
}

FUNCTION uint4 sm120_mma_bytes_f32(A_B, C_F32, uint32_t type_a, uint32_t type_b) {
  float d[4] = {};
  multiply_bytes(d, a0, a1, a2, a3, b0, b1, type_a, type_b);
  float const c[4] = {d[0] + c0, d[1] + c1, d[2] + c2, d[3] + c3};
  return bits(c);
}
