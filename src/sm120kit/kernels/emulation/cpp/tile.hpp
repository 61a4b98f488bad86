// Runs the SM120 block-scaled collectives of the CUTLASS on the include path, the mainloop's own load() and mma() and the
// epilogue's own load() and store(), on the host, for CTA tiles of a grouped or a dense GEMM, and compares with an integer GEMM
// bit for bit. A program includes this file once for each of its tiles, each time in another namespace and with
//
//   DTYPE        nvfp4, mxfp4, mxfp8 or fp8xmxfp4
//   TILE_M, TILE_N, TILE_K   elements
//   SWAP         1: A and B change places
//   GROUPED      0: dense
//   PINGPONG     1: that schedule, else cooperative
//   STAGES       a stage count, else the builder's (0)
//   KERNEL       1: then also the whole kernel, which is grouped and cooperative; of it only what it stores is compared
//
// Templates that the tiles share are instantiated once.
#include "kernel_types.hpp"
#include "cta.hpp"
#if KERNEL
#include "kernel.hpp"
#endif

namespace {

/// What the runs showed, over all problems.
struct Totals {
  std::uint64_t outputs = 0, mismatches = 0, stored = 0, stored_mismatches = 0, mmas = 0;
  double max_error = 0;
  std::string signature;
};

void judge(cta::Problem const& p, cta::Output const& output, int group, float beta, bool whole_kernel, Totals& totals) {
  auto const compared = whole_kernel ? emulate::Comparison{} : p.compare(output.accumulators, TILE_K);
  totals.outputs += whole_kernel ? 0 : output.accumulators.size();
  totals.mismatches += compared.mismatches;
  totals.max_error = std::max(totals.max_error, compared.max_error);
  if (totals.signature.empty()) totals.signature = compared.signature;
  for (int i = 0; i < p.m; ++i) {
    for (int j = 0; j < p.n; ++j) {
      std::uint16_t const expected = p.stored(i, j, beta), got = output.stored.get(i, j);
      ++totals.stored;
      if (expected == got || ((expected | got) & 0x7fff) == 0) continue;
      ++totals.stored_mismatches;
      if (whole_kernel || p.is_right(i, j, output.accumulators[std::size_t(i) * p.n + j]))
        emulate::report().add("wrongly stored",
                              emulate::format("group %d row %d column %d: %04x is stored, not %04x%s", group, i, j, got, expected,
                                              whole_kernel ? " (whole kernel)" : "; the accumulator is right"));
    }
  }
  if (std::size_t const bytes = output.stored.overwritten()) {
    emulate::report().add("stored out of bounds",
                          emulate::format("group %d: %zu bytes around the output were written", group, bytes));
  }
  auto const tiles = [](int extent, int tile) { return std::uint64_t(extent + tile - 1) / tile; };
  totals.mmas += tiles(p.m, TILE_M) * tiles(p.n, TILE_N) * tiles(p.k, TILE_K) * (TILE_M / 16) * (TILE_N / 8) *
                 (TILE_K / int(cute::size<2>(typename cta::TiledMma::AtomShape_MNK{})));
}

using Orders = std::array<emulate::Schedule, 3>;
constexpr Orders orders{emulate::Schedule::producer_first, emulate::Schedule::producer_last, emulate::Schedule::random};

/// Launch the problems in each order, a grouped kernel all at once and a dense one each by itself; false if a launch hung.
template <class Launch>
bool run_all(emulate::Machine& machine, std::vector<cta::Problem> const& problems, bool whole_kernel, Totals& totals,
             Launch launch_one) {
  emulate::current_machine() = &machine;
  emulate::catch_wild_access(machine.shared);
  auto const inputs = emulate::global_memory().ranges;
  std::uint64_t const needed_before = totals.mmas;
  std::vector<std::vector<cta::Problem const*>> launches(1);
  for (auto const& p : problems) {
    if (!cta::grouped && !launches.back().empty()) launches.emplace_back();
    launches.back().push_back(&p);
  }
  int run = 0;
  for (auto order : orders) {
    float const beta = cta::grouped && order == emulate::Schedule::random ? 1 : 0;
    for (auto const& launch : launches) {
      std::vector<cta::Output> outputs;
      outputs.reserve(launch.size());
      for (auto const* p : launch) outputs.emplace_back(*p);
      bool hung = false;
      try {
        launch_one(launch, outputs, beta, order, ++run);
      } catch (emulate::Hang const&) {
        hung = true;
      }
      for (std::size_t i = 0; i < launch.size(); ++i) judge(*launch[i], outputs[i], int(i), beta, whole_kernel, totals);
      emulate::global_memory().ranges = inputs;
      if (hung) return false;
    }
  }
  if (machine.mma_count != totals.mmas - needed_before) {
    emulate::report().add("mma count", emulate::format("%llu mma instructions ran, %llu are needed%s",
                                                       (unsigned long long)machine.mma_count,
                                                       (unsigned long long)(totals.mmas - needed_before),
                                                       whole_kernel ? " (whole kernel)" : ""));
  }
  return true;
}

/// One row and a single k tile; ragged edges and a partial k tile; stages that wrap around twice; two k tiles and three tiles
/// of n; four k tiles. A grouped kernel gets nine groups, four of them empty, the first and the last among these.
std::vector<cta::Problem> problems() {
  constexpr int k_unit = cta::mixed ? 128 : 32;
  auto const whole = [](int k) { return (k + k_unit - 1) / k_unit * k_unit; };
  constexpr int ragged_k = TILE_K % k_unit == 0 && TILE_K > k_unit ? 2 * TILE_K + k_unit : 2 * TILE_K;
  std::vector<cta::Problem> all;
  auto const empty = [&] {
    if (cta::grouped) all.emplace_back(SWAP ? TILE_M : 0, SWAP ? 0 : TILE_N, whole(TILE_K), 9);
  };
  all.reserve(9);
  empty();
  all.emplace_back(1, TILE_N, whole(TILE_K), 1);
  all.emplace_back(TILE_M + TILE_M / 2 + 1, TILE_N + 8, whole(ragged_k), 2);
  empty();
  empty();
  all.emplace_back(TILE_M, TILE_N, whole(TILE_K * (2 * cta::stage_count + 1)), 3);
  all.emplace_back(TILE_M, 2 * TILE_N + 8, whole(2 * TILE_K), 4);
  all.emplace_back(16, TILE_N, whole(4 * TILE_K), 5);
  empty();
  return all;
}

}  // namespace

