// Runs the SM120 block-scaled collectives of the CUTLASS on the include path, the mainloop's own load() and mma() and the
// epilogue's own load() and store(), on the host, for CTA tiles of a grouped or a dense GEMM, and compares with an integer GEMM
// bit for bit. Prints one JSON object; exit code 0: proven, 1: wrong.
//
// -DDTYPE=nvfp4|mxfp4|mxfp8|fp8xmxfp4  -DTILE_M -DTILE_N -DTILE_K (elements)  -DSWAP=1: A and B change places
// -DGROUPED=0: dense  -DPINGPONG=1: that schedule, else cooperative  -DSTAGES: a stage count, else the builder's (0)
// -DKERNEL=1: the whole kernel instead, which is grouped and cooperative; its accumulators are not seen, only what it stores
// An argument names a seeded fault (cta.hpp): each must be found, or the emulation proves nothing.
#include "cta.hpp"

#ifndef KERNEL
#define KERNEL 0
#endif
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

void judge(cta::Problem const& p, cta::Output const& output, int group, float beta, Totals& totals) {
  auto const compared = KERNEL ? emulate::Comparison{} : p.compare(output.accumulators, TILE_K);
  totals.outputs += KERNEL ? 0 : output.accumulators.size();
  totals.mismatches += compared.mismatches;
  totals.max_error = std::max(totals.max_error, compared.max_error);
  if (totals.signature.empty()) totals.signature = compared.signature;
  for (int i = 0; i < p.m; ++i) {
    for (int j = 0; j < p.n; ++j) {
      std::uint16_t const expected = p.stored(i, j, cta::alpha_of(group), beta), got = output.stored.get(i, j);
      ++totals.stored;
      if (expected == got || ((expected | got) & 0x7fff) == 0) continue;
      ++totals.stored_mismatches;
      if (KERNEL || p.is_right(i, j, output.accumulators[std::size_t(i) * p.n + j]))
        emulate::report().add("wrongly stored",
                              emulate::format("group %d row %d column %d: %04x is stored, not %04x%s", group, i, j, got, expected,
                                              KERNEL ? "" : "; the accumulator is right"));
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

}  // namespace

int main(int argc, char** argv) {
  std::string const fault_name = argc > 1 ? argv[1] : "none";
  auto const faults = cta::faults();
  if (faults.count(fault_name) == 0) {
    std::fprintf(stderr, "no such fault: %s\n", fault_name.c_str());
    return 2;
  }
  cta::Fault const fault = faults.at(fault_name);
#if KERNEL
  if (fault.producer_stage != 0) {
    std::fprintf(stderr, "the kernel counts its stages by itself: %s cannot be planted\n", fault_name.c_str());
    return 2;
  }
  emulate::Machine machine(sizeof(cta::Kernel::SharedStorage));
#else
  emulate::Machine machine(sizeof(cta::SharedStorage));
#endif
  emulate::current_machine() = &machine;
  emulate::catch_wild_access(machine.shared);

  // One row and a single k tile; ragged edges and a partial k tile; stages that wrap around twice.
  constexpr int k_unit = cta::mixed ? 128 : 32;
  constexpr int whole_k = TILE_K * (2 * cta::stage_count + 1);
  constexpr int ragged_k = TILE_K % k_unit == 0 && TILE_K > k_unit ? 2 * TILE_K + k_unit : 2 * TILE_K;
  std::vector<cta::Problem> problems;
  problems.emplace_back(1, TILE_N, (TILE_K + k_unit - 1) / k_unit * k_unit, 1);
  problems.emplace_back(TILE_M + TILE_M / 2 + 1, TILE_N + 8, (ragged_k + k_unit - 1) / k_unit * k_unit, 2);
  problems.emplace_back(TILE_M, TILE_N, (whole_k + k_unit - 1) / k_unit * k_unit, 3);
  for (auto const& p : problems) p.register_memory();
  auto const inputs = emulate::global_memory().ranges;

  Totals totals;
  bool hung = false, exact = true;
  for (auto const& p : problems) exact = exact && p.exact;
  int run = 0;
  for (auto order : {emulate::Schedule::producer_first, emulate::Schedule::producer_last, emulate::Schedule::random}) {
    float const beta = cta::grouped && order == emulate::Schedule::random ? 1 : 0;
    std::vector<std::vector<cta::Problem const*>> launches(1);  // a grouped kernel takes all, a dense one each by itself
    for (auto const& p : problems) {
      if (!cta::grouped && !launches.back().empty()) launches.emplace_back();
      launches.back().push_back(&p);
    }
    for (auto const& launch : launches) {
      std::vector<cta::Output> outputs;
      outputs.reserve(launch.size());
      for (auto const* p : launch) outputs.emplace_back(*p);
      try {
        ++run;
#if KERNEL
        cta::launch(launch, outputs, beta, /* CTAs */ run, fault, order, run);
#else
        cta::run(launch, outputs, beta, fault, order, run);
#endif
      } catch (emulate::Hang const&) {
        hung = true;
      }
      for (std::size_t i = 0; i < launch.size(); ++i) judge(*launch[i], outputs[i], int(i), beta, totals);
      emulate::global_memory().ranges = inputs;
      if (hung) break;
    }
    if (hung) break;
  }
  if (!hung && machine.mma_count != totals.mmas) {
    emulate::report().add("mma count", emulate::format("%llu mma instructions ran, %llu are needed",
                                                       (unsigned long long)machine.mma_count, (unsigned long long)totals.mmas));
  }
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
