/* The CUDA driver, opened at run time. Sources: CUDA driver API reference, sections "Library Management",
   "Execution Control" and "Stream Management"; the declarations below are the few that are used here. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "arithmetic.h"
#include "kernel.h"

extern const int aotmm_capability, aotmm_specific, aotmm_min_driver; /* of the images; for it alone; lowest driver */

const uint64_t driver_max_threads = UINT64_MAX; /* blocks alone are limited */

typedef int result; /* CUresult */
enum {
  ATTRIBUTE_CLOCK = 13, /* CUdevice_attribute; kHz */
  ATTRIBUTE_MULTIPROCESSORS = 16,
  ATTRIBUTE_MEMORY_CLOCK = 36, /* kHz */
  ATTRIBUTE_MEMORY_BUS = 37,   /* bits */
  ATTRIBUTE_L2 = 38,           /* bytes */
  ATTRIBUTE_MAJOR = 75,
  ATTRIBUTE_MINOR = 76,
  ATTRIBUTE_SHARED_OPTIN = 97,
  FUNCTION_MAX_DYNAMIC_SHARED = 8, /* CUfunction_attribute */
  CAPTURE_RELAXED = 2,             /* CUstreamCaptureMode */
  LAUNCH_PDL = 6,         /* CUlaunchAttributeID */
  PROMOTION_128B = 2,              /* CUtensorMapL2promotion */
};

typedef struct launch_attribute { /* CUlaunchAttribute */
  int id;
  int pad;
  union {
    uint32_t number[3];
    char bytes[64];
  } value;
} launch_attribute;

typedef struct launch_config { /* CUlaunchConfig */
  unsigned grid[3], block[3], shared_bytes;
  void *stream;
  launch_attribute *attributes;
  unsigned attribute_count;
} launch_config;

static struct {
  result (*cuInit)(unsigned);
  result (*cuDriverGetVersion)(int *);
  result (*cuDeviceGet)(int *, int);
  result (*cuDeviceGetAttribute)(int *, int, int);
  result (*cuDeviceGetName)(char *, int, int);
  result (*cuDevicePrimaryCtxRetain)(void **, int);
  result (*cuCtxGetCurrent)(void **);
  result (*cuCtxPushCurrent)(void *);
  result (*cuCtxPopCurrent)(void **);
  result (*cuThreadExchangeStreamCaptureMode)(int *);
  result (*cuLibraryLoadData)(void **, const void *, int *, void **, unsigned, int *, void **, unsigned);
  result (*cuLibraryUnload)(void *);
  result (*cuLibraryGetKernel)(void **, void *, const char *);
  result (*cuKernelGetFunction)(void **, void *);
  result (*cuKernelSetAttribute)(int, int, void *, int);
  result (*cuOccupancyMaxActiveClusters)(int *, void *, const launch_config *);
  result (*cuLaunchKernelEx)(const launch_config *, void *, void **, void **);
  result (*cuTensorMapEncodeTiled)(void *, int, unsigned, void *, const uint64_t *, const uint64_t *, const unsigned *,
                                   const unsigned *, int, int, int, int);
  result (*cuGetErrorName)(result, const char **);
  result (*cuGetErrorString)(result, const char **);
} cu;