/// Run the tile with a seeded fault of cta.hpp, each of which must be found, or the emulation proves nothing: exit code 0 if its
/// numbers are proven, 1 if they are wrong. `kernel:FAULT` runs the whole kernel alone.
int run(std::string fault_name) {
  bool const kernel_alone = fault_name.rfind("kernel:", 0) == 0;
  if (kernel_alone) fault_name.erase(0, 7);
  auto const faults = cta::faults();
  if (faults.count(fault_name) == 0 || (kernel_alone && !KERNEL)) {
    std::fprintf(stderr, "no such fault: %s\n", fault_name.c_str());
    return 2;
  }
  cta::Fault const fault = faults.at(fault_name);
  auto const all = problems();
  for (auto const& p : all) p.register_memory();
  bool exact = true;
  for (auto const& p : all) exact = exact && p.exact;

  Totals totals;
  emulate::Machine machine(sizeof(cta::SharedStorage));
  bool finished = true;
  if (!kernel_alone) {
    finished = run_all(machine, all, false, totals, [&](auto const& launch, auto& outputs, float beta, auto order, int run) {
      cta::run(launch, outputs, beta, fault, order, run);
    });
  }
#if KERNEL
  emulate::Machine kernel_machine(sizeof(cta::Kernel::SharedStorage));
  // The kernel counts its stages and tiles by itself: the faults that are planted there are not in it.
  if (finished && (kernel_alone || fault_name == "none")) {
    run_all(kernel_machine, all, true, totals, [&](auto const& launch, auto& outputs, float beta, auto order, int run) {
      cta::launch(launch, outputs, beta, fault, order, run, /* CTAs */ run);
    });
    machine.mma_count += kernel_machine.mma_count;
  }
#endif
  if (!exact)
    emulate::report().add("inexact data", "a sum of magnitudes exceeds 24 bits: the order of addition could change bits");
  bool const passed = totals.mismatches == 0 && totals.stored_mismatches == 0 && emulate::report().clean();
  emulate::Result{passed,
                  totals.outputs,
                  totals.mismatches,
                  totals.max_error,
                  totals.signature,
                  totals.stored,
                  totals.stored_mismatches,
                  machine.mma_count,
                  machine.phase_bytes,
                  static_cast<long>(cta::Collective::TmaTransactionBytes) - fault.missing_bytes,
                  cta::stage_count,
                  long(sizeof(typename cta::Collective::TensorStorage))}
      .print();
  return passed ? 0 : 1;
}

#undef DTYPE
#undef TILE_M
#undef TILE_N
#undef TILE_K
#undef SWAP
#undef GROUPED
#undef PINGPONG
#undef STAGES
#undef KERNEL
