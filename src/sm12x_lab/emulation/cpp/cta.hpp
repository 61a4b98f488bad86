// One CTA that works through GEMMs as the SM120 kernels do: a producer for the mainloop, one for the epilogue's source, and the
// consumers, each with CUTLASS's own load(), mma() and store(). What a kernel's tile scheduler decides is decided here: tile
// after tile, problem after problem.

namespace cta {

/// What can be planted, to see it found.
struct Fault {
  int producer_stage = 0;      // stages by which the producer starts ahead of the consumer
  int missing_bytes = 0;       // by which the full barriers expect too few
  bool swap_scales = false;    // the scale factors of A and B change places
  int scale_k = 0;             // by which the layout of A's scale factors is made for a longer k: row blocks lie too far apart
  int box_rows = 0;            // rows that the box of A's tensor map lacks
  bool swap_modes = false;     // m and n change places in the problem's shape
  char group_of = 0;           // an operand for which every group gets the address of group 0: a, b, s, t (scales of b), d
  bool no_store_wait = false;  // the epilogue does not wait until its stores have read shared memory
  bool no_named_barrier = false;
  bool alpha_of_one = false;      // every alpha is 1
  bool even_k_tiles = false;      // of an even number of k tiles the last one is left out
  bool third_tile_of_n = false;   // tiles of n after the second are left out
  bool skips_empty = false;       // operands are numbered without the empty groups
};
inline std::map<std::string, Fault> faults() {
  std::map<std::string, Fault> all;
  all["none"];
  all["stage-off-by-one"].producer_stage = 1;
  all["bytes-too-few"].missing_bytes = 16;
  all["bytes-too-many"].missing_bytes = -16;
  all["scales-swapped"].swap_scales = true;
  all["scale-stride"].scale_k = 128;
  all["box-too-small"].box_rows = 8;
  all["box-too-big"].box_rows = -8;
  all["modes-swapped"].swap_modes = true;
  all["group-offset-a"].group_of = 'a';
  all["group-offset-b"].group_of = 'b';
  all["group-offset-sfa"].group_of = 's';
  all["group-offset-sfb"].group_of = 't';
  all["group-offset-output"].group_of = 'd';
  all["no-store-wait"].no_store_wait = true;
  all["no-named-barrier"].no_named_barrier = true;
  all["alpha-of-one"].alpha_of_one = true;
  all["even-k-tiles"].even_k_tiles = true;
  all["third-tile-of-n"].third_tile_of_n = true;
  all["empty-groups-skipped"].skips_empty = true;
  return all;
}

using TiledMma = typename Collective::TiledMma;
constexpr int consumers = int(size(TiledMma{}));
constexpr int stage_count = Collective::DispatchPolicy::Stages;
constexpr int producers = 2;                // fibres before the consumers: mainloop, epilogue source
constexpr int first_consumer_thread = 128;  // after the producer's warp group, as in the kernels

struct SharedStorage {
  alignas(1024) typename Collective::PipelineStorage pipeline;
  typename Epilogue::PipelineStorage source_pipeline;
#if GROUPED
  alignas(128) typename Collective::TensorMapStorage tensormaps;
  alignas(128) typename Epilogue::TensorMapStorage epilogue_tensormaps;
#endif
  alignas(1024) typename Epilogue::TensorStorage epilogue;
  alignas(1024) typename Collective::TensorStorage tensors;  // last: beyond it lies a page that faults
};

using Problem = emulate::Problem<Pair::a, Pair::b, Pair::scale, Pair::vector>;
using ProblemShape = conditional_t<grouped, cutlass::gemm::GroupProblemShape<Shape<int, int, int>>, Shape<int, int, int, int>>;

/// What comes out of one GEMM: the accumulators, and what the epilogue stores.
struct Output {
  explicit Output(Problem const& p)
      : accumulators(std::size_t(p.m) * p.n, std::numeric_limits<float>::quiet_NaN()), stored(p.m, p.n, column_major) {
    stored.allow(true);
  }
  std::vector<float> accumulators;
  emulate::Bf16Matrix stored;
};

template <class Stride>
Stride k_major(int k) {
  Stride stride{};
  get<0>(stride) = k;
  return stride;
}
template <class Stride>
Stride output_stride(emulate::Bf16Matrix const& matrix) {
  Stride stride{};
  get<column_major>(stride) = matrix.pitch();
  return stride;
}

/// What the host hands to the kernel, per group.
struct Device {
  template <class T>
  using Each = std::vector<cute::remove_pointer_t<T>>;
  std::vector<void const*> a, b, sfa, sfb, c;
  std::vector<void*> d;
  Each<typename Collective::StrideA> stride_a;
  Each<typename Collective::StrideB> stride_b;
  Each<typename Collective::LayoutSFA> layout_sfa;
  Each<typename Collective::LayoutSFB> layout_sfb;
  Each<typename Epilogue::StrideD> stride_d;
  std::vector<float> alpha;
  std::vector<float const*> alpha_address;
  std::vector<emulate::Bf16Matrix> source;
  std::vector<Shape<int, int, int>> shape;
  std::size_t first = 0;  // the first group that is not empty

