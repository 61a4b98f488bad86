// Preloaded into the programs that `sm120kit verify run` starts: the driver of a Hopper GPU as a program for SM120 sees it.
//
// - It reports compute capability 12.0 and the shared memory of SM120, and refuses kernels that need more.
// - Modules with code for SM12x and none for Hopper are rewritten by the program in SM120KIT_PTX_REWRITER before they are loaded.
//   They cannot be linked by the driver's linker.
// - Kernels that were captured from a build take the place of those of the same name.
// - Tensor maps of 4-bit elements, which Hopper's driver rejects, are encoded as maps of bytes with a mark, see rewrite.py. Those
//   that a program writes itself, as CuTe DSL does, are replaced among the parameters of a launch.
//
// Programs reach the driver through symbols of libcuda, dlsym or cuGetProcAddress; all three lead here. CUDA's headers are not
// needed: the functions and numbers are those of cuda.h 13.0, and the layout of fatbins is that of kernels/cubin/fatbin.py.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_BINARY_FOR_GPU = 209, FILE_NOT_FOUND = 301, NOT_FOUND = 500 };

// CUdevice_attribute and CUfunction_attribute
enum { THREADS_PER_SM = 39, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, SHARED_PER_SM = 81, SHARED_PER_CTA = 97 };
enum { STATIC_SHARED_BYTES = 1, DYNAMIC_SHARED_BYTES = 8 };
enum { LARGEST_SHARED_BYTES = 101376 };

extern char **environ;

static void *(*dlsym_of_libc(void))(void *, char const *) {
  static void *(*found)(void *, char const *);
  if (!found) {
    static char const *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
    for (unsigned i = 0; i < sizeof versions / sizeof *versions && !found; ++i)
      found = (void *(*)(void *, char const *))dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    if (!found) abort();
  }
  return found;
}

static int not_in_this_driver(void) { return NOT_FOUND; }

/// A function of the driver itself; one that fails if the driver has none of this name.
static void *driver(char const *name) {
  static void *library;
  if (!library) library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  void *function = library ? dlsym_of_libc()(library, name) : NULL;
  return function ? function : (void *)not_in_this_driver;
}
#define DRIVER(result, name, ...) ((result(*)(__VA_ARGS__))driver(name))

/// Append a line to the log of the run; lines of several processes do not mix.
static void note(char const *format, ...) {
  char const *directory = getenv("SM120KIT_PTX_RUN");
  if (!directory) return;
  char path[4096], line[1024];
  snprintf(path, sizeof path, "%s/events", directory);
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  if (length > (int)sizeof line - 2) length = sizeof line - 2;
  line[length++] = '\n';
  int const file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return;
  if (write(file, line, length) < 0) {}
  close(file);
}

// ---- modules

static uint64_t u64(unsigned char const *at) { uint64_t x; memcpy(&x, at, 8); return x; }
static uint32_t u32(unsigned char const *at) { uint32_t x; memcpy(&x, at, 4); return x; }
static uint16_t u16(unsigned char const *at) { uint16_t x; memcpy(&x, at, 2); return x; }

/// An image in memory: its bytes, and whether it has code for SM12x and code that Hopper runs.
struct image {
  unsigned char const *data;
  size_t size;
  int for_sm120, for_hopper;
};

static void add_arch(struct image *image, unsigned arch, int is_ptx) {
  if (arch >= 120 && arch < 130) image->for_sm120 = 1;
  if (arch == 90 || (is_ptx && arch < 90)) image->for_hopper = 1;
}

/// What follows a comment, a string or the line of a preprocessor at `text`; `text` itself if there is none.
static char const *after_ignored(char const *text) {
  char const *end = text;
  if (text[0] == '#' || (text[0] == '/' && text[1] == '/')) {
    end = strchr(text, '\n');
  } else if (text[0] == '/' && text[1] == '*') {
    end = strstr(text + 2, "*/");
    if (end) end += 2;
  } else if (text[0] == '"') {
    for (end = text + 1; *end && *end != '"'; ++end)
      if (end[0] == '\\' && end[1]) ++end;
    if (*end) ++end;
  }
  return end ? end : text + strlen(text);
}

/// The arch of the directive .target of a PTX module: 120 for sm_120a; 0 without one.
static unsigned target_arch(char const *text) {
  unsigned arch = 0;
  int is_target = 0;
  while (*text) {
    char const *next = after_ignored(text);
    if (next != text) {
      text = next;
    } else if (strchr(" \t\r\n\f", *text)) {
      ++text;
    } else if (is_target) {
      return sscanf(text, "sm_%u", &arch) == 1 ? arch : 0;
    } else {
      is_target = !strncmp(text, ".target", 7);
      text += is_target ? 7 : 1;
    }
  }
  return 0;
}

