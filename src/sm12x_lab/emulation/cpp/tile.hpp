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

void judge(cta::Problem const& p, cta::Output const& output, int group, int groups, float beta, bool whole_kernel,
           Totals& totals) {
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
        emulate::report().add(
            "wrongly stored",
            emulate::format("group %d of %d row %d column %d: %04x is stored, not %04x%s", group, groups, i, j, got, expected,
                            whole_kernel ? " (whole kernel)" : "; the accumulator is right"));
    }
  }
  if (std::size_t const bytes = output.stored.overwritten()) {
    emulate::report().add("stored out of bounds",
                          emulate::format("group %d of %d: %zu bytes around the output were written", group, groups, bytes));
  }
  auto const tiles = [](int extent, int tile) { return std::uint64_t(extent + tile - 1) / tile; };
  totals.mmas += tiles(p.m, TILE_M) * tiles(p.n, TILE_N) * tiles(p.k, TILE_K) * (TILE_M / 16) * (TILE_N / 8) *
                 (TILE_K / int(cute::size<2>(typename cta::TiledMma::AtomShape_MNK{})));
}

using Orders = std::vector<emulate::Schedule>;
Orders const orders{emulate::Schedule::producer_first, emulate::Schedule::producer_last, emulate::Schedule::random};

/// Launch the problems in each order, a grouped kernel all at once and a dense one each by itself; false if a launch hung.
template <class Launch>
bool run_all(emulate::Machine& machine, std::vector<cta::Problem> const& problems, Orders const& orders, bool whole_kernel,
             Totals& totals, Launch launch_one) {
  emulate::current_machine() = &machine;
  emulate::catch_wild_access(machine.shared);
  auto const inputs = emulate::global_memory().ranges;
  std::uint64_t const needed_before = totals.mmas, ran_before = machine.mma_count;
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
      for (std::size_t i = 0; i < launch.size(); ++i)
        judge(*launch[i], outputs[i], int(i), int(launch.size()), beta, whole_kernel, totals);
      emulate::global_memory().ranges = inputs;
      if (hung) return false;
    }
  }
  unsigned long long const ran = machine.mma_count - ran_before, needed = totals.mmas - needed_before;
  if (ran != needed) {
    emulate::report().add("mma count", emulate::format("%llu mma instructions ran, %llu are needed%s", ran, needed,
                                                       whole_kernel ? " (whole kernel)" : ""));
  }
  return true;
}

constexpr int k_unit = cta::mixed ? 128 : 32;
constexpr int whole(int k) { return (k + k_unit - 1) / k_unit * k_unit; }

/// One row and a single k tile; ragged edges and a partial k tile; stages that wrap around twice; two k tiles and three tiles
/// of n; four k tiles. A grouped kernel gets nine groups, four of them empty, the first and the last among these.
std::vector<cta::Problem> problems() {
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

#if KERNEL
/// More groups than the scheduler reads at a time, one per lane of a warp: 40 with every third one empty, few rows and one k
/// tile each, but group 35 with two tiles; 37 empty ones in a row, which also few CTAs must skip; three more. It has 30 tiles.
std::vector<cta::Problem> many_groups() {
  std::vector<cta::Problem> all;
  all.reserve(80);
  for (int group = 0; group < 80; ++group) {
    bool const empty = group % 3 == 1 || (group >= 40 && group < 77);
    int const rows = empty ? 0 : group == 35 ? (SWAP ? TILE_N : TILE_M) + 22 : 1 + group % 9;
    all.emplace_back(SWAP ? 8 : rows, SWAP ? rows : 8, whole(TILE_K), 10 + group);
  }
  return all;
}
#endif

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
    auto const run_one = [&](auto const& launch, auto& outputs, float beta, auto order, int run) {
      cta::run(launch, outputs, beta, fault, order, run);
    };
    finished = run_all(machine, all, orders, false, totals, run_one);
  }
#if KERNEL
  emulate::Machine kernel_machine(sizeof(cta::Kernel::SharedStorage));
  // The kernel counts its stages and tiles by itself: the faults that are planted there are not in it.
  if (finished && (kernel_alone || fault_name == "none")) {
    auto launcher = [&](std::array<int, 3> ctas, bool shapes_on_host) {
      return [&fault, ctas, shapes_on_host](auto const& launch, auto& outputs, float beta, auto order, int run) {
        cta::launch(launch, outputs, beta, fault, order, run, ctas[run - 1], shapes_on_host);
      };
    };
    finished = run_all(kernel_machine, all, orders, true, totals, launcher({1, 2, 3}, true));
    auto const many = many_groups();
    emulate::global_memory().ranges.clear();
    for (auto const& p : many) p.register_memory();
    for (auto const& p : many) exact = exact && p.exact;
    Orders const last_and_random(orders.begin() + 1, orders.end());
    if (finished) run_all(kernel_machine, many, last_and_random, true, totals, launcher({7, 34}, false));
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
