// Runs one configuration of the SM120 block-scaled GEMM kernels (see kernels.cuh for the -D flags) and compares it with
// reference kernels: on an SM12x natively, or on Hopper with sm120_on_sm90.hpp force-included. Prints one JSON object a run,
// one a line.
//
//   gemm --set std|moe|big|deep|groups|batch|c|pdl|inexact|nan --clc 0|W --jitter NS --seed S --fault NAME
//   gemm --list
//
// Each value may be a list: a,b. --list prints the sets and faults that this kernel has.
//
// Exit code 0: all passed, 1: something is wrong, 2: usage.
//
// All sets but nan and inexact hold data for which fp32 gives the same bits in any order: every term is a multiple of one unit,
// and the sum of magnitudes, which is measured, stays below 2^24 units. Outputs are compared bit for bit; those of finalize that
// add up more than two roundings in any order, within half an ulp of the sum of magnitudes for each addition. For set pdl, the
// kernel before lets the GEMM start early and then writes the scales of the last group's activations. Set inexact holds codes
// and scales of the full range. With S = alpha sum |terms| of one output and r the output's exact value,
//   |error| <= u |r| + g S + s,   g = (c + 2) 2^-24  (emulated: c = ceil(K / K of the mma), each mma rounds its exact sum once)
//                                 g = (K + 2) 2^-23  (native: at worst each addition truncates)
// where u is half an ulp of the output type and s half its smallest step; the 2 is for alpha and for the bias of finalize.
// Reported are max |error| / S and the largest bound / S, of outputs for which S is a normal number of the output type.
#include "kernels.cuh"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <map>
#include <memory>
#include <sstream>
#include <thread>

#include <unistd.h>

namespace verify {

#ifdef SM120_ON_SM90
constexpr bool emulated = true;
#else
constexpr bool emulated = false;
#endif

constexpr int hang_seconds = 10;

struct Fault {
  std::string name, kind, what, set = "std";  // the set that detects it
};
std::vector<Fault> const faults = {
    {"none", "", "no fault"},
    {"scale-stride", "scale-factor stride", "the layout of the activations' scales is made for a longer K"},
    {"scales-swapped", "scale-factor stride", "the scales of activations and weights change places"},
#if GROUPED
    {"group-offset", "wrong group offset", "one group's weights are those of the group before it"},
    {"group-scale-offset", "wrong group offset", "one group's weight scales are those of the group before it"},
    {"group-k", "wrong group offset", "one group's problem has a K one k tile shorter"},
    {"group-past-32", "wrong group offset", "the weights of the groups after the 32nd are those of the group before", "groups"},
    {"deep-k", "wrong tile count", "a K of more than 2048 is cut", "deep"},
#if FINALIZED
    {"token-moved", "wrong token", "one row is added to another token", "groups"},
    {"bias-added", "wrong bias", "a bias is added to a layer that has none", "groups"},
#else
    {"beta-of-zero", "wrong beta", "C is not added", "c"},
#endif
#else
    {"scale-pointer", "wrong group offset", "the weight scales start one block too late"},
    {"batch-scales", "wrong group offset", "the activation scales of all batches are those of the first", "batch"},
#endif
};

struct Shape3 {
  int m, n, k;  // tokens, features
};
struct Launch {
  std::vector<Shape3> groups;  // of a dense kernel: batches, which have one shape
  int experts = 2;             // of a token, at most, for finalize
  bool bias = true;            // of finalize
};

std::map<std::string, Data> const sets = {
    {"std", Data::exact},    {"moe", Data::exact}, {"big", Data::exact},         {"deep", Data::exact},
#if GROUPED
    {"groups", Data::exact},
#if !FINALIZED
    {"c", Data::exact},
#endif
#else
    {"batch", Data::exact},
#endif
    {"pdl", Data::exact},    {"nan", Data::nan},   {"inexact", Data::inexact},
};
constexpr float beta_of_c = 0.5;  // exact products

/// What each set launches. K is a multiple of what TMA asks for: 32 elements, or 128 when it unpacks.
std::vector<Launch> launches_of(std::string const& set) {
  auto k = [](int elements) {
    int const unit = mixed ? 128 : 32;
    return std::max(unit, elements / unit * unit);
  };
  int const wrap = k(TILE_K * (2 * stages + 1));
  std::vector<Launch> result;
  if (set == "std") {
    std::vector<Shape3> const shapes = {
        {1, 128, k(TILE_K)}, {TILE_M, TILE_N, k(TILE_K)},    {129, 136, k(TILE_K + 32)},
        {300, 264, wrap},    {257, 72, k(TILE_K / 2)},       {64, 384, k(2 * TILE_K + 96)},
        {200, 200, k(640)},  {385, 128, k(3 * TILE_K - 32)}, {17, 520, k(wrap - 32)},
    };
    for (auto const& s : shapes) result.push_back({{s}});
#if GROUPED
    for (int n : {128, 264}) {  // uneven and empty groups, one row, another K in each
      Launch launch;
      int i = 0;
      for (int m : {130, 0, 1, 257, 64, 0, 7, 128}) launch.groups.push_back({m, n, k(i++ % 2 ? wrap : TILE_K + 32 * i)});
      result.push_back(launch);
    }
#endif
  } else if (set == "moe") {
#if GROUPED
    Launch launch;
    launch.bias = false;
    std::mt19937 random(32);
    for (int expert = 0; expert < 32; ++expert) {
      int const m = expert % 5 == 3 ? 0 : expert % 7 == 1 ? 1 : int(random() % 60) + (expert == 9 ? 150 : 0);
      launch.groups.push_back({m, 384, k(512)});
    }
    result = {launch, {std::vector<Shape3>(32, {1, 256, k(256)})}};
#else
    for (int m : {1, 2, 3, 5, 8, 16, 33, 64}) result.push_back({{{m, 512, k(512)}}});
#endif
  } else if (set == "big") {
#if GROUPED
    result = {{{{1024, 2048, 1024}, {0, 2048, 1024}, {1000, 2048, 1024}, {24, 2048, 1024}}}};
#else
    result = {{{{2048, 2048, 1024}}}};
#endif
  } else if (set == "groups") {  // the scheduler reads the shapes of 32 groups at a time
    std::mt19937 random(512);
    for (auto const [count, experts] : {std::pair{40, 1}, std::pair{130, 8}, std::pair{512, 3}}) {
      Launch launch{{}, experts, false};
      for (int group = 0; group < count; ++group)
        launch.groups.push_back({group % 3 == 1 ? 0 : group == 35 ? 150 : 1 + int(random() % 9), 136, k(256)});
      result.push_back(launch);
    }
    result.push_back({std::vector<Shape3>(40, {0, 136, k(256)}), 2, false});
  } else if (set == "deep") {
    result = {{{{130, 136, k(4096)}}}, {{{7, 264, k(4128)}}}};
#if GROUPED
    result.push_back({{{3, 128, k(4096)}, {0, 128, k(4096)}, {129, 128, k(4096)}, {1, 128, k(128)}}});
#endif
  } else if (set == "batch") {
    for (auto const& s : {Shape3{129, 136, k(TILE_K + 32)}, Shape3{300, 264, wrap}})
      result.push_back({std::vector<Shape3>(3, s)});
  } else if (set == "c") {
    result = {{{{129, 136, k(TILE_K + 32)}, {0, 136, k(512)}, {1, 136, k(256)}, {300, 136, wrap}}}};
  } else {
    result = {{{{129, 136, k(TILE_K + 32)}}}, {{{300, 264, wrap}}}, {{{64, 128, k(2048)}}}};
#if GROUPED
    result.push_back({{{130, 128, k(512)}, {0, 128, k(512)}, {1, 128, k(256)}, {257, 128, wrap}}});
#endif
  }
  return result;
}

// ---- one group and its reference

struct Group {
  Shape3 shape;
  DeviceBytes activations, weights, activation_scales, weight_scales;
  Sums<long long> exact;  // of exact data
  Sums<double> inexact;   // of inexact data
  float alpha = 1;
  std::vector<float> bias;  // of finalize, one a feature
  std::vector<float> c;     // one an output; empty if there is no C