/// `limit` is the size of a file; images in memory have none, and end where their headers say.
static struct image examine(void const *code, size_t limit) {
  unsigned char const *data = code;
  struct image image = {data, 0, 0, 0};
  if (!data) return image;
  if (limit == SIZE_MAX && u32(data) == 0x466243b1) {  // what nvcc registers: it has the address
    image.data = data = (unsigned char const *)(uintptr_t)u64(data + 8);
    if (!data) return image;
  }
  if (u32(data) == 0xba55ed50) {
    image.size = u16(data + 6) + u64(data + 8);
    if (image.size > limit) return image;
    for (size_t at = u16(data + 6); at + 64 <= image.size;) {
      unsigned const kind = u16(data + at);
      if (kind == 1 || kind == 2) add_arch(&image, u32(data + at + 28), kind == 1);
      uint64_t const next = u32(data + at + 4) + u64(data + at + 8);
      if (!next) break;
      at += next;
    }
  } else if (u32(data) == 0x464c457f && u16(data + 18) == 190) {
    uint64_t const sections = u64(data + 40) + (uint64_t)u16(data + 58) * u16(data + 60);
    uint64_t const segments = u64(data + 32) + (uint64_t)u16(data + 54) * u16(data + 56);
    image.size = sections > segments ? sections : segments;
    if (image.size > limit) return image;
    for (unsigned i = 0; i < u16(data + 60); ++i) {
      unsigned char const *header = data + u64(data + 40) + (uint64_t)i * u16(data + 58);
      uint64_t const end = u32(header + 4) == 8 ? 0 : u64(header + 24) + u64(header + 32);  // SHT_NOBITS has no bytes
      if (end > image.size) image.size = end;
    }
    if (image.size > limit) return image;
    uint32_t const flags = u32(data + 48);
    add_arch(&image, data[7] == 0x41 ? flags >> 8 & 0xff : flags & 0xff, 0);
  } else if ((data[0] >= ' ' && data[0] < 0x7f) || strchr("\t\r\n\f\xef", data[0])) {  // a byte order mark begins with 0xef
    image.size = strlen((char const *)data) + 1;
    add_arch(&image, target_arch((char const *)data), 1);
  }
  return image;
}

static int write_file(char const *path, void const *data, size_t size) {
  FILE *file = fopen(path, "wbe");
  if (!file) return 0;
  int const complete = fwrite(data, 1, size, file) == size;
  return fclose(file) == 0 && complete;
}

/// A file's bytes, and zeros after them, so that a header can be read of a short one.
static void *read_file(char const *path, size_t *size) {
  struct stat status;
  FILE *file = path ? fopen(path, "rbe") : NULL;
  if (!file) return NULL;
  char *data = fstat(fileno(file), &status) == 0 ? calloc(1, status.st_size + 64) : NULL;
  if (data && fread(data, 1, status.st_size, file) != (size_t)status.st_size) free(data), data = NULL;
  if (data && size) *size = status.st_size;
  fclose(file);
  return data;
}

/// Run the rewriter on a file of the run's directory; its messages go to stderr.
static int run_rewriter(char const *image, char const *cubin) {
  char *rewriter = getenv("SM120KIT_PTX_REWRITER");
  char *const arguments[] = {rewriter, (char *)image, (char *)cubin, NULL};
  pid_t child;
  int status;
  size_t count = 0, kept = 0;
  while (environ[count]) ++count;
  char **variables = calloc(count + 1, sizeof *variables);
  if (!rewriter || !variables) return 0;
  for (size_t i = 0; i < count; ++i)
    if (strncmp(environ[i], "LD_PRELOAD=", 11)) variables[kept++] = environ[i];
  int const failed = posix_spawn(&child, rewriter, NULL, NULL, arguments, variables);
  free(variables);
  if (failed) return 0;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return 0;
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// The cubin for Hopper of an image for SM12x; NULL if it cannot be rewritten. It stays in memory, as the driver may read it later.
static void *rewritten(struct image const *image) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < image->size; ++i) hash = (hash ^ image->data[i]) * 0x100000001b3u;
  char const *directory = getenv("SM120KIT_PTX_RUN");
  char source[4096], cubin[4096];
  if (!directory) return NULL;
  snprintf(source, sizeof source, "%s/%016llx-%zx.%d", directory, (unsigned long long)hash, image->size, (int)getpid());
  snprintf(cubin, sizeof cubin, "%s/%016llx-%zx.cubin", directory, (unsigned long long)hash, image->size);
  pthread_mutex_lock(&lock);
  void *result = read_file(cubin, NULL);
  if (!result && write_file(source, image->data, image->size)) {
    if (run_rewriter(source, cubin)) result = read_file(cubin, NULL);
    unlink(source);
  }
  pthread_mutex_unlock(&lock);
  if (!result) note("refused %016llx %zu", (unsigned long long)hash, image->size);
  return result;
}

/// Code to load, and whether it is another than that of the program. There is none if what is only for SM12x cannot be rewritten.
struct loadable {
  void const *code;
  int changed, refused;
};

