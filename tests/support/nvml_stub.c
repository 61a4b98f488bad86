/* A library with the functions of NVML that bench/_energy_sampler.py calls, for a driver with two GPUs.
   Layouts: nvml.h of CUDA 13. */
#include <stdlib.h>
#include <time.h>

#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7

static long gpu(void *handle) { return (long)handle - 1; }

int nvmlInitWithFlags(unsigned flags) { return flags; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
/* One process on the GPU with the number NVML_BUSY; otherwise unknown for the second GPU. */
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *list)
{
    const char *busy = getenv("NVML_BUSY");
    *count = busy && atol(busy) == gpu(handle);
    return *count ? (list ? 0 : INSUFFICIENT_SIZE) : gpu(handle) * NOT_SUPPORTED;
}
/* 100 W; the second GPU 50 W, or nothing with NVML_NO_COUNTER. */
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = (now.tv_sec * 1000ull + now.tv_nsec / 1000000) * (gpu(handle) ? 50 : 100);
    return getenv("NVML_NO_COUNTER") ? gpu(handle) * NOT_SUPPORTED : 0;
}
