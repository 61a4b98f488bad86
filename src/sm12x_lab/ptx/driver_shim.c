// Preloaded into the programs that `sm120kit verify run` starts: the driver of a Hopper GPU as a program for SM120 sees it.
//
// - It reports compute capability 12.0 and the limits of SM120. Occupancy, and launches that do not fit, are those of SM120: from
//   what ptxas reports of the original PTX, by cuda_occupancy.h, the calculator in CUDA's headers.
// - Modules with PTX for SM12x are rewritten by the program in SM120KIT_PTX_REWRITER before they are loaded. They cannot be linked
//   by the driver's linker. Modules that SM120 cannot load are refused; those whose code for Hopper runs are written to the log.
// - Kernels that were captured from a build take the place of those of the same name.
// - Tensor maps of 4-bit elements, which Hopper's driver rejects, are encoded as maps of bytes with a mark, see rewrite.py. Those
//   that a program writes itself, as CuTe DSL does, are replaced among the parameters of a launch.
//
// Programs reach the driver through symbols of libcuda, dlsym or cuGetProcAddress; all three lead here. The functions and numbers
// are those of cuda.h 13.0, and the layout of fatbins is that of kernels/cubin/fatbin.py.
#define _GNU_SOURCE
#include <cuda_occupancy.h>
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

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_BINARY_FOR_GPU = 209, INVALID_PTX = 218, FILE_NOT_FOUND = 301, NOT_FOUND = 500 };
enum { LAUNCH_OUT_OF_RESOURCES = 701, COOPERATIVE_LAUNCH_TOO_LARGE = 720, INVALID_CLUSTER_SIZE = 912 };

