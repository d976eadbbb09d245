/* The launch of any kernel, linked into every pack's library: guards (guards.c), one kernel (kernel.c), and a driver
   (driver.c with cuda.c or hip.c). It knows no more of a kernel than its quantities. Who launches it gives their values:
   products (core.h), or functions of a user's own (functions.c). Tables declared `extern` are in the generated
   launcher.c. */
#ifndef AOTMM_KERNEL_H
#define AOTMM_KERNEL_H

#include "launcher.h"

#include <stddef.h>

enum { AOTMM_MAX_DEVICES = 32, AOTMM_MAX_PARAMETERS = 80, AOTMM_MAX_PARAMETER_BYTES = 4096, AOTMM_MAX_ATTRIBUTES = 8 };
enum { AOTMM_TENSOR_MAP_BYTES = 128, AOTMM_TENSOR_MAP_ALIGNMENT = 64, AOTMM_MAX_MAPS = 8 };
enum { AOTMM_MAX_QUANTITIES = 64 /* bits of quantities.free */ };

typedef void *aotmm_function; /* a loaded kernel of one device, NULL until its first use */

enum { MAX_GRID = 0x7fffffff, VECTOR_BYTES = 16 };

/* A guard: (value & mask) - least, unsigned, is at most `span`. */
typedef struct aotmm_guard_test {
  uint64_t mask, least, span;
  uint16_t value; /* number of a quantity */
} aotmm_guard_test;

typedef struct aotmm_group {
  uint16_t first, count;
} aotmm_group;

extern const aotmm_kernel aotmm_kernels[];
extern const uint32_t aotmm_kernel_count;
/* Those of a kernel are in the order of its quantities. */
extern const aotmm_guard_test aotmm_guard_tests[];
extern const aotmm_group aotmm_guard_tests_of[]; /* in aotmm_guard_tests, by kernel */
extern aotmm_function aotmm_functions[][AOTMM_MAX_DEVICES];
extern const char aotmm_arch[];

/* The values that a launch gives a kernel: of its quantities, in its order. Every guard on a free one holds; it is the
   stride of a dimension of size 1, which counts as 0, or an argument that the caller leaves open. */
typedef struct quantities {
  int64_t value[AOTMM_MAX_QUANTITIES];
  uint64_t free; /* bit set: a free one */
} quantities;

/* The blocks of a kernel's cluster. */
static inline uint32_t num_ctas(const aotmm_kernel *k) { return k->cluster_m * k->cluster_n; }

/* ---- guards.c */

static inline int guard_test_holds(const aotmm_guard_test *c, const quantities *q) {
  return ((uint64_t)q->value[c->value] & c->mask) - c->least <= c->span || q->free >> c->value & 1;
}

int guards_hold(uint32_t kernel, const quantities *);
uint32_t first_failed_guard(const aotmm_kernel *, const quantities *);
int uses_map(const aotmm_tensor_map *, const quantities *);

/* ---- kernel.c */

/* When a kernel with pdl starts: once the one before has ended, earlier, or earlier with its blocks spread over the GPU. */
enum { AFTER, EARLY, SPREAD };

int launch(uint32_t kernel, const quantities *, const uint32_t grid[3], int pdl, int ordinal, void *stream);
/* Load a kernel for the current device, if it is not there yet. */
int load(uint32_t kernel, int ordinal);

/* ---- functions of every pack's table */

int aotmm_device_facts(int ordinal, aotmm_device *);
int aotmm_preload(int ordinal);
const aotmm_error *aotmm_last_error(void);

/* Record the calling thread's failure and return `status`. */
int aotmm_fail(int status, int code, int device, const char *call, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* The failure of calls that need the driver in a child that was forked after the driver had been opened. */
int aotmm_fail_forked(int ordinal);

/* ---- the driver. Functions return an aotmm_status, after aotmm_fail if they fail. */

void set_speeds(aotmm_device *, int clock_khz, int memory_clock_khz, int bus_bits);
extern const uint64_t driver_max_threads; /* of a whole grid */
/* Open the driver once and read the device's facts; the pointer stays valid. To be called before the others. */
int driver_device(int ordinal, const aotmm_device **);
/* Make the device current in this thread; driver_leave restores *saved. */
int driver_enter(int ordinal, void **saved);
void driver_leave(void *saved);
/* Load a kernel for the current device; allowed during stream capture. */
int driver_load(const aotmm_kernel *, int ordinal, aotmm_function *);

/* Set *made to the code of a kernel in new memory, with a 0 behind it, if edits are stored; else to NULL. */
int rebuilt(const aotmm_code *, const char *kernel, int ordinal, unsigned char **made);
/* A batch of matrices in memory, as a tensor map has it: sizes in elements, the contiguous one first, and the distances
   of lines and matrices in bytes. */
typedef struct boxed_memory {
  int64_t address;
  uint64_t sizes[3], strides[2];
} boxed_memory;

/* Write the tensor map of `memory` to `encoded`. */
int driver_encode(const aotmm_kernel *, const aotmm_tensor_map *, const boxed_memory *memory, int ordinal, void *encoded);
int driver_launch(aotmm_function, const aotmm_kernel *, const uint32_t grid[3], int pdl, void *stream,
                  void **parameters, int ordinal);

#endif
