// Kernels with seeded faults of synchronisation: races FAULT prints a digest of the results, which the fault may change. Fault 0 is
// none. races.py runs all of them with delays. A program has one kernel, so that its module is assembled soon; compile KERNEL 0 to 5:
// nvcc -std=c++17 -lineinfo -gencode arch=compute_120a,code=compute_120a -DKERNEL=0 races.cu -o races-0
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#define CHECK(call)                                           \
  do {                                                        \
    int const status = int(call);                             \
    if (status) printf("%s: %d\n", #call, status), exit(9);   \
  } while (0)

constexpr int ITEMS = 1 << 16, TILES = 24;

__device__ unsigned shared_address(void const* p) { return unsigned(__cvta_generic_to_shared(p)); }
__device__ void copy16(void* to, void const* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
template <int N>
__device__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/// A pipeline of cp.async in three stages: each thread reads what its neighbours copied.
template <int F>
__global__ void pipeline(uint4 const* in, unsigned* out) {
  __shared__ uint4 stage[3][128];
  unsigned const t = threadIdx.x;
  uint4 const* from = in + blockIdx.x * 128 * TILES / 8;
  unsigned sum = 0;
  auto const issue = [&](int tile) {
    if (tile < TILES) copy16(&stage[(F == 4 ? tile + 2 : tile) % 3][t], from + tile * 128 + t);
    if (F != 6 || tile % 4) asm volatile("cp.async.commit_group;" ::: "memory");
  };
  issue(0), issue(1);
  for (int tile = 0; tile < TILES; ++tile) {
    if (F == 1)
      wait_group<2>();
    else if (F == 5 && tile + 1 == TILES)
      wait_group<3>();
    else if (F != 2)
      wait_group<1>();
    if (F != 3) __syncthreads();
    if (F != 7) issue(tile + 2);
    uint4 const x = stage[tile % 3][(t * 37 + tile) % 128];
    sum = sum * 31 + (x.x ^ x.y * 3 ^ x.z * 5 ^ x.w * 7);
    if (F == 7) issue(tile + 2), __syncwarp();
  }
  out[blockIdx.x * 128 + t] = sum;
}

__device__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ void wait(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

/// A producer warp of bulk copies, three consumer warps, full and empty barriers.
template <int F>
__global__ void bulk(uint4 const* in, unsigned* out) {
  constexpr int STAGES = 2;
  __shared__ __align__(128) uint4 stage[STAGES][96];
  __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
  unsigned const t = threadIdx.x, warp = t / 32;
  uint4 const* from = in + blockIdx.x * 96 * TILES / 8;
  if (!t)
    for (int i = 0; i < STAGES; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[i])) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&empty[i])), "r"(F == 5 ? 1 : 3) : "memory");
    }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  unsigned sum = 0;
  for (int tile = 0; tile < TILES; ++tile) {
    int const s = tile % STAGES, round = tile / STAGES;
    if (warp == 3) {
      if (t % 32 == 0) {
        if (F != 4 && tile >= STAGES) wait(&empty[s], (round + 1) & 1);
        unsigned const bytes = F == 6 ? 512 : 1536;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full[s])), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(stage[s])),
                     "l"(from + tile * 96), "r"(bytes), "r"(shared_address(&full[s]))
                     : "memory");
        if (F == 6)
          for (int part = 1; part < 3; ++part)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(shared_address(&stage[s][32 * part])), "l"(from + tile * 96 + 32 * part) : "memory");
      }
    } else {
      if (F != 1) wait(&full[s], F == 2 ? (round + 1) & 1 : round & 1);
      if (F == 3 && t % 32 == 0) arrive(&empty[s]);
      uint4 const x = stage[s][(t * 29 + tile) % 96];
      sum = sum * 31 + (x.x ^ x.y * 3 ^ x.z * 5 ^ x.w * 7);
      if (F != 7) __syncwarp();
      if (F != 3 && t % 32 == 0) arrive(&empty[s]);
    }
  }
  out[blockIdx.x * 128 + t] = sum;
}