  Device(std::vector<Problem const*> const& problems, std::vector<Output>& outputs, Fault const& fault) {
    using Scales = typename Collective::Sm1xxBlkScaledConfig;
    int group = 0;
    for (auto const* problem : problems) {
      auto const& p = *problem;
      a.push_back(p.a.packed.data());
      b.push_back(p.b.packed.data());
      sfa.push_back((fault.swap_scales ? p.b : p.a).scale_bytes.data());
      sfb.push_back((fault.swap_scales ? p.a : p.b).scale_bytes.data());
      stride_a.push_back(k_major<cute::remove_pointer_t<typename Collective::StrideA>>(p.k));
      stride_b.push_back(k_major<cute::remove_pointer_t<typename Collective::StrideB>>(p.k));
      layout_sfa.push_back(Scales::tile_atom_to_shape_SFA(make_shape(p.m, p.n, p.k + fault.scale_k, 1)));
      layout_sfb.push_back(Scales::tile_atom_to_shape_SFB(make_shape(p.m, p.n, p.k, 1)));
      shape.push_back(fault.swap_modes ? make_shape(p.n, p.m, p.k) : make_shape(p.m, p.n, p.k));
      alpha.push_back(fault.alpha_of_one ? 1.0f : p.alpha);
      auto& from = source.emplace_back(p.m, p.n, column_major);
      for (int i = 0; i < p.m; ++i)
        for (int j = 0; j < p.n; ++j)
          from.set(i, j, emulate::bf16_of(static_cast<float>(p.source[std::size_t(i) * p.n + j] * p.unit)));
      from.allow(false);
      c.push_back(from.first());
      d.push_back(outputs[group].stored.first());
      stride_d.push_back(output_stride<cute::remove_pointer_t<typename Epilogue::StrideD>>(outputs[group].stored));
      ++group;
    }
    for (auto const& each : alpha) alpha_address.push_back(&each);
    auto is_empty = [&](std::size_t each) { return problems[each]->m == 0 || problems[each]->n == 0; };
    while (is_empty(first)) ++first;
    if (fault.skips_empty) {
      std::size_t to = 0;
      for (std::size_t from = 0; from < problems.size(); ++from)
        if (!is_empty(from)) b[to] = b[from], sfb[to++] = sfb[from];
    }
    auto all_as_first = [&](auto& addresses) { std::fill(addresses.begin(), addresses.end(), addresses[first]); };
    if (fault.group_of == 'a') all_as_first(a);
    if (fault.group_of == 'b') all_as_first(b);
    if (fault.group_of == 's') all_as_first(sfa);
    if (fault.group_of == 't') all_as_first(sfb);
    if (fault.group_of == 'd') all_as_first(d);
  }
  Device(Device const&) = delete;

  /// The shapes are also on the host, or only on the device, as those of FlashInfer's experts.
  ProblemShape problem_shape(bool on_host = true) {
#if GROUPED
    return {int(shape.size()), shape.data(), on_host ? shape.data() : nullptr};
#else
    return append<4>(shape.at(0), 1);
#endif
  }

  /// A per-group address or value in the form of the kernel: those of all groups, or of the only one.
  template <class Argument, class Values>
  static void give(Argument& argument, Values& values) {
    if constexpr (grouped)
      argument = reinterpret_cast<Argument>(values.data());
    else if constexpr (std::is_pointer_v<Argument>)
      argument = static_cast<Argument>(values.at(0));
    else
      argument = values.at(0);
  }