static struct loadable for_hopper(void const *code, size_t limit) {
  struct image const image = examine(code, limit);
  if (!image.for_sm120 || image.for_hopper) return (struct loadable){code, 0, 0};
  void const *cubin = rewritten(&image);
  return (struct loadable){cubin, 1, !cubin};
}

EXPORT int cuModuleLoadData(void **module, void const *code) {
  struct loadable const it = for_hopper(code, SIZE_MAX);
  return it.refused ? NO_BINARY_FOR_GPU : DRIVER(int, "cuModuleLoadData", void **, void const *)(module, it.code);
}

EXPORT int cuModuleLoadDataEx(void **module, void const *code, unsigned count, void *options, void **values) {
  struct loadable const it = for_hopper(code, SIZE_MAX);
  if (it.refused) return NO_BINARY_FOR_GPU;
  return DRIVER(int, "cuModuleLoadDataEx", void **, void const *, unsigned, void *, void **)(
      module, it.code, it.changed ? 0 : count, options, values);
}

EXPORT int cuModuleLoadFatBinary(void **module, void const *code) {
  struct loadable const it = for_hopper(code, SIZE_MAX);
  if (it.refused) return NO_BINARY_FOR_GPU;
  return DRIVER(int, it.changed ? "cuModuleLoadData" : "cuModuleLoadFatBinary", void **, void const *)(module, it.code);
}

EXPORT int cuModuleLoad(void **module, char const *path) {
  size_t size = 0;
  void *content = read_file(path, &size);
  struct loadable const it = for_hopper(content, size);
  free(content);
  if (it.refused) return NO_BINARY_FOR_GPU;
  if (it.changed) return DRIVER(int, "cuModuleLoadData", void **, void const *)(module, it.code);
  return DRIVER(int, "cuModuleLoad", void **, char const *)(module, path);
}

EXPORT int cuLibraryLoadData(void **library, void const *code, void *jit, void **jit_values, unsigned jit_count, void *options,
                             void **values, unsigned count) {
  struct loadable const it = for_hopper(code, SIZE_MAX);
  if (it.refused) return NO_BINARY_FOR_GPU;
  return DRIVER(int, "cuLibraryLoadData", void **, void const *, void *, void **, unsigned, void *, void **, unsigned)(
      library, it.code, jit, jit_values, it.changed ? 0 : jit_count, options, values, count);
}

EXPORT int cuLibraryLoadFromFile(void **library, char const *path, void *jit, void **jit_values, unsigned jit_count, void *options,
                                 void **values, unsigned count) {
  size_t size = 0;
  void *content = read_file(path, &size);
  struct loadable const it = for_hopper(content, size);
  free(content);
  if (it.refused) return NO_BINARY_FOR_GPU;
  if (it.changed)
    return DRIVER(int, "cuLibraryLoadData", void **, void const *, void *, void **, unsigned, void *, void **, unsigned)(
        library, it.code, jit, jit_values, 0, options, values, count);
  return DRIVER(int, "cuLibraryLoadFromFile", void **, char const *, void *, void **, unsigned, void *, void **, unsigned)(
      library, path, jit, jit_values, jit_count, options, values, count);
}

// ---- the linker

/// Whether an input of the driver's linker is only for SM12x. It makes a cubin of several inputs, which are not rewritten.
static int cannot_be_linked(void const *data, size_t size, char const *name) {
  char *copy = data ? calloc(1, size + 64) : NULL;
  if (!copy) return 0;
  memcpy(copy, data, size);
  struct image const image = examine(copy, size);
  free(copy);
  if (!image.for_sm120 || image.for_hopper) return 0;
  note("refused link-%zx %zu", size, size);
  fprintf(stderr,
          "sm120kit verify run: %s is code for SM12x; it cannot be linked at run time (cuLinkAddData, cuLinkAddFile)\n"
          "  load the module itself: cuModuleLoadData, cuLibraryLoadData\n",
          name ? name : "an input");
  return 1;
}

EXPORT int cuLinkAddData_v2(void *state, int type, void *data, size_t size, char const *name, unsigned count, void *options,
                            void **values) {
  if (cannot_be_linked(data, size, name)) return NO_BINARY_FOR_GPU;
  return DRIVER(int, "cuLinkAddData_v2", void *, int, void *, size_t, char const *, unsigned, void *, void **)(
      state, type, data, size, name, count, options, values);
}

EXPORT int cuLinkAddFile_v2(void *state, int type, char const *path, unsigned count, void *options, void **values) {
  size_t size = 0;
  void *content = read_file(path, &size);
  int const refused = cannot_be_linked(content, size, path);
  free(content);
  if (refused) return NO_BINARY_FOR_GPU;
  return DRIVER(int, "cuLinkAddFile_v2", void *, int, char const *, unsigned, void *, void **)(state, type, path, count, options,
                                                                                             values);
}

