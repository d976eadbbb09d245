/* What the C programs share: the CUDA driver, opened at run time, and a pack's library. */
#pragma once

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher.h"

/* What of the CUDA driver a program needs for memory; one that uses the CUDA runtime has cudaMalloc and so on. */
static struct {
  int (*cuInit)(unsigned);
  int (*cuDeviceGetCount)(int *);
  int (*cuDevicePrimaryCtxRetain)(void **, int);
  int (*cuDevicePrimaryCtxRelease)(int);
  int (*cuCtxSetCurrent)(void *);
  int (*cuMemAlloc)(uint64_t *, size_t);
  int (*cuMemFree)(uint64_t);
  int (*cuMemcpyHtoD)(uint64_t, const void *, size_t);
  int (*cuMemcpyDtoH)(void *, uint64_t, size_t); /* waits for the default stream */
} cu;
static const struct {
  const char *name;
  void *slot;
} symbols[] = {
    {"cuInit", &cu.cuInit},
    {"cuDeviceGetCount", &cu.cuDeviceGetCount},
    {"cuDevicePrimaryCtxRetain", &cu.cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease_v2", &cu.cuDevicePrimaryCtxRelease},
    {"cuCtxSetCurrent", &cu.cuCtxSetCurrent},
    {"cuMemAlloc_v2", &cu.cuMemAlloc},
    {"cuMemFree_v2", &cu.cuMemFree},
    {"cuMemcpyHtoD_v2", &cu.cuMemcpyHtoD},
    {"cuMemcpyDtoH_v2", &cu.cuMemcpyDtoH},
};

static int fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  return 1;
}

static int open_driver(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return fail(dlerror());
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = dlsym(driver, symbols[i].name);
    if (!found) return fail(dlerror());
    memcpy(symbols[i].slot, &found, sizeof found);
  }
  return 0;
}

/* The functions of the pack's library at `path`, which stays loaded: its kernels will be in the driver. */
static const aotmm_launcher *open_pack(const char *path) {
  char arch[32], entry[64];
  const char *slash = strrchr(path, '/');
  if (sscanf(slash ? slash + 1 : path, "libaotmm_%31[^.].so", arch) != 1) return fail("not a libaotmm_ARCH.so"), NULL;
  void *library = dlopen(path, RTLD_NOW);
  if (!library) return fail(dlerror()), NULL;
  snprintf(entry, sizeof entry, "aotmm_launcher_%s", arch);
  const aotmm_launcher *(*launcher)(void);
  void *found = dlsym(library, entry);
  if (!found) return fail(dlerror()), NULL;
  memcpy(&launcher, &found, sizeof found);
  const aotmm_launcher *mm = launcher();
  if (mm->abi == AOTMM_ABI && mm->problem_bytes == sizeof(aotmm_problem)) return mm;
  return fail("the library is not of the launcher.h that this program was compiled with"), NULL;
}

/* Open the pack at `path`, and give each GPU to `use`, with its context current. */
static int on_every_gpu(const char *path, const int64_t sizes[3], int (*use)(const aotmm_launcher *, int, const int64_t[3])) {
  const aotmm_launcher *mm = open_pack(path);
  int devices = 0, failed = !mm || open_driver();
  if (!failed && (cu.cuInit(0) || cu.cuDeviceGetCount(&devices) || !devices)) failed = fail("there is no GPU");
  for (int device = 0; device < devices; device++) {
    void *context;
    if (cu.cuDevicePrimaryCtxRetain(&context, device)) {
      failed = fail("the GPU has no context");
      continue;
    }
    failed |= cu.cuCtxSetCurrent(context) ? fail("the GPU's context cannot be used") : use(mm, device, sizes);
    cu.cuCtxSetCurrent(NULL);
    cu.cuDevicePrimaryCtxRelease(device);
  }
  return failed;
}

/* Set the three sizes that may stand behind the library's path. */
static int read_sizes(int argc, char **argv, int64_t sizes[3]) {
  for (int i = 2; i < argc; i++)
    if ((sizes[i - 2] = atoi(argv[i])) < 1) return fail("sizes are numbers above 0");
  return 0;
}