// CUdevice_attribute and CUfunction_attribute
enum { SM_COUNT = 16, L2_BYTES = 38, THREADS_PER_SM = 39, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
enum { SHARED_PER_SM = 81, SHARED_PER_CTA = 97, CTAS_PER_SM = 106, NVLINK_MULTICAST = 132 };
enum { MOST_THREADS = 0, STATIC_SHARED_BYTES = 1, REGISTERS = 4, BINARY_VERSION = 6, DYNAMIC_SHARED_BYTES = 8 };

// Of compute capability 12.0: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability". cuda_occupancy.h has
// the others: 24 CTAs a multiprocessor, and how registers, shared memory and barriers are allocated.
enum { LARGEST_SHARED_BYTES = 101376, RESERVED_SHARED_BYTES = 1024, MULTIPROCESSOR_SHARED_BYTES = 102400 };
enum { MULTIPROCESSOR_THREADS = 1536, MULTIPROCESSOR_CTAS = 24, MULTIPROCESSOR_REGISTERS = 65536, CTA_THREADS = 1024 };
// The most CTAs of a cluster that any GPU has; whether SM120 has more is not documented.
enum { CLUSTER_CTAS = 8 };

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

/// The log of the run; that of the start, so that a program may replace its environment.
static char events[4096];

__attribute__((constructor)) static void find_log(void) {
  char const *directory = getenv("SM120KIT_PTX_RUN");
  if (directory) snprintf(events, sizeof events, "%s/events", directory);
}

/// Append a line to the log; lines of several processes do not mix. Returns whether it was written.
static int note(char const *format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  int length = vsnprintf(line, sizeof line - 1, format, arguments);
  va_end(arguments);
  if (length > (int)sizeof line - 2) length = sizeof line - 2;
  line[length++] = '\n';
  int const file = open(events, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (file < 0) return 0;
  int const written = write(file, line, length) == length;
  close(file);
  return written;
}

/// A number of SM120 that `verify run` was given; `otherwise` without one.
static int given(char const *variable, int otherwise) {
  char const *text = getenv(variable);
  return text && *text ? atoi(text) : otherwise;
}

/// The compute capability is 12 and this: 1 of DGX Spark.
static int minor_capability(void) { return given("SM120KIT_PTX_MINOR", 0); }

// ---- other programs

/// Programs that start without this library are not seen: their names go to the log.
static void observe(char const *path, char *const *variables) {
  for (; variables && *variables; ++variables)
    if (!strncmp(*variables, "LD_PRELOAD=", 11) && strstr(*variables, "libsm120kit_driver.so")) return;
  char const *slash = path ? strrchr(path, '/') : NULL;
  if (path) note("unseen %.200s", slash ? slash + 1 : path);
}

typedef int Execute(char const *, char *const *, char *const *);
typedef int Spawn(pid_t *, char const *, void const *, void const *, char *const *, char *const *);
static Execute *execute, *execute_by_name;
static Spawn *spawn, *spawn_by_name;

/// In a child of vfork, no function of libc can be looked up.
__attribute__((constructor)) static void find_programs(void) {
  execute = (Execute *)dlsym_of_libc()(RTLD_NEXT, "execve"), execute_by_name = (Execute *)dlsym_of_libc()(RTLD_NEXT, "execvpe");
  spawn = (Spawn *)dlsym_of_libc()(RTLD_NEXT, "posix_spawn"), spawn_by_name = (Spawn *)dlsym_of_libc()(RTLD_NEXT, "posix_spawnp");
}

EXPORT int execve(char const *path, char *const *words, char *const *variables) {
  return observe(path, variables), execute(path, words, variables);
}
EXPORT int execv(char const *path, char *const *words) { return execve(path, words, environ); }
EXPORT int execvpe(char const *name, char *const *words, char *const *variables) {
  return observe(name, variables), execute_by_name(name, words, variables);
}
EXPORT int execvp(char const *name, char *const *words) { return execvpe(name, words, environ); }
EXPORT int posix_spawn(pid_t *child, char const *path, posix_spawn_file_actions_t const *actions, posix_spawnattr_t const *attributes,
                       char *const *words, char *const *variables) {
  return observe(path, variables), spawn(child, path, actions, attributes, words, variables);
}
EXPORT int posix_spawnp(pid_t *child, char const *name, posix_spawn_file_actions_t const *actions,
                        posix_spawnattr_t const *attributes, char *const *words, char *const *variables) {
  return observe(name, variables), spawn_by_name(child, name, actions, attributes, words, variables);
}

// ---- modules

static uint64_t u64(unsigned char const *at) { uint64_t x; memcpy(&x, at, 8); return x; }
static uint32_t u32(unsigned char const *at) { uint32_t x; memcpy(&x, at, 4); return x; }
static uint16_t u16(unsigned char const *at) { uint16_t x; memcpy(&x, at, 2); return x; }

/// An image in memory: its bytes, and whether it has code for the GPU that the program sees, PTX for it, code of another GPU, and any
/// that SM120 can load.
struct image {
  unsigned char const *data;
  size_t size;
  int for_sm120, ptx_for_sm120, for_another, loadable;
};

/// Code for an architecture as 120, or for it alone as sm_120a and sm_90a, or for its family as sm_120f.
static void add_arch(struct image *image, unsigned arch, int is_ptx, int alone, int family) {
  unsigned const own = 120 + minor_capability();
  int const runs = alone ? arch == own : arch >= 120 && arch <= own;
  if (runs) image->for_sm120 = image->loadable = 1;
  if (runs && is_ptx) image->ptx_for_sm120 = 1;
  if (arch == 90 || (is_ptx && arch < 90) || (!runs && arch >= 120 && arch < 130)) image->for_another = 1;
  if (is_ptx && arch < 120 && !alone && !family) image->loadable = 1;
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

/// The arch of the directive .target of a PTX module, 0 without one: 120 and the suffix `a` of sm_120a.
static unsigned target_arch(char const *text, char *suffix) {
  unsigned arch = 0;
  int is_target = 0;
  while (*text) {
    char const *next = after_ignored(text);
    if (next != text) {
      text = next;
    } else if (strchr(" \t\r\n\f", *text)) {
      ++text;
    } else if (is_target) {
      return sscanf(text, "sm_%u%c", &arch, suffix) > 0 ? arch : 0;
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
  struct image image = {data, 0, 0, 0, 0, 0};
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
      uint32_t const flags = u32(data + at + 40);
      if (kind == 1 || kind == 2) add_arch(&image, u32(data + at + 28), kind == 1, (flags & 0x100000) != 0, (flags & 0x200000) != 0);
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
    add_arch(&image, data[7] == 0x41 ? flags >> 8 & 0xff : flags & 0xff, 0, 0, 0);
  } else if ((data[0] >= ' ' && data[0] < 0x7f) || strchr("\t\r\n\f\xef", data[0])) {  // a byte order mark begins with 0xef
    image.size = strlen((char const *)data) + 1;
    char suffix = 0;
    unsigned const arch = target_arch((char const *)data, &suffix);
    add_arch(&image, arch, 1, suffix == 'a', suffix == 'f');
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

/// Run the rewriter on a file of the run's directory; its messages go to stderr. Returns its exit code, or -1.
static int run_rewriter(char const *image, char const *cubin) {
  char *rewriter = getenv("SM120KIT_PTX_REWRITER");
  char *const arguments[] = {rewriter, (char *)image, (char *)cubin, NULL};
  pid_t child;
  int status;
  size_t count = 0, kept = 0;
  while (environ[count]) ++count;
  char **variables = calloc(count + 1, sizeof *variables);
  if (!rewriter || !variables) return -1;
  for (size_t i = 0; i < count; ++i)
    if (strncmp(environ[i], "LD_PRELOAD=", 11)) variables[kept++] = environ[i];
  int const failed = spawn(&child, rewriter, NULL, NULL, arguments, variables);
  free(variables);
  if (failed) return -1;
  while (waitpid(child, &status, 0) < 0)
    if (errno != EINTR) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Bitwise CRC-32, as zlib's.
static uint32_t crc32_of(unsigned char const *data, size_t size) {
  uint32_t crc = 0xffffffffu;
  for (size_t i = 0; i < size; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
  }
  return ~crc;
}

/// The lines `NAME REGISTERS BARRIERS SHARED THREADS CLUSTER` of the kernels in machine code that the rewriter made; NULL of other code.
static char *figures_of(struct image const *image) {
  char path[4096], *directory = getenv("SM120KIT_PTX_RUN");
  if (!directory) return NULL;
  snprintf(path, sizeof path, "%s/%08x-%zx.figures", directory, crc32_of(image->data, image->size), image->size);
  return read_file(path, NULL);
}

/// Write seed and range of sites for delays into rewritten machine code, see perturb.py: SM120KIT_PTX_DELAYS has `SEED FIRST LAST
/// MODULE`, and only the module with these figures is delayed, or all if it is `-`.
static void set_delays(unsigned char *code, size_t size) {
  static uint32_t const magic[] = {0x32316d73, 0x6c656478, 0x73796179, 0x0ab12039};
  char const *text = getenv("SM120KIT_PTX_DELAYS");
  char module[32], own[32];
  uint32_t words[3];
  if (!text || sscanf(text, "%u %u %u %31s", words, words + 1, words + 2, module) != 4) return;
  snprintf(own, sizeof own, "%08x-%zx", crc32_of(code, size), size);
  if (strcmp(module, "-") && strcmp(module, own)) return;
  for (size_t at = 0; at + 32 <= size; at += 4)
    if (!memcmp(code + at, magic, sizeof magic)) memcpy(code + at + sizeof magic, words, sizeof words);
}

/// Code to load, and whether it is another than that of the program. `refused` is the status of what cannot be loaded; `figures` are
/// those of rewritten kernels; `hopper`: kernels of the module run as code for Hopper, and `id` is its name in the log.
struct loadable {
  void const *code;
  int changed, refused, hopper;
  char *figures;
  uint64_t id;
};

static uint64_t hash_of(struct image const *image) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < image->size; ++i) hash = (hash ^ image->data[i]) * 0x100000001b3u;
  return hash;
}

/// The cubin for Hopper of an image for SM12x. It stays in memory, as the driver may read it later.
static struct loadable rewritten(struct image const *image) {
  enum { REJECTED_BY_PTXAS = 50 };
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  struct loadable result = {NULL, 1, NO_BINARY_FOR_GPU, 0, NULL, hash_of(image)};
  char const *directory = getenv("SM120KIT_PTX_RUN");
  char source[4096], cubin[4096];
  int status = 0;
  if (!directory) return result;
  snprintf(source, sizeof source, "%s/%016llx-%zx.%d", directory, (unsigned long long)result.id, image->size, (int)getpid());
  snprintf(cubin, sizeof cubin, "%s/%016llx-%zx.cubin", directory, (unsigned long long)result.id, image->size);
  pthread_mutex_lock(&lock);
  size_t size = 0;
  void *code = read_file(cubin, &size);
  if (!code && write_file(source, image->data, image->size)) {
    status = run_rewriter(source, cubin);
    if (!status) code = read_file(cubin, &size);
    unlink(source);
  }
  pthread_mutex_unlock(&lock);
  if (code) {
    struct image const ours = {code, size, 0, 0, 0, 0};
    result.code = code, result.refused = SUCCESS, result.figures = figures_of(&ours);
    set_delays(code, size);
    return result;
  }
  if (status == REJECTED_BY_PTXAS) result.refused = INVALID_PTX;
  note("refused %016llx %zu %d", (unsigned long long)result.id, image->size, status);
  return result;
}

/// The name of the library or program that has an address, without its directories; "memory" of what a program allocated.
static char const *file_of(void const *address) {
  Dl_info where;
  if (!dladdr(address, &where) || !where.dli_fname) return "memory";
  char const *slash = strrchr(where.dli_fname, '/');
  return slash ? slash + 1 : where.dli_fname;
}

/// Whether an address is in a library of NVIDIA that chooses among kernels of its own, some of them for Hopper: it sees the GPU as it
/// is, because its kernels for SM120 have no PTX.
static int in_library_of_nvidia(void const *address) {
  static char const *const names[] = {"libcublas", "libcudnn", "libcufft", "libcurand", "libcusolver", "libcusparse", "libnccl"};
  char const *name = file_of(address);
  for (unsigned i = 0; i < sizeof names / sizeof *names; ++i)
    if (!strncmp(name, names[i], strlen(names[i]))) return 1;
  return 0;
}

/// A module of which SM120 would run other code, or none. With SM120KIT_PTX_STRICT it is refused, except that of PyTorch.
static struct loadable for_another_gpu(struct image const *image, void const *code) {
  struct loadable it = {code, 0, SUCCESS, 1, NULL, (uintptr_t)image->data ^ (uint64_t)getpid() << 44};
  char const *file = file_of(code), *strict = getenv("SM120KIT_PTX_STRICT");
  int const of_pytorch = !strncmp(file, "libtorch", 8) || !strncmp(file, "libc10", 6);
  int const refused = strict && *strict && !of_pytorch;
  if (image->loadable && !refused && note("hopper %llx %zu %d %s", (unsigned long long)it.id, image->size, image->for_sm120, file))
    return it;
  it.refused = NO_BINARY_FOR_GPU;
  note("refused %llx %zu %s", (unsigned long long)it.id, image->size, image->loadable ? "strict" : "hopper");
  fprintf(stderr, "sm120kit verify run: a module of %zu B in %s %s\n", image->size, file,
          !image->loadable ? "has no code that SM120 can load"
          : refused        ? "would run code for Hopper; --strict refuses it"
                           : "would run code for Hopper, and this process cannot write that to the log of the run");
  return it;
}

/// What to load for `code`: that for SM120 if it is known, rewritten; the code as it is if the rewriter made it, or if it is of a
/// library of NVIDIA. `caller` is the return address of the function that loads it.
static struct loadable for_hopper(void const *code, size_t limit, void const *caller) {
  struct image const image = examine(code, limit);
  struct loadable const as_it_is = {code, 0, SUCCESS, 0, NULL, 0};
  int const known = image.for_sm120 || image.for_another;
  if (!known || in_library_of_nvidia(caller) || in_library_of_nvidia(code)) return as_it_is;
  if (image.ptx_for_sm120 || !image.for_another) return rewritten(&image);
  char *figures = u32(image.data) == 0x464c457f ? figures_of(&image) : NULL;
  if (figures) {
    unsigned char *own = malloc(image.size);
    if (own) set_delays(memcpy(own, image.data, image.size), image.size);
    return (struct loadable){own ? own : code, own != NULL, SUCCESS, 0, figures, 0};
  }
  return for_another_gpu(&image, code);
}

/// What was loaded by its handle.
struct module {
  struct module *next;
  void *handle;
  struct loadable it;
};
static struct module *modules;
static pthread_mutex_t modules_lock = PTHREAD_MUTEX_INITIALIZER;

/// The handle may be that of another module, which was unloaded.
static int loaded(int status, void *const *handle, struct loadable it) {
  if (status || !handle) return status;
  pthread_mutex_lock(&modules_lock);
  struct module *at = modules;
  while (at && at->handle != *handle) at = at->next;
  if (!at && (at = malloc(sizeof *at))) *at = (struct module){modules, *handle, it}, modules = at;
  if (at) at->it = it;
  pthread_mutex_unlock(&modules_lock);
  return status;
}

static struct loadable module_of(void *handle) {
  pthread_mutex_lock(&modules_lock);
  struct module const *at = modules;
  while (at && at->handle != handle) at = at->next;
  pthread_mutex_unlock(&modules_lock);
  return at ? at->it : (struct loadable){NULL, 0, SUCCESS, 0, NULL, 0};
}

#define LOADABLE(code, limit)                                                        \
  struct loadable const it = for_hopper(code, limit, __builtin_return_address(0)); \
  if (it.refused) return it.refused

EXPORT int cuModuleLoadData(void **module, void const *code) {
  LOADABLE(code, SIZE_MAX);
  return loaded(DRIVER(int, "cuModuleLoadData", void **, void const *)(module, it.code), module, it);
}

EXPORT int cuModuleLoadDataEx(void **module, void const *code, unsigned count, void *options, void **values) {
  LOADABLE(code, SIZE_MAX);
  return loaded(DRIVER(int, "cuModuleLoadDataEx", void **, void const *, unsigned, void *, void **)(
                    module, it.code, it.changed ? 0 : count, options, values),
                module, it);
}

EXPORT int cuModuleLoadFatBinary(void **module, void const *code) {
  LOADABLE(code, SIZE_MAX);
  char const *name = it.changed ? "cuModuleLoadData" : "cuModuleLoadFatBinary";
  return loaded(DRIVER(int, name, void **, void const *)(module, it.code), module, it);
}

EXPORT int cuModuleLoad(void **module, char const *path) {
  size_t size = 0;
  void *content = read_file(path, &size);
  struct loadable const it = for_hopper(content, size, __builtin_return_address(0));
  free(content);
  if (it.refused) return it.refused;
  int const status = it.changed ? DRIVER(int, "cuModuleLoadData", void **, void const *)(module, it.code)
                                : DRIVER(int, "cuModuleLoad", void **, char const *)(module, path);
  return loaded(status, module, it);
}

typedef int LoadLibrary(void **, void const *, void *, void **, unsigned, void *, void **, unsigned);

EXPORT int cuLibraryLoadData(void **library, void const *code, void *jit, void **jit_values, unsigned jit_count, void *options,
                             void **values, unsigned count) {
  LOADABLE(code, SIZE_MAX);
  LoadLibrary *load = (LoadLibrary *)driver("cuLibraryLoadData");
  return loaded(load(library, it.code, jit, jit_values, it.changed ? 0 : jit_count, options, values, count), library, it);
}

EXPORT int cuLibraryLoadFromFile(void **library, char const *path, void *jit, void **jit_values, unsigned jit_count, void *options,
                                 void **values, unsigned count) {
  size_t size = 0;
  void *content = read_file(path, &size);
  struct loadable const it = for_hopper(content, size, __builtin_return_address(0));
  free(content);
  if (it.refused) return it.refused;
  LoadLibrary *load = (LoadLibrary *)driver(it.changed ? "cuLibraryLoadData" : "cuLibraryLoadFromFile");
  return loaded(load(library, it.changed ? it.code : path, jit, jit_values, it.changed ? 0 : jit_count, options, values, count),
                library, it);
}

EXPORT int cuLibraryGetModule(void **module, void *library) {
  int const status = DRIVER(int, "cuLibraryGetModule", void **, void *)(module, library);
  return loaded(status, module, module_of(library));
}

// ---- the linker

/// Whether an input of the driver's linker has code for SM12x. It makes a cubin of several inputs, which are not rewritten.
static int cannot_be_linked(void const *data, size_t size, char const *name) {
  char *copy = data ? calloc(1, size + 64) : NULL;
  if (!copy) return 0;
  memcpy(copy, data, size);
  struct image const image = examine(copy, size);
  free(copy);
  if (!image.for_sm120) return 0;
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
/// `NAME FILE`. Returns 0 if the name is not in it, else 1, the driver's status, and the module as that of the kernel.
static int captured(char const *name, void **kernel, int *status, void **library) {
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
    *library = files[at].library;
    if (!*status) *status = DRIVER(int, "cuLibraryGetKernel", void **, void *, char const *)(kernel, *library, name);
  }
  pthread_mutex_unlock(&lock);
  return found;
}

static int looked_up(int status, void *const *kernel, char const *query, struct loadable it, char const *name);
static int same_kernel(int status, void *const *function, void *kernel);

EXPORT int cuLibraryGetKernel(void **kernel, void *library, char const *name) {
  int status;
  if (!name || !captured(name, kernel, &status, &library))
    status = DRIVER(int, "cuLibraryGetKernel", void **, void *, char const *)(kernel, library, name);
  return looked_up(status, kernel, "cuKernelGetParamInfo", module_of(library), name);
}

EXPORT int cuKernelGetFunction(void **function, void *kernel) {
  int const status = DRIVER(int, "cuKernelGetFunction", void **, void *)(function, kernel);
  return same_kernel(status, function, kernel);
}

EXPORT int cuModuleGetFunction(void **function, void *module, char const *name) {
  void *kernel;
  int status;
  if (!name || !captured(name, &kernel, &status, &module))
    status = DRIVER(int, "cuModuleGetFunction", void **, void *, char const *)(function, module, name);
  else if (!status)
    status = DRIVER(int, "cuKernelGetFunction", void **, void *)(function, kernel);
  return looked_up(status, function, "cuFuncGetParamInfo", module_of(module), name);
}

/// Kernels that a program takes without their names.
static int enumerated(int status, void *const *kernels, unsigned room, char const *query, char const *get_name, void *owner,
                      char const *get_count) {
  unsigned count = 0;
  if (!status && kernels) DRIVER(int, get_count, unsigned *, void *)(&count, owner);
  for (unsigned i = 0; i < room && i < count; ++i) {
    char const *name = NULL;
    if (DRIVER(int, get_name, char const **, void *)(&name, kernels[i]) == SUCCESS)
      looked_up(SUCCESS, kernels + i, query, module_of(owner), name);
  }
  return status;
}

EXPORT int cuLibraryEnumerateKernels(void **kernels, unsigned count, void *library) {
  int const status = DRIVER(int, "cuLibraryEnumerateKernels", void **, unsigned, void *)(kernels, count, library);
  return enumerated(status, kernels, count, "cuKernelGetParamInfo", "cuKernelGetName", library, "cuLibraryGetKernelCount");
}

EXPORT int cuModuleEnumerateFunctions(void **functions, unsigned count, void *module) {
  int const status = DRIVER(int, "cuModuleEnumerateFunctions", void **, unsigned, void *)(functions, count, module);
  return enumerated(status, functions, count, "cuFuncGetParamInfo", "cuFuncGetName", module, "cuModuleGetFunctionCount");
}

// ---- the GPU

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
  int const status = DRIVER(int, "cuDeviceGetAttribute", int *, int, int)(value, attribute, device);
  if (status || in_library_of_nvidia(__builtin_return_address(0))) return status;
  switch (attribute) {
    case CAPABILITY_MAJOR: *value = 12; break;
    case CAPABILITY_MINOR: *value = minor_capability(); break;
    case SHARED_PER_CTA: *value = LARGEST_SHARED_BYTES; break;
    case SHARED_PER_SM: *value = MULTIPROCESSOR_SHARED_BYTES; break;
    case THREADS_PER_SM: *value = MULTIPROCESSOR_THREADS; break;
    case CTAS_PER_SM: *value = MULTIPROCESSOR_CTAS; break;
    case SM_COUNT: *value = given("SM120KIT_PTX_SMS", *value); break;
    case L2_BYTES: *value = given("SM120KIT_PTX_L2", *value); break;
    case NVLINK_MULTICAST: *value = 0; break;
  }
  return status;
}

EXPORT int cuDeviceComputeCapability(int *major, int *minor, int device) {
  int const status = DRIVER(int, "cuDeviceComputeCapability", int *, int *, int)(major, minor, device);
  if (!status) *major = 12, *minor = minor_capability();
  return status;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  (void)device;
  *major = 12, *minor = minor_capability();
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
/// `limits` are those of a rewritten kernel on SM120; `of` is its module.
struct launchable {
  struct launchable *next;
  void *kernel;
  char const *query;
  unsigned parameters, count, maps[MOST_MAPS];
  struct limits {
    int registers, barriers, shared, threads, cluster;
  } limits;
  int rewritten;
  struct loadable of;
};

static pthread_mutex_t launchables_lock = PTHREAD_MUTEX_INITIALIZER;

static struct launchable **launchables(void *kernel) {
  static struct launchable *buckets[4096];
  struct launchable **at = &buckets[((uintptr_t)kernel >> 4) % 4096];
  while (*at && (*at)->kernel != kernel) at = &(*at)->next;
  return at;
}

/// The figures of a kernel among the lines of its module; 0 without them.
static int limits_of(char const *figures, char const *name, struct limits *limits) {
  size_t const length = strlen(name);
  char const *line = figures;
  while (line && (strncmp(line, name, length) || line[length] != ' ')) line = (line = strchr(line, '\n')) ? line + 1 : NULL;
  return line && sscanf(line + length, "%d %d %d %d %d", &limits->registers, &limits->barriers, &limits->shared, &limits->threads,
                        &limits->cluster) == 5;
}

static int looked_up(int status, void *const *kernel, char const *query, struct loadable it, char const *name) {
  if (status || !kernel || !*kernel) return status;
  if (it.hopper && name) note("kernel %llx %.900s", (unsigned long long)it.id, name);
  pthread_mutex_lock(&launchables_lock);
  struct launchable **at = launchables(*kernel);
  if (!*at) *at = calloc(1, sizeof **at);
  // The address may be that of another kernel, which was unloaded.
  if (*at) {
    **at = (struct launchable){.next = (*at)->next, .kernel = *kernel, .query = query, .of = it};
    (*at)->rewritten = it.figures && name && limits_of(it.figures, name, &(*at)->limits);
  }
  pthread_mutex_unlock(&launchables_lock);
  return status;
}

static struct launchable found(void *kernel) {
  pthread_mutex_lock(&launchables_lock);
  struct launchable *at = *launchables(kernel);
  struct launchable const copy = at ? *at : (struct launchable){0};
  pthread_mutex_unlock(&launchables_lock);
  return copy;
}

/// A function is that of a kernel that was looked up.
static int same_kernel(int status, void *const *function, void *kernel) {
  if (status || !function || !*function) return status;
  struct launchable const of = found(kernel);
  looked_up(SUCCESS, function, "cuFuncGetParamInfo", of.of, NULL);
  pthread_mutex_lock(&launchables_lock);
  struct launchable *at = *launchables(*function);
  if (at) at->limits = of.limits, at->rewritten = of.rewritten;
  pthread_mutex_unlock(&launchables_lock);
  return status;
}

EXPORT int cuFuncGetModule(void **module, void *function) {
  return loaded(DRIVER(int, "cuFuncGetModule", void **, void *)(module, function), module, found(function).of);
}

// ---- residency

/// CUlaunchConfig and CUlaunchAttribute of cuda.h.
struct attribute {
  int id, padding;
  int value[16];
};
struct launch {
  unsigned grid[3], block[3], shared;
  void *stream;
  struct attribute *attributes;
  unsigned count;
};
enum { COOPERATIVE = 2, CLUSTER_DIMENSION = 4 };

static int const *attribute_of(struct launch const *launch, int id) {
  for (unsigned i = 0; launch->attributes && i < launch->count; ++i)
    if (launch->attributes[i].id == id) return launch->attributes[i].value;
  return NULL;
}

/// CTAs of a launch's cluster: by its attribute, else what the kernel states.
static int cluster_of(struct limits limits, struct launch const *launch) {
  int const *size = attribute_of(launch, CLUSTER_DIMENSION);
  return size ? size[0] * size[1] * size[2] : limits.cluster;
}

static int multiprocessors(void) {
  static int count;
  int device = 0;
  if (!count) {
    DRIVER(int, "cuCtxGetDevice", int *)(&device);
    DRIVER(int, "cuDeviceGetAttribute", int *, int, int)(&count, SM_COUNT, device);
  }
  return given("SM120KIT_PTX_SMS", count);
}

static cudaOccDeviceProp sm120(void) {
  return (cudaOccDeviceProp){
      .computeMajor = 12, .maxThreadsPerBlock = CTA_THREADS, .maxThreadsPerMultiprocessor = MULTIPROCESSOR_THREADS,
      .regsPerBlock = MULTIPROCESSOR_REGISTERS, .regsPerMultiprocessor = MULTIPROCESSOR_REGISTERS, .warpSize = 32,
      .sharedMemPerBlock = 49152, .sharedMemPerMultiprocessor = MULTIPROCESSOR_SHARED_BYTES, .numSms = multiprocessors(),
      .sharedMemPerBlockOptin = LARGEST_SHARED_BYTES, .reservedSharedMemPerBlock = RESERVED_SHARED_BYTES};
}

static cudaOccDeviceState const no_preference = {.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT};

static cudaOccFuncAttributes attributes_on_sm120(struct limits limits) {
  return (cudaOccFuncAttributes){
      .maxThreadsPerBlock = limits.threads, .numRegs = limits.registers, .sharedSizeBytes = limits.shared,
      .shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN, .maxDynamicSharedSizeBytes = LARGEST_SHARED_BYTES,
      .numBlockBarriers = limits.barriers};
}

/// CTAs of a kernel that one multiprocessor of SM120 has room for.
static int resident(struct limits limits, int threads, size_t shared) {
  cudaOccFuncAttributes const attributes = attributes_on_sm120(limits);
  cudaOccDeviceProp const gpu = sm120();
  cudaOccResult result;
  int const status = cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &attributes, &no_preference, threads, shared);
  return status == CUDA_OCC_SUCCESS ? result.activeBlocksPerMultiprocessor : 0;
}

/// The most threads of a CTA of a kernel: what it states, or what its registers leave room for.
static int most_threads(struct limits limits) {
  int threads = limits.threads;
  while (threads > 32 && !resident((struct limits){limits.registers, 0, 0, limits.threads, 1}, threads, 0)) threads -= 32;
  return threads;
}

/// The status with which SM120 refuses a launch; SUCCESS for one that fits, and for kernels that were not rewritten.
static int does_not_fit(void *kernel, struct launch const *launch, int cooperative) {
  struct launchable const it = found(kernel);
  if (!it.rewritten) return SUCCESS;
  unsigned long long const ctas = (unsigned long long)launch->grid[0] * launch->grid[1] * launch->grid[2];
  unsigned long long const threads = (unsigned long long)launch->block[0] * launch->block[1] * launch->block[2];
  if (!ctas || !threads || threads > CTA_THREADS) return SUCCESS;  // the driver refuses it
  if ((uint64_t)it.limits.shared + launch->shared > LARGEST_SHARED_BYTES) {
    note("shared %llu", (unsigned long long)it.limits.shared + launch->shared);
    return INVALID_VALUE;
  }
  int const room = resident(it.limits, threads, launch->shared), cluster = cluster_of(it.limits, launch);
  unsigned long long const most = (unsigned long long)room * multiprocessors();
  int const status = !room                           ? LAUNCH_OUT_OF_RESOURCES
                     : cluster > CLUSTER_CTAS        ? INVALID_CLUSTER_SIZE
                     : cooperative && ctas > most    ? COOPERATIVE_LAUNCH_TOO_LARGE
                                                     : SUCCESS;
  if (!status) return status;
  note("launch %llu %llu %u %d", ctas, threads, launch->shared, room);
  fprintf(stderr,
          "sm120kit verify run: refused as on SM120: a %slaunch of %llu CTAs of %llu threads, %d registers each, with %llu B of "
          "shared memory, in clusters of %d; a multiprocessor has room for %d, %d of them for %llu, a cluster for %d\n",
          cooperative ? "cooperative " : "", ctas, threads, it.limits.registers,
          (unsigned long long)it.limits.shared + launch->shared, cluster, room, multiprocessors(), most, CLUSTER_CTAS);
  return status;
}

EXPORT int cuOccupancyMaxPotentialClusterSize(int *ctas, void *kernel, void const *config) {
  int const status = DRIVER(int, "cuOccupancyMaxPotentialClusterSize", int *, void *, void const *)(ctas, kernel, config);
  if (!status && ctas && found(kernel).rewritten && *ctas > CLUSTER_CTAS) *ctas = CLUSTER_CTAS;
  return status;
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, void *kernel, int threads, size_t shared,
                                                                unsigned flags) {
  struct launchable const it = found(kernel);
  int const status = DRIVER(int, "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags", int *, void *, int, size_t, unsigned)(
      count, kernel, threads, shared, flags);
  if (!it.rewritten || !count || threads < 1) return status;
  return *count = resident(it.limits, threads, shared), SUCCESS;
}

EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, void *kernel, int threads, size_t shared) {
  return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, kernel, threads, shared, 0);
}

EXPORT int cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, void *kernel, int ctas, int threads) {
  struct launchable const it = found(kernel);
  int const status = DRIVER(int, "cuOccupancyAvailableDynamicSMemPerBlock", size_t *, void *, int, int)(bytes, kernel, ctas, threads);
  if (!it.rewritten || !bytes || ctas < 1 || threads < 1) return status;
  long long total = LARGEST_SHARED_BYTES, own = it.limits.shared;  // of cuda_occupancy.h, this function leaves out the reserved bytes
  while (total > own && resident(it.limits, threads, total - own) < ctas) total -= 128;
  return *bytes = total > own ? total - own : 0, SUCCESS;
}

typedef size_t SharedOfBlock(int);

EXPORT int cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, void *kernel, SharedOfBlock *shared_of, size_t shared,
                                                     int limit, unsigned flags) {
  struct launchable const it = found(kernel);
  int const status = DRIVER(int, "cuOccupancyMaxPotentialBlockSizeWithFlags", int *, int *, void *, SharedOfBlock *, size_t, int,
                            unsigned)(grid, block, kernel, shared_of, shared, limit, flags);
  if (!it.rewritten || !grid || !block) return status;
  cudaOccDeviceProp const gpu = sm120();
  cudaOccFuncAttributes attributes = attributes_on_sm120(it.limits);
  if (limit > 0 && limit < attributes.maxThreadsPerBlock) attributes.maxThreadsPerBlock = limit;
  int const wrong = cudaOccMaxPotentialOccupancyBlockSize(grid, block, &gpu, &attributes, &no_preference, shared_of, shared);
  return wrong ? INVALID_VALUE : SUCCESS;
}