  double unit(Data data) const {
    return data == Data::inexact ? 1
                                 : std::ldexp(1.0, unit_exponent(Type::activation) + unit_exponent(Type::weight) +
                                                       2 * unit_exponent(Type::scale));
  }
};

/// Multiples of 2^bits reference units are the unit of exact data.
constexpr int exact_shift = (Type::activation == Element::e4m3 ? 6 : 0) + (Type::weight == Element::e4m3 ? 6 : 0) +
                            (Type::scale == Scale::ue4m3 ? 12 : 0);

constexpr std::size_t slack = 65536;  // after operands, so that seeded faults read garbage and not beyond memory

Group make_group(Shape3 shape, Data data, bool with_c, std::mt19937_64& random, bool& is_exact) {
  Group g;
  g.shape = shape;
  int const m = shape.m, n = shape.n, k = shape.k;
  auto const a = random_operand(data, Type::activation, Type::scale, Type::vector, m, k, random);
  auto const b = random_operand(data, Type::weight, Type::scale, Type::vector, n, k, random);
  auto upload = [](std::vector<unsigned char> bytes) {
    bytes.resize((bytes.size() + 255) / 256 * 256 + slack, 0x7f);
    return DeviceBytes(bytes);
  };
  g.activations = upload(a.packed);
  g.weights = upload(b.packed);
  g.activation_scales = upload(a.scales);
  g.weight_scales = upload(b.scales);
  ReferenceOperand const ra{g.activations.data(), g.activation_scales.data()}, rb{g.weights.data(), g.weight_scales.data()};
  auto const reference_of = [&](auto zero) {
    return reference<decltype(zero), Type::activation, Type::weight, Type::scale, Type::vector>(ra, rb, m, n, k, TILE_K);
  };
  if (data == Data::inexact) {
    g.inexact = reference_of(0.0);
    double largest = 0;
    for (double s : g.inexact.magnitude) largest = std::max(largest, s);
    g.alpha = largest == 0 ? 1 : float(std::ldexp(1.0, 10 - std::ilogb(largest)));  // results of up to 2^11
  } else {
    g.exact = reference_of(0ll);
    for (long long s : g.exact.magnitude) is_exact = is_exact && (s >> exact_shift) < (1 << 24);
    g.alpha = float(std::ldexp(1.0, int(random() % 4) - 4));
  }
  auto eighths = [&](std::size_t count) {
    std::vector<float> values(count);
    for (auto& x : values) x = float(int(random() % 65) - 32) / 8;
    return values;
  };
  g.bias = eighths(n);
  if (with_c) g.c = eighths(std::size_t(m) * n);
  return g;
}

// ---- one launch: kernel and comparison

struct Result {
  std::uint64_t outputs = 0, mismatches = 0, signature_hits = 0, nan_expected = 0, mma_expected = 0;
  double max_relative_error = 0, error_bound = 0, error_over_bound = 0;
  bool guard_intact = true, exact = true, nan_scales = false, nan_unnoticed = false;
  std::string first_mismatch;
  float milliseconds = 0;
};

struct Options {
  std::string set, fault = "none";
  unsigned clc = 0, jitter = 0;
  std::uint64_t seed = 1;
};

struct Run {
  Options options;
  Result result;
};
std::unique_ptr<Run> current;

unsigned long long mma_count() {
  unsigned long long count = 0;
#ifdef SM120_ON_SM90
  check(cudaMemcpyFromSymbol(&count, sm120_on_sm90::mma_count, sizeof count), "mma count");
#endif
  return count;
}

/// Whether an mma got a NaN scale since the last call.
bool nan_scales() {
  unsigned seen = 0;
#ifdef SM120_ON_SM90
  unsigned const none = 0;
  check(cudaMemcpyFromSymbol(&seen, sm120_on_sm90::nan_scales, sizeof seen), "NaN scales");
  check(cudaMemcpyToSymbol(sm120_on_sm90::nan_scales, &none, sizeof none), "NaN scales");
#endif
  return seen != 0;
}

void print(std::string const& verdict, std::string const& detail, long long count) {
  auto const& o = current->options;
  auto const& r = current->result;
  auto quoted = [](std::string const& text) {
    std::string out = "\"";
    for (char c : text) {
      if (c == '"' || c == '\\')
        out += '\\', out += c;
      else
        out += c == '\n' || c == '\t' ? ' ' : c;
    }
    return out + '"';
  };
  auto number = [](double x) {
    char text[32];
    std::snprintf(text, sizeof text, "%.9g", x);
    return std::isfinite(x) ? std::string(text) : std::string("null");
  };
  std::string const signature =
      r.mismatches != 0 && r.signature_hits == r.mismatches ? "first k tile lost, last counted twice" : "";
  std::ostringstream out;
  out << "{\"set\": " << quoted(o.set) << ", \"seed\": " << o.seed << ", \"jitter_ns\": " << o.jitter << ", \"clc\": " << o.clc
      << ", \"fault\": " << quoted(o.fault) << ", \"verdict\": " << quoted(verdict) << ", \"detail\": " << quoted(detail)
      << ", \"outputs\": " << r.outputs << ", \"mismatches\": " << r.mismatches
      << ", \"max_relative_error\": " << number(r.max_relative_error) << ", \"error_bound\": " << number(r.error_bound)
      << ", \"error_over_bound\": " << number(r.error_over_bound) << ", \"nan_expected\": " << r.nan_expected
      << ", \"signature\": " << quoted(signature) << ", \"first_mismatch\": " << quoted(r.first_mismatch)
      << ", \"mma_count\": " << (emulated && count >= 0 ? std::to_string(count) : "null")
      << ", \"mma_expected\": " << r.mma_expected << ", \"guard_intact\": " << (r.guard_intact ? "true" : "false")
      << ", \"stages\": " << stages << ", \"smem_bytes\": " << Kernel::SharedStorageSize
      << ", \"milliseconds\": " << number(r.milliseconds) << "}\n";
  std::fputs(out.str().c_str(), stdout);
  std::fflush(stdout);
}

/// Ends the process: a kernel that hangs, or memory that it has spoilt, goes with it.
[[noreturn]] void end(std::string const& verdict, std::string const& detail) {
  print(verdict, detail, -1);
  _exit(1);
}

/// Ends the process if it is not destroyed in time: the launcher itself may wait for the kernel.
class Watchdog {
 public:
  Watchdog()
      : thread_([this] {
          auto const start = std::chrono::steady_clock::now();
          while (!done_) {
            if (std::chrono::steady_clock::now() - start > std::chrono::seconds(hang_seconds))
              end("hang", "no end after " + std::to_string(hang_seconds) + " s");
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
          }
        }) {}
  ~Watchdog() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_{false};
  std::thread thread_;
};

/// The rows of all groups lie one after the other, as a mixture of experts has its permuted tokens.
struct Output {
  DeviceBytes bytes;
  std::vector<int> token;           // finalize: the output row of each row
  std::vector<float> router_scale;  // finalize: of each row
  int rows = 0;                     // of the output
};

constexpr int poison = FINALIZED ? 0 : 0xff;  // the kernel adds to it; else NaN of both types

Output make_output(Launch const& launch, std::mt19937_64& random) {
  Output out;
  int total = 0;
  for (auto const& s : launch.groups) total += s.m;
  int const n = launch.groups[0].n;
  if (!FINALIZED) {
    out.rows = total;
    out.bytes = DeviceBytes(std::size_t(total) * n * 2);
    return out;
  }
  out.rows = std::max(1, launch.experts == 1 ? total : total / launch.experts + 1);
  for (int i = 0; i < total; ++i) out.token.push_back(i % out.rows);
  std::shuffle(out.token.begin(), out.token.end(), random);
  for (int i = 0; i < total; ++i) out.router_scale.push_back(float(1 + random() % 255) / 256);
  out.bytes = DeviceBytes(std::size_t(out.rows) * n * 2);
  return out;
}

template <class T>
DeviceBytes upload(std::vector<T> const& values) {
  return DeviceBytes(values);
}

/// Writes late, after having let the next kernel of the stream start: one that reads too early finds NaN scales.
__global__ void late_writer(unsigned char* to, unsigned char const* from, std::size_t size) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int i = 0; i < 300; ++i) __nanosleep(1000);
  for (std::size_t i = threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
}

