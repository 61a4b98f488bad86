// The block-scaled mma.sync of SM120 in software, for a warp of any GPU from sm_75 on. Written from the fragment tables of the
// PTX ISA ("Matrix Fragments for mma.m16n8k64", "... m16n8k32", "Block Scaling for mma.sync"), not from CuTe's traits.
//
// lane = 4 g + p. Register fragments:
//   A  m16n8k64, 4 bit: a0 (row g, k 8p..8p+7)  a1 (row g+8, same)  a2 (row g, k+32)  a3 (row g+8, k+32)
//      m16n8k32, 8 bit: a0 (row g, k 4p..4p+3)  a1 (row g+8, same)  a2 (row g, k+16)  a3 (row g+8, k+16)
//   B  the same for column g: b0, b1 (k + 32 or + 16)
//   C  c0 c1 (row g, columns 2p, 2p+1)  c2 c3 (row g+8)
// Scales with selectors 0: of each quad, lane p=0 holds those of row g, p=1 of row g+8; for B lane p=0 those of column g. Byte
// j belongs to the j-th scale vector along k. What other lanes and bytes hold does not matter.
//
// Arithmetic. Products and the sum over one scale vector are exact, in integers. These sums times their two scales are added in
// double in ascending k, the accumulator last, and the result is rounded once to fp32. NaN elements and scales give NaN, also
// against zero. What the tensor core does with sums that fp32 cannot hold is not documented; this is one admissible order.
#pragma once

#include <cstdint>

namespace sm120_on_sm90 {

enum class Element { e2m1, e4m3 };
enum class Scale { ue4m3, ue8m0 };

struct Fragments {
  uint32_t a[4], b[2], sfa, sfb;
  float c[4];
};
struct Accumulators {
  float d[4];
};

namespace detail {

__device__ inline double power_of_two(int exponent) { return __hiloint2double((exponent + 1023) << 20, 0); }

/// The scale in byte `index` of a register. The sign bit of ue4m3 is no part of it.
template <Scale S>
__device__ inline double scale_value(uint32_t reg, int index) {
  uint32_t const code = (reg >> (8 * index)) & 0xff;
  double const nan = __hiloint2double(0x7ff80000, 0);
  if constexpr (S == Scale::ue8m0) {
    return code == 0xff ? nan : power_of_two(int(code) - 127);
  } else {
    uint32_t const magnitude = code & 0x7f;  // as the exponent and mantissa of a double, then from bias 1023 to bias 7
    return magnitude == 0x7f ? nan : __longlong_as_double((long long)magnitude << 49) * power_of_two(1016);
  }
}

/// Four e2m1 codes, in the low 16 bits, as four signed bytes of twice their value.
__device__ inline uint32_t e2m1_bytes(uint32_t codes) {
  uint32_t const select = codes & 0x7777;
  uint32_t const positive = __byte_perm(0x03020100, 0x0c080604, select);
  uint32_t const negative = __byte_perm(0xfdfeff00, 0xf4f8fafc, select);
  uint32_t const sign = (codes & 0x8) >> 3 | (codes & 0x80) << 1 | (codes & 0x800) << 5 | (codes & 0x8000) << 9;
  uint32_t const mask = sign * 0xff;
  return (positive & ~mask) | (negative & mask);
}

/// Byte `index` of a register as an integer: e4m3 in units of 2^-9, e2m1 (in bits 2 to 5 of the byte) in units of 2^-1.
template <Element E>
__device__ inline int byte_value(uint32_t reg, int index) {
  uint32_t const code = (reg >> (8 * index)) & 0xff;
  int magnitude, sign;
  if constexpr (E == Element::e4m3) {
    int const exponent = (code >> 3) & 15, mantissa = code & 7;
    magnitude = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    sign = code >> 7;
  } else {
    int const exponent = (code >> 3) & 3, mantissa = (code >> 2) & 1;
    magnitude = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
    sign = (code >> 5) & 1;
  }
  return sign ? -magnitude : magnitude;
}
template <Element E>
__device__ inline bool holds_nan(uint32_t reg) {
  return E == Element::e4m3 && __vcmpeq4(reg & 0x7f7f7f7f, 0x7f7f7f7f) != 0;
}

/// Scales of rows g and g+8 and of columns 2p and 2p+1, for scale vector `index`.
template <Scale S>
struct Scales {
  uint32_t row[2], column[2];
  __device__ Scales(Fragments const& f, int lane) {
    int const quad = lane & ~3, p = lane & 3;
    row[0] = __shfl_sync(0xffffffff, f.sfa, quad);
    row[1] = __shfl_sync(0xffffffff, f.sfa, quad + 1);
    column[0] = __shfl_sync(0xffffffff, f.sfb, 8 * p);
    column[1] = __shfl_sync(0xffffffff, f.sfb, 8 * p + 4);
  }
  __device__ double product(int r, int c, int index) const {
    return scale_value<S>(row[r], index) * scale_value<S>(column[c], index);
  }
};

}  // namespace detail

/// mma.sync.aligned.kind::mxf4nvf4.block_scale.m16n8k64 of e2m1 x e2m1, one scale for `Vector` elements (16 or 32).
template <Scale S, int Vector>
__device__ __noinline__ Accumulators mma_m16n8k64(Fragments f) {
  constexpr int vectors = 64 / Vector;
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  int const quad = lane & ~3, p = lane & 3;
  uint32_t a[4][2], b[2][2];  // each register as two words of four bytes
  for (int i = 0; i < 4; ++i) a[i][0] = detail::e2m1_bytes(f.a[i] & 0xffff), a[i][1] = detail::e2m1_bytes(f.a[i] >> 16);
  for (int i = 0; i < 2; ++i) b[i][0] = detail::e2m1_bytes(f.b[i] & 0xffff), b[i][1] = detail::e2m1_bytes(f.b[i] >> 16);

  int dot[2][2][vectors] = {};  // rows g, g+8; columns 2p, 2p+1; in quarters
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const vector = (32 * half + 8 * q) / Vector;
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        int row[2], column[2];
        row[0] = __shfl_sync(0xffffffff, a[2 * half][word], quad + q);
        row[1] = __shfl_sync(0xffffffff, a[2 * half + 1][word], quad + q);
        column[0] = __shfl_sync(0xffffffff, b[half][word], 8 * p + q);
        column[1] = __shfl_sync(0xffffffff, b[half][word], 8 * p + 4 + q);
        for (int r = 0; r < 2; ++r)
          for (int c = 0; c < 2; ++c) dot[r][c][vector] = __dp4a(row[r], column[c], dot[r][c][vector]);
      }
    }
  }
  detail::Scales<S> const scales(f, lane);
  Accumulators result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    double sum = 0;
    for (int v = 0; v < vectors; ++v) sum += 0.25 * dot[i / 2][i % 2][v] * scales.product(i / 2, i % 2, v);
    result.d[i] = __double2float_rn(sum + f.c[i]);
  }
  return result;
}

/// mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32, one ue8m0 scale for 32 elements.
template <Element A, Element B>
__device__ __noinline__ Accumulators mma_m16n8k32(Fragments f) {
  constexpr double unit = (A == Element::e4m3 ? 1.0 / 512 : 0.5) * (B == Element::e4m3 ? 1.0 / 512 : 0.5);
  uint32_t lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  int const quad = lane & ~3, p = lane & 3;
  uint32_t const nan_row0 = __ballot_sync(0xffffffff, detail::holds_nan<A>(f.a[0]) || detail::holds_nan<A>(f.a[2]));
  uint32_t const nan_row8 = __ballot_sync(0xffffffff, detail::holds_nan<A>(f.a[1]) || detail::holds_nan<A>(f.a[3]));
  uint32_t const nan_column = __ballot_sync(0xffffffff, detail::holds_nan<B>(f.b[0]) || detail::holds_nan<B>(f.b[1]));

  long long dot[2][2] = {};
#pragma unroll 1
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t row[2], column[2];
      row[0] = __shfl_sync(0xffffffff, f.a[2 * half], quad + q);
      row[1] = __shfl_sync(0xffffffff, f.a[2 * half + 1], quad + q);
      column[0] = __shfl_sync(0xffffffff, f.b[half], 8 * p + q);
      column[1] = __shfl_sync(0xffffffff, f.b[half], 8 * p + 4 + q);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        int x[2], y[2];
        for (int r = 0; r < 2; ++r) x[r] = detail::byte_value<A>(row[r], i), y[r] = detail::byte_value<B>(column[r], i);
        for (int r = 0; r < 2; ++r)
          for (int c = 0; c < 2; ++c) dot[r][c] += (long long)x[r] * y[c];
      }
    }
  }
  detail::Scales<Scale::ue8m0> const scales(f, lane);
  Accumulators result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bool const nan = ((i / 2 ? nan_row8 : nan_row0) >> quad & 15) != 0 || (nan_column >> (8 * p + 4 * (i % 2)) & 15) != 0;
    double const sum = double(dot[i / 2][i % 2]) * unit * scales.product(i / 2, i % 2, 0);
    result.d[i] = nan ? __int_as_float(0x7fffffff) : __double2float_rn(sum + f.c[i]);
  }
  return result;
}

}  // namespace sm120_on_sm90
