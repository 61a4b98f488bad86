// Kernels as nodes of CUDA graphs, and in clusters, as a program on SM120 has them: `verify run -- graphs`. Prints a line a case, with
// what was expected if that is another; the exit code is the number of such cases. A case is a process, so that one that ends by
// a signal is named. Compile: nvcc -std=c++17 -gencode arch=compute_120a,code=compute_120a graphs.cu -lcuda
#include <cooperative_groups.h>
#include <cuda.h>
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

extern __shared__ unsigned char storage[];

__global__ void adds(unsigned* counter) {
  storage[threadIdx.x] = 1;
  if (!threadIdx.x) atomicAdd(counter, storage[0]);
}

__global__ void ranks(unsigned* counter) {
  cooperative_groups::cluster_group const cluster = cooperative_groups::this_cluster();
  cluster.sync();
  if (!threadIdx.x) atomicAdd(counter, cluster.num_blocks());
}

__global__ void __cluster_dims__(4) stated(unsigned* counter) {
  if (!threadIdx.x) atomicAdd(counter, cooperative_groups::this_cluster().num_blocks());
}

static unsigned* counter;
static void* arguments[] = {&counter};
static cudaGraph_t graph;
static int multiprocessors, status;

static void check(int result) { status = status ? status : result; }

static std::string counted() {
  unsigned value = 0;
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(&value, counter, 4, cudaMemcpyDeviceToHost));
  return "status " + std::to_string(status) + ", " + std::to_string(value);
}

static std::string launched() {
  cudaGraphExec_t ready;
  if (!status) check(cudaGraphInstantiate(&ready, graph, 0));
  if (!status) check(cudaGraphLaunch(ready, 0));
  return counted();
}

static cudaKernelNodeParams node(int ctas, unsigned kib) { return {(void*)adds, dim3(ctas), dim3(128), kib << 10, arguments, nullptr}; }

static CUDA_KERNEL_NODE_PARAMS raw() {
  cudaFunction_t function;
  check(cudaGetFuncBySymbol(&function, (void*)adds));
  CUDA_KERNEL_NODE_PARAMS it = {};
  it.func = (CUfunction)function, it.kernelParams = arguments;
  it.gridDimX = 3, it.blockDimX = 128, it.gridDimY = it.gridDimZ = it.blockDimY = it.blockDimZ = 1;
  return it;
}

static std::string added_by_runtime() {
  cudaGraphNode_t first, second;
  cudaGraphNodeParams of = {};
  of.type = cudaGraphNodeTypeKernel;
  of.kernel.func = (void*)adds, of.kernel.gridDim = dim3(3), of.kernel.blockDim = dim3(128), of.kernel.kernelParams = arguments;
  check(cudaGraphAddNode(&first, graph, nullptr, nullptr, 0, &of));
  of.kernel.gridDim = dim3(2);
  check(cudaGraphAddNode(&second, graph, &first, nullptr, 1, &of));
  return launched();
}

static std::string added_as_kernel_by_runtime() {
  cudaGraphNode_t added;
  auto const of = node(3, 0);
  check(cudaGraphAddKernelNode(&added, graph, nullptr, 0, &of));
  return launched();
}

static std::string added_as_kernel() {
  CUgraphNode added;
  auto const of = raw();
  check(cuGraphAddKernelNode(&added, graph, nullptr, 0, &of));
  return launched();
}

/// An edition of cuGraphAddNode, as runtimes of CUDA look it up; that of 12.2 has no edges.
static std::string added_by(int version) {
  void* entry = nullptr;
  CUdriverProcAddressQueryResult result;
  CUgraphNode added;
  CUgraphNodeParams of = {};
  auto const kernel = raw();
  of.type = CU_GRAPH_NODE_TYPE_KERNEL;
  of.kernel.func = kernel.func, of.kernel.kernelParams = arguments;
  of.kernel.gridDimX = 3, of.kernel.blockDimX = 128;
  of.kernel.gridDimY = of.kernel.gridDimZ = of.kernel.blockDimY = of.kernel.blockDimZ = 1;
  if (cuGetProcAddress("cuGraphAddNode", &entry, version, CU_GET_PROC_ADDRESS_DEFAULT, &result) || !entry) return "the driver has none";
  using Node = CUgraphNode;
  using First = CUresult (*)(Node*, CUgraph, Node const*, size_t, CUgraphNodeParams*);
  using Second = CUresult (*)(Node*, CUgraph, Node const*, CUgraphEdgeData const*, size_t, CUgraphNodeParams*);
  check(version < 12030 ? ((First)entry)(&added, graph, nullptr, 0, &of) : ((Second)entry)(&added, graph, nullptr, nullptr, 0, &of));
  return launched();
}