// Since CUDA 6.5, the names without a suffix are those of these functions.
EXPORT int cuLinkAddData(void *, int, void *, size_t, char const *, unsigned, void *, void **)
    __attribute__((alias("cuLinkAddData_v2")));
EXPORT int cuLinkAddFile(void *, int, char const *, unsigned, void *, void **) __attribute__((alias("cuLinkAddFile_v2")));

// ---- captured kernels

/// A kernel of a captured module, which is loaded when a program looks the kernel up. The run's directory has a list of lines
/// `NAME FILE`. Returns 0 if the name is not in it, else 1 and the driver's status.
static int captured(char const *name, void **kernel, int *status) {
  enum { MOST_FILES = 4096 };
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  static struct {
    char *path;
    void *library;
  } files[MOST_FILES];
  static char *list;
  pthread_mutex_lock(&lock);
  if (!list && getenv("SM120KIT_PTX_RUN")) {
    char path[4096];
    snprintf(path, sizeof path, "%s/captured.list", getenv("SM120KIT_PTX_RUN"));
    list = read_file(path, NULL);
  }
  size_t const length = strlen(name);
  char *line = list;
  while (line && *line && (strncmp(line, name, length) || line[length] != ' ')) line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL;
  int const found = line && *line;
  if (found) {
    char path[4096];
    int at = 0;
    snprintf(path, sizeof path, "%.*s", (int)strcspn(line + length + 1, "\n"), line + length + 1);
    while (at < MOST_FILES - 1 && files[at].path && strcmp(files[at].path, path)) ++at;
    *status = SUCCESS;
    if (!files[at].library) {
      files[at].path = strdup(path);
      char *text = read_file(path, NULL);
      *status = text ? cuLibraryLoadData(&files[at].library, text, NULL, NULL, 0, NULL, NULL, 0) : FILE_NOT_FOUND;
      free(text);
    }
    if (!*status) *status = DRIVER(int, "cuLibraryGetKernel", void **, void *, char const *)(kernel, files[at].library, name);
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static int looked_up(int status, void *const *kernel, char const *query);

EXPORT int cuLibraryGetKernel(void **kernel, void *library, char const *name) {
  int status;
  if (!name || !captured(name, kernel, &status))
    status = DRIVER(int, "cuLibraryGetKernel", void **, void *, char const *)(kernel, library, name);
  return looked_up(status, kernel, "cuKernelGetParamInfo");
}

EXPORT int cuKernelGetFunction(void **function, void *kernel) {
  int const status = DRIVER(int, "cuKernelGetFunction", void **, void *)(function, kernel);
  return looked_up(status, function, "cuFuncGetParamInfo");
}

EXPORT int cuModuleGetFunction(void **function, void *module, char const *name) {
  void *kernel;
  int status;
  if (!name || !captured(name, &kernel, &status))
    status = DRIVER(int, "cuModuleGetFunction", void **, void *, char const *)(function, module, name);
  else if (!status)
    status = DRIVER(int, "cuKernelGetFunction", void **, void *)(function, kernel);
  return looked_up(status, function, "cuFuncGetParamInfo");
}

// ---- the GPU

/// Whether a return address is in a library of NVIDIA that chooses among kernels of its own, some of them for Hopper: it sees the
/// GPU as it is, because its kernels for SM120 have no PTX.
static int in_library_of_nvidia(void *address) {
  static char const *const names[] = {"libcublas", "libcudnn", "libcufft", "libcurand", "libcusolver", "libcusparse", "libnccl"};
  Dl_info where;
  if (!dladdr(address, &where) || !where.dli_fname) return 0;
  char const *slash = strrchr(where.dli_fname, '/');
  char const *name = slash ? slash + 1 : where.dli_fname;
  for (unsigned i = 0; i < sizeof names / sizeof *names; ++i)
    if (!strncmp(name, names[i], strlen(names[i]))) return 1;
  return 0;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int const status = DRIVER(int, "cuDeviceGetAttribute", int *, int, int)(value, attribute, device);
  if (status || in_library_of_nvidia(__builtin_return_address(0))) return status;
  switch (attribute) {
    case CAPABILITY_MAJOR: *value = 12; break;
    case CAPABILITY_MINOR: *value = 0; break;
    case SHARED_PER_CTA: *value = LARGEST_SHARED_BYTES; break;
    case SHARED_PER_SM: *value = LARGEST_SHARED_BYTES + 1024; break;
    case THREADS_PER_SM: *value = 1536; break;
  }
  return status;
}

EXPORT int cuDeviceComputeCapability(int *major, int *minor, int device) {
  int const status = DRIVER(int, "cuDeviceComputeCapability", int *, int *, int)(major, minor, device);
  if (!status) *major = 12, *minor = 0;
  return status;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  (void)device;
  *major = 12, *minor = 0;
  return SUCCESS;
}

static int too_much_shared(int attribute, int value, int status, int static_bytes) {
  if (attribute != DYNAMIC_SHARED_BYTES || status || value + static_bytes <= LARGEST_SHARED_BYTES) return 0;
  note("shared %d", value + static_bytes);
  return 1;
}

EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
  int bytes = 0;
  int const status = DRIVER(int, "cuFuncGetAttribute", int *, int, void *)(&bytes, STATIC_SHARED_BYTES, function);
  int const exempt = in_library_of_nvidia(__builtin_return_address(0));
  if (!exempt && too_much_shared(attribute, value, status, bytes)) return INVALID_VALUE;
  return DRIVER(int, "cuFuncSetAttribute", void *, int, int)(function, attribute, value);
}

EXPORT int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
  int bytes = 0;
  int const status = DRIVER(int, "cuKernelGetAttribute", int *, int, void *, int)(&bytes, STATIC_SHARED_BYTES, kernel, device);
  int const exempt = in_library_of_nvidia(__builtin_return_address(0));
  if (!exempt && too_much_shared(attribute, value, status, bytes)) return INVALID_VALUE;
  return DRIVER(int, "cuKernelSetAttribute", int, int, void *, int)(attribute, value, kernel, device);
}

