// The whole grouped cooperative kernel: CUTLASS's own operator() with its scheduler, pipelines and tensor map updates, as
// several persistent CTAs, one after another.

namespace cta {

using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Collective, Epilogue, void>;

/// Every tile of the problems, divided among `ctas` by the kernel's scheduler; what is stored goes to `outputs`. No CTA is
/// without a tile if the shapes are on the host.
inline void launch(std::vector<Problem const*> const& problems, std::vector<Output>& outputs, float beta, Fault const& fault,
                   emulate::Schedule order, std::uint64_t seed, int ctas, bool shapes_on_host) {
  auto& machine = emulate::machine();
  plant(fault);
  Device device(problems, outputs, fault);
  typename Kernel::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = device.problem_shape(shapes_on_host);
  arguments.mainloop = device.mainloop();
  arguments.epilogue = device.epilogue(beta);
  arguments.hw_info.sm_count = ctas;
  std::vector<CUtensorMap> workspace(Kernel::get_workspace_size(arguments) / sizeof(CUtensorMap) + 1);
  auto params = Kernel::to_underlying_arguments(arguments, workspace.data());
  params.mainloop.tma_transaction_bytes -= fault.missing_bytes;
  gridDim = Kernel::get_grid_shape(params);
  blockDim = Kernel::get_block_shape();
  machine.on_switch = [](int thread) { threadIdx.x = thread; };
  auto* shared = reinterpret_cast<typename Kernel::SharedStorage*>(machine.shared.base());
  watch_stages(&shared->pipelines.mainloop);
  for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
      machine.shared.clear();
      std::vector<std::function<void()>> const threads(blockDim.x, [&] {
        Kernel kernel;
        kernel(params, reinterpret_cast<char*>(shared));
      });
      machine.run(threads, order, seed);
    }
  }
}

}  // namespace cta
