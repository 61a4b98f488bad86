// The block-scaled mma.sync in software (block_scaled_mma.cuh) against an independent scalar model on the host, and with
// -DNATIVE (for sm_120a) against the hardware instruction, fragment by fragment. Prints one JSON object an instruction; exit
// code 0: all agree, 1: something differs.
//
// The model works on whole matrices: it draws A, B, C and scales as codes, puts them into fragments, and computes D in long
// double. Everything that the instruction must not read (other lanes' scale registers, other bytes, the two bits on either side
// of a 4-bit element) is junk. Kinds of input: random codes of the whole range, extremes (zeros, smallest, largest), NaN, and
// exact data, for which the sum has one right value in fp32: they are compared bit for bit. For the others the software must be
// within one rounding; the hardware, whose order of addition is not documented, within 64 + 2 roundings of the sum of
// magnitudes.
#include "block_scaled_mma.cuh"

#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include <cuda_runtime.h>

namespace {

using namespace sm120_on_sm90;

enum class Input { exact, random, extreme, nan };
constexpr Input inputs[] = {Input::exact, Input::random, Input::extreme, Input::nan};

// ---- the model's own decoding: by table and by formula, not as in block_scaled_mma.cuh

double element_value(Element e, unsigned code) {
  if (e == Element::e2m1) {
    double const table[] = {0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6};
    return table[code & 15];
  }
  if ((code & 0x7f) == 0x7f) return NAN;
  double const fraction = (code & 7) / 8.0;
  int const exponent = code >> 3 & 15;
  double const magnitude = exponent ? (1 + fraction) * std::pow(2.0, exponent - 7) : fraction * std::pow(2.0, -6);
  return code & 0x80 ? -magnitude : magnitude;
}
double scale_value(Scale s, unsigned code) {
  if (s == Scale::ue4m3) return element_value(Element::e4m3, code & 0x7f);
  return code == 255 ? NAN : std::pow(2.0, double(code) - 127);
}

struct Case {
  Fragments lane[32];
  double want[16][8], magnitude[16][8];
  bool nan[16][8];
};

template <int K, Element A, Element B, Scale S, int Vector>
Case draw(Input input, std::mt19937_64& random) {
  constexpr int vectors = K / Vector;
  static unsigned a[16][K], b[8][K], sa[16][vectors], sb[8][vectors];
  static float c[16][8];
  auto code = [&](Element e) -> unsigned {
    if (e == Element::e2m1) return input == Input::extreme ? (random() % 2 ? 7 : 0) | random() % 2 << 3 : random() % 16;
    switch (input) {
      case Input::exact:
        return (random() % 2) << 7 | (48 + random() % 16);
      case Input::extreme: {
        unsigned const some[] = {0, 1, 0x80, 0x81, 7, 0x7e, 0xfe};
        return some[random() % 7];
      }
      default: {
        unsigned const any = random() % 256;
        return (any & 127) == 127 && (input != Input::nan || random() % 4) ? any ^ 1 : any;
      }
    }
  };
  auto scale = [&]() -> unsigned {
    switch (input) {
      case Input::exact:
        return S == Scale::ue4m3 ? 48 + random() % 16 : 125 + random() % 4;
      case Input::extreme: {
        unsigned const four[] = {0, 1, 7, 126}, eight[] = {110, 127, 140};
        return S == Scale::ue4m3 ? four[random() % 4] : eight[random() % 3];
      }
      case Input::nan:
        if (random() % 16 == 0) return S == Scale::ue4m3 ? 127 : 255;
        [[fallthrough]];
      default:
        return S == Scale::ue4m3 ? random() % 127 : 97 + random() % 61;
    }
  };
  for (auto& row : a)
    for (auto& x : row) x = code(A);
  for (auto& column : b)
    for (auto& x : column) x = code(B);
  for (auto& row : sa)
    for (auto& x : row) x = scale();
  for (auto& column : sb)
    for (auto& x : column) x = scale();
  for (auto& row : c)
    for (auto& x : row) x = float(int(random() % 4001) - 2000) / 16;

  Case result;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) {
      long double sum = c[i][j], magnitude = std::abs(c[i][j]);
      bool nan = false;
      for (int k = 0; k < K; ++k) {
        double const x = element_value(A, a[i][k]), y = element_value(B, b[j][k]), p = scale_value(S, sa[i][k / Vector]),
                     q = scale_value(S, sb[j][k / Vector]);
        if (std::isnan(x) || std::isnan(y) || std::isnan(p) || std::isnan(q)) {
          nan = true;
          continue;
        }
        long double const term = (long double)x * y * p * q;
        sum += term;
        magnitude += std::abs(term);
      }
      result.want[i][j] = double(sum);
      result.magnitude[i][j] = double(magnitude);
      result.nan[i][j] = nan;
    }

