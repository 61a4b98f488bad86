// What CUTLASS headers expect from nvcc and a device, for a plain host compiler. Include before everything else.
#pragma once

#if !defined(__CUDACC_VER_MAJOR__) || !defined(CUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED)
#error "compile with -D__CUDACC_VER_MAJOR__=13 -D__CUDACC_VER_MINOR__=0 -DCUTE_CVTA_GENERIC_TO_SHARED_ACTIVATED=1"
#endif

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

asm(".macro brkpt\nint3\n.endm");  // CUTLASS writes asm("brkpt;") on paths that must not run

inline uint3 threadIdx{0, 0, 0};
inline uint3 blockIdx{0, 0, 0};
inline dim3 blockDim{1, 1, 1};
inline dim3 gridDim{1, 1, 1};

std::size_t __cvta_generic_to_shared(void const* pointer);

void __syncthreads();
inline void __syncwarp(unsigned = 0xffffffffu) {}
inline void __threadfence() {}
inline void __nanosleep(unsigned) {}
inline void __trap() { __builtin_trap(); }
template <class T>
T __shfl_sync(unsigned, T value, int from, int = 32);
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned by, int = 32);
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned by, int = 32);
template <class T>
T __shfl_xor_sync(unsigned, T value, int by, int = 32);
unsigned __ballot_sync(unsigned, int predicate);
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
inline unsigned __activemask() { return 1; }
template <class T>
T __ldg(T const* pointer) {
  return *pointer;
}
template <class T>
T atomicAdd(T* pointer, T value) {
  T old = *pointer;
  *pointer += value;
  return old;
}
inline long long clock64() { return 0; }
