// Runs the SM120 block-scaled collective of the CUTLASS on the include path, its own load() and mma(), on the host, for CTA
// tiles of a grouped or a dense GEMM, and compares with an integer GEMM bit for bit. Prints one JSON object; exit code 0: proven,
// 1: wrong.
//
// -DDTYPE=nvfp4|mxfp4|mxfp8|fp8xmxfp4  -DTILE_M -DTILE_N -DTILE_K (elements)  -DSWAP: A and B change places  -DGROUPED=0: dense
// -DPINGPONG: that schedule, else cooperative  -DSTAGES: a stage count, else the builder's
// An argument names a seeded fault (see faults): each must be found, or the emulation proves nothing.
#include "hooks.hpp"

#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>

#include "problem.hpp"

#ifndef GROUPED
#define GROUPED 1
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif
#ifndef STAGES
#define STAGES 0
#endif
#ifndef SWAP
#define SWAP 0
#endif

namespace {

using namespace cute;
using emulate::Element;
using emulate::Scale;

// ---- what is asked for

namespace dtype {
template <class A_, class B_, Element EA, Element EB, Scale S, int V>
struct Base {
  using A = A_;
  using B = B_;
  static constexpr Element a = EA, b = EB;
  static constexpr Scale scale = S;
  static constexpr int vector = V;
};
using namespace cutlass;
struct nvfp4 : Base<nv_float4_t<float_e2m1_t>, nv_float4_t<float_e2m1_t>, Element::e2m1, Element::e2m1, Scale::ue4m3, 16> {};
struct mxfp4 : Base<mx_float4_t<float_e2m1_t>, mx_float4_t<float_e2m1_t>, Element::e2m1, Element::e2m1, Scale::ue8m0, 32> {};
struct mxfp8 : Base<mx_float8_t<float_e4m3_t>, mx_float8_t<float_e4m3_t>, Element::e4m3, Element::e4m3, Scale::ue8m0, 32> {};
struct fp8xmxfp4 : Base<mx_float8_t<float_e4m3_t>, mx_float4_t<float_e2m1_t>, Element::e4m3, Element::e2m1, Scale::ue8m0, 32> {
};
template <class D>
struct Swapped : Base<typename D::B, typename D::A, D::b, D::a, D::scale, D::vector> {};
}  // namespace dtype

using Pair = conditional_t<SWAP, dtype::Swapped<dtype::DTYPE>, dtype::DTYPE>;
using TileShape = Shape<Int<TILE_M>, Int<TILE_N>, Int<TILE_K>>;
using ClusterShape = Shape<_1, _1, _1>;
constexpr bool grouped = GROUPED;
constexpr bool mixed = Pair::a != Pair::b;  // the 4-bit operand is unpacked on its way: rows are multiples of 128 elements

constexpr int alignment(Element e) { return e == Element::e4m3 ? 16 : mixed ? 128 : 32; }
template <class Layout>
using Tag = conditional_t<grouped, Layout*, Layout>;
using Schedule =
    conditional_t<!PINGPONG, cutlass::gemm::collective::KernelScheduleAuto,  // cooperative, as FlashInfer asks for it
                  conditional_t<grouped, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong,
                                cutlass::gemm::KernelTmaWarpSpecializedPingpong>>;

using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, TileShape, ClusterShape,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Tag<cutlass::layout::RowMajor>, 8, cutlass::bfloat16_t,
    Tag<cutlass::layout::RowMajor>, 8,
    conditional_t<
        PINGPONG,
        conditional_t<grouped, cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong, cutlass::epilogue::TmaWarpSpecialized>,
        conditional_t<grouped, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
                      cutlass::epilogue::TmaWarpSpecializedCooperative>>>::CollectiveOp;

using StageCount = conditional_t<
    STAGES != 0, cutlass::gemm::collective::StageCount<STAGES>,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>>;

using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, typename Pair::A, Tag<cutlass::layout::RowMajor>,
    alignment(Pair::a), typename Pair::B, Tag<cutlass::layout::ColumnMajor>, alignment(Pair::b), float, TileShape, ClusterShape,
    StageCount, Schedule>::CollectiveOp;

// ---- seeded faults

struct Fault {
  int producer_stage = 0;    // stages by which the producer starts ahead of the consumer
  int missing_bytes = 0;     // by which the full barriers expect too few
  bool swap_scales = false;  // the scale factors of A and B change places
  int scale_k = 0;           // by which the scale factors' layout is made for a longer k: its row blocks are too far apart
};
std::map<std::string, Fault> const faults = {
    {"none", {}},
    {"stage-off-by-one", {1}},
    {"bytes-too-few", {0, 16}},
    {"bytes-too-many", {0, -16}},
    {"scales-swapped", {0, 0, true}},
    {"scale-stride", {0, 0, false, 128}},
};

using TiledMma = typename Collective::TiledMma;
constexpr int consumers = int(size(TiledMma{}));
constexpr int stage_count = Collective::DispatchPolicy::Stages;

struct SharedStorage {
  alignas(1024) typename Collective::PipelineStorage pipeline;
#if GROUPED
  alignas(128) typename Collective::TensorMapStorage tensormaps;
#endif
  alignas(1024) typename Collective::TensorStorage tensors;  // last: beyond it lies a page that faults
};

// ---- one GEMM of the group

using Problem = emulate::Problem<Pair::a, Pair::b, Pair::scale, Pair::vector>;
using ProblemShape = conditional_t<grouped, cutlass::gemm::GroupProblemShape<Shape<int, int, int>>, Shape<int, int, int, int>>;

using ScaleConfig = typename Collective::Sm1xxBlkScaledConfig;

struct Device {  // what the host hands to the kernel, per group
  std::vector<void const*> a, b, sfa, sfb;
  std::vector<cute::remove_pointer_t<typename Collective::StrideA>> stride_a;
  std::vector<cute::remove_pointer_t<typename Collective::StrideB>> stride_b;
  std::vector<cute::remove_pointer_t<typename Collective::LayoutSFA>> layout_sfa;
  std::vector<cute::remove_pointer_t<typename Collective::LayoutSFB>> layout_sfb;
};

template <class Stride>
Stride k_major(int k) {
  Stride stride{};
  get<0>(stride) = k;
  return stride;
}

// From 4.5 on, mma() also takes the tile's coordinate.
template <class... Arguments, class Coordinate>
auto call_mma(int, Collective& collective, Coordinate const& coordinate, Arguments&&... arguments)
    -> decltype(collective.mma(arguments..., coordinate)) {
  collective.mma(arguments..., coordinate);
}
template <class... Arguments, class Coordinate>
void call_mma(long, Collective& collective, Coordinate const&, Arguments&&... arguments) {
  collective.mma(arguments...);
}

/// One CTA works through every tile of the given problems; the outputs go to `outputs`.
void run_cta(std::vector<Problem const*> const& problems, std::vector<std::vector<float>>& outputs, Fault const& fault,
             emulate::Schedule order, std::uint64_t seed) {
  auto& machine = emulate::machine();
  auto* shared = reinterpret_cast<SharedStorage*>(machine.shared.base());
  machine.shared.clear();

  Device device;
  for (auto const* problem : problems) {
    auto const& p = *problem;
    device.a.push_back(p.a.packed.data());
    device.b.push_back(p.b.packed.data());
    device.sfa.push_back((fault.swap_scales ? p.b : p.a).scale_bytes.data());
    device.sfb.push_back((fault.swap_scales ? p.a : p.b).scale_bytes.data());
    device.stride_a.push_back(k_major<cute::remove_pointer_t<typename Collective::StrideA>>(p.k));
    device.stride_b.push_back(k_major<cute::remove_pointer_t<typename Collective::StrideB>>(p.k));
    device.layout_sfa.push_back(ScaleConfig::tile_atom_to_shape_SFA(make_shape(p.m, p.n, p.k + fault.scale_k, 1)));
    device.layout_sfb.push_back(ScaleConfig::tile_atom_to_shape_SFB(make_shape(p.m, p.n, p.k, 1)));
  }

  typename Collective::Arguments arguments{};
  ProblemShape problem_shape{};
#if GROUPED
  alignas(128) static unsigned char workspace[4 * 128];
  std::vector<Shape<int, int, int>> shapes;
  for (auto const* p : problems) shapes.push_back(make_shape(p->m, p->n, p->k));
  problem_shape = {int(problems.size()), shapes.data(), shapes.data()};
  arguments.ptr_A = reinterpret_cast<decltype(arguments.ptr_A)>(device.a.data());
  arguments.dA = device.stride_a.data();
  arguments.ptr_B = reinterpret_cast<decltype(arguments.ptr_B)>(device.b.data());
  arguments.dB = device.stride_b.data();
  arguments.ptr_SFA = reinterpret_cast<decltype(arguments.ptr_SFA)>(device.sfa.data());
  arguments.layout_SFA = device.layout_sfa.data();
  arguments.ptr_SFB = reinterpret_cast<decltype(arguments.ptr_SFB)>(device.sfb.data());
  arguments.layout_SFB = device.layout_sfb.data();
  void* const work = workspace;
#else
  auto const& only = *problems.at(0);
  problem_shape = make_shape(only.m, only.n, only.k, 1);
  arguments.ptr_A = static_cast<decltype(arguments.ptr_A)>(device.a[0]);
  arguments.dA = device.stride_a[0];
  arguments.ptr_B = static_cast<decltype(arguments.ptr_B)>(device.b[0]);
  arguments.dB = device.stride_b[0];
  arguments.ptr_SFA = static_cast<decltype(arguments.ptr_SFA)>(device.sfa[0]);
  arguments.layout_SFA = device.layout_sfa[0];
  arguments.ptr_SFB = static_cast<decltype(arguments.ptr_SFB)>(device.sfb[0]);
  arguments.layout_SFB = device.layout_sfb[0];
  void* const work = nullptr;
#endif
  auto const params = Collective::to_underlying_arguments(problem_shape, arguments, work);

  using Pipeline = typename Collective::MainloopPipeline;
  emulate::stages().first_full = machine.shared.address_of(&shared->pipeline);
  emulate::stages().first_empty = emulate::stages().first_full + 8 * stage_count;
  emulate::stages().count = stage_count;
  machine.on_phase = [&](std::uint32_t address) {
    int const stage = emulate::stages().of_empty(address);
    if (stage >= 0) machine.shared.release(stage);
  };
  auto pipeline_for = [&](bool producer, auto initialise) {
    typename Pipeline::Params p;
    p.role = producer ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
    p.is_leader = producer;
    p.num_consumers = consumers;
    p.num_producers = 1;
    p.transaction_bytes = params.tma_transaction_bytes - fault.missing_bytes;
    return Pipeline(shared->pipeline, p, ClusterShape{}, initialise);
  };
  (void)pipeline_for(true, cute::true_type{});

  Collective collective;
  auto for_each_tile = [&](auto work_on) {
    for (int group = 0; group < int(problems.size()); ++group) {
      auto const& p = *problems[group];
      for (int m = 0; m < (p.m + TILE_M - 1) / TILE_M; ++m)
        for (int n = 0; n < (p.n + TILE_N - 1) / TILE_N; ++n) work_on(group, m, n, (p.k + TILE_K - 1) / TILE_K);
    }
  };

  std::vector<std::function<void()>> threads;
  threads.push_back([&] {
    auto pipeline = pipeline_for(true, cute::false_type{});
    auto state = cutlass::make_producer_start_state<Pipeline>();
    for (int i = 0; i < fault.producer_stage; ++i) ++state;
#if GROUPED
    auto maps = collective.tensormaps_init(params, shared->tensormaps, 1, 0);
    int last_group = -1;
#endif
    // As the kernels do it: what load_init() makes of the first problem serves for all.
    auto const inputs = collective.load_init(make_shape(problems[0]->m, problems[0]->n, problems[0]->k, 1), params);
    auto const k_shape = cute::shape<3>(get<0>(inputs));
    for_each_tile([&](int group, int m, int n, int k_tiles) {
      auto const& p = *problems[group];
      auto k_iterator = cute::make_coord_iterator(idx2crd(0, k_shape), k_shape);
      auto const coordinate = make_coord(m, n, cute::_, 0);
#if GROUPED
      auto const shape = make_shape(p.m, p.n, p.k, 1);
      if (group != last_group) {
        collective.tensormaps_perform_update(shared->tensormaps, params, maps, shape, group);
        collective.tensormaps_cp_fence_release(shared->tensormaps, maps);
        collective.tensormaps_fence_acquire(maps);
        last_group = group;
      }
      collective.load(params, pipeline, state, inputs, maps, coordinate, k_iterator, k_tiles, 0, 0, shared->tensors);
#else
      collective.load(params, pipeline, state, inputs, coordinate, k_iterator, k_tiles, 0, 0, shared->tensors);
#endif
      state.advance(k_tiles);
    });
    collective.load_tail(pipeline, state);
  });
  for (int thread = 0; thread < consumers; ++thread) {
    threads.push_back([&, thread] {
      auto pipeline = pipeline_for(false, cute::false_type{});
      typename Collective::PipelineState state;
      TiledMma tiled_mma;
      for_each_tile([&](int group, int m, int n, int k_tiles) {
        auto const& p = *problems[group];
        auto accumulators = partition_fragment_C(tiled_mma, take<0, 2>(TileShape{}));
        call_mma(0, collective, make_coord(m, n, cute::_, 0), pipeline, state, accumulators, k_tiles, thread, shared->tensors,
                 params);
        collective.mma_tail(pipeline, state, k_tiles);
        state.advance(k_tiles);
        auto const where = tiled_mma.get_thread_slice(thread).partition_C(make_identity_tensor(take<0, 2>(TileShape{})));
        for (int i = 0; i < int(size(accumulators)); ++i) {
          int const row = m * TILE_M + int(get<0>(where(i))), column = n * TILE_N + int(get<1>(where(i)));
          if (row < p.m && column < p.n) outputs[group][std::size_t(row) * p.n + column] = accumulators(i);
        }
      });
    });
  }
  machine.run(threads, order, seed);
}

}  // namespace