EXPORT int cuOccupancyMaxPotentialBlockSize(int *grid, int *block, void *kernel, SharedOfBlock *shared_of, size_t shared,
                                            int limit) {
  return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, kernel, shared_of, shared, limit, 0);
}

EXPORT int cuOccupancyMaxActiveClusters(int *clusters, void *kernel, struct launch const *config) {
  struct launchable const it = found(kernel);
  int const status = DRIVER(int, "cuOccupancyMaxActiveClusters", int *, void *, void const *)(clusters, kernel, config);
  if (!it.rewritten || !clusters || !config) return status;
  int const cluster = cluster_of(it.limits, config);
  if (cluster < 1 || cluster > CLUSTER_CTAS) return *clusters = 0, INVALID_CLUSTER_SIZE;
  int const room = resident(it.limits, config->block[0] * config->block[1] * config->block[2], config->shared);
  return *clusters = room * multiprocessors() / cluster, SUCCESS;
}

/// The figure of a rewritten kernel on SM120 that is an attribute of it; 0 if it is none.
static int attribute_on_sm120(void *kernel, int attribute, int *value) {
  struct launchable const it = found(kernel);
  if (!it.rewritten || !value) return 0;
  switch (attribute) {
    case MOST_THREADS: *value = most_threads(it.limits); return 1;
    case STATIC_SHARED_BYTES: *value = it.limits.shared; return 1;
    case REGISTERS: *value = it.limits.registers; return 1;
    case BINARY_VERSION: *value = 120; return 1;
  }
  return 0;
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
  if (attribute_on_sm120(function, attribute, value)) return SUCCESS;
  return DRIVER(int, "cuFuncGetAttribute", int *, int, void *)(value, attribute, function);
}

