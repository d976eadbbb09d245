/* The HIP runtime, opened at run time. Source: HIP runtime API reference, "Module Management". It has never run on an
   AMD GPU; it is tested with a stand-in of the same interface. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernel.h"

extern const int aotmm_counted_units, aotmm_shared_bytes; /* of the arch: compute units that HIP counts as one, LDS of a block */

/* Source: HIP runtime API reference, hipModuleLaunchKernel: grid times block is below 2^32. */
const uint64_t driver_max_threads = UINT32_MAX;

typedef int result; /* hipError_t */
enum {
  CAPTURE_RELAXED = 2, /* hipStreamCaptureMode */
  ATTRIBUTE_CLOCK = 5, /* hipDeviceAttribute_t since ROCm 5; kHz */
  ATTRIBUTE_L2 = 19,   /* bytes */
  ATTRIBUTE_MEMORY_BUS = 59,   /* bits */
  ATTRIBUTE_MEMORY_CLOCK = 60, /* kHz */
  ATTRIBUTE_MULTIPROCESSORS = 63,
};

static struct {
  result (*hipInit)(unsigned);
  result (*hipGetDeviceCount)(int *);
  result (*hipDeviceGetAttribute)(int *, int, int);
  result (*hipDeviceGetName)(char *, int, int);
  result (*hipGetDevice)(int *);
  result (*hipSetDevice)(int);
  result (*hipThreadExchangeStreamCaptureMode)(int *);
  result (*hipModuleLoadData)(void **, const void *);
  result (*hipModuleUnload)(void *);
  result (*hipModuleGetFunction)(void **, void *, const char *);
  result (*hipModuleLaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                                  void **, void **);
  const char *(*hipGetErrorName)(result);
  const char *(*hipGetErrorString)(result);
} hip;

static const struct {
  const char *name;
  void *slot;
} symbols[] = {
    {"hipInit", &hip.hipInit},
    {"hipGetDeviceCount", &hip.hipGetDeviceCount},
    {"hipDeviceGetAttribute", &hip.hipDeviceGetAttribute},
    {"hipDeviceGetName", &hip.hipDeviceGetName},
    {"hipGetDevice", &hip.hipGetDevice},
    {"hipSetDevice", &hip.hipSetDevice},
    {"hipThreadExchangeStreamCaptureMode", &hip.hipThreadExchangeStreamCaptureMode},
    {"hipModuleLoadData", &hip.hipModuleLoadData},
    {"hipModuleUnload", &hip.hipModuleUnload},
    {"hipModuleGetFunction", &hip.hipModuleGetFunction},
    {"hipModuleLaunchKernel", &hip.hipModuleLaunchKernel},
    {"hipGetErrorName", &hip.hipGetErrorName},
    {"hipGetErrorString", &hip.hipGetErrorString},
};

static aotmm_device facts[AOTMM_MAX_DEVICES];
static int device_count;
static int ready; /* the two above are valid */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int forked; /* after the driver was opened; this is the child */

/* Make the next use of any device check `forked`, so that no other use has to. */
static void in_child(void) {
  forked = 1;
  ready = 0;
}

static int failed(result code, int device, const char *call, const char *what) {
  return aotmm_fail(AOTMM_DRIVER, code, device, call, "%s failed on HIP device %d%s%s: %s (%d): %s", call, device,
                    *what ? " for kernel " : "", what, hip.hipGetErrorName(code), code, hip.hipGetErrorString(code));
}

/* Open the runtime that torch loaded if there is one (its soname changes with ROCm), else the system's. */
static void *open_library(void) {
  static const char *const names[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"};
  void *handle = dlopen("libtorch_hip.so", RTLD_NOW | RTLD_NOLOAD);
  for (int load = 0; load < 2; load++)
    for (unsigned i = 0; !handle && i < sizeof names / sizeof *names; i++)
      handle = dlopen(names[i], RTLD_NOW | RTLD_LOCAL | (load ? 0 : RTLD_NOLOAD));
  return handle;
}

/* Read a device's facts; a die of an MI250 is a device. */
static int read_device(int ordinal) {
  aotmm_device *to = facts + ordinal;
  int clock = 0, memory_clock = 0, bus = 0, count = 0;
  result code;
  if ((code = hip.hipDeviceGetAttribute(&clock, ATTRIBUTE_CLOCK, ordinal)) ||
      (code = hip.hipDeviceGetAttribute(&memory_clock, ATTRIBUTE_MEMORY_CLOCK, ordinal)) ||
      (code = hip.hipDeviceGetAttribute(&bus, ATTRIBUTE_MEMORY_BUS, ordinal)) ||
      (code = hip.hipDeviceGetAttribute(&count, ATTRIBUTE_MULTIPROCESSORS, ordinal)) ||
      (code = hip.hipDeviceGetAttribute(&to->l2_bytes, ATTRIBUTE_L2, ordinal)))
    return failed(code, ordinal, "hipDeviceGetAttribute", "");
  if ((code = hip.hipDeviceGetName(to->name, sizeof to->name, ordinal))) return failed(code, ordinal, "hipDeviceGetName", "");
  to->multiprocessors = count * aotmm_counted_units;
  to->shared_bytes = aotmm_shared_bytes;
  set_speeds(to, clock, memory_clock, bus);
  return AOTMM_OK;
}

static int open_driver(void) {
  static int watched;
  void *handle = open_library();
  if (!handle)
    return aotmm_fail(AOTMM_NO_DRIVER, 0, -1, "dlopen", "the HIP runtime cannot be opened: %s; install ROCm", dlerror());
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = dlsym(handle, symbols[i].name);
    if (!found)
      return aotmm_fail(AOTMM_NO_DRIVER, 0, -1, symbols[i].name, "the HIP runtime has no %s; update ROCm",
                        symbols[i].name);
    memcpy(symbols[i].slot, &found, sizeof found);
  }
  if (!watched && pthread_atfork(NULL, NULL, in_child))
    return aotmm_fail(AOTMM_NO_DRIVER, 0, -1, "pthread_atfork", "no memory to open the HIP runtime");
  watched = 1;
  result code = hip.hipInit(0);
  if (code) return failed(code, -1, "hipInit", "");
  if ((code = hip.hipGetDeviceCount(&device_count))) return failed(code, -1, "hipGetDeviceCount", "");
  for (int i = 0, status; i < device_count && i < AOTMM_MAX_DEVICES; i++)
    if ((status = read_device(i))) return status;
  __atomic_store_n(&ready, 1, __ATOMIC_RELEASE);
  return AOTMM_OK;
}

