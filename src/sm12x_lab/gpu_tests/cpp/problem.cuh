// Block-scaled GEMMs with known results: data, and reference kernels that know nothing of CUTLASS. Codes are decoded and the
// layouts of packed codes and of scale factors are written out here.
//
// D[m][n] = sum over k of a[m][k] sa[m][k/V] b[n][k] sb[n][k/V]; a are the activations (m tokens), b the weights (n features).
// Scale factors differ in every coordinate. Those of rows beyond m or n are NaN; those of k beyond the end are ordinary, they
// meet zeros.
#pragma once

#include "block_scaled_mma.cuh"

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

namespace verify {

using sm120_on_sm90::Element;
using sm120_on_sm90::Scale;

inline void check(cudaError_t status, char const* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

/// Device memory with guard bytes before and after it.
class DeviceBytes {
 public:
  static constexpr std::size_t guard = 4096;
  static constexpr int guard_byte = 0xa5;

  DeviceBytes() = default;
  explicit DeviceBytes(std::size_t size, int fill = 0) : size_(size) {
    check(cudaMalloc(&base_, size + 2 * guard), "cudaMalloc");
    this->fill(fill);
  }
  template <class T>
  explicit DeviceBytes(std::vector<T> const& from) : DeviceBytes(from.size() * sizeof(T)) {
    check(cudaMemcpy(data(), from.data(), size_, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  DeviceBytes(DeviceBytes&& other) noexcept : base_(other.base_), size_(other.size_) { other.base_ = nullptr; }
  DeviceBytes& operator=(DeviceBytes&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceBytes() { cudaFree(base_); }

  unsigned char* data() const { return base_ + guard; }
  std::size_t size() const { return size_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data());
  }
  /// Sets all bytes, and the guard bytes anew.
  void fill(int byte) const {
    check(cudaMemset(base_, guard_byte, size_ + 2 * guard), "cudaMemset");
    check(cudaMemset(data(), byte, size_), "cudaMemset");
  }
  template <class T>
  std::vector<T> read() const {
    std::vector<T> to(size_ / sizeof(T));
    check(cudaMemcpy(to.data(), data(), to.size() * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return to;
  }
  bool guards_intact() const {
    std::vector<unsigned char> bytes(2 * guard);
    check(cudaMemcpy(bytes.data(), base_, guard, cudaMemcpyDeviceToHost), "cudaMemcpy");
    check(cudaMemcpy(bytes.data() + guard, base_ + guard + size_, guard, cudaMemcpyDeviceToHost), "cudaMemcpy");
    for (unsigned char byte : bytes)
      if (byte != guard_byte) return false;
    return true;
  }

 private:
  unsigned char* base_ = nullptr;
  std::size_t size_ = 0;
};

// ---- decoding

/// e2m1 in units of 1/2; e4m3 in units of 2^-9, NaN codes excepted.
__host__ __device__ constexpr int integer_value(Element e, unsigned code) {
  int const mantissa_bits = e == Element::e2m1 ? 1 : 3, exponent_bits = e == Element::e2m1 ? 2 : 4;
  int const mantissa = int(code) & ((1 << mantissa_bits) - 1),
            exponent = int(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  int const magnitude = exponent == 0 ? mantissa : ((1 << mantissa_bits) + mantissa) << (exponent - 1);
  return code >> (mantissa_bits + exponent_bits) & 1 ? -magnitude : magnitude;
}
__host__ __device__ constexpr bool is_nan(Element e, unsigned code) { return e == Element::e4m3 && (code & 127) == 127; }
__host__ __device__ constexpr bool is_nan(Scale s, unsigned code) {
  return s == Scale::ue8m0 ? code == 255 : (code & 127) == 127;
}
__host__ __device__ constexpr int unit_exponent(Element e) { return e == Element::e2m1 ? -1 : -9; }
constexpr int smallest_exact_ue8m0 = 125;  // 1/4, the unit of ue8m0 in exact data
__host__ __device__ constexpr int unit_exponent(Scale s) { return s == Scale::ue4m3 ? -9 : smallest_exact_ue8m0 - 127; }
__host__ __device__ inline long long integer_value(Scale s, unsigned code) {
  return s == Scale::ue4m3 ? integer_value(Element::e4m3, code & 127) : 1ll << (code - smallest_exact_ue8m0);
}
__host__ __device__ inline double double_value(Element e, unsigned code) {
  return ldexp(double(integer_value(e, code)), unit_exponent(e));
}
__host__ __device__ inline double double_value(Scale s, unsigned code) {
  return s == Scale::ue4m3 ? ldexp(double(integer_value(s, code)), -9) : ldexp(1.0, int(code) - 127);
}

/// Where the scale of row r and k block kb lies: blocks of 128 rows x 4.
__host__ __device__ constexpr std::size_t scale_offset(std::size_t r, std::size_t kb, std::size_t blocks4) {
  return (r / 128 * (blocks4 / 4) + kb / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + kb % 4;
}

// ---- data

enum class Data { exact, inexact, nan };  // nan: exact, with a few NaN

struct Operand {
  std::vector<unsigned char> packed, scales;
};

inline Operand random_operand(Data data, Element element, Scale scale, int vector, int rows, int k, std::mt19937_64& random) {
  Operand o;
  int const blocks4 = ((k + vector - 1) / vector + 3) / 4 * 4, rows128 = (rows + 127) / 128 * 128;
  // Exact: ue4m3 with all mantissas of two binades, 1 to 3.75; ue8m0 of four binades. Inexact: all positive ue4m3, 2^-10 to
  // 2^10.
  auto scale_code = [&]() -> unsigned {
    if (data == Data::inexact) return scale == Scale::ue4m3 ? 1 + random() % 126 : 117 + random() % 21;
    if (k > 2048)  // two powers of two, so that the sum of magnitudes stays exact
      return scale == Scale::ue4m3 ? 56 + random() % 2 * 8 : smallest_exact_ue8m0 + random() % 2;
    return scale == Scale::ue4m3 ? 56 + random() % 16 : smallest_exact_ue8m0 + random() % 4;
  };
  // Exact e4m3: all mantissas of two binades, and zero. Inexact: every code but NaN.
  auto code = [&]() -> unsigned {
    if (element == Element::e2m1) return random() % 16;
    if (data == Data::inexact) {
      unsigned const any = random() % 256;
      return is_nan(element, any) ? any - 1 : any;
    }
    unsigned const choice = random() % 33;
    return choice == 32 ? 0 : (choice & 16) << 3 | (56 + (choice & 15));
  };
  o.scales.assign(std::size_t(rows128) * blocks4, 0xff);
  for (int r = 0; r < rows; ++r)
    for (int kb = 0; kb < blocks4; ++kb) o.scales[scale_offset(r, kb, blocks4)] = scale_code();
  int const bits = element == Element::e2m1 ? 4 : 8;
  o.packed.assign(std::size_t(rows) * k * bits / 8, 0);
  for (std::size_t i = 0; i < std::size_t(rows) * k; ++i) {
    if (bits == 4)
      o.packed[i / 2] |= code() << (4 * (i % 2));
    else
      o.packed[i] = code();
  }
  if (data == Data::nan && rows > 0) {
    for (int i = 0; i < 1 + rows / 40; ++i) {
      int const r = random() % rows, x = random() % k;
      if (element == Element::e4m3 && i % 2 == 1)
        o.packed[std::size_t(r) * k + x] = random() % 2 ? 0x7f : 0xff;
      else
        o.scales[scale_offset(r, x / vector, blocks4)] = scale == Scale::ue8m0 ? 0xff : 0x7f;
    }
  }
  return o;
}

// ---- reference

/// For each output of one GEMM: the sum, the sum of magnitudes, the parts of the first and of the last k tile, and whether it
/// is NaN. In units for integers.
template <class T>
struct Sums {
  std::vector<T> sum, magnitude, first, last;
  std::vector<unsigned char> nan;
};

struct ReferenceOperand {
  unsigned char const *packed, *scales;
};

template <class T, Element A, Element B, Scale S, int Vector>
__global__ void reference_kernel(ReferenceOperand a, ReferenceOperand b, int m, int n, int k, int tile_k, T* sum, T* magnitude,
                                 T* first, T* last, unsigned char* nan) {
  long long const index = blockIdx.x * 256ll + threadIdx.x;
  if (index >= (long long)m * n) return;
  std::size_t const row = index / n, column = index % n, blocks4 = ((k + Vector - 1) / Vector + 3) / 4 * 4;
  int const last_start = (k - 1) / tile_k * tile_k;
  T total = 0, absolute = 0, first_part = 0, last_part = 0;
  bool any_nan = false;
  auto code_at = [](unsigned char const* packed, Element e, std::size_t i) -> unsigned {
    return e == Element::e2m1 ? packed[i / 2] >> (4 * (i % 2)) & 15 : packed[i];
  };
  auto value = [](auto kind, unsigned code) -> T {
    if constexpr (std::is_floating_point_v<T>)
      return double_value(kind, code);
    else
      return integer_value(kind, code);
  };
  for (int block = 0; block * Vector < k; ++block) {
    unsigned const sa = a.scales[scale_offset(row, block, blocks4)], sb = b.scales[scale_offset(column, block, blocks4)];
    bool const bad_scale = is_nan(S, sa) || is_nan(S, sb);
    any_nan |= bad_scale;
    T const scales = bad_scale ? T(0) : value(S, sa) * value(S, sb);
    for (int x = block * Vector; x < min(k, (block + 1) * Vector); ++x) {
      unsigned const ca = code_at(a.packed, A, row * k + x), cb = code_at(b.packed, B, column * k + x);
      if (is_nan(A, ca) || is_nan(B, cb)) {
        any_nan = true;
        continue;
      }
      T const term = value(A, ca) * value(B, cb) * scales;
      total += term;
      absolute += term < 0 ? -term : term;
      if (x < tile_k) first_part += term;
      if (x >= last_start) last_part += term;
    }
  }
  sum[index] = total, magnitude[index] = absolute, first[index] = first_part, last[index] = last_part, nan[index] = any_nan;
}

template <class T, Element A, Element B, Scale S, int Vector>
Sums<T> reference(ReferenceOperand a, ReferenceOperand b, int m, int n, int k, int tile_k) {
  std::size_t const count = std::size_t(m) * n;
  if (count == 0) return {};
  DeviceBytes const all(count * (4 * sizeof(T) + 1));  // one allocation and one copy: each waits for the GPU
  T* const sums = all.as<T>();
  reference_kernel<T, A, B, S, Vector><<<unsigned((count + 255) / 256), 256>>>(
      a, b, m, n, k, tile_k, sums, sums + count, sums + 2 * count, sums + 3 * count, all.data() + 4 * count * sizeof(T));
  check(cudaDeviceSynchronize(), "reference");
  auto const bytes = all.read<unsigned char>();
  auto const part = [&](int i) {
    std::vector<T> values(count);
    std::memcpy(values.data(), bytes.data() + i * count * sizeof(T), count * sizeof(T));
    return values;
  };
  return {part(0), part(1), part(2), part(3), {bytes.end() - count, bytes.end()}};
}

// ---- 16-bit output types, with their own rounding to nearest even

struct OutputType {
  int mantissa_bits, smallest_exponent;  // of normal numbers
  double largest;
  double half_ulp() const { return std::ldexp(1.0, -1 - mantissa_bits); }
  double smallest_step() const { return std::ldexp(1.0, smallest_exponent - mantissa_bits); }

  double round(double x) const {
    if (x == 0 || !std::isfinite(x)) return x;
    double const step = std::ldexp(1.0, std::max(std::ilogb(x), smallest_exponent) - mantissa_bits);
    double const rounded = std::nearbyint(x / step) * step;
    return std::abs(rounded) > largest ? std::copysign(INFINITY, x) : rounded;
  }
  double value(std::uint16_t bits) const {
    int const exponent_bits = 15 - mantissa_bits, bias = (1 << (exponent_bits - 1)) - 1;
    int const exponent = bits >> mantissa_bits & ((1 << exponent_bits) - 1), mantissa = bits & ((1 << mantissa_bits) - 1);
    double magnitude;
    if (exponent == (1 << exponent_bits) - 1)
      magnitude = mantissa ? NAN : INFINITY;
    else
      magnitude = exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                : std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
    return bits & 0x8000 ? -magnitude : magnitude;
  }
};
inline constexpr OutputType bf16{7, -126, 3.3895313892515355e38}, f16{10, -14, 65504};

}  // namespace verify