// ---- tensor maps

enum { UINT8 = 0, PACKED_U4 = 13, UNPACKED_U4 = 14, UNPACKED_U6 = 15 };
enum { MARK_OFFSET = 120, INTERLEAVE_NONE = 0, SWIZZLE_NONE = 0, SWIZZLE_128 = 3 };
#define MARK_PACKED 0x34753631303231u
#define MARK_UNPACKING 0x64656b6361706e75u

/// A map for software that copies and unpacks, see functions.cu.
struct unpacking_map {
  uint64_t unused[2], address, stride[4];
  uint32_t dim[5], box[5], swizzle_128, bits;
};

static int refused_map(char const *rule, unsigned long long value) {
  note("map %s: %llu", rule, value);
  fprintf(stderr, "sm120kit verify run: tensor map refused: %s, is %llu\n", rule, value);
  return INVALID_VALUE;
}

/// The rules of cuTensorMapEncodeTiled for types that unpack (CUDA driver API, cuda.h 13.0).
static int encode_unpacking(void *map, int type, uint32_t rank, void *address, uint64_t const *dim, uint64_t const *stride,
                            uint32_t const *box, uint32_t const *element_stride, int interleave, int swizzle) {
  struct unpacking_map ours = {{0, 0}, (uintptr_t)address, {0}, {1, 1, 1, 1, 1}, {1, 1, 1, 1, 1}, swizzle == SWIZZLE_128, 0};
  ours.bits = type == UNPACKED_U4 ? 4 : 6;
  if (rank < 1 || rank > 5) return refused_map("rank must be 1 to 5", rank);
  if ((uintptr_t)address % 32) return refused_map("the address must be a multiple of 32", (uintptr_t)address);
  if (dim[0] % 128) return refused_map("globalDim[0] must be a multiple of 128", dim[0]);
  if (box[0] != 128) return refused_map("boxDim[0] must be 128", box[0]);
  if (interleave != INTERLEAVE_NONE) return refused_map("interleaving is not done in software", interleave);
  if (swizzle != SWIZZLE_NONE && swizzle != SWIZZLE_128) return refused_map("the swizzle must be none or 128B", swizzle);
  for (uint32_t i = 0; i < rank; ++i) {
    if (dim[i] < 1 || dim[i] > UINT32_MAX) return refused_map("globalDim must be 1 to 2^32 - 1", dim[i]);
    if (box[i] < 1 || box[i] > 256) return refused_map("boxDim must be 1 to 256", box[i]);
    if (element_stride[i] != 1) return refused_map("element strides are not done in software", element_stride[i]);
    ours.dim[i] = dim[i], ours.box[i] = box[i];
    if (i + 1 == rank) break;
    if (stride[i] % 32 || stride[i] >> 40) return refused_map("globalStrides must be multiples of 32 below 2^40", stride[i]);
    ours.stride[i] = stride[i];
  }
  uint64_t const mark = MARK_UNPACKING;
  memset(map, 0, 128);
  memcpy(map, &ours, sizeof ours);
  memcpy((char *)map + MARK_OFFSET, &mark, 8);
  return SUCCESS;
}

