// Warp instructions by the fragment tables of the PTX ISA, not by CuTe's traits: ldmatrix, stmatrix, the block-scaled mma.sync.
//
// lane = 4 g + p. Register fragments, from "Matrix Fragments for mma.m16n8k64" and "... m16n8k32":
//   A  m16n8k64, 4 bit: a0 (row g, k 8p..8p+7)  a1 (row g+8, same)  a2 (row g, k+32)  a3 (row g+8, k+32)
//      m16n8k32, 8 bit: a0 (row g, k 4p..4p+3)  a1 (row g+8, same)  a2 (row g, k+16)  a3 (row g+8, k+16)
//   B  the same for column g: b0, b1 (k + 32 or + 16)
//   C  c0 c1 (row g, columns 2p, 2p+1)  c2 c3 (row g+8)
// Scales with selectors 0: of each quad, lane p=0 holds those of row g, p=1 of row g+8; for B lane p=0 those of column g.
// Byte j covers k of the j-th scale vector.
#pragma once

#include "machine.hpp"

#include <cmath>
#include <limits>

namespace emulate {

inline double e2m1_value(unsigned code) {
  static constexpr double magnitude[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return code & 8 ? -magnitude[code & 7] : magnitude[code & 7];
}
inline double e4m3_value(unsigned code) {
  int const exponent = (code >> 3) & 15, mantissa = code & 7;
  double const value = (code & 127) == 127 ? std::numeric_limits<double>::quiet_NaN()
                       : exponent == 0     ? std::ldexp(mantissa, -9)
                                           : std::ldexp(8 + mantissa, exponent - 10);
  return code & 128 ? -value : value;
}
inline double ue8m0_value(unsigned code) {
  return code == 255 ? std::numeric_limits<double>::quiet_NaN() : std::ldexp(1.0, int(code) - 127);
}
inline double ue4m3_value(unsigned code) { return e4m3_value(code & 127); }

enum class Element { e2m1, e4m3 };
enum class Scale { ue4m3, ue8m0 };

/// What one lane brings to mma.sync and takes away.
struct MmaLane {
  std::uint32_t a[4], b[2], sfa, sfb;
  float c[4];
  float d[4];
};

/// mma.sync.m16n8k{K}.block_scale, fp32 accumulator: exact products and sum, rounded once.
template <int K, Element A, Element B, Scale S, int Vector>
void block_scaled_mma(std::array<MmaLane*, 32> const& lanes) {
  constexpr int per_register = K == 64 ? 8 : 4;  // elements of one 32-bit register
  constexpr int half = K / 2;
  auto element = [](std::uint32_t reg, int i, Element kind) {
    if (K == 64) return e2m1_value((reg >> (4 * i)) & 15);
    unsigned const byte = (reg >> (8 * i)) & 255;
    return kind == Element::e2m1 ? e2m1_value((byte >> 2) & 15) : e4m3_value(byte);  // 4 bits sit in bits 2 to 5 of a byte
  };
  auto scale = [](std::uint32_t reg, int j) {
    unsigned const code = (reg >> (8 * j)) & 255;
    return S == Scale::ue4m3 ? ue4m3_value(code) : ue8m0_value(code);
  };
  double a[16][K], b[8][K];
  for (int lane = 0; lane < 32; ++lane) {
    int const g = lane / 4, p = lane % 4;
    for (int i = 0; i < per_register; ++i) {
      for (int r = 0; r < 4; ++r) a[g + 8 * (r % 2)][per_register * p + i + half * (r / 2)] = element(lanes[lane]->a[r], i, A);
      for (int r = 0; r < 2; ++r) b[g][per_register * p + i + half * r] = element(lanes[lane]->b[r], i, B);
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < K; ++k) a[row][k] *= scale(lanes[4 * (row % 8) + row / 8]->sfa, k / Vector);
  }
  for (int column = 0; column < 8; ++column) {
    for (int k = 0; k < K; ++k) b[column][k] *= scale(lanes[4 * column]->sfb, k / Vector);
  }
  for (int lane = 0; lane < 32; ++lane) {
    int const g = lane / 4, p = lane % 4;
    for (int i = 0; i < 4; ++i) {
      int const row = g + 8 * (i / 2), column = 2 * p + i % 2;
      double sum = lanes[lane]->c[i];
      for (int k = 0; k < K; ++k) sum += a[row][k] * b[column][k];
      lanes[lane]->d[i] = static_cast<float>(sum);
    }
  }
}

/// What one lane brings to ldmatrix or stmatrix, and takes away.
struct LdmatrixLane {
  std::uint32_t address;
  std::uint32_t registers[4];
};

/// How ldmatrix and stmatrix see the 8 rows of 16 bytes of a matrix.
enum class Matrix {
  plain,       // .m8n8.b16: lane 4 g + p holds of row g the columns 2p, 2p+1
  transposed,  // .m8n8.trans.b16: of column g the rows 2p, 2p+1
  unpacked,    // .m8n16.b8x16.b4x16_p64: 16 values of 4 bits in the first 8 bytes become the low bits of 16 bytes
};

/// Where the two halves of lane 4 g + p's register lie in a matrix: row and byte in it.
template <Matrix Kind>
std::array<std::array<int, 2>, 2> halves(int g, int p) {
  if (Kind == Matrix::transposed) return {{{2 * p, 2 * g}, {2 * p + 1, 2 * g}}};
  return {{{g, 4 * p}, {g, 4 * p + 2}}};
}

/// The addresses of a matrix's rows, from lanes 8 i to 8 i + 7 for matrix i; what is wrong with one is a finding.
inline bool row_is_good(std::uint32_t address, char const* what) {
  if (address % 16 != 0)
    report().add(std::string("misaligned ") + what, format("row address %u is not a multiple of 16", address));
  if (machine().shared.holds(address, 16)) return true;
  report().add("shared memory out of bounds", format("%s of 16 bytes at %u of %zu", what, address, machine().shared.size()));
  return false;
}

template <int Count, Matrix Kind>
void ldmatrix(std::array<LdmatrixLane*, 32> const& lanes) {
  for (int matrix = 0; matrix < Count; ++matrix) {
    unsigned char bytes[8][16];
    std::memset(bytes, SharedMemory::poison, sizeof bytes);
    for (int row = 0; row < 8; ++row) {
      std::uint32_t const address = lanes[8 * matrix + row]->address;
      if (!row_is_good(address, "ldmatrix")) continue;
      unsigned char const* from = machine().shared.base() + address;
      for (int i = 0; i < 16; ++i) bytes[row][i] = Kind == Matrix::unpacked ? (from[i / 2] >> (4 * (i % 2))) & 15 : from[i];
    }
    for (int lane = 0; lane < 32; ++lane) {
      auto* to = reinterpret_cast<unsigned char*>(&lanes[lane]->registers[matrix]);
      for (auto [row, byte] : halves<Kind>(lane / 4, lane % 4)) std::memcpy(to, bytes[row] + byte, 2), to += 2;
    }
  }
}

template <int Count, Matrix Kind>
void stmatrix(std::array<LdmatrixLane*, 32> const& lanes) {
  for (int matrix = 0; matrix < Count; ++matrix) {
    for (int lane = 0; lane < 32; ++lane) {
      auto const* from = reinterpret_cast<unsigned char const*>(&lanes[lane]->registers[matrix]);
      for (auto [row, byte] : halves<Kind>(lane / 4, lane % 4)) {
        std::uint32_t const address = lanes[8 * matrix + row]->address;
        if (row_is_good(address, "stmatrix")) std::memcpy(machine().shared.base() + address + byte, from, 2);
        from += 2;
      }
    }
  }
}

}  // namespace emulate