/// The operands of all batches one after the other.
DeviceBytes joined(std::vector<Group> const& groups, DeviceBytes Group::*operand, std::size_t size, bool first_only = false) {
  std::vector<unsigned char> bytes;
  for (auto const& g : groups) {
    auto const one = ((first_only ? groups[0] : g).*operand).read<unsigned char>();
    bytes.insert(bytes.end(), one.begin(), one.begin() + size);
  }
  bytes.resize(bytes.size() + slack, 0x7f);
  return DeviceBytes(bytes);
}

void run_kernel(std::vector<Group> const& groups, Launch const& launched, Output const& out, Options const& options) {
  auto const& fault = options.fault;
  std::size_t const workspace_size = 64 << 20;
  static DeviceBytes const workspace(workspace_size);
  workspace.fill(0);
  cudaEvent_t begin, finish;
  check(cudaEventCreate(&begin), "event");
  check(cudaEventCreate(&finish), "event");
  bool const written_late = options.set == "pdl";
  auto const& late = groups.back().activation_scales;
  DeviceBytes late_copy;
  if (written_late) {
    late_copy = DeviceBytes(late.read<unsigned char>());
    check(cudaMemset(late.data(), 0xff, late.size()), "cudaMemset");
  }
  check(cudaDeviceSynchronize(), "setup");
  Watchdog const watchdog;
  auto start = [&] {
    check(cudaEventRecord(begin), "event");
    if (written_late) late_writer<<<1, 1024>>>(late.data(), late_copy.data(), late.size());
  };
#if GROUPED
  using StrideAct = conditional_t<SWAP, Input::StrideB, Input::StrideA>;
  using StrideWeight = conditional_t<SWAP, Input::StrideA, Input::StrideB>;
  using StrideD = conditional_t<SWAP, Input::StrideD_T, Input::StrideD>;
  std::vector<typename Input::ProblemShape::UnderlyingProblemShape> shapes;
  std::vector<void const*> act, weight, sf_act, sf_weight, bias, c;
  std::vector<void*> d;
  std::vector<float const*> alpha, router;
  std::vector<int const*> token;
  std::vector<StrideAct> stride_act;
  std::vector<StrideWeight> stride_weight;
  std::vector<StrideD> stride_d;
  std::vector<ScaleLayout> layout_act, layout_weight;
  std::vector<float> alphas;
  std::vector<ElementD> biases, values_of_c;
  for (auto const& g : groups) {
    alphas.push_back(g.alpha);
    for (float x : g.bias) biases.push_back(ElementD(x));
    for (float x : g.c) values_of_c.push_back(ElementD(x));
  }
  std::vector<int> tokens = out.token;
  if (fault == "token-moved" && !tokens.empty()) tokens[0] = (tokens[0] + 1) % out.rows;
  DeviceBytes const device_alpha = upload(alphas), device_bias = upload(biases), device_token = upload(tokens),
                    device_router = upload(out.router_scale), device_c = upload(values_of_c);
  std::size_t row = 0, i = 0;
  for (auto const& g : groups) {
    auto [m, n, k] = g.shape;
    auto const& before = groups[i == 0 ? 0 : i - 1];
    bool const second = i == 1 || (groups.size() > 2 && i + 1 == groups.size());
    if (fault == "group-k" && second && k > TILE_K) k -= TILE_K;
    if (fault == "deep-k") k = std::min(k, 2048);
    shapes.push_back({SWAP ? n : m, SWAP ? m : n, k});
    bool const swapped = fault == "scales-swapped";
    act.push_back(g.activations.data());
    bool const other = (fault == "group-offset" && second) || (fault == "group-past-32" && i >= 32);
    weight.push_back((other ? before : g).weights.data());
    sf_act.push_back(swapped ? g.weight_scales.data() : g.activation_scales.data());
    sf_weight.push_back(swapped ? g.activation_scales.data()
                                : (fault == "group-scale-offset" && second ? before : g).weight_scales.data());
    stride_act.push_back(cutlass::make_cute_packed_stride(StrideAct{}, make_shape(m, g.shape.k, 1)));
    stride_weight.push_back(cutlass::make_cute_packed_stride(StrideWeight{}, make_shape(n, g.shape.k, 1)));
    stride_d.push_back(cutlass::make_cute_packed_stride(StrideD{}, SWAP ? make_shape(n, m, 1) : make_shape(m, n, 1)));
    int const scale_k = g.shape.k + (fault == "scale-stride" ? 4 * Type::vector : 0);
    if constexpr (SWAP) {
      layout_act.push_back(ScaleConfig::tile_atom_to_shape_SFB(make_shape(n, m, scale_k, 1)));
      layout_weight.push_back(ScaleConfig::tile_atom_to_shape_SFA(make_shape(n, m, g.shape.k, 1)));
    } else {
      layout_act.push_back(ScaleConfig::tile_atom_to_shape_SFA(make_shape(m, n, scale_k, 1)));
      layout_weight.push_back(ScaleConfig::tile_atom_to_shape_SFB(make_shape(m, n, g.shape.k, 1)));
    }
    d.push_back(out.bytes.data() + row * n * 2);
    c.push_back(device_c.data() + row * n * 2);
    alpha.push_back(device_alpha.as<float>() + i);
    bias.push_back(device_bias.as<ElementD>() + i * n);
    router.push_back(device_router.as<float>() + row);
    token.push_back(device_token.as<int>() + row);
    row += g.shape.m;
    ++i;
  }
  DeviceBytes const device_shapes = upload(shapes), device_act = upload(act), device_weight = upload(weight),
                    device_sf_act = upload(sf_act), device_sf_weight = upload(sf_weight), device_d = upload(d),
                    device_alphas = upload(alpha), device_biases = upload(bias), device_routers = upload(router),
                    device_tokens = upload(token), device_cs = upload(c), device_stride_act = upload(stride_act),
                    device_stride_weight = upload(stride_weight), device_stride_d = upload(stride_d),
                    device_layout_act = upload(layout_act), device_layout_weight = upload(layout_weight);
  Input input;
  input.swap_ab = SWAP;
  input.shape_info = {int(groups.size()), device_shapes.as<typename Input::ProblemShape::UnderlyingProblemShape>(), nullptr};
  input.stride_act = device_stride_act.data();
  input.stride_weight = device_stride_weight.data();
  input.ptr_act = device_act.as<void const*>();
  input.ptr_weight = device_weight.as<void const*>();
  input.stride_d = device_stride_d.data();
  input.ptr_d = device_d.as<void*>();
  input.alpha_scale_ptr_array = device_alphas.as<float const*>();
  input.fpX_block_scaling_factors_act = device_sf_act.as<unsigned char const*>();
  input.fpX_block_scaling_factors_weight = device_sf_weight.as<unsigned char const*>();
  input.fpX_block_scaling_factors_stride_act = device_layout_act.data();
  input.fpX_block_scaling_factors_stride_weight = device_layout_weight.data();
  input.gemm_workspace = workspace.data();
  input.gemm_workspace_size = workspace_size;
  input.enable_pdl = true;
#if FINALIZED
  // As TmaWarpSpecializedGroupedGemmInput::setFinalizeFusionParams
  int const hidden = groups[0].shape.n;
  input.fusion = Input::EpilogueFusion::FINALIZE;
  auto& f = input.fused_finalize_epilogue;
  f.ptr_final_output = out.bytes.data();
  f.stride_final_output =
      cutlass::make_cute_packed_stride(Input::FusedFinalizeEpilogue::StrideFinalOutput{}, make_shape(out.rows, hidden, 1));
  f.stride_final_output_transposed =
      cutlass::make_cute_packed_stride(Input::FusedFinalizeEpilogue::StrideFinalOutput_T{}, make_shape(hidden, out.rows, 1));
  f.num_rows_in_final_output = out.rows;
  f.shape_override = hidden;
  f.use_reduction = true;
  f.ptr_bias = launched.bias || fault == "bias-added" ? device_biases.as<void const*>() : nullptr;
  f.ptr_router_scales = device_routers.as<float const*>();
  f.ptr_source_token_index = device_tokens.as<int const*>();
#endif
  int sm_count = 0;
  check(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0), "multiprocessors");
  start();
  launch_grouped(input, int(groups.size()), options.clc != 0 ? std::min<int>(options.clc, sm_count) : sm_count,
                 values_of_c.empty() ? nullptr : device_cs.as<void const*>(), fault == "beta-of-zero" ? 0 : beta_of_c);
