// What an SM120 GPU refuses, as a program sees it: residency, and tensor maps of 4-bit elements. A case a process, since a kernel that
// is stopped ends its context. limits.py runs them; compile: nvcc -gencode arch=compute_120a,code=compute_120a limits.cu -lcuda
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(call)                                                            \
  do {                                                                         \
    int const status = int(call);                                              \
    if (status) printf("%s: %d\n", #call, status), exit(9);                    \
  } while (0)

extern __shared__ __align__(128) unsigned char storage[];

__global__ void counts(unsigned* counter) {
  storage[threadIdx.x] = 1;
  if (!threadIdx.x) atomicAdd(counter, storage[0]);
}

__global__ void __launch_bounds__(1024, 1) registers(float* out) {
  float x[56];
#pragma unroll
  for (int i = 0; i < 56; ++i) asm volatile("ld.volatile.f32 %0, [%1];" : "=f"(x[i]) : "l"(out + i));
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 56; ++i) asm volatile("st.volatile.f32 [%1], %0;" ::"f"(2 * x[i] + x[55 - i]), "l"(out + i));
}

static int launch(unsigned* counter, int ctas, int kib) {
  void* arguments[] = {&counter};
  return cudaLaunchCooperativeKernel((void*)counts, ctas, 128, arguments, kib << 10, nullptr);
}

static void residency() {
  cudaDeviceProp gpu;
  unsigned* counter;
  CHECK(cudaGetDeviceProperties(&gpu, 0));
  CHECK(cudaMalloc(&counter, 4096));
  CHECK(cudaMemset(counter, 0, 4096));
  CHECK(cudaFuncSetAttribute(counts, cudaFuncAttributeMaxDynamicSharedMemorySize, 99 << 10));
  printf("gpu %d.%d %d %d %zu %d\n", gpu.major, gpu.minor, gpu.maxBlocksPerMultiProcessor, gpu.maxThreadsPerMultiProcessor,
         gpu.sharedMemPerMultiprocessor, gpu.l2CacheSize);
  int sizes[] = {1, 40, 60, 90}, most[4];
  for (int i = 0; i < 4; ++i) {
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&most[i], counts, 128, sizes[i] << 10));
    int const fits = most[i] * gpu.multiProcessorCount;
    int const first = launch(counter, fits, sizes[i]);
    cudaGetLastError();
    int const second = launch(counter, fits + 1, sizes[i]);
    cudaGetLastError();
    printf("%d KiB: %d a multiprocessor, launches %d %d\n", sizes[i], most[i], first, second);
  }
  CHECK(cudaDeviceSynchronize());
  unsigned ran;
  CHECK(cudaMemcpy(&ran, counter, 4, cudaMemcpyDeviceToHost));
  printf("ran %d\n", int(ran) == (most[0] + most[1] + most[2] + most[3]) * gpu.multiProcessorCount);
  cudaFuncAttributes attributes;
  CHECK(cudaFuncGetAttributes(&attributes, registers));
  printf("binary %d registers %d\n", attributes.binaryVersion, attributes.numRegs <= 64);
}

enum Way { LOAD, PREFETCH, REDUCE, CLUSTER, STORE };

/// Copies a box of 128 x 8 elements at (column, 0) into shared memory and out to `out`, 1024 bytes.
template <int What>
__global__ void copies(const __grid_constant__ CUtensorMap map, int column, unsigned bytes, unsigned char* out) {
  __shared__ __align__(8) uint64_t barrier;
  unsigned const there = __cvta_generic_to_shared(storage), wait = __cvta_generic_to_shared(&barrier);
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) storage[i] = 0x5a;
  if (!threadIdx.x) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(wait) : "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
  __syncthreads();
  if (!threadIdx.x) {
    if constexpr (What == REDUCE)
      asm volatile("cp.reduce.async.bulk.tensor.2d.global.shared::cta.or.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column), "r"(0), "r"(there) : "memory");
    else if constexpr (What == STORE)
      asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(column), "r"(0), "r"(there) : "memory");
    if constexpr (What == REDUCE || What == STORE)
      asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    if constexpr (What == PREFETCH)
      asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(0) : "memory");
    if constexpr (What == LOAD || What == PREFETCH || What == CLUSTER) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(wait), "r"(bytes) : "memory");
      if constexpr (What == CLUSTER)
        asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(there), "l"(&map), "r"(column), "r"(0), "r"(wait) : "memory");
      else
        asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(there), "l"(&map), "r"(column), "r"(0), "r"(wait) : "memory");
      asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0; @!p bra again; }" ::"r"(wait) : "memory");
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 1024; i += blockDim.x) out[i] = storage[i];
}

static void copy(Way way, int padded, int column) {
  unsigned char host[8][256], result[1024], *tensor, *out;
  for (int i = 0; i < 8 * 256; ++i) (&host[0][0])[i] = (unsigned char)(i * 37 + i / 256);
  CHECK(cudaMalloc(&tensor, sizeof host));
  CHECK(cudaMalloc(&out, 1024));
  CHECK(cudaMemcpy(tensor, host, sizeof host, cudaMemcpyHostToDevice));
  CUtensorMap map;
  cuuint64_t const dim[] = {512, 8}, stride[] = {256};
  cuuint32_t const box[] = {128, 8}, steps[] = {1, 1};
  auto const type = padded ? CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B : CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B;
  CHECK(cuTensorMapEncodeTiled(&map, type, 2, tensor, dim, stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE));
  auto* kernel = way == LOAD ? copies<LOAD> : way == PREFETCH ? copies<PREFETCH> : way == REDUCE ? copies<REDUCE> : way == CLUSTER ? copies<CLUSTER> : copies<STORE>;
  kernel<<<1, 128, 1024>>>(map, column, 512, out);
  int const status = cudaDeviceSynchronize();
  printf("status %d", status);
  if (!status) {
    CHECK(cudaMemcpy(result, out, 1024, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(host, tensor, sizeof host, cudaMemcpyDeviceToHost));
    int right = 1, stored = 1;
    for (int row = 0; row < 8; ++row)
      for (int chunk = 0; chunk < 8; ++chunk) {  // 16 elements: 8 bytes of memory, in slots of 16 bytes if padded
        unsigned char const* slot = result + (padded ? row * 128 + chunk * 16 : row * 64 + chunk * 8);
        right &= !memcmp(slot, &host[row][column / 2 + chunk * 8], 8);
        for (int i = 0; i < 8; ++i) stored &= host[row][column / 2 + chunk * 8 + i] == 0x5a;
      }
    printf(" %s", way == STORE ? (stored ? "right" : "wrong") : right ? "right" : "wrong");
  }
  printf("\n");
}

int main(int count, char** words) {
  CHECK(cuInit(0));
  CHECK(cudaFree(nullptr));
  if (count == 1)
    residency();
  else
    copy(Way(atoi(words[1])), atoi(words[2]), atoi(words[3]));
}
