// A kernel with a frame of its own, which calls a function of callee.cu that has another; one with static shared memory.
extern __device__ int callee(int*, int);
extern "C" __global__ void calls(int* p, int n) {
  int bins[16];
#pragma unroll 1
  for (int i = 0; i < n; ++i) bins[p[i] & 15] = i;
  p[0] = callee(p, n) + bins[p[1] & 15];
}
extern "C" __global__ void shares(int* p) {
  __shared__ int slots[10];
  slots[threadIdx.x] = p[0];
  p[0] = callee(p, slots[p[1]]);
}
