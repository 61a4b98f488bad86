// A random block-scaled GEMM, its reference in integers, and the comparison. Independent of CUTLASS: the layout of packed
// codes and of scale factors is written out here.
//
// D[m][n] = sum over k of a[m][k] sa[m][k/V] b[n][k] sb[n][k/V]. Data are multiples of one unit and the sum of magnitudes stays
// below 2^24 units, so that fp32 gives the same bits in any order. Scale factors differ in every coordinate.
#pragma once

#include "instructions.hpp"
#include "tensormap.hpp"

namespace emulate {

inline int bits_of_element(Element e) { return e == Element::e2m1 ? 4 : 8; }

/// Bytes in global memory, aligned as tensor maps require.
class Bytes {
 public:
  void assign(std::size_t size, unsigned char value) {
    size_ = size;
    lines_.resize((size + sizeof(Line) - 1) / sizeof(Line));
    std::memset(data(), value, size);
  }
  unsigned char* data() { return lines_.data()->bytes; }
  unsigned char const* data() const { return lines_.data()->bytes; }
  std::size_t size() const { return size_; }
  unsigned char& operator[](std::size_t i) { return data()[i]; }

 private:
  struct alignas(128) Line {
    unsigned char bytes[128];
  };
  std::vector<Line> lines_;
  std::size_t size_ = 0;
};

/// One operand: `rows` x `k` codes, K-major and packed, and its scale factors in blocks of 128 rows x 4.
struct Operand {
  Bytes packed;                     // two e2m1 a byte, the first in the low half; one e4m3 a byte
  Bytes scale_bytes;                // ((r/128) ceil(K/V/4) + kb/4) 512 + (r%32) 16 + (r%128/32) 4 + kb%4
  std::vector<std::int32_t> value;  // in units, scale included: rows x k
};

inline std::uint16_t bf16_of(float value) {  // round to nearest even; not for NaN
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// An m x n matrix of bf16 as a kernel stores it: lines padded to 8 elements and 8 more, guards around, all poisoned (NaN).
class Bf16Matrix {
 public:
  Bf16Matrix(int m, int n, bool column_major)
      : lines_(column_major ? n : m), length_(column_major ? m : n), column_major_(column_major) {
    bytes_.assign(2 * guard + std::size_t(lines_) * pitch() * 2, poison);
  }
  int pitch() const { return (length_ + 7) / 8 * 8 + 8; }
  unsigned char* first() { return bytes_.data() + guard; }
  void allow(bool writable) { global_memory().allow(first(), std::size_t(lines_) * pitch() * 2, writable); }
  std::uint16_t get(int i, int j) const {
    std::uint16_t value;
    std::memcpy(&value, bytes_.data() + at(i, j), sizeof value);
    return value;
  }
  void set(int i, int j, std::uint16_t value) { std::memcpy(bytes_.data() + at(i, j), &value, sizeof value); }
  /// Bytes of the guards and of the padding that are not poison any more.
  std::size_t overwritten() const {
    std::size_t count = 0;
    std::size_t const line = std::size_t(pitch()) * 2, end = guard + lines_ * line;
    for (std::size_t b = 0; b < bytes_.size(); ++b) {
      bool const inside = b >= guard && b < end && (b - guard) % line < std::size_t(length_) * 2;
      count += !inside && bytes_.data()[b] != poison;
    }
    return count;
  }

 private:
  static constexpr std::size_t guard = 1024;
  static constexpr unsigned char poison = 0xff;
  std::size_t at(int i, int j) const {
    return guard + 2 * (column_major_ ? std::size_t(j) * pitch() + i : std::size_t(i) * pitch() + j);
  }
  int lines_, length_;
  bool column_major_;
  Bytes bytes_;
};

struct Comparison {
  std::uint64_t mismatches = 0;
  double max_error = 0;
  std::string signature;
};

template <Element A, Element B, Scale S, int Vector>
struct Problem {
  int m, n, k;
  float alpha;  // a power of two, so that it costs no bits
  Operand a, b;
  double unit = 0;
  bool exact = true;
  std::vector<std::int64_t> expected;  // in units, m x n
  std::vector<std::int32_t> source;    // the epilogue's C, in units, m x n: multiples of 16, so that bf16 holds them

  Problem(int m_, int n_, int k_, std::uint64_t seed)
      : m(m_), n(n_), k(k_), alpha(seed % 3 == 0 ? 1.0f : seed % 3 == 1 ? 0.5f : 2.0f) {
    std::mt19937_64 random(seed);
    double const unit_a = fill(a, m, A, random), unit_b = fill(b, n, B, random);
    unit = unit_a * unit_b;
    expected.resize(std::size_t(m) * n);
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        std::int64_t sum = 0, magnitude = 0;
        for (int x = 0; x < k; ++x) {
          std::int64_t const term = std::int64_t(a.value[std::size_t(i) * k + x]) * b.value[std::size_t(j) * k + x];
          sum += term;
          magnitude += term < 0 ? -term : term;
        }
        expected[std::size_t(i) * n + j] = sum;
        source.push_back(16 * (int(random() % 256) - 128));
        if (magnitude + 2 * std::abs(source.back()) >= (std::int64_t{1} << 24)) exact = false;
      }
    }
  }