#else
  auto const& g = groups[0];
  int const m = g.shape.m, n = g.shape.n, k = g.shape.k;
  DeviceBytes const device_alpha = upload(std::vector<float>{g.alpha});
  DeviceBytes activations, weights, activation_scales, weight_scales;
  bool const several = groups.size() > 1;
  if (several) {
    auto bytes = [&](Element e, int rows) { return std::size_t(rows) * k * (e == Element::e2m1 ? 4 : 8) / 8; };
    activations = joined(groups, &Group::activations, bytes(Type::activation, m));
    weights = joined(groups, &Group::weights, bytes(Type::weight, n));
    activation_scales =
        joined(groups, &Group::activation_scales, g.activation_scales.size() - slack, fault == "batch-scales");
    weight_scales = joined(groups, &Group::weight_scales, g.weight_scales.size() - slack);
  }
  auto const* sf_act = (several ? activation_scales : g.activation_scales).data();
  auto const* sf_weight = (several ? weight_scales : g.weight_scales).data();
  bool const swapped = fault == "scales-swapped";
  DenseInput const input{m,
                         n,
                         k,
                         int(groups.size()),
                         (several ? activations : g.activations).data(),
                         (several ? weights : g.weights).data(),
                         swapped ? sf_weight : sf_act,
                         swapped ? sf_act : sf_weight + (fault == "scale-pointer" ? 512 : 0),
                         k + (fault == "scale-stride" ? 4 * Type::vector : 0),
                         device_alpha.as<float>(),
                         out.bytes.data()};
  start();
  launch_dense(input, workspace.data(), workspace_size);