int driver_device(int ordinal, const aotmm_device **device) {
  if (ordinal < 0 || ordinal >= AOTMM_MAX_DEVICES)
    return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "device %d: ordinals are 0 to %d", ordinal, AOTMM_MAX_DEVICES - 1);
  *device = facts + ordinal;
  if (!__atomic_load_n(&ready, __ATOMIC_ACQUIRE)) {
    if (forked) return aotmm_fail_forked(ordinal);
    pthread_mutex_lock(&lock);
    int status = ready ? AOTMM_OK : open_driver();
    pthread_mutex_unlock(&lock);
    if (status) return status;
  }
  if (ordinal >= device_count)
    return aotmm_fail(AOTMM_INVALID, 0, ordinal, "", "device %d: HIP has %d devices", ordinal, device_count);
  return AOTMM_OK;
}

/* *saved is 1 + the device to restore, NULL if it is the same */
int driver_enter(int ordinal, void **saved) {
  int current = -1;
  *saved = NULL;
  result code = hip.hipGetDevice(&current);
  if (code) return failed(code, ordinal, "hipGetDevice", "");
  if (current == ordinal) return AOTMM_OK;
  if ((code = hip.hipSetDevice(ordinal))) return failed(code, ordinal, "hipSetDevice", "");
  *saved = (void *)(intptr_t)(current + 1);
  return AOTMM_OK;
}

void driver_leave(void *saved) {
  if (saved) hip.hipSetDevice((int)(intptr_t)saved - 1);
}

int driver_load(const aotmm_kernel *kernel, int ordinal, aotmm_function *function) {
  unsigned char *made;
  const int status = rebuilt(&kernel->image, kernel->name, ordinal, &made);
  if (status) return status;
  void *module = NULL;
  int mode = CAPTURE_RELAXED; /* else loading is forbidden while a stream captures */
  const char *call = "hipThreadExchangeStreamCaptureMode";
  result code = hip.hipThreadExchangeStreamCaptureMode(&mode);
  if (code) {
    free(made);
    return failed(code, ordinal, call, kernel->name);
  }
  call = "hipModuleLoadData";
  code = hip.hipModuleLoadData(&module, made ? made : kernel->image.stored);
  if (!code) call = "hipModuleGetFunction", code = hip.hipModuleGetFunction(function, module, kernel->symbol);
  if (code && module) hip.hipModuleUnload(module);
  if (code) free(made); /* else it stays: no documentation says that the module has a copy */
  hip.hipThreadExchangeStreamCaptureMode(&mode);
  if (code) *function = NULL;
  return code ? failed(code, ordinal, call, kernel->name) : AOTMM_OK;
}

int driver_encode(const aotmm_kernel *kernel, const aotmm_tensor_map *map, const boxed_memory *memory, int ordinal,
                  void *encoded) {
  (void)map, (void)memory, (void)encoded;
  return aotmm_fail(AOTMM_NO_KERNEL, 0, ordinal, "", "kernel %s takes tensor maps, which HIP does not have", kernel->name);
}

int driver_launch(aotmm_function function, const aotmm_kernel *kernel, const uint32_t grid[3], int pdl, void *stream,
                  void **parameters, int ordinal) {
  (void)pdl; /* HIP has no pdl, and no kernel there asks for it */
  result code = hip.hipModuleLaunchKernel(function, grid[0], grid[1], grid[2], kernel->threads, 1, 1,
                                          kernel->shared_bytes, stream, parameters, NULL);
  return code ? failed(code, ordinal, "hipModuleLaunchKernel", kernel->name) : AOTMM_OK;
}
