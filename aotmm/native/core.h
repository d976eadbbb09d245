/* The launch core: selection (core.c) over a driver (driver_cuda.c or driver_hip.c), linked into every launcher.
   What is declared `extern` here is defined by the generated launcher.c. */
#ifndef AOTMM_CORE_H
#define AOTMM_CORE_H

#include "launcher.h"

enum { AOTMM_MAX_DEVICES = 32, AOTMM_MAX_PARAMETERS = 48, AOTMM_MAX_PARAMETER_BYTES = 4096, AOTMM_MAX_ATTRIBUTES = 8 };

typedef void *aotmm_function; /* a loaded kernel of one device, NULL until its first use */

extern const aotmm_kernel aotmm_kernels[];
extern const uint32_t aotmm_kernel_count;
extern aotmm_function aotmm_functions[][AOTMM_MAX_DEVICES];
extern const char aotmm_arch[];

int aotmm_check(const aotmm_problem *, const aotmm_device *, uint32_t kernel, aotmm_verdict *);
int aotmm_select(const aotmm_problem *, const aotmm_device *, uint32_t *kernel);
int aotmm_device_facts(int ordinal, aotmm_device *);
int aotmm_matmul(const aotmm_problem *, int ordinal, void *stream);
int aotmm_launch(uint32_t kernel, const aotmm_problem *, int ordinal, void *stream);
int aotmm_preload(int ordinal);
const aotmm_error *aotmm_last_error(void);

/* Records the calling thread's failure and returns `status`. */
int aotmm_fail(int status, int code, int device, const char *call, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* ---- the driver. Each function returns an aotmm_status after aotmm_fail. */

/* Opens the driver once and reads the device's facts; the pointer stays valid. */
extern const uint64_t driver_max_threads; /* of a whole grid */
int driver_device(int ordinal, const aotmm_device **);
/* Makes the device current in this thread; *saved is what driver_leave restores. */
int driver_enter(int ordinal, void **saved);
void driver_leave(void *saved);
/* Loads a kernel for the current device; allowed during stream capture. */
int driver_load(const aotmm_kernel *, int ordinal, aotmm_function *);
int driver_launch(aotmm_function, const aotmm_kernel *, uint32_t grid, void *stream, void **parameters, int ordinal);

#endif