  /// alpha A B + beta C rounded once; alpha is 1/2, 1 or 2, beta 0 or 1.
  std::uint16_t stored(int i, int j, double beta) const {
    std::size_t const at = std::size_t(i) * n + j;
    return bf16_of(static_cast<float>((double(alpha) * double(expected[at]) + beta * source[at]) * unit));
  }

  void register_memory() const {
    for (auto const* o : {&a, &b}) {
      global_memory().allow(o->packed.data(), o->packed.size());
      global_memory().allow(o->scale_bytes.data(), o->scale_bytes.size());
    }
  }

  bool is_right(int i, int j, float got) const {
    float const correct = static_cast<float>(double(expected[std::size_t(i) * n + j]) * unit);
    return std::memcmp(&correct, &got, sizeof correct) == 0 || (correct == 0 && got == 0);
  }

  /// Bit for bit. The signature names a known way to be wrong that explains every mismatch.
  Comparison compare(std::vector<float> const& output, int tile_k) const {
    Comparison result;
    std::uint64_t first_lost = 0;
    for (int i = 0; i < m; ++i) {
      for (int j = 0; j < n; ++j) {
        std::size_t const at = std::size_t(i) * n + j;
        float const correct = static_cast<float>(double(expected[at]) * unit), got = output[at];
        if (is_right(i, j, got)) continue;
        ++result.mismatches;
        double const error = std::abs(double(correct) - double(got));
        result.max_error = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(result.max_error, error);
        int const last = (k - 1) / tile_k * tile_k;
        double const shifted = double(expected[at] - part(i, j, 0, std::min(tile_k, k)) + part(i, j, last, k)) * unit;
        if (static_cast<float>(shifted) == got) ++first_lost;
      }
    }
    if (result.mismatches != 0 && first_lost == result.mismatches) result.signature = "first k tile lost, last counted twice";
    return result;
  }

 private:
  std::int64_t part(int i, int j, int from, int to) const {
    std::int64_t sum = 0;
    for (int x = from; x < to; ++x) sum += std::int64_t(a.value[std::size_t(i) * k + x]) * b.value[std::size_t(j) * k + x];
    return sum;
  }