/// Results go through shared memory, and out by a bulk store.
template <int F>
__global__ void store(uint4 const* in, unsigned* out) {
  __shared__ __align__(128) unsigned buffer[128];
  unsigned const t = threadIdx.x;
  unsigned const* from = (unsigned const*)in + blockIdx.x * 128;
  for (int tile = 0; tile < 16; ++tile) {
    buffer[(t * 5 + tile) % 128] = from[t] * (tile + 3);
    if (F != 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    if (F != 2) __syncthreads();
    if (!t) {
      unsigned* to = out + (blockIdx.x * 16 + tile) * 128;
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 512; cp.async.bulk.commit_group;" ::"l"(to), "r"(shared_address(buffer)) : "memory");
      if (F == 4) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      if (F != 3 && F != 4 && F != 7) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    }
    if (F == 7 && t == 32) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
    if (F == 6)
      asm volatile("bar.sync 1, 64;" ::: "memory");
    else if (F != 5)
      __syncthreads();
  }
  if (!t) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// Warps exchange maxima, as attention does for each block of keys.
template <int F>
__global__ void attention(uint4 const* in, unsigned* out) {
  __shared__ unsigned most[4], row[128];
  unsigned const t = threadIdx.x, warp = t / 32;
  unsigned const* from = (unsigned const*)in + blockIdx.x * 128;
  unsigned sum = 0, largest = 0;
  for (int block = 0; block < TILES; ++block) {
    unsigned const x = from[(t + 7 * block) % 128] >> 8;
    unsigned const mine = __reduce_max_sync(~0u, x);
    if (t % 32 == 0) most[warp] = mine;
    row[t] = x;
    if (F == 4)
      asm volatile("bar.sync 1, 64;" ::: "memory");
    else if (F == 6)
      asm volatile("bar.arrive 2, 256; bar.arrive 2, 256;" ::: "memory");
    else if (F != 1)
      __syncthreads();
    for (int i = 0; i < 4; ++i) largest = max(largest, most[i]);
    sum = sum * 33 + (row[(t * 3 + block) % 128] ^ largest);
    if (F == 3 && t % 32 == 0) most[warp] = 0;
    if (F != 2) __syncthreads();
    row[t] = sum;
    if (F != 5) __syncwarp();
    sum += row[t ^ 9];
    __syncthreads();
  }
  out[blockIdx.x * 128 + t] = sum;
}

__device__ unsigned ticket, arrived[4];

/// Split-K: the last CTA adds the parts of all.
template <int F>
__global__ void split(uint4 const* in, unsigned* out, unsigned* parts) {
  __shared__ unsigned last;
  unsigned const t = threadIdx.x;
  if (F == 3 && !t) last = atomicAdd(&ticket, 1) == gridDim.x - 1;
  parts[blockIdx.x * 128 + t] = ((unsigned const*)in)[blockIdx.x * 128 + t] * 5;
  if (F != 2) __threadfence();
  if (F == 6)
    asm volatile("bar.sync 1, 64;" ::: "memory");
  else if (F != 1)
    __syncthreads();
  if (F != 3 && !t) last = atomicAdd(&ticket, 1) == gridDim.x - (F == 5 ? 2 : 1);
  if (F != 4) __syncthreads();
  if (last) {
    unsigned sum = 0;
    for (unsigned i = 0; i < gridDim.x; ++i) sum = sum * 31 + ((unsigned volatile*)parts)[i * 128 + t];
    out[t] = sum;
    if (!t) ticket = 0;
  }
}

template <int F>
__device__ void meet(int number) {
  if (F != 3) __syncthreads();
  if (!threadIdx.x) {
    if (F != 6) __threadfence();
    atomicAdd(&arrived[F == 5 ? 0 : number], 1);
    unsigned const all = gridDim.x - (F == 2 ? 1 : 0);
    while (atomicAdd(&arrived[F == 5 ? 0 : number], 0) < all) {}
    __threadfence();
  }
  if (F != 4) __syncthreads();
}

/// Two phases between which all CTAs meet, as of a fused MoE: scatter, transform, gather.
template <int F>
__global__ void phases(uint4 const* in, unsigned* out, unsigned* parts) {
  unsigned const i = blockIdx.x * 128 + threadIdx.x, all = gridDim.x * 128;
  parts[(i * 77 + 5) % all] = ((unsigned const*)in)[i];
  if (F != 1) meet<F>(0);
  unsigned const x = ((unsigned volatile*)parts)[(i + all / 2) % all];
  parts[all + (i * 13 + 1) % all] = x * 3 + 1;
  if (F != 7) meet<F>(1);
  out[i] = ((unsigned volatile*)parts)[all + (i + all / 3) % all];
}

static unsigned digest(unsigned const* values, int count) {
  unsigned hash = 2166136261u;
  for (int i = 0; i < count; ++i) hash = (hash ^ values[i]) * 16777619u;
  return hash;
}

template <int F>
static void run(uint4 const* in, unsigned* out, unsigned* parts) {
  if constexpr (KERNEL == 0) pipeline<F><<<64, 128>>>(in, out);
  if constexpr (KERNEL == 1) bulk<F><<<64, 128>>>(in, out);
  if constexpr (KERNEL == 2) store<F><<<32, 128>>>(in, out);
  if constexpr (KERNEL == 3) attention<F><<<64, 128>>>(in, out);
  if constexpr (KERNEL == 4) split<F><<<64, 128>>>(in, out, parts);
  if constexpr (KERNEL == 5) phases<F><<<64, 128>>>(in, out, parts);
}

int main(int, char** words) {
  static unsigned host[4 * ITEMS];
  for (int i = 0; i < 4 * ITEMS; ++i) host[i] = i * 2654435769u ^ i >> 3;
  uint4* in;
  unsigned *out, *parts;
  CHECK(cudaMalloc(&in, sizeof host));
  CHECK(cudaMalloc(&out, 4 * ITEMS));
  CHECK(cudaMalloc(&parts, 4 * ITEMS));
  CHECK(cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice));
  CHECK(cudaMemset(out, 0, 4 * ITEMS));
  void (*const runs[])(uint4 const*, unsigned*, unsigned*) = {run<0>, run<1>, run<2>, run<3>, run<4>, run<5>, run<6>, run<7>};
  runs[atoi(words[1])](in, out, parts);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host, out, 4 * ITEMS, cudaMemcpyDeviceToHost));
  printf("%08x\n", digest(host, ITEMS));
}