static const struct {
  const char *name;
  void *slot;
} symbols[] = {
    /* these are for check_version, before functions that an old driver may lack */
    {"cuDriverGetVersion", &cu.cuDriverGetVersion},
    {"cuGetErrorName", &cu.cuGetErrorName},
    {"cuGetErrorString", &cu.cuGetErrorString},
    {"cuInit", &cu.cuInit},
    {"cuDeviceGet", &cu.cuDeviceGet},
    {"cuDeviceGetAttribute", &cu.cuDeviceGetAttribute},
    {"cuDeviceGetName", &cu.cuDeviceGetName},
    {"cuDevicePrimaryCtxRetain", &cu.cuDevicePrimaryCtxRetain},
    {"cuCtxGetCurrent", &cu.cuCtxGetCurrent},
    {"cuCtxPushCurrent_v2", &cu.cuCtxPushCurrent},
    {"cuCtxPopCurrent_v2", &cu.cuCtxPopCurrent},
    {"cuThreadExchangeStreamCaptureMode", &cu.cuThreadExchangeStreamCaptureMode},
    {"cuLibraryLoadData", &cu.cuLibraryLoadData},
    {"cuLibraryUnload", &cu.cuLibraryUnload},
    {"cuLibraryGetKernel", &cu.cuLibraryGetKernel},
    {"cuKernelGetFunction", &cu.cuKernelGetFunction},
    {"cuKernelSetAttribute", &cu.cuKernelSetAttribute},
    {"cuOccupancyMaxActiveClusters", &cu.cuOccupancyMaxActiveClusters},
    {"cuLaunchKernelEx", &cu.cuLaunchKernelEx},
    {"cuTensorMapEncodeTiled", &cu.cuTensorMapEncodeTiled},
};