EXPORT int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, uint64_t const *dim, uint64_t const *stride,
                                  uint32_t const *box, uint32_t const *element_stride, int interleave, int swizzle, int promotion,
                                  int fill) {
  typedef int Encode(void *, int, uint32_t, void *, uint64_t const *, uint64_t const *, uint32_t const *, uint32_t const *, int,
                     int, int, int);
  Encode *encode = (Encode *)driver("cuTensorMapEncodeTiled");
  int const complete = map && dim && box && element_stride && (stride || rank < 2);
  if (complete && (type == UNPACKED_U4 || type == UNPACKED_U6))
    return encode_unpacking(map, type, rank, address, dim, stride, box, element_stride, interleave, swizzle);
  if (!complete || type != PACKED_U4 || rank < 1 || rank > 5)
    return encode(map, type, rank, address, dim, stride, box, element_stride, interleave, swizzle, promotion, fill);
  if (dim[0] % 2) return refused_map("globalDim[0] of 4-bit elements must be even", dim[0]);
  if (box[0] % 32) return refused_map("the bytes of boxDim[0] must be a multiple of 16", box[0] / 2);
  uint64_t bytes[5];
  uint32_t box_bytes[5];
  for (uint32_t i = 0; i < rank; ++i) bytes[i] = i ? dim[i] : dim[0] / 2, box_bytes[i] = i ? box[i] : box[0] / 2;
  int const status = encode(map, UINT8, rank, address, bytes, stride, box_bytes, element_stride, interleave, swizzle, promotion, fill);
  uint64_t const mark = MARK_PACKED;
  if (!status) memcpy((char *)map + MARK_OFFSET, &mark, 8);
  return status;
}

EXPORT int cuTensorMapReplaceAddress(void *map, void *address) {
  uint64_t mark = 0, value = (uintptr_t)address;
  if (map) memcpy(&mark, (char *)map + MARK_OFFSET, 8);
  if (mark != MARK_UNPACKING) return DRIVER(int, "cuTensorMapReplaceAddress", void *, void *)(map, address);
  if (value % 32) return refused_map("the address must be a multiple of 32", value);
  memcpy((char *)map + 16, &value, 8);
  return SUCCESS;
}

// ---- launches

// A tensor map as hardware reads it, in 32-bit words: 0 and 1 the address; 2 the kind: bits 0 to 3 are 2, 4 to 6 the rank less 1,
// 7 to 10 the type, 11 and 12 the interleaving, 13 to 15 the swizzle, 16 the fill, 17 and 18 the promotion, 21 set for 128 KB
// and more; 3 to 6 the strides in units of 16 bytes, whose upper 4 bits each are in 7; 8 to 12 the extents less 1; 13 the
// strides of elements less 1, 3 bits each, and in its last byte the box's first extent less 1; 14 the other extents of the box;
// 15 is 0. Seen in what the host code of CuTe DSL 4.4.1 and 4.8.0 writes, and in what the driver encodes for bytes. The last 16 words
// are not written by that of 4.8.0, and have any value.
enum { MAP_WORDS = 32, MAP_KIND = 2, MAP_STRIDES = 3, MAP_EXTENTS = 8, MAP_STEPS = 13, MAP_LAST = 15 };
enum { HARDWARE_UINT8 = 0, HARDWARE_PACKED_U4 = 11, HARDWARE_UNPACKED_U4 = 12 };
enum { MOST_MAPS = 16 };

/// Replace a map of 4-bit elements in hardware's form by that which cuTensorMapEncodeTiled makes here. Returns 0 if it is none.
static int converted(uint32_t *map) {
  unsigned const kind = map[MAP_KIND], type = kind >> 7 & 15, rank = (kind >> 4 & 7) + 1, swizzle = kind >> 13 & 7;
  if ((kind & 15) != 2 || (type != HARDWARE_PACKED_U4 && type != HARDWARE_UNPACKED_U4) || rank > 5 || map[0] % 16 || map[MAP_LAST])
    return 0;
  if (type == HARDWARE_PACKED_U4 && map[MAP_EXTENTS] % 2 && (map[MAP_STEPS] >> 24) % 2) {
    uint64_t const mark = MARK_PACKED;
    map[MAP_KIND] = (kind & ~(15u << 7)) | HARDWARE_UINT8 << 7;
    map[MAP_EXTENTS] >>= 1;  // both are less by 1: (n + 1) / 2 - 1
    map[MAP_STEPS] = (map[MAP_STEPS] & 0xffffff) | (map[MAP_STEPS] >> 25) << 24;
    memcpy(map + MARK_OFFSET / 4, &mark, 8);
    return 1;
  }
  uint64_t address, dim[5], stride[5] = {0};
  uint32_t box[5], steps[5];
  memcpy(&address, map, 8);
  for (unsigned i = 0; i < rank; ++i) {
    dim[i] = (uint64_t)map[MAP_EXTENTS + i] + 1;
    box[i] = (i ? map[MAP_STEPS + 1] >> (8 * (i - 1)) & 255 : map[MAP_STEPS] >> 24) + 1;
    steps[i] = (map[MAP_STEPS] >> (3 * i) & 7) + 1;
    if (i + 1 < rank) stride[i] = (map[MAP_STRIDES + i] | (uint64_t)(map[MAP_STRIDES + 4] >> (4 * i) & 15) << 32) << 4;
  }
  return type == HARDWARE_UNPACKED_U4 &&
         encode_unpacking(map, UNPACKED_U4, rank, (void *)(uintptr_t)address, dim, stride, box, steps, kind >> 11 & 3, swizzle) ==
             SUCCESS;
}

