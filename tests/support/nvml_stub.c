/* A library with the functions of NVML that facts/nvml.py and bench/energy_sampler.py call, for a driver
   with two GPUs, of which the second supports little.
   Layouts: nvml.h of CUDA 13. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define NOT_SUPPORTED 3
#define INSUFFICIENT_SIZE 7

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { unsigned long long total, free, used; } memory;

static long gpu(void *handle) { return (long)handle - 1; }

int nvmlInitWithFlags(unsigned flags) { return flags; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)(long)(index + 1); return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { strncpy(text, "580.126.09", size); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13000; return 0; }
int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *info)
{
    strcpy(info->bus_id, gpu(handle) ? "00000000:41:00.0" : "00000000:01:00.0");
    return 0;
}
int nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    strncpy(text, "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", size);
    return gpu(handle) * NOT_SUPPORTED;
}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 12; *minor = 0; return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory *info)
{
    info->total = 97887ull << 20;
    return gpu(handle) * NOT_SUPPORTED;
}
int nvmlDeviceGetBAR1MemoryInfo(void *handle, memory *info)
{
    info->total = 131072ull << 20;
    return gpu(handle) * NOT_SUPPORTED;
}
int nvmlDeviceGetPowerManagementLimit(void *handle, unsigned *limit) { *limit = 450000; return gpu(handle) * NOT_SUPPORTED; }
int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *least, unsigned *most)
{
    *least = 150000;
    *most = 600000;
    return gpu(handle) * NOT_SUPPORTED;
}
int nvmlDeviceGetPersistenceMode(void *handle, int *mode) { *mode = 1; return gpu(handle) * NOT_SUPPORTED; }
int nvmlDeviceGetPerformanceState(void *handle, int *state) { *state = gpu(handle) ? 32 : 8; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) { *celsius = 41; return gpu(handle) * NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *list)
{
    const char *busy = getenv("NVML_BUSY");
    *count = busy && atol(busy) == gpu(handle);
    return *count ? (list ? 0 : INSUFFICIENT_SIZE) : gpu(handle) * NOT_SUPPORTED;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons)
{
    *reasons = 0x81;
    return gpu(handle) * NOT_SUPPORTED;
}
/* 100 W; the second GPU 50 W, or nothing with NVML_NO_COUNTER. */
int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *millijoules = (now.tv_sec * 1000ull + now.tv_nsec / 1000000) * (gpu(handle) ? 50 : 100);
    return getenv("NVML_NO_COUNTER") ? gpu(handle) * NOT_SUPPORTED : 0;
}