static std::string captured() {
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  check(cudaLaunchKernel((void*)adds, dim3(3), dim3(128), arguments, 128, stream));
  check(cudaStreamEndCapture(stream, &graph));
  return launched();
}

/// Two CTAs of 60 KiB a multiprocessor, as Hopper has room for; then none too many.
static std::string cooperative() {
  cudaGraphNode_t added;
  check(cudaFuncSetAttribute(adds, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10));
  auto of = node(2 * multiprocessors, 60);
  check(cudaGraphAddKernelNode(&added, graph, nullptr, 0, &of));
  cudaLaunchAttributeValue value = {};
  value.cooperative = 1;
  int const large = cudaGraphKernelNodeSetAttribute(added, cudaLaunchAttributeCooperative, &value);
  cudaGetLastError();
  of.gridDim = dim3(multiprocessors);
  check(cudaGraphKernelNodeSetParams(added, &of));
  check(cudaGraphKernelNodeSetAttribute(added, cudaLaunchAttributeCooperative, &value));
  return "refused with " + std::to_string(large) + "; " + launched();
}

/// Sixteen CTAs in clusters of a size; of those that a kernel states, the size is 0.
static std::string clusters(int size) {
  auto const* kernel = size ? (void const*)ranks : (void const*)stated;
  cudaLaunchConfig_t config = {};
  cudaLaunchAttribute attribute = {};
  config.gridDim = dim3(16), config.blockDim = dim3(128), config.attrs = &attribute, config.numAttrs = size ? 1 : 0;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = size, attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  if (size) check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  int room = 0, most = 0;
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&room, kernel, 128, 0));
  int const asked = cudaOccupancyMaxActiveClusters(&most, kernel, &config);
  cudaGetLastError();
  check(cudaLaunchKernelExC(&config, kernel, arguments));
  cudaGetLastError();
  bool const all = most && most == room * multiprocessors / (size ? size : 4);
  return "occupancy " + std::to_string(asked) + (all ? ", all" : most ? ", another" : ", none") + "; " + counted();
}

static struct {
  char const *name, *expected;
  std::function<std::string()> run;
} const cases[] = {
    {"cudaGraphAddKernelNode", "status 0, 3", added_as_kernel_by_runtime},
    {"cudaGraphAddNode, twice", "status 0, 5", added_by_runtime},
    {"cuGraphAddKernelNode", "status 0, 3", added_as_kernel},
    {"cuGraphAddNode of 12.2", "status 0, 3", [] { return added_by(12020); }},
    {"cuGraphAddNode of 12.3", "status 0, 3", [] { return added_by(12030); }},
    {"cuGraphAddNode of 13.0", "status 0, 3", [] { return added_by(13000); }},
    {"captured launch", "status 0, 3", captured},
    {"cooperative node", nullptr, cooperative},
    {"clusters of 1", "occupancy 0, all; status 0, 16", [] { return clusters(1); }},
    {"clusters of 2", "occupancy 0, all; status 0, 32", [] { return clusters(2); }},
    {"clusters of 8", "occupancy 0, all; status 0, 128", [] { return clusters(8); }},
    {"clusters of 16", "occupancy 912, none; status 912, 0", [] { return clusters(16); }},
    {"stated clusters of 4", "occupancy 0, all; status 0, 64", [] { return clusters(0); }},
};

/// The exit code of a case's process: 0 as expected, 1 another result, 2 no GPU.
static int examine(char const* name, char const* expected, std::function<std::string()> const& run) {
  if (cuInit(0) || cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0)) return 2;
  check(cudaMalloc(&counter, 4));
  check(cudaMemset(counter, 0, 4));
  check(cudaGraphCreate(&graph, 0));
  std::string const wanted = expected ? expected : "refused with 720; status 0, " + std::to_string(multiprocessors), got = run();
  printf("%s: %s%s\n", name, got.c_str(), got == wanted ? "" : (", expected: " + wanted).c_str());
  return got != wanted;
}

int main() {
  int differ = 0, result;
  for (auto const& it : cases) {
    fflush(stdout);
    if (!fork()) exit(examine(it.name, it.expected, it.run));
    if (wait(&result) < 0 || WIFSIGNALED(result)) printf("%s: ended by signal %d\n", it.name, WTERMSIG(result));
    if (WIFEXITED(result) && WEXITSTATUS(result) == 2) return printf("no GPU\n"), 77;
    differ += result != 0;
  }
  printf("%d of %zu cases are not as on SM120\n", differ, sizeof cases / sizeof *cases);
  return differ;
}