/// A kernel that a program looked up, the driver's function for the sizes of its parameters, and which of these may be tensor maps:
/// those of 128 bytes. Their alignment is not seen in their offsets, which on Hopper begin at byte 528 of the constants. Launches
/// determine them, as these need a context.
struct launchable {
  struct launchable *next;
  void *kernel;
  char const *query;
  unsigned parameters, count, maps[MOST_MAPS];
};

static pthread_mutex_t launchables_lock = PTHREAD_MUTEX_INITIALIZER;

static struct launchable **launchables(void *kernel) {
  static struct launchable *buckets[4096];
  struct launchable **at = &buckets[((uintptr_t)kernel >> 4) % 4096];
  while (*at && (*at)->kernel != kernel) at = &(*at)->next;
  return at;
}

static int looked_up(int status, void *const *kernel, char const *query) {
  if (status || !kernel || !*kernel) return status;
  pthread_mutex_lock(&launchables_lock);
  struct launchable **at = launchables(*kernel);
  if (!*at) *at = calloc(1, sizeof **at);
  // The address may be that of another kernel, which was unloaded.
  if (*at) (*at)->kernel = *kernel, (*at)->query = query, (*at)->parameters = (*at)->count = 0;
  pthread_mutex_unlock(&launchables_lock);
  return status;
}

/// The parameters of a launch, with tensor maps replaced in `maps` and the pointers to all in `space`.
static void **with_maps(void *kernel, void **parameters, void **space, size_t most, uint32_t (*maps)[MAP_WORDS]) {
  if (!parameters) return parameters;
  pthread_mutex_lock(&launchables_lock);
  struct launchable *at = *launchables(kernel), found = {0};
  if (at && !at->parameters) {
    size_t offset, size;
    int (*parameter)(void *, size_t, size_t *, size_t *) = DRIVER(int, at->query, void *, size_t, size_t *, size_t *);
    for (; parameter(kernel, at->parameters, &offset, &size) == SUCCESS; ++at->parameters)
      if (size == 4 * MAP_WORDS && at->count < MOST_MAPS) at->maps[at->count++] = at->parameters;
  }
  if (at) found = *at;
  pthread_mutex_unlock(&launchables_lock);
  int changed = 0;
  if (!found.count || found.parameters > most) return parameters;
  memcpy(space, parameters, found.parameters * sizeof *space);
  for (unsigned i = 0; i < found.count; ++i) {
    memcpy(maps[i], parameters[found.maps[i]], sizeof maps[i]);
    if (converted(maps[i])) space[found.maps[i]] = maps[i], ++changed;
  }
  return changed ? space : parameters;
}

enum { MOST_PARAMETERS = 1024 };
#define REPLACE_MAPS(kernel, parameters)              \
  _Alignas(64) uint32_t maps[MOST_MAPS][MAP_WORDS];   \
  void *space[MOST_PARAMETERS];                       \
  parameters = with_maps(kernel, parameters, space, MOST_PARAMETERS, maps)