#endif
  check(cudaEventRecord(finish), "event");
  // FlashInfer's launcher makes its own types: what it launched must be the kernel whose stages and size are reported here.
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, cutlass::device_kernel<Kernel>), "cudaFuncGetAttributes");
  if (attributes.maxDynamicSharedSizeBytes != int(Kernel::SharedStorageSize))
    throw std::runtime_error("another kernel was launched");
  check(cudaEventSynchronize(finish), "kernel");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, finish), "event");
  current->result.milliseconds += milliseconds;
  current->result.guard_intact = current->result.guard_intact && out.bytes.guards_intact();
}

/// Adds to the result. The expected bits are made here from sums, with this program's own rounding.
void compare(std::vector<Group> const& groups, Launch const& launched, Output const& out, Data data) {
  auto& r = current->result;
  int const n = groups[0].shape.n;
  auto const got = out.bytes.read<std::uint16_t>();
  std::vector<std::pair<int, int>> row_of;  // of all rows: group, and row within it
  for (int g = 0; g < int(groups.size()); ++g)
    for (int m = 0; m < groups[g].shape.m; ++m) row_of.push_back({g, m});
  std::vector<std::vector<int>> contributions(out.rows);
  for (int row = 0; row < int(row_of.size()); ++row) contributions[FINALIZED ? out.token[row] : row].push_back(row);

  struct Contribution {
    double value, shifted, magnitude, bound;
    bool nan;
  };
  auto contribution = [&](int row, int column) {
    auto const& g = groups[row_of[row].first];
    std::size_t const at = std::size_t(row_of[row].second) * n + column;
    Contribution c{};
    double const bias = FINALIZED ? (launched.bias ? g.bias[column] : 0) : g.c.empty() ? 0 : beta_of_c * g.c[at];
    double const router = FINALIZED ? out.router_scale[row] : 1;
    auto finish = [&](double accumulator) {
      float const biased = float(double(g.alpha) * accumulator + bias);
      return FINALIZED ? double(float(double(biased) * router)) : double(biased);
    };
    if (data == Data::inexact) {
      c.value = (double(g.alpha) * g.inexact.sum[at] + bias) * router;
      c.magnitude = (double(g.alpha) * g.inexact.magnitude[at] + std::abs(bias)) * router;
      double const k = g.shape.k;
      double const slack = emulated ? (std::ceil(k / Type::mma_k) + 2) * std::ldexp(1.0, -24) : (k + 2) * std::ldexp(1.0, -23);
      c.bound = slack * c.magnitude;
      c.nan = g.inexact.nan[at];
    } else {
      double const unit = g.unit(data);
      c.value = finish(double(g.exact.sum[at]) * unit);
      c.shifted = finish(double(g.exact.sum[at] - g.exact.first[at] + g.exact.last[at]) * unit);
      c.magnitude = (double(g.alpha) * double(g.exact.magnitude[at]) * unit + std::abs(bias)) * router;
      c.nan = g.exact.nan[at];
    }
    return c;
  };
  auto same = [](double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); };
  for (int row = 0; row < out.rows; ++row) {
    for (int column = 0; column < n; ++column) {
      double want = 0, shifted = 0, magnitude = 0, bound = 0, rounded_magnitude = 0;
      bool nan = false;
      std::size_t const additions = contributions[row].size() - (contributions[row].empty() ? 0 : 1);
      bool const any_order = data != Data::inexact && additions > 1;
      for (int const contributing : contributions[row]) {
        auto const c = contribution(contributing, column);
        nan = nan || c.nan;
        magnitude += c.magnitude;
        if (data == Data::inexact) {
          want += c.value;
          bound += c.bound + output_type.half_ulp() * std::abs(c.value) + output_type.smallest_step() / 2;
        } else if (any_order) {
          want += output_type.round(c.value);
          shifted += output_type.round(c.shifted);
          rounded_magnitude += std::abs(output_type.round(c.value));
        } else {
          want = output_type.round(want + output_type.round(c.value));
          shifted = output_type.round(shifted + output_type.round(c.shifted));
        }
      }
      if (any_order)  // partial sums are, rounded, at most 2^-5 larger than the sum of magnitudes
        bound = double(additions) *
                (output_type.half_ulp() * (1 + std::ldexp(1.0, -5)) * rounded_magnitude + output_type.smallest_step() / 2);
      if (data == Data::inexact && contributions[row].size() > 1)
        bound += output_type.half_ulp() * (std::abs(want) + bound) + output_type.smallest_step() / 2;
      if (nan) want = shifted = NAN;
      double const have = output_type.value(got[std::size_t(row) * n + column]);
      ++r.outputs;
      r.nan_expected += nan;
      double const error = same(have, want) ? 0 : std::isfinite(have - want) ? std::abs(have - want) : INFINITY;
      bool const good = error <= bound;  // 0 for bits
      if (magnitude >= std::ldexp(1.0, output_type.smallest_exponent)) {
        r.max_relative_error = std::max(r.max_relative_error, error / magnitude);
        r.error_bound = std::max(r.error_bound, bound / magnitude);
        r.error_over_bound = std::max(r.error_over_bound, bound == 0 ? 0 : error / bound);
      }
      if (!good) {
        if (r.mismatches++ == 0) {
          std::ostringstream text;
          text << "row " << row << " column " << column << " of " << out.rows << "x" << n << " K " << groups[0].shape.k << " ("
               << groups.size() << " groups): " << have << ", expected " << want;
          r.first_mismatch = text.str();
        }
        r.signature_hits += data != Data::inexact && same(have, shifted);
      }
    }
  }
}