  typename Collective::Arguments mainloop() {
    typename Collective::Arguments arguments{};
    give(arguments.ptr_A, a), give(arguments.dA, stride_a);
    give(arguments.ptr_B, b), give(arguments.dB, stride_b);
    give(arguments.ptr_SFA, sfa), give(arguments.layout_SFA, layout_sfa);
    give(arguments.ptr_SFB, sfb), give(arguments.layout_SFB, layout_sfb);
    return arguments;
  }
  typename Epilogue::Arguments epilogue(float beta) {
    typename Epilogue::Arguments arguments{};
    arguments.thread.beta = beta;
#if GROUPED
    arguments.thread.alpha_ptr_array = alpha_address.data();
    arguments.thread.dAlpha = {_0{}, _0{}, 1};
#else
    arguments.thread.alpha = alpha.at(0);
#endif
    give(arguments.ptr_C, c), give(arguments.dC, stride_d);
    give(arguments.ptr_D, d), give(arguments.dD, stride_d);
    return arguments;
  }
};

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

/// One of CUTLASS's pipelines, as a thread in one of its roles constructs it.
template <class Pipeline, class Storage, class Initialise>
Pipeline transaction_pipeline(Storage& storage, bool producer, std::uint32_t bytes, Initialise initialise) {
  typename Pipeline::Params p;
  p.role = producer ? Pipeline::ThreadCategory::Producer : Pipeline::ThreadCategory::Consumer;
  p.transaction_bytes = bytes;
  if constexpr (std::is_same_v<Pipeline, typename Collective::MainloopPipeline>) {
    p.is_leader = producer;
    p.num_consumers = consumers;
    p.num_producers = 1;
    return Pipeline(storage, p, ClusterShape{}, initialise);
  } else {
    p.producer_arv_count = 1;
    p.consumer_arv_count = consumers;
    return Pipeline(storage, p, initialise);
  }
}

/// Plant what is not planted in the arguments: in the machine, and in the first map that the host encodes, that of A.
inline void plant(Fault const& fault) {
  emulate::machine().ignores_store_waits = fault.no_store_wait;
  emulate::machine().ignores_named_barriers = fault.no_named_barrier;
  emulate::on_encode() = [rows = fault.box_rows, encoded = 0](emulate::TensorMap& map) mutable {
    if (encoded++ == 0) map.box[1] -= rows;
  };
}

/// Register the mainloop's barriers, full ones first: the machine poisons a stage that all consumers have released.
inline void watch_stages(void const* barriers) {
  auto& machine = emulate::machine();
  emulate::stages().first_full = machine.shared.address_of(barriers);
  emulate::stages().first_empty = emulate::stages().first_full + 8 * stage_count;
  emulate::stages().count = stage_count;
  machine.on_phase = [&machine](std::uint32_t address, std::int64_t bytes) {
    int const stage = emulate::stages().of_empty(address);
    if (stage >= 0) machine.shared.release(stage);
    if (emulate::stages().of_full(address) >= 0 && bytes != 0) machine.phase_bytes = bytes;
  };
}

/// Every tile of the problems; the results go to `outputs`. With beta 0 the source is not loaded.
inline void run(std::vector<Problem const*> const& problems, std::vector<Output>& outputs, float beta, Fault const& fault,
                emulate::Schedule order, std::uint64_t seed) {
  auto& machine = emulate::machine();
  auto* shared = reinterpret_cast<SharedStorage*>(machine.shared.base());
  machine.shared.clear();
  plant(fault);
  machine.on_switch = [](int fibre) {
    // The first lane of a producer warp issues its copies: warp 0 for the mainloop, warp 2 for the epilogue's source.
    threadIdx.x = fibre < producers ? 64 * fibre : first_consumer_thread + fibre - producers;
  };
  machine.on_switch(0);

  Device device(problems, outputs, fault);
  alignas(128) static unsigned char workspace[2][8 * 128];
  auto const problem_shape = device.problem_shape();
  auto const params = Collective::to_underlying_arguments(problem_shape, device.mainloop(), workspace[0]);
  auto const epilogue_params = Epilogue::to_underlying_arguments(problem_shape, device.epilogue(beta), workspace[1]);
  watch_stages(&shared->pipeline);
  using Pipeline = typename Collective::MainloopPipeline;
  using SourcePipeline = typename Epilogue::LoadPipeline;
  auto pipeline_for = [&](bool producer, auto initialise) {
    return transaction_pipeline<Pipeline>(shared->pipeline, producer, params.tma_transaction_bytes - fault.missing_bytes,
                                          initialise);
  };
  auto source_pipeline_for = [&](bool producer, auto initialise) {
    return transaction_pipeline<SourcePipeline>(shared->source_pipeline, producer, Epilogue::TmaTransactionBytes, initialise);
  };
  (void)pipeline_for(true, cute::true_type{});
  (void)source_pipeline_for(true, cute::true_type{});

  Collective collective;
  auto shape_of = [&](int group) { return append<4>(device.shape[group], 1); };
  auto for_each_tile = [&](auto work_on) {
    for (int group = 0; group < int(problems.size()); ++group) {
      auto const& p = *problems[group];
      for (int m = 0; m < (p.m + TILE_M - 1) / TILE_M; ++m)
        for (int n = 0; n < (p.n + TILE_N - 1) / TILE_N; ++n) {
          int const k_tiles = (p.k + TILE_K - 1) / TILE_K;
          if (fault.third_tile_of_n && n > 1) continue;
          work_on(group, m, n, k_tiles - int(fault.even_k_tiles && k_tiles % 2 == 0));
        }
    }
  };
  // The epilogue's tensor map of one direction, made to fit each group before its first tile.
  auto epilogue_map = [&](Epilogue& epilogue, auto load) {
#if GROUPED
    constexpr bool is_load = decltype(load)::value;
    auto map = get<0>(epilogue.template tensormaps_init<is_load>(epilogue_params, shared->epilogue_tensormaps, 1, 0, 0));
    return [&, map, last_group = -1](int group) mutable {
      if (group != last_group) {
        epilogue.template tensormaps_perform_update<is_load>(shared->epilogue_tensormaps, epilogue_params, map, shape_of(group),
                                                             group, 0);
        epilogue.template tensormaps_cp_fence_release<is_load>(shared->epilogue_tensormaps, map, 0);
        epilogue.template tensormaps_fence_acquire<is_load>(map);
        last_group = group;
      }
      return map;
    };
#else
    return [](int) { return 0; };
#endif
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
    // As the kernels do it: what load_init() makes of the first tile's problem serves for all.
    auto const inputs = collective.load_init(shape_of(int(device.first)), params);
    auto const k_shape = cute::shape<3>(get<0>(inputs));
    for_each_tile([&](int group, int m, int n, int k_tiles) {
      auto k_iterator = cute::make_coord_iterator(idx2crd(0, k_shape), k_shape);
      auto const coordinate = make_coord(m, n, cute::_, 0);
#if GROUPED
      if (group != last_group) {
        collective.tensormaps_perform_update(shared->tensormaps, params, maps, shape_of(group), group);
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
  threads.push_back([&] {
    Epilogue epilogue(epilogue_params, shared->epilogue);
    if (!epilogue.is_producer_load_needed()) return;
    auto pipeline = source_pipeline_for(true, cute::false_type{});
    auto state = cutlass::make_producer_start_state<SourcePipeline>();
    auto map_for = epilogue_map(epilogue, cute::true_type{});
    for_each_tile([&](int group, int m, int n, int) {
      auto const coordinate = make_coord(m, n, cute::_, group);
#if GROUPED
      state = epilogue.load(pipeline, state, shape_of(group), TileShape{}, coordinate, TiledMma{}, 0, shared->epilogue,
                            map_for(group));
#else
      state = epilogue.load(pipeline, state, shape_of(group), TileShape{}, coordinate, TiledMma{}, 0, shared->epilogue);
#endif
    });
    epilogue.load_tail(pipeline, state);
  });
  for (int thread = 0; thread < consumers; ++thread) {
    threads.push_back([&, thread] {
      auto pipeline = pipeline_for(false, cute::false_type{});
      typename Collective::PipelineState state;
      TiledMma tiled_mma;
      Epilogue epilogue(epilogue_params, shared->epilogue);
      auto source_pipeline = source_pipeline_for(false, cute::false_type{});
      typename Epilogue::LoadPipelineState source_state;
      typename Epilogue::StorePipeline::Params always;
      always.always_wait = true;
      typename Epilogue::StorePipeline store_pipeline(always);
      auto store_state = cutlass::make_producer_start_state<typename Epilogue::StorePipeline>();
#if GROUPED
      std::function<cute::TmaDescriptor*(int)> map_for = [](int) { return nullptr; };
      if (thread / 32 == 0) map_for = epilogue_map(epilogue, cute::false_type{});  // the warp that stores
#endif
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
          if (row < p.m && column < p.n) outputs[group].accumulators[std::size_t(row) * p.n + column] = accumulators(i);
        }
        auto store = [&](auto const&... map) {
          auto [next_source, next_store] =
              epilogue.store(source_pipeline, source_state, store_pipeline, store_state, shape_of(group), TileShape{},
                             make_coord(m, n, cute::_, group), accumulators, tiled_mma, thread, shared->epilogue, map...);
          source_state = next_source, store_state = next_store;
        };
#if GROUPED
        store(map_for(group));
#else
        store();
#endif
      });
      epilogue.store_tail(source_pipeline, source_state, store_pipeline, store_state);
    });
  }
  machine.run(threads, order, seed);
}

}  // namespace cta