#define LAUNCHES(suffix)                                                                                                        \
  EXPORT int cuLaunchKernelEx##suffix(void const *config, void *kernel, void **parameters, void **extra) {                      \
    REPLACE_MAPS(kernel, parameters);                                                                                           \
    return DRIVER(int, "cuLaunchKernelEx" #suffix, void const *, void *, void **, void **)(config, kernel, parameters, extra);  \
  }                                                                                                                             \
  EXPORT int cuLaunchKernel##suffix(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                                    unsigned shared, void *stream, void **parameters, void **extra) {                           \
    REPLACE_MAPS(kernel, parameters);                                                                                           \
    return DRIVER(int, "cuLaunchKernel" #suffix, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,  \
                  void *, void **, void **)(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);                 \
  }                                                                                                                             \
  EXPORT int cuLaunchCooperativeKernel##suffix(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,   \
                                               unsigned bz, unsigned shared, void *stream, void **parameters) {                 \
    REPLACE_MAPS(kernel, parameters);                                                                                           \
    return DRIVER(int, "cuLaunchCooperativeKernel" #suffix, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                  unsigned, void *, void **)(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters);                       \
  }
LAUNCHES()
LAUNCHES(_ptsz)

// ---- CuTe DSL

/// The files of PTX and machine code that CuTe DSL keeps have the name of the function: each process gets a directory of its own.
__attribute__((constructor)) static void choose_directory(void) {
  char const *directory = getenv("SM120KIT_PTX_RUN");
  char path[4096];
  if (!directory) return;
  snprintf(path, sizeof path, "%s/cute-dsl/%d", directory, (int)getpid());
  if (mkdir(path, 0700) == 0 || errno == EEXIST) setenv("CUTE_DSL_DUMP_DIR", path, 1);
}

/// In it, files of an earlier compile of the same function get another name, of this process, before PTX, which is written first,
/// replaces them. A process that was forked shares the directory.
EXPORT FILE *fopen64(char const *path, char const *mode) {
  char const *directory = getenv("CUTE_DSL_DUMP_DIR"), *end = path ? strrchr(path, '.') : NULL;
  size_t const length = directory ? strlen(directory) : 0;
  int const inside = length && path && !strncmp(path, directory, length) && path[length] == '/';
  if (inside && end && mode[0] == 'w' && !strcmp(end, ".ptx")) {
    static unsigned count;
    char from[4096], to[4096];
    unsigned const number = __atomic_fetch_add(&count, 1, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; ++i) {
      snprintf(from, sizeof from, "%.*s%s", (int)(end - path), path, i ? ".cubin" : ".ptx");
      snprintf(to, sizeof to, "%.*s.%d-%u%s", (int)(end - path), path, (int)getpid(), number, i ? ".cubin" : ".ptx");
      rename(from, to);
    }
  }
  return ((FILE * (*)(char const *, char const *)) dlsym_of_libc()(RTLD_NEXT, "fopen64"))(path, mode);
}

// ---- look-ups

static void *replacement(char const *name);

/// With flag 2, functions with a stream are those whose default stream is the thread's.
static void replace_look_up(int status, void **function, char const *name, uint64_t flags) {
  char of_threads[64];
  snprintf(of_threads, sizeof of_threads, "%s_ptsz", name);
  if (status || !function || !*function) return;
  void *ours = flags & 2 ? replacement(of_threads) : NULL;
  if (!ours) ours = replacement(name);
  if (ours) *function = ours;
}

EXPORT int cuGetProcAddress_v2(char const *name, void **function, int version, uint64_t flags, void *result) {
  int const status =
      DRIVER(int, "cuGetProcAddress_v2", char const *, void **, int, uint64_t, void *)(name, function, version, flags, result);
  // From CUDA 12 on, the name without a suffix is that of the function with five parameters.
  int const second = name && !strcmp(name, "cuGetProcAddress") && version >= 12000;
  replace_look_up(status, function, second ? "cuGetProcAddress_v2" : name, flags);
  return status;
}

EXPORT int cuGetProcAddress(char const *name, void **function, int version, uint64_t flags) {
  int const status = DRIVER(int, "cuGetProcAddress", char const *, void **, int, uint64_t)(name, function, version, flags);
  replace_look_up(status, function, name, flags);
  return status;
}

static void *replacement(char const *name) {
#define ENTRY(function) {#function, (void *)function}
  static struct {
    char const *name;
    void *function;
  } const entries[] = {
      ENTRY(cuDeviceComputeCapability), ENTRY(cuDeviceGetAttribute),   ENTRY(cuFuncSetAttribute),
      ENTRY(cuGetProcAddress),          ENTRY(cuGetProcAddress_v2),    ENTRY(cuKernelSetAttribute),
      ENTRY(cuLibraryGetKernel),        ENTRY(cuModuleGetFunction),
      ENTRY(cuKernelGetFunction),       ENTRY(cuLaunchCooperativeKernel),
      ENTRY(cuLaunchCooperativeKernel_ptsz), ENTRY(cuLaunchKernel),
      ENTRY(cuLaunchKernel_ptsz),       ENTRY(cuLaunchKernelEx),
      ENTRY(cuLaunchKernelEx_ptsz),
      ENTRY(cuLinkAddData),             ENTRY(cuLinkAddData_v2),
      ENTRY(cuLinkAddFile),             ENTRY(cuLinkAddFile_v2),
      ENTRY(cuLibraryLoadData),         ENTRY(cuLibraryLoadFromFile),  ENTRY(cuModuleLoad),
      ENTRY(cuModuleLoadData),          ENTRY(cuModuleLoadDataEx),     ENTRY(cuModuleLoadFatBinary),
      ENTRY(cuTensorMapEncodeTiled),    ENTRY(cuTensorMapReplaceAddress), ENTRY(nvmlDeviceGetCudaComputeCapability),
  };
  for (unsigned i = 0; i < sizeof entries / sizeof *entries; ++i)
    if (!strcmp(entries[i].name, name)) return entries[i].function;
  return NULL;
}

/// The jump to libc's function keeps the caller's return address, which decides what RTLD_NEXT means.
EXPORT void *dlsym(void *handle, char const *name) {
  if ((name[0] == 'c' && name[1] == 'u') || (name[0] == 'n' && name[1] == 'v')) {
    void *ours = replacement(name);
    if (ours && dlsym_of_libc()(handle, name)) return ours;
  }
  return dlsym_of_libc()(handle, name);
}