/// The data of a set, which all its runs of one seed share: kernels write outputs only.
struct Prepared {
  std::vector<Launch> launches;
  std::vector<std::vector<Group>> groups;  // of each launch
  std::vector<Output> outputs;
  bool exact = true;
};

Prepared const& prepare(std::string const& set, std::uint64_t seed) {
  static std::map<std::uint64_t, Prepared> by_seed;
  static std::string of_set;
  if (of_set != set) by_seed.clear();
  of_set = set;
  if (auto const known = by_seed.find(seed); known != by_seed.end()) return known->second;
  auto& next = by_seed[seed];
  next.launches = launches_of(set);
  std::mt19937_64 random(seed);
  for (auto const& launch : next.launches) {
    auto& groups = next.groups.emplace_back();
    for (auto const& shape : launch.groups) {
      groups.push_back(make_group(shape, sets.at(set), set == "c", random, next.exact));
      if (!GROUPED) groups.back().alpha = groups[0].alpha;
    }
    next.outputs.push_back(make_output(launch, random));
  }
  return next;
}

void run_set(Options const& options) {
  current = std::make_unique<Run>(Run{options, {}});
  auto& r = current->result;
  Data const data = sets.at(options.set);
  std::string detail, verdict = "pass";
#ifdef SM120_ON_SM90
  unsigned long long const zero = 0;
  unsigned mask = 0;
  while (mask < options.jitter) mask = 2 * mask + 1;
  unsigned const workers = GROUPED ? 0 : options.clc;
  check(cudaMemcpyToSymbol(sm120_on_sm90::mma_count, &zero, sizeof zero), "mma count");
  check(cudaMemcpyToSymbol(sm120_on_sm90::jitter_mask, &mask, sizeof mask), "jitter");
  check(cudaMemcpyToSymbol(sm120_on_sm90::clc_workers, &workers, sizeof workers), "clc");
#endif
  auto const& prepared = prepare(options.set, options.seed);
  r.exact = prepared.exact;
  for (std::size_t i = 0; i < prepared.launches.size(); ++i) {
    auto const& launch = prepared.launches[i];
    auto const& groups = prepared.groups[i];
    auto const& out = prepared.outputs[i];
    out.bytes.fill(poison);
    run_kernel(groups, launch, out, options);
    compare(groups, launch, out, data);
    // Scales of rows beyond the matrix are NaN. Where whole blocks of 128 rows are used there are none, and no mma may meet
    // one.
    bool const whole_blocks = std::all_of(launch.groups.begin(), launch.groups.end(),
                                          [](Shape3 const& s) { return s.m % 128 == 0 && s.n % 128 == 0; });
    bool const seen = nan_scales();
    if (data == Data::nan)
      r.nan_unnoticed = r.nan_unnoticed || (emulated && !seen);
    else
      r.nan_scales = r.nan_scales || (seen && whole_blocks);
    for (auto const& s : launch.groups) {
      std::uint64_t const tile_rows = SWAP ? s.n : s.m, tile_columns = SWAP ? s.m : s.n;
      r.mma_expected += (tile_rows + TILE_M - 1) / TILE_M * ((tile_columns + TILE_N - 1) / TILE_N) *
                        ((s.k + TILE_K - 1) / TILE_K) * (TILE_M / 16) * (TILE_N / 8) * (TILE_K / Type::mma_k);
    }
  }
  auto const count = mma_count();
  auto wrong = [&](std::string const& why) {
    verdict = "wrong";
    detail += (detail.empty() ? "" : "; ") + why;
  };
  if (r.mismatches != 0) wrong("outputs differ");
  if (!r.guard_intact) wrong("guard bytes overwritten");
  if (emulated && count != r.mma_expected) wrong("mma count");
  if (r.nan_scales) wrong("NaN scales reached an mma");
  if (r.nan_unnoticed) wrong("the NaN scales of the NaN set were not noticed");
  if (!r.exact) wrong("the data are not exact: a sum of magnitudes reaches 2^24 units");
  if (data == Data::nan && r.nan_expected == 0) wrong("no NaN in the NaN set");
  print(verdict, detail, count);
  if (verdict != "pass") throw std::runtime_error("");
}