  /// Random codes and scales; returns the unit of `value`.
  double fill(Operand& o, int rows, Element element, std::mt19937_64& random) {
    int const blocks = (k + Vector - 1) / Vector, blocks4 = (blocks + 3) / 4 * 4, rows128 = (rows + 127) / 128 * 128;
    int const bits = bits_of_element(element);
    // codes: every e2m1; e4m3 with all mantissas in two binades, and zero
    double const element_unit = element == Element::e2m1 ? 0.5 : 0.125;
    // scales: ue4m3 with all mantissas in two binades (1 to 3.75); ue8m0 of four binades (1/4 to 2)
    double const scale_unit = S == Scale::ue4m3 ? 0.125 : 0.25;
    auto scale_code = [&] { return S == Scale::ue4m3 ? unsigned(56 + random() % 16) : unsigned(125 + random() % 4); };
    auto scale_value = [](unsigned code) { return S == Scale::ue4m3 ? ue4m3_value(code) : ue8m0_value(code); };

    // Rows beyond the matrix hold NaN scales; k blocks beyond it hold ordinary ones, which meet zeros.
    o.scale_bytes.assign(std::size_t(rows128) * blocks4, 0xff);
    std::vector<double> scale(std::size_t(rows) * blocks);
    for (int r = 0; r < rows; ++r) {
      for (int kb = 0; kb < blocks4; ++kb) {
        unsigned const code = scale_code();
        o.scale_bytes[(std::size_t(r / 128) * (blocks4 / 4) + kb / 4) * 512 + (r % 32) * 16 + (r % 128 / 32) * 4 + kb % 4] =
            static_cast<unsigned char>(code);
        if (kb < blocks) scale[std::size_t(r) * blocks + kb] = scale_value(code);
      }
    }
    o.packed.assign(std::size_t(rows) * k * bits / 8, 0);
    o.value.resize(std::size_t(rows) * k);
    for (int r = 0; r < rows; ++r) {
      for (int x = 0; x < k; ++x) {
        std::size_t const at = std::size_t(r) * k + x;
        unsigned code;
        double value;
        if (element == Element::e2m1) {
          code = unsigned(random() % 16);
          value = e2m1_value(code);
          o.packed[at / 2] |= static_cast<unsigned char>(code << (4 * (at % 2)));
        } else {
          unsigned const choice = unsigned(random() % 33);
          code = choice == 32 ? 0 : (choice & 16 ? 128 : 0) | (56 + (choice & 15));
          value = e4m3_value(code);
          o.packed[at] = static_cast<unsigned char>(code);
        }
        o.value[at] =
            static_cast<std::int32_t>(value * scale[std::size_t(r) * blocks + x / Vector] / (element_unit * scale_unit));
      }
    }
    return element_unit * scale_unit;
  }
};

/// The machine's shared memory ends at a page that faults: a plain load beyond it ends the process with a result that names it.
inline void catch_wild_access(SharedMemory const&) {
  static char stack[1 << 16];
  stack_t alternate{};
  alternate.ss_sp = stack;
  alternate.ss_size = sizeof stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction action{};
  action.sa_flags = SA_ONSTACK;
  action.sa_handler = [](int) {
    static char const text[] =
        "{\"passed\": false, \"findings\": {\"shared memory out of bounds\": {\"count\": 1, \"first\": [\"a load or store "
        "outside shared memory faulted\"]}}}\n";
    [[maybe_unused]] auto written = write(STDOUT_FILENO, text, sizeof text - 1);
    _exit(1);
  };
  sigaction(SIGSEGV, &action, nullptr);
  sigaction(SIGBUS, &action, nullptr);
}

struct Result {
  bool passed;
  std::uint64_t outputs, mismatches;
  double max_error;
  std::string signature;
  std::uint64_t stored, stored_mismatches, mma_count;
  std::int64_t delivered_bytes;
  long expected_bytes;
  int stages;
  long tensor_bytes;

  void print() const {
    std::printf(
        "{\"passed\": %s, \"outputs\": %llu, \"mismatches\": %llu, \"max_error\": %s, \"signature\": %s, \"stored\": %llu, "
        "\"stored_mismatches\": %llu, \"stages\": %d, \"tensor_bytes\": %ld, "
        "\"mma_count\": %llu, \"expected_bytes\": %ld, \"delivered_bytes\": %lld, \"findings\": %s}\n",
        passed ? "true" : "false", (unsigned long long)outputs, (unsigned long long)mismatches,
        std::isinf(max_error) ? "null" : format("%.9g", max_error).c_str(), Report::quote(signature).c_str(),
        (unsigned long long)stored, (unsigned long long)stored_mismatches, stages, tensor_bytes, (unsigned long long)mma_count,
        expected_bytes, (long long)delivered_bytes, report().json().c_str());
  }
};

}  // namespace emulate
