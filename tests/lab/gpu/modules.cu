// A kernel that returns the architecture of its code. modules.py compiles it for several targets, each a module, into one program.
#include <cuda_runtime.h>

#define NAME_(what, target) what##_##target
#define NAME(what, target) NAME_(what, target)

extern "C" __global__ void NAME(arch, TARGET)(int* out) {
#ifdef __CUDA_ARCH__
  *out = __CUDA_ARCH__;
#endif
}

/// The architecture whose code ran; negative: the status of the launch.
extern "C" int NAME(run, TARGET)(void) {
  int *out, result = 0;
  if (cudaMalloc(&out, 4)) return -1;
  NAME(arch, TARGET)<<<1, 1>>>(out);
  int const status = cudaGetLastError();
  return status || cudaMemcpy(&result, out, 4, cudaMemcpyDeviceToHost) ? -status : result;
}