static struct {
  int ready; /* the rest is valid */
  int number, capability;
  void *context; /* primary context, retained for the life of the process: kernels stay loaded in it */
  aotmm_device facts;
  uint32_t clustered[AOTMM_MOST_BLOCKS + 1]; /* blocks at once in clusters of so many (`at_once`) */
} devices[AOTMM_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int forked; /* after the driver was opened; this is the child */

/* Make the next use of each device check `forked`, so that no other use has to. */
static void in_child(void) {
  forked = 1;
  for (int i = 0; i < AOTMM_MAX_DEVICES; i++) devices[i].ready = 0;
}

static int failed(result code, int device, const char *call, const char *what) {
  const char *name = "", *text = "";
  cu.cuGetErrorName(code, &name);
  cu.cuGetErrorString(code, &text);
  return aotmm_fail(AOTMM_DRIVER, code, device, call, "%s failed on CUDA device %d%s%s: %s (%d): %s", call, device,
                    *what ? " for kernel " : "", what, name ? name : "unknown error", code, text ? text : "");
}

enum { SYMBOLS = sizeof symbols / sizeof *symbols, FOR_VERSION = 3 };

static int find(void *handle, unsigned first, unsigned end) {
  for (unsigned i = first; i < end; i++) {
    void *found = dlsym(handle, symbols[i].name);
    if (!found)
      return aotmm_fail(AOTMM_NO_DRIVER, 0, -1, symbols[i].name,
                        "the CUDA driver has no %s; pack %s needs driver %d.%d or newer; update the NVIDIA driver",
                        symbols[i].name, aotmm_arch, aotmm_min_driver / 1000, aotmm_min_driver % 1000 / 10);
    memcpy(symbols[i].slot, &found, sizeof found);
  }
  return AOTMM_OK;
}

static int check_version(void) {
  int version = 0;
  result code = cu.cuDriverGetVersion(&version);
  if (code) return failed(code, -1, "cuDriverGetVersion", "");
  if (version >= aotmm_min_driver) return AOTMM_OK;
  return aotmm_fail(AOTMM_NO_DRIVER, 0, -1, "cuDriverGetVersion",
                    "the CUDA driver is %d.%d; pack %s needs %d.%d or newer; update the NVIDIA driver", version / 1000,
                    version % 1000 / 10, aotmm_arch, aotmm_min_driver / 1000, aotmm_min_driver % 1000 / 10);
}

static int open_driver(void) {
  static int done, watched;
  if (done) return AOTMM_OK;
  void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return aotmm_fail(AOTMM_NO_DRIVER, 0, -1, "dlopen", "the CUDA driver cannot be opened: %s; install the NVIDIA driver",
                      dlerror());
  /* An old driver lacks functions; its version is the better error. */
  int status = find(handle, 0, FOR_VERSION);
  if (status || (status = check_version()) || (status = find(handle, FOR_VERSION, SYMBOLS))) return status;
  if (!watched && pthread_atfork(NULL, NULL, in_child))
    return aotmm_fail(AOTMM_NO_DRIVER, 0, -1, "pthread_atfork", "no memory to open the CUDA driver");
  watched = 1;
  result code = cu.cuInit(0);
  if (code) return failed(code, -1, "cuInit", "");
  done = 1;
  return AOTMM_OK;
}

static int read_device(int ordinal) {
  int status = open_driver(), major = 0, minor = 0, clock = 0, memory_clock = 0, bus = 0;
  aotmm_device *facts = &devices[ordinal].facts;
  if (status) return status;
  result code = cu.cuDeviceGet(&devices[ordinal].number, ordinal);
  if (code) return failed(code, ordinal, "cuDeviceGet", "");
  int number = devices[ordinal].number;
  if ((code = cu.cuDeviceGetAttribute(&facts->multiprocessors, ATTRIBUTE_MULTIPROCESSORS, number)) ||
      (code = cu.cuDeviceGetAttribute(&facts->shared_bytes, ATTRIBUTE_SHARED_OPTIN, number)) ||
      (code = cu.cuDeviceGetAttribute(&clock, ATTRIBUTE_CLOCK, number)) ||
      (code = cu.cuDeviceGetAttribute(&memory_clock, ATTRIBUTE_MEMORY_CLOCK, number)) ||
      (code = cu.cuDeviceGetAttribute(&bus, ATTRIBUTE_MEMORY_BUS, number)) ||
      (code = cu.cuDeviceGetAttribute(&facts->l2_bytes, ATTRIBUTE_L2, number)) ||
      (code = cu.cuDeviceGetAttribute(&major, ATTRIBUTE_MAJOR, number)) ||
      (code = cu.cuDeviceGetAttribute(&minor, ATTRIBUTE_MINOR, number)))
    return failed(code, ordinal, "cuDeviceGetAttribute", "");
  if ((code = cu.cuDeviceGetName(facts->name, sizeof facts->name, number))) return failed(code, ordinal, "cuDeviceGetName", "");
  set_speeds(facts, clock, memory_clock, bus);
  devices[ordinal].capability = 10 * major + minor;
  __atomic_store_n(&devices[ordinal].ready, 1, __ATOMIC_RELEASE);
  return AOTMM_OK;
}

int driver_device(int ordinal, const aotmm_device **facts) {
  if (ordinal < 0 || ordinal >= AOTMM_MAX_DEVICES)
    return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "device %d: ordinals are 0 to %d", ordinal, AOTMM_MAX_DEVICES - 1);
  *facts = &devices[ordinal].facts;
  if (__atomic_load_n(&devices[ordinal].ready, __ATOMIC_ACQUIRE)) return AOTMM_OK;
  if (forked) return aotmm_fail_forked(ordinal);
  pthread_mutex_lock(&lock);
  int status = devices[ordinal].ready ? AOTMM_OK : read_device(ordinal);
  pthread_mutex_unlock(&lock);
  return status;
}