EXPORT int cuKernelGetAttribute(int *value, int attribute, void *kernel, int device) {
  if (attribute_on_sm120(kernel, attribute, value)) return SUCCESS;
  return DRIVER(int, "cuKernelGetAttribute", int *, int, void *, int)(value, attribute, kernel, device);
}

/// The parameters of a launch, with tensor maps replaced in `maps` and the pointers to all in `space`.
static void **with_maps(void *kernel, void **parameters, void **space, size_t most, uint32_t (*maps)[MAP_WORDS]) {
  if (!parameters) return parameters;
  pthread_mutex_lock(&launchables_lock);
  struct launchable *at = *launchables(kernel), it = {0};
  if (at && !at->parameters) {
    size_t offset, size;
    int (*parameter)(void *, size_t, size_t *, size_t *) = DRIVER(int, at->query, void *, size_t, size_t *, size_t *);
    for (; parameter(kernel, at->parameters, &offset, &size) == SUCCESS; ++at->parameters)
      if (size == 4 * MAP_WORDS && at->count < MOST_MAPS) at->maps[at->count++] = at->parameters;
  }
  if (at) it = *at;
  pthread_mutex_unlock(&launchables_lock);
  int changed = 0;
  if (!it.count || it.parameters > most) return parameters;
  memcpy(space, parameters, it.parameters * sizeof *space);
  for (unsigned i = 0; i < it.count; ++i) {
    memcpy(maps[i], parameters[it.maps[i]], sizeof maps[i]);
    if (converted(maps[i])) space[it.maps[i]] = maps[i], ++changed;
  }
  return changed ? space : parameters;
}