  // Into fragments: where row i and element k lie is written out for each register.
  constexpr int bits = K == 64 ? 4 : 8;
  for (auto& lane : result.lane) {
    for (auto& x : lane.a) x = 0;
    for (auto& x : lane.b) x = 0;
    lane.sfa = unsigned(random());
    lane.sfb = unsigned(random());
  }
  auto container = [&](Element e, unsigned x) -> unsigned {
    if (bits == 4 || e == Element::e4m3) return x;
    return x << 2 | (random() & 0xc3);  // 4 bits in the middle of a byte
  };
  for (int k = 0; k < K; ++k) {
    int const half = k / (K / 2), in_half = k % (K / 2), p = in_half / (32 / bits), position = in_half % (32 / bits) * bits;
    for (int i = 0; i < 16; ++i) result.lane[i % 8 * 4 + p].a[2 * half + i / 8] |= container(A, a[i][k]) << position;
    for (int j = 0; j < 8; ++j) result.lane[j * 4 + p].b[half] |= container(B, b[j][k]) << position;
  }
  auto put = [](unsigned& reg, int byte, unsigned value) { reg = (reg & ~(0xffu << (8 * byte))) | value << (8 * byte); };
  for (int v = 0; v < vectors; ++v) {
    for (int i = 0; i < 16; ++i) put(result.lane[i % 8 * 4 + i / 8].sfa, v, sa[i][v]);
    for (int j = 0; j < 8; ++j) put(result.lane[j * 4].sfb, v, sb[j][v]);
  }
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 8; ++j) result.lane[i % 8 * 4 + j / 2].c[i / 8 * 2 + j % 2] = c[i][j];
  return result;
}

// ---- on the device

template <int K, Element A, Element B, Scale S, int Vector>
__global__ void software(Fragments const* in, Accumulators* out) {
  int const at = blockIdx.x * 32 + threadIdx.x;
  if constexpr (K == 64)
    out[at] = mma_m16n8k64<S, Vector>(in[at]);
  else
    out[at] = mma_m16n8k32<A, B>(in[at]);
}

#ifdef NATIVE
#define HARDWARE(KIND, SHAPE, TYPES)                                                                                        \
  asm volatile("mma.sync.aligned.kind::" KIND "." SHAPE ".row.col.f32." TYPES                                               \
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13}, {%14}, {%15, %15}, {%16}, {%15, %15};" \
               : "=f"(d.d[0]), "=f"(d.d[1]), "=f"(d.d[2]), "=f"(d.d[3])                                                     \
               : "r"(f.a[0]), "r"(f.a[1]), "r"(f.a[2]), "r"(f.a[3]), "r"(f.b[0]), "r"(f.b[1]), "f"(f.c[0]), "f"(f.c[1]),    \
                 "f"(f.c[2]), "f"(f.c[3]), "r"(f.sfa), "h"((unsigned short)0), "r"(f.sfb))

template <int K, Element A, Element B, Scale S, int Vector>
__global__ void hardware(Fragments const* in, Accumulators* out) {
  int const at = blockIdx.x * 32 + threadIdx.x;
  Fragments const f = in[at];
  Accumulators d;
  if constexpr (K == 64 && S == Scale::ue4m3)
    HARDWARE("mxf4nvf4.block_scale.scale_vec::4X", "m16n8k64", "e2m1.e2m1.f32.ue4m3");
  else if constexpr (K == 64)
    HARDWARE("mxf4nvf4.block_scale.scale_vec::2X", "m16n8k64", "e2m1.e2m1.f32.ue8m0");
  else if constexpr (A == Element::e4m3 && B == Element::e4m3)
    HARDWARE("mxf8f6f4.block_scale.scale_vec::1X", "m16n8k32", "e4m3.e4m3.f32.ue8m0");
  else if constexpr (A == Element::e4m3)
    HARDWARE("mxf8f6f4.block_scale.scale_vec::1X", "m16n8k32", "e4m3.e2m1.f32.ue8m0");
  else
    HARDWARE("mxf8f6f4.block_scale.scale_vec::1X", "m16n8k32", "e2m1.e4m3.f32.ue8m0");
  out[at] = d;
}
#endif

bool good_status(cudaError_t status, char const* what) {
  if (status != cudaSuccess) std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(status));
  return status == cudaSuccess;
}