static int retain(int ordinal) {
  void *context;
  pthread_mutex_lock(&lock);
  result code = 0;
  if (!devices[ordinal].context && !(code = cu.cuDevicePrimaryCtxRetain(&context, devices[ordinal].number)))
    __atomic_store_n(&devices[ordinal].context, context, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
  return code ? failed(code, ordinal, "cuDevicePrimaryCtxRetain", "") : AOTMM_OK;
}

int driver_enter(int ordinal, void **saved) {
  *saved = NULL;
  void *current = NULL;
  if (!__atomic_load_n(&devices[ordinal].context, __ATOMIC_ACQUIRE)) {
    int status = retain(ordinal);
    if (status) return status;
  }
  void *context = devices[ordinal].context;
  result code = cu.cuCtxGetCurrent(&current);
  if (code) return failed(code, ordinal, "cuCtxGetCurrent", "");
  if (current == context) return AOTMM_OK;
  if ((code = cu.cuCtxPushCurrent(context))) return failed(code, ordinal, "cuCtxPushCurrent", "");
  *saved = context;
  return AOTMM_OK;
}

void driver_leave(void *saved) {
  void *popped;
  if (saved) cu.cuCtxPopCurrent(&popped);
}

/* Describe a launch, for which `attributes` has room. */
static launch_config config_of(const aotmm_kernel *kernel, const uint32_t grid[3], launch_attribute *attributes) {
  for (uint32_t i = 0; i < kernel->attribute_count; i++) {
    attributes[i].id = kernel->attributes[i].id;
    memcpy(attributes[i].value.number, kernel->attributes[i].value, sizeof attributes[i].value.number);
  }
  return (launch_config){.grid = {grid[0], grid[1], grid[2]},
                         .block = {kernel->threads, 1, 1},
                         .shared_bytes = kernel->shared_bytes,
                         .attributes = attributes,
                         .attribute_count = kernel->attribute_count};
}

/* Return how many blocks of a kernel's clusters run at once; 0: the driver was not asked yet. */
static uint32_t at_once(const aotmm_kernel *kernel, int ordinal) {
  return __atomic_load_n(devices[ordinal].clustered + num_ctas(kernel), __ATOMIC_RELAXED);
}

/* Ask how many blocks of a kernel's clusters run at once. A cluster stays within a part of the GPU, so some
   multiprocessors may be left over. Kernels with clusters fill a multiprocessor each, so one answer is right for all
   with clusters of that size. */
static result ask_clusters(const aotmm_kernel *kernel, void *function, int ordinal) {
  launch_attribute attributes[AOTMM_MAX_ATTRIBUTES];
  const uint32_t blocks = num_ctas(kernel);
  const launch_config config = config_of(kernel, (const uint32_t[]){kernel->cluster_m, kernel->cluster_n, 1}, attributes);
  int clusters = 0;
  const result code = cu.cuOccupancyMaxActiveClusters(&clusters, function, &config);
  if (!code && clusters > 0)
    __atomic_store_n(devices[ordinal].clustered + blocks, blocks * (uint32_t)clusters, __ATOMIC_RELAXED);
  return code;
}

/* Return the shared memory to ask for, so that the blocks of an early launch spread over all multiprocessors. They would all lie
   on those that the kernel before leaves first, as many as fit. With this much no more fit on one than its part. */
static unsigned spreading_bytes(const aotmm_kernel *kernel, uint32_t blocks, int ordinal) {
  enum { RESERVED = 1024 /* bytes of every block that the system takes: CUDA C++ Programming Guide, "Compute Capability 9.0" */ };
  const aotmm_device *facts = &devices[ordinal].facts;
  const uint32_t part = (uint32_t)ceil_div(blocks, facts->multiprocessors);
  const uint32_t too_many = ((uint32_t)facts->shared_bytes + RESERVED) / (part + 1) + 1; /* for one block more than its part */
  return too_many > RESERVED + kernel->shared_bytes ? too_many - RESERVED : kernel->shared_bytes;
}

int driver_load(const aotmm_kernel *kernel, int ordinal, aotmm_function *function) {
  /* cubins run on their major version from their minor one on, or on that one alone; newer devices take PTX */
  int capability = devices[ordinal].capability, major = aotmm_capability / 10, minor = aotmm_capability % 10;
  int runs = aotmm_specific ? capability == aotmm_capability : capability / 10 == major;
  const aotmm_code *code_here = runs ? &kernel->image : &kernel->ptx;
  if (capability < aotmm_capability || !code_here->stored)
    return aotmm_fail(AOTMM_NO_KERNEL, 0, ordinal, "", "pack %s has no code for CUDA device %d (sm_%d): it has cubins for "
                      "%d.%d%s%s; use the pack of another arch", aotmm_arch, ordinal, capability, major, minor,
                      aotmm_specific ? " alone" : " and later ones of that major version",
                      kernel->ptx.stored ? ", and PTX for what is newer" : "");
  unsigned char *made;
  const int status = rebuilt(code_here, kernel->name, ordinal, &made);
  if (status) return status;
  void *library = NULL, *handle = NULL;
  int mode = CAPTURE_RELAXED; /* else loading is forbidden while a stream captures */
  const char *call = "cuThreadExchangeStreamCaptureMode";
  result code = cu.cuThreadExchangeStreamCaptureMode(&mode);
  if (code) {
    free(made);
    return failed(code, ordinal, call, kernel->name);
  }
  code = cu.cuLibraryLoadData(&library, made ? made : code_here->stored, NULL, NULL, 0, NULL, NULL, 0);
  free(made); /* the driver has a copy */
  call = "cuLibraryLoadData";
  if (!code) call = "cuLibraryGetKernel", code = cu.cuLibraryGetKernel(&handle, library, kernel->symbol);
  const int shared_bytes = kernel->pdl ? devices[ordinal].facts.shared_bytes : (int)kernel->shared_bytes; /* to spread blocks */
  if (!code && shared_bytes)
    call = "cuKernelSetAttribute", code = cu.cuKernelSetAttribute(FUNCTION_MAX_DYNAMIC_SHARED, shared_bytes, handle,
                                                                  devices[ordinal].number);
  if (!code) call = "cuKernelGetFunction", code = cu.cuKernelGetFunction(function, handle);
  if (!code && num_ctas(kernel) > 1 && !at_once(kernel, ordinal))
    call = "cuOccupancyMaxActiveClusters", code = ask_clusters(kernel, *function, ordinal);
  if (code && library) cu.cuLibraryUnload(library);
  cu.cuThreadExchangeStreamCaptureMode(&mode);
  if (code) *function = NULL;
  return code ? failed(code, ordinal, call, kernel->name) : AOTMM_OK;
}

int driver_encode(const aotmm_kernel *kernel, const aotmm_tensor_map *map, const boxed_memory *memory, int ordinal,
                  void *encoded) {
  enum { GROUP = 8 /* lines of a period of the swizzle, which a box has whole */ };
  const int64_t lines = GROUP * ceil_div((int64_t)memory->sizes[1], GROUP);
  const unsigned outer = map->fits && lines < map->box_outer ? (unsigned)lines : map->box_outer;
  const unsigned box[3] = {map->box_inner, outer, 1}, steps[3] = {1, 1, 1};
  result code = cu.cuTensorMapEncodeTiled(encoded, map->type, map->rank, (void *)(intptr_t)memory->address, memory->sizes,
                                          memory->strides, box, steps, 0, map->swizzle, PROMOTION_128B, 0);
  return code ? failed(code, ordinal, "cuTensorMapEncodeTiled", kernel->name) : AOTMM_OK;
}

int driver_launch(aotmm_function function, const aotmm_kernel *kernel, const uint32_t grid[3], int pdl, void *stream,
                  void **parameters, int ordinal) {
  launch_attribute attributes[AOTMM_MAX_ATTRIBUTES + 1];
  const uint32_t most = at_once(kernel, ordinal);
  launch_config config = config_of(kernel, grid, attributes);
  if (kernel->persistent && most && grid[0] * grid[1] > most) config.grid[0] = most / grid[1];
  config.stream = stream;
  if (pdl) attributes[config.attribute_count++] = (launch_attribute){.id = LAUNCH_PDL, .value.number = {1}};
  if (pdl == SPREAD) config.shared_bytes = spreading_bytes(kernel, grid[0] * grid[1], ordinal);
  result code = cu.cuLaunchKernelEx(&config, function, parameters, NULL);
  return code ? failed(code, ordinal, "cuLaunchKernelEx", kernel->name) : AOTMM_OK;
}