enum { MOST_PARAMETERS = 1024 };
#define REPLACE_MAPS(kernel, parameters)              \
  _Alignas(64) uint32_t maps[MOST_MAPS][MAP_WORDS];   \
  void *space[MOST_PARAMETERS];                       \
  parameters = with_maps(kernel, parameters, space, MOST_PARAMETERS, maps)

#define LAUNCHES(suffix)                                                                                                        \
  EXPORT int cuLaunchKernelEx##suffix(struct launch const *config, void *kernel, void **parameters, void **extra) {             \
    int const *cooperative = config ? attribute_of(config, COOPERATIVE) : NULL;                                                 \
    int const refused = config ? does_not_fit(kernel, config, cooperative && *cooperative) : SUCCESS;                           \
    if (refused) return refused;                                                                                                \
    REPLACE_MAPS(kernel, parameters);                                                                                           \
    return DRIVER(int, "cuLaunchKernelEx" #suffix, void const *, void *, void **, void **)(config, kernel, parameters, extra);  \
  }                                                                                                                             \
  EXPORT int cuLaunchKernel##suffix(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, \
                                    unsigned shared, void *stream, void **parameters, void **extra) {                           \
    struct launch const launch = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};                                         \
    int const refused = does_not_fit(kernel, &launch, 0);                                                                       \
    if (refused) return refused;                                                                                                \
    REPLACE_MAPS(kernel, parameters);                                                                                           \
    return DRIVER(int, "cuLaunchKernel" #suffix, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,  \
                  void *, void **, void **)(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);                 \
  }                                                                                                                             \
  EXPORT int cuLaunchCooperativeKernel##suffix(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,   \
                                               unsigned bz, unsigned shared, void *stream, void **parameters) {                 \
    struct launch const launch = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};                                         \
    int const refused = does_not_fit(kernel, &launch, 1);                                                                       \
    if (refused) return refused;                                                                                                \
    REPLACE_MAPS(kernel, parameters);                                                                                           \
    return DRIVER(int, "cuLaunchCooperativeKernel" #suffix, void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
                  unsigned, void *, void **)(kernel, gx, gy, gz, bx, by, bz, shared, stream, parameters);                       \
  }