template <int K, Element A, Element B, Scale S, int Vector>
bool test(char const* name) {
  constexpr int cases = 4000;
  std::mt19937_64 random(K + 2 * Vector + int(A) * 7 + int(B) * 11 + int(S) * 13);
  std::vector<Case> all;
  std::vector<Fragments> fragments;
  for (int i = 0; i < cases; ++i) {
    all.push_back(draw<K, A, B, S, Vector>(inputs[i % 4], random));
    fragments.insert(fragments.end(), all.back().lane, all.back().lane + 32);
  }
  Fragments* in = nullptr;
  Accumulators* out = nullptr;
  if (!good_status(cudaMalloc(&in, fragments.size() * sizeof(Fragments)), "cudaMalloc")) return false;
  if (!good_status(cudaMalloc(&out, fragments.size() * sizeof(Accumulators)), "cudaMalloc")) return false;
  cudaMemcpy(in, fragments.data(), fragments.size() * sizeof(Fragments), cudaMemcpyHostToDevice);
  bool passed = true;
  auto run = [&](char const* who, bool of_hardware, auto kernel) {
    std::vector<Accumulators> got(fragments.size());
    kernel<<<cases, 32>>>(in, out);
    bool const ran = good_status(cudaDeviceSynchronize(), who);
    cudaMemcpy(got.data(), out, got.size() * sizeof(Accumulators), cudaMemcpyDeviceToHost);
    long differ[4] = {};
    double worst = 0;
    for (int at = 0; at < cases; ++at)
      for (int i = 0; i < 16; ++i)
        for (int j = 0; j < 8; ++j) {
          Case const& c = all[at];
          float const have = got[at * 32 + i % 8 * 4 + j / 2].d[i / 8 * 2 + j % 2];
          bool good;
          if (c.nan[i][j]) {
            good = std::isnan(have);
          } else if (inputs[at % 4] == Input::exact) {
            good = have == float(c.want[i][j]);
          } else {
            double const error = std::abs(double(have) - c.want[i][j]);
            double const bound = of_hardware
                                     ? (K + 2) * std::ldexp(c.magnitude[i][j], -23)
                                     : std::ldexp(std::abs(c.want[i][j]), -24) * 1.0001 + std::ldexp(c.magnitude[i][j], -48);
            good = error <= bound;
            if (c.magnitude[i][j] > 0) worst = std::fmax(worst, error / c.magnitude[i][j]);
          }
          differ[at % 4] += !good;
        }
    bool const good = ran && differ[0] + differ[1] + differ[2] + differ[3] == 0;
    std::printf(
        "{\"instruction\": \"%s\", \"compared\": \"%s\", \"verdict\": \"%s\", \"values\": %d, \"differ_exact\": %ld, "
        "\"differ_random\": "
        "%ld, \"differ_extreme\": %ld, \"differ_nan\": %ld, \"max_error_over_magnitude\": %.3g}\n",
        name, who, good ? "pass" : "wrong", cases * 128, differ[0], differ[1], differ[2], differ[3], worst);
    passed = passed && good;
  };
  run("software with model", false, software<K, A, B, S, Vector>);
#ifdef NATIVE
  run("hardware with model", true, hardware<K, A, B, S, Vector>);
#endif
  cudaFree(in);
  cudaFree(out);
  return passed;
}

}  // namespace

int main() {
  bool passed = true;
  passed &= test<64, Element::e2m1, Element::e2m1, Scale::ue4m3, 16>("m16n8k64 e2m1 e2m1 ue4m3 4X");
  passed &= test<64, Element::e2m1, Element::e2m1, Scale::ue8m0, 32>("m16n8k64 e2m1 e2m1 ue8m0 2X");
#ifndef NATIVE  // scale_vec::4X with ue8m0
  passed &= test<64, Element::e2m1, Element::e2m1, Scale::ue8m0, 16>("m16n8k64 e2m1 e2m1 ue8m0 4X");
#endif
  passed &= test<32, Element::e4m3, Element::e4m3, Scale::ue8m0, 32>("m16n8k32 e4m3 e4m3 ue8m0 1X");
  passed &= test<32, Element::e4m3, Element::e2m1, Scale::ue8m0, 32>("m16n8k32 e4m3 e2m1 ue8m0 1X");
  passed &= test<32, Element::e2m1, Element::e4m3, Scale::ue8m0, 32>("m16n8k32 e2m1 e4m3 ue8m0 1X");
  return passed ? 0 : 1;
}