std::vector<std::string> split(std::string const& list) {
  std::vector<std::string> parts;
  std::stringstream stream(list);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

int usage(std::string const& problem) {
  std::fprintf(
      stderr,
      "%s\nusage: gemm --set SET [--clc 0|W] [--jitter NS] [--seed S] [--fault NAME], or gemm --list, which prints the sets\n",
      problem.c_str());
  return 2;
}

int run(int argc, char** argv) {
  std::map<std::string, std::string> given = {
      {"--set", ""}, {"--clc", "0"}, {"--jitter", "0"}, {"--seed", "1"}, {"--fault", "none"}};
  if (argc == 2 && std::string(argv[1]) == "--list") {
    std::printf("{\"sets\": [");
    char const* comma = "";
    for (auto const& s : sets) std::printf("%s\"%s\"", comma, s.first.c_str()), comma = ", ";
    std::printf("], \"faults\": [");
    comma = "";
    for (auto const& f : faults)
      std::printf("%s{\"name\": \"%s\", \"class\": \"%s\", \"what\": \"%s\", \"set\": \"%s\"}", comma, f.name.c_str(),
                  f.kind.c_str(), f.what.c_str(), f.set.c_str()),
          comma = ", ";
    std::printf("], \"stages\": %d, \"smem_bytes\": %d, \"emulated\": %s}\n", stages, int(Kernel::SharedStorageSize),
                emulated ? "true" : "false");
    return 0;
  }
  for (int i = 1; i < argc; i += 2) {
    if (given.count(argv[i]) == 0) return usage(std::string("unknown option: ") + argv[i]);
    if (i + 1 == argc) return usage(std::string("no value: ") + argv[i]);
    given[argv[i]] = argv[i + 1];
  }
  auto to_number = [](std::string const& text, unsigned long long& value) {
    char* rest = nullptr;
    value = std::strtoull(text.c_str(), &rest, 10);
    return !text.empty() && *rest == 0 && text[0] != '-';
  };
  std::vector<Options> runs;
  for (auto const& set : split(given["--set"])) {
    if (sets.count(set) == 0) return usage("no such set: " + set);
    for (auto const& fault : split(given["--fault"])) {
      if (std::none_of(faults.begin(), faults.end(), [&](Fault const& f) { return f.name == fault; }))
        return usage("no such fault: " + fault);
      for (auto const& clc : split(given["--clc"]))
        for (auto const& jitter : split(given["--jitter"]))
          for (auto const& seed : split(given["--seed"])) {
            unsigned long long w, j, s;
            if (!to_number(clc, w) || !to_number(jitter, j) || !to_number(seed, s)) return usage("not a number");
            if (!emulated && (j != 0 || (w != 0 && !GROUPED))) return usage("--jitter and --clc are for emulation");
            runs.push_back({set, fault, unsigned(w), unsigned(j), s});
          }
    }
  }
  if (runs.empty()) return usage("no --set");
  std::signal(SIGABRT, [](int) { end("crash", "an assertion failed; see standard error"); });
  int status = 0;
  for (auto const& options : runs) {
    try {
      run_set(options);
    } catch (std::exception const& error) {
      status = 1;
      if (*error.what() != 0) end("crash", error.what());  // else printed; a CUDA error would spoil the runs to come
    }
  }
  return status;
}

}  // namespace verify

int main(int argc, char** argv) { return verify::run(argc, argv); }