LAUNCHES()
LAUNCHES(_ptsz)

// ---- graphs

/// CUDA_KERNEL_NODE_PARAMS; the first edition ends before `kernel`, and always has a function.
struct node {
  void *function;
  unsigned grid[3], block[3], shared;
  void **parameters, **extra;
  void *kernel, *context;
};

/// Whether a node is a cooperative launch, by its own attribute.
static int is_cooperative(void *node) {
  struct attribute it = {0};
  DRIVER(int, "cuGraphKernelNodeGetAttribute", void *, int, void *)(node, COOPERATIVE, it.value);
  return it.value[0];
}

static int node_does_not_fit(struct node const *it, struct attribute *attributes, int cooperative) {
  if (!it) return SUCCESS;
  struct launch const launch = {{it->grid[0], it->grid[1], it->grid[2]}, {it->block[0], it->block[1], it->block[2]}, it->shared,
                                NULL, attributes, attributes != NULL};
  return does_not_fit(it->function ? it->function : it->kernel, &launch, cooperative);
}

/// The parameters of a kernel in CUgraphNodeParams; NULL of other nodes.
static struct node const *kernel_of(uintptr_t parameters) {
  return parameters && !*(int const *)parameters ? (struct node const *)(parameters + 16) : NULL;
}

/// A function with up to six arguments that sets the parameters of a node.
#define SETS(name, given, of)                                                                                                      \
  EXPORT int name(uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e, uintptr_t f) {                                \
    int const refused = node_does_not_fit((struct node const *)(given), NULL, (of) && is_cooperative((void *)(of)));             \
    if (refused) return refused;                                                                                                 \
    return DRIVER(int, #name, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t)(a, b, c, d, e, f);               \
  }
SETS(cuGraphAddKernelNode, e, 0)
SETS(cuGraphAddKernelNode_v2, e, 0)
SETS(cuGraphAddNode, kernel_of(e), 0)
SETS(cuGraphAddNode_v2, kernel_of(f), 0)
SETS(cuGraphKernelNodeSetParams, b, a)
SETS(cuGraphKernelNodeSetParams_v2, b, a)
SETS(cuGraphExecKernelNodeSetParams, c, b)
SETS(cuGraphExecKernelNodeSetParams_v2, c, b)
SETS(cuGraphNodeSetParams, kernel_of(b), a)
SETS(cuGraphExecNodeSetParams, kernel_of(c), b)

/// A node becomes a cooperative launch, or one of clusters.
static int becomes(void *node, int id, int const *value) {
  struct node it = {0};
  struct attribute attribute = {id, 0, {value[0], value[1], value[2]}};
  if (id != COOPERATIVE && id != CLUSTER_DIMENSION) return SUCCESS;
  if (DRIVER(int, "cuGraphKernelNodeGetParams_v2", void *, void *)(node, &it)) return SUCCESS;
  return node_does_not_fit(&it, &attribute, id == COOPERATIVE ? value[0] : is_cooperative(node));
}

EXPORT int cuGraphKernelNodeSetAttribute(void *node, int id, int const *value) {
  int const refused = value ? becomes(node, id, value) : SUCCESS;
  return refused ? refused : DRIVER(int, "cuGraphKernelNodeSetAttribute", void *, int, void const *)(node, id, value);
}

EXPORT int cuGraphKernelNodeCopyAttributes(void *to, void *from) {
  int const cooperative = is_cooperative(from), refused = cooperative ? becomes(to, COOPERATIVE, (int[3]){1}) : SUCCESS;
  return refused ? refused : DRIVER(int, "cuGraphKernelNodeCopyAttributes", void *, void *)(to, from);
}

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

/// The name in the driver of the function that a name means since a version of CUDA.
static char const *edition(char const *name, int version, char *second, size_t size) {
  static struct {
    char const *name;
    int since;
  } const changed[] = {{"cuGetProcAddress", 12000}, {"cuGraphAddKernelNode", 12000}, {"cuGraphAddNode", 12030},
                       {"cuGraphExecKernelNodeSetParams", 12000}, {"cuGraphKernelNodeSetParams", 12000}};
  for (unsigned i = 0; name && i < sizeof changed / sizeof *changed; ++i)
    if (!strcmp(name, changed[i].name) && version >= changed[i].since) return snprintf(second, size, "%s_v2", name), second;
  return name;
}

EXPORT int cuGetProcAddress_v2(char const *name, void **function, int version, uint64_t flags, void *result) {
  int const status =
      DRIVER(int, "cuGetProcAddress_v2", char const *, void **, int, uint64_t, void *)(name, function, version, flags, result);
  char of_version[64];
  replace_look_up(status, function, edition(name, version, of_version, sizeof of_version), flags);
  return status;
}

EXPORT int cuGetProcAddress(char const *name, void **function, int version, uint64_t flags) {
  int const status = DRIVER(int, "cuGetProcAddress", char const *, void **, int, uint64_t)(name, function, version, flags);
  char of_version[64];
  replace_look_up(status, function, edition(name, version, of_version, sizeof of_version), flags);
  return status;
}

static void *replacement(char const *name) {
#define ENTRY(function) {#function, (void *)function}
  static struct {
    char const *name;
    void *function;
  } const entries[] = {
      ENTRY(cuDeviceComputeCapability), ENTRY(cuDeviceGetAttribute),   ENTRY(cuFuncGetAttribute),
      ENTRY(cuFuncSetAttribute),        ENTRY(cuKernelGetAttribute),   ENTRY(cuLibraryEnumerateKernels),
      ENTRY(cuLibraryGetModule),        ENTRY(cuModuleEnumerateFunctions),
      ENTRY(cuOccupancyAvailableDynamicSMemPerBlock),
      ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor),
      ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags),
      ENTRY(cuOccupancyMaxActiveClusters),
      ENTRY(cuOccupancyMaxPotentialBlockSize), ENTRY(cuOccupancyMaxPotentialBlockSizeWithFlags),
      ENTRY(cuGetProcAddress),          ENTRY(cuGetProcAddress_v2),    ENTRY(cuKernelSetAttribute),
      ENTRY(cuLibraryGetKernel),        ENTRY(cuModuleGetFunction),
      ENTRY(cuKernelGetFunction),       ENTRY(cuFuncGetModule),        ENTRY(cuLaunchCooperativeKernel),
      ENTRY(cuGraphAddKernelNode),      ENTRY(cuGraphAddKernelNode_v2), ENTRY(cuGraphAddNode), ENTRY(cuGraphAddNode_v2),
      ENTRY(cuGraphExecKernelNodeSetParams), ENTRY(cuGraphExecKernelNodeSetParams_v2), ENTRY(cuGraphExecNodeSetParams),
      ENTRY(cuGraphKernelNodeCopyAttributes), ENTRY(cuGraphKernelNodeSetAttribute), ENTRY(cuGraphKernelNodeSetParams),
      ENTRY(cuGraphKernelNodeSetParams_v2), ENTRY(cuGraphNodeSetParams), ENTRY(cuOccupancyMaxPotentialClusterSize),
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