int main(int argc, char** argv) {
  std::string const fault_name = argc > 1 ? argv[1] : "none";
  if (faults.count(fault_name) == 0) {
    std::fprintf(stderr, "no such fault: %s\n", fault_name.c_str());
    return 2;
  }
  Fault const fault = faults.at(fault_name);
  emulate::Machine machine(sizeof(SharedStorage));
  emulate::current_machine() = &machine;
  emulate::catch_wild_access(machine.shared);

  // One row and a single k tile; ragged edges and a partial k tile; stages that wrap around twice.
  constexpr int k_unit = mixed ? 128 : 32;
  constexpr int whole_k = TILE_K * (2 * stage_count + 1);
  constexpr int ragged_k = TILE_K % k_unit == 0 && TILE_K > k_unit ? 2 * TILE_K + k_unit : 2 * TILE_K;
  std::vector<Problem> problems;
  problems.emplace_back(1, TILE_N, (TILE_K + k_unit - 1) / k_unit * k_unit, 1);
  problems.emplace_back(TILE_M + TILE_M / 2 + 1, TILE_N + 8, (ragged_k + k_unit - 1) / k_unit * k_unit, 2);
  problems.emplace_back(TILE_M, TILE_N, (whole_k + k_unit - 1) / k_unit * k_unit, 3);
  for (auto const& p : problems) p.register_memory();

  std::uint64_t outputs_checked = 0, mismatches = 0, expected_mmas = 0;
  double max_error = 0;
  std::string signature;
  bool hung = false, exact = true;
  for (auto const& p : problems) exact = exact && p.exact;
  int run = 0;
  for (auto order : {emulate::Schedule::producer_first, emulate::Schedule::producer_last, emulate::Schedule::random}) {
    std::vector<std::vector<Problem const*>> launches(1);  // a grouped kernel takes all problems, a dense one each by itself
    for (auto const& p : problems) {
      if (!grouped && !launches.back().empty()) launches.emplace_back();
      launches.back().push_back(&p);
    }
    for (auto const& launch : launches) {
      std::vector<std::vector<float>> outputs;
      for (auto const* p : launch) outputs.emplace_back(std::size_t(p->m) * p->n, std::numeric_limits<float>::quiet_NaN());
      try {
        run_cta(launch, outputs, fault, order, ++run);
      } catch (emulate::Hang const&) {
        hung = true;
      }
      for (std::size_t i = 0; i < launch.size(); ++i) {
        auto const& p = *launch[i];
        auto const compared = p.compare(outputs[i], TILE_K);
        outputs_checked += outputs[i].size();
        mismatches += compared.mismatches;
        max_error = std::max(max_error, compared.max_error);
        if (signature.empty()) signature = compared.signature;
        expected_mmas += std::uint64_t((p.m + TILE_M - 1) / TILE_M) * ((p.n + TILE_N - 1) / TILE_N) *
                         ((p.k + TILE_K - 1) / TILE_K) * (TILE_M / 16) * (TILE_N / 8) *
                         (TILE_K / int(size<2>(typename TiledMma::AtomShape_MNK{})));
      }
      if (hung) break;
    }
    if (hung) break;
  }
  if (!hung && machine.mma_count != expected_mmas) {
    emulate::report().add("mma count",
                          emulate::format("%llu mma instructions ran, %llu are needed", (unsigned long long)machine.mma_count,
                                          (unsigned long long)expected_mmas));
  }
  if (!exact)
    emulate::report().add("inexact data", "a sum of magnitudes exceeds 24 bits: the order of addition could change bits");
  bool const passed = mismatches == 0 && emulate::report().clean();
  emulate::Result{passed,
                  outputs_checked,
                  mismatches,
                  max_error,
                  signature,
                  machine.mma_count,
                  machine.phase_bytes,
                  static_cast<long>(Collective::TmaTransactionBytes) - fault.missing_bytes,
                  stage_count,
                  long(sizeof(typename Collective::TensorStorage))}
      .print();
  return passed ? 0 : 1;
}
