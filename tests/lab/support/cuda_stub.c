// A driver of a Hopper GPU that runs nothing: it records in the directory STUB_RECORDS what a program passes to it.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void record(char const *name, void const *data, size_t size) {
  char path[4096];
  snprintf(path, sizeof path, "%s/%s", getenv("STUB_RECORDS"), name);
  FILE *file = fopen(path, "wb");
  if (!file || fwrite(data, 1, size, file) != size || fclose(file)) abort();
}

int cuInit(unsigned flags) { return flags; }
int cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
int cuDeviceGetName(char *name, int size, int device) { return snprintf(name, size, "A Card") < 0 || device; }
int cuDriverGetVersion(int *version) { return *version = 13010, 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 97 ? 232448 : 7;
  return device;
}

/// A cubin, whose size is in its header, or the first bytes of anything else.
static int record_module(void const *code) {
  unsigned char const *data = code;
  if (!data) return 1;
  if (!memcmp(data, "\xb1\x43\x62\x46", 4)) return 1;  // what nvcc registers
  uint64_t sections;
  uint16_t counts[2];
  memcpy(&sections, data + 40, 8), memcpy(counts, data + 58, 4);
  int const cubin = !memcmp(data, "\177ELF", 4);
  record("module", data, cubin ? sections + (uint64_t)counts[0] * counts[1] : 64);
  return 0;
}
int cuModuleLoadData(void **module, void const *code) { return *module = (void *)code, record_module(code); }
int cuModuleLoadFatBinary(void **module, void const *code) { return *module = (void *)code, record_module(code); }
int cuLibraryLoadData(void **library, void const *code) { return *library = (void *)code, record_module(code); }

/// A module has one function, and a handle that is none has no name to read.
int cuModuleGetFunctionCount(unsigned *count, void *module) { return *count = 1, module == 0; }
int cuModuleEnumerateFunctions(void **functions, unsigned count, void *module) { return *functions = module, 0; }
int cuFuncGetName(char const **name, void *function) { return *name = *(char *)function ? "kernel" : "", 0; }

int cuLibraryGetKernel(void **kernel, void *library, char const *name) {
  if (!name) return 1;
  return record("kernel", name, strlen(name)), *kernel = library, 0;
}
int cuKernelGetFunction(void **function, void *kernel) { return *function = kernel, 0; }
int cuModuleGetFunction(void **function, void *module, char const *name) {
  return *function = (char *)module + (name ? 64 * strlen(name) : 0), 0;
}

int cuLinkAddData_v2(void *state, int type, void *data, size_t size) { return record("linked", data, size), type; }
int cuLinkAddFile_v2(void *state, int type, char const *path) { return record("linked", path, strlen(path)), type; }

int cuFuncGetAttribute(int *value, int attribute, void *function) { return *value = attribute == 1 ? 1024 : 0, function != 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) {
  int const arguments[] = {attribute, value};
  return record("shared", arguments, sizeof arguments), function != 0;
}

/// Every kernel has a pointer and two parameters of 128 bytes, at offsets as Hopper has them for an alignment of 64.
int cuKernelGetParamInfo(void *kernel, size_t index, size_t *offset, size_t *size) {
  if (index > 2) return 1;
  return *offset = index ? 48 + 128 * (index - 1) : 0, *size = index ? 128 : 8, 0;
}
int cuFuncGetParamInfo(void *function, size_t index, size_t *offset, size_t *size) {
  return cuKernelGetParamInfo(function, index, offset, size);
}
static int record_launch(void **parameters) {
  unsigned char bytes[264];
  memcpy(bytes, parameters[0], 8), memcpy(bytes + 8, parameters[1], 128), memcpy(bytes + 136, parameters[2], 128);
  return record("launch", bytes, sizeof bytes), 0;
}
int cuLaunchKernelEx(void const *config, void *kernel, void **parameters, void **extra) {
  return parameters ? record_launch(parameters) : 0;
}
int cuLaunchKernelEx_ptsz(void const *config, void *kernel, void **parameters, void **extra) { return record_launch(parameters); }
int cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra) {
  int const arguments[] = {gx, gy, gz, bx, by, bz, shared};
  return record("shape", arguments, sizeof arguments), record_launch(parameters);
}

int cuLaunchCooperativeKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz) {
  unsigned const ctas = gx * gy * gz;
  return record("cooperative", &ctas, sizeof ctas), 0;
}

/// A graph has one node of a kernel, with room for its parameters and attributes; an attribute has 64 bytes.
static char node_parameters[72], node_attributes[16][64];
static int set_node(void const *parameters) { return memcpy(node_parameters, parameters, 72), record("node", parameters, 72), 0; }
int cuGraphAddKernelNode_v2(void **node, void *graph, void *of, size_t count, void const *parameters) {
  return *node = node_parameters, set_node(parameters);
}
int cuGraphAddNode_v2(void **node, void *graph, void *of, void *edges, size_t count, char const *parameters) {
  return *node = node_parameters, *(int *)parameters ? 0 : set_node(parameters + 16);
}
int cuGraphAddNode(void **node, void *graph, void *of, size_t count, char const *parameters) {
  return cuGraphAddNode_v2(node, graph, of, NULL, count, parameters);
}
int cuGraphKernelNodeSetParams_v2(void *node, void const *parameters) { return set_node(parameters); }
int cuGraphExecKernelNodeSetParams_v2(void *graph, void *node, void const *parameters) { return set_node(parameters); }
int cuGraphKernelNodeGetParams_v2(void *node, void *parameters) { return memcpy(parameters, node_parameters, 72), 0; }
int cuGraphKernelNodeGetAttribute(void *node, int id, void *value) { return memcpy(value, node_attributes[id], 64), 0; }
int cuGraphKernelNodeSetAttribute(void *node, int id, void const *value) { return memcpy(node_attributes[id], value, 64), 0; }
int cuGraphKernelNodeCopyAttributes(void *to, void *from) { return 0; }

/// The module of a function is another handle than what was loaded.
int cuFuncGetModule(void **module, void *function) { return *module = (char *)function + 8, 0; }
int cuOccupancyMaxPotentialClusterSize(int *ctas, void *kernel, void const *config) { return *ctas = 16, 0; }

/// The occupancy of any kernel on this GPU is 5.
int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, void *kernel, int threads, size_t shared, unsigned flags) {
  return *count = 5, 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *kernel, int threads, size_t shared) { return *count = 5, 0; }
int cuOccupancyMaxPotentialBlockSize(int *grid, int *block, void *kernel) { return *grid = *block = 5, 0; }
int cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, void *kernel, int ctas, int threads) { return *bytes = 5, 0; }
int cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, void *kernel) { return *grid = *block = 5, 0; }
int cuOccupancyMaxActiveClusters(int *clusters, void *kernel, void const *config) { return *clusters = 5, 0; }
int cuCtxGetDevice(int *device) { return *device = 0; }

int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, uint64_t const *dim, uint64_t const *stride,
                           uint32_t const *box) {
  if (!map || !dim || !stride || !box) return 1;
  uint64_t const arguments[] = {type, rank, (uintptr_t)address, dim[0], dim[1], stride[0], box[0], box[1]};
  record("map", arguments, sizeof arguments);
  return memset(map, 0xab, 128), 0;
}

int cuTensorMapReplaceAddress(void *map, void *address) { return record("address", &address, sizeof address), map == 0; }

int cuGetProcAddress_v2(char const *name, void **function, int version, uint64_t flags, void *status) {
  *function = !strcmp(name, "cuDeviceGetAttribute") ? (void *)cuDeviceGetAttribute
              : !strcmp(name, "cuModuleLoadData")   ? (void *)cuModuleLoadData
              : !strcmp(name, "cuGetProcAddress")   ? (void *)cuGetProcAddress_v2
              : !strcmp(name, "cuGraphAddNode")     ? (void *)(version < 12030 ? cuGraphAddNode : cuGraphAddNode_v2)
              : !strcmp(name, "cuLaunchKernelEx")   ? (void *)(flags & 2 ? cuLaunchKernelEx_ptsz : cuLaunchKernelEx)
                                                    : 0;
  (void)version, (void)status;
  return *function ? 0 : 500;
}
