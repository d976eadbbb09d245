/* The launch core: selection (core.c) over a driver (driver_cuda.c or driver_hip.c), linked into every launcher.
   What is declared `extern` here is defined by the generated launcher.c. */
#ifndef AOTMM_CORE_H
#define AOTMM_CORE_H

#include "launcher.h"

enum { AOTMM_MAX_DEVICES = 32, AOTMM_MAX_PARAMETERS = 56, AOTMM_MAX_PARAMETER_BYTES = 4096, AOTMM_MAX_ATTRIBUTES = 8 };
enum { AOTMM_TENSOR_MAP_BYTES = 128, AOTMM_TENSOR_MAP_ALIGNMENT = 64, AOTMM_MAX_MAPS = 8 };
enum { AOTMM_UNMEASURED = 0xffff };

typedef void *aotmm_function; /* a loaded kernel of one device, NULL until its first use */

enum { AOTMM_ROWS_COUNT = sizeof((int32_t[])AOTMM_ROWS) / sizeof(int32_t) };

/* Constants of the time model of one kernel, for a range of rows. */
typedef struct aotmm_constants {
  double base, step, tile, byte, load;
  uint32_t blocks; /* how many a multiprocessor is taken to work on at once */
} aotmm_constants;

/* Lanes side by side, for vector instructions: of bounds on their times what does not depend on the problem. */
typedef float aotmm_floats __attribute__((vector_size(AOTMM_LANES * sizeof(float))));
typedef int32_t aotmm_bits __attribute__((vector_size(AOTMM_LANES * sizeof(int32_t))));
typedef struct aotmm_candidates {
  aotmm_floats per_m, per_n, per_k, per_block; /* tiles and steps of an element, multiprocessors of a tile */
  aotmm_floats base, step, tile, byte;         /* ns, as in the model; of a partial `tile` is that of two slices */
  aotmm_floats byte_c;                         /* ns per byte of C; of a partial 0 */
  aotmm_floats sums;                           /* ns per tile: two slices of partial sums */
  aotmm_floats load_a, load_b;                 /* ns per step of a tile and byte of an element */
  aotmm_floats half, whole;                    /* what rounds waves up; of a partial 0, which does not */
  aotmm_floats partial;                        /* 1 or 0 */
  aotmm_bits class;                            /* as in aotmm_lane */
  aotmm_bits schedule, fast_accum;             /* as in aotmm_tuning; unmeasured: 0 and -1 */
} aotmm_candidates;

/* A tuning table in terms of this library's kernels. */
typedef struct aotmm_tuning {
  aotmm_candidates *candidates;     /* by place in AOTMM_ROWS and block of lanes */
  const aotmm_constants (*constants)[AOTMM_ROWS_COUNT]; /* by kernel */
  const uint16_t *schedules;        /* by kernel: its schedule's number, or AOTMM_UNMEASURED */
  const aotmm_shape *shapes;
  const aotmm_time *times;          /* by shape and schedule */
  uint32_t *places;                 /* of shapes: a table of their numbers from 1 on, by a sum of their fields; 0: empty */
  uint32_t shape_count, schedule_count, place_count; /* which is a power of two above shape_count */
} aotmm_tuning;

/* A promise: (value & mask) - least, unsigned, is at most `span`. */
typedef struct aotmm_condition {
  uint64_t mask, least, span;
  uint16_t value; /* AOTMM_VALUE_* */
} aotmm_condition;

typedef struct aotmm_group {
  uint16_t first, count;
} aotmm_group;

/* Kernels that differ in nothing but their epilogue, the plainer first, of aotmm_order. */
typedef struct aotmm_lane {
  uint16_t first, count;
  uint16_t class; /* the same in lanes of a span whose roles and promises are equal */
} aotmm_lane;

/* At most AOTMM_MAX_LANES of equal types that want no strides to be 1 but these: a bit for each, from AOTMM_VALUE_STRIDE_AM
   on. The last block is filled up with lanes without kernels. */
typedef struct aotmm_span {
  uint16_t first, count; /* blocks of AOTMM_LANES */
  uint16_t units;
} aotmm_span;

extern const aotmm_kernel aotmm_kernels[];
extern const uint32_t aotmm_kernel_count;
/* In the order of values. */
extern const aotmm_condition aotmm_conditions[];
extern const aotmm_group aotmm_promised[]; /* in aotmm_conditions, by kernel */
extern aotmm_function aotmm_functions[][AOTMM_MAX_DEVICES];
extern const char aotmm_arch[];
extern const int64_t aotmm_pointer_alignment; /* a power of two: no promise sees more of an address than its remainder */
extern const aotmm_tuning aotmm_built_tuning;
/* Numbers of kernels. Products and partials are in lanes; reduces and copies are in the order of preference. */
extern const uint16_t aotmm_order[];
extern const aotmm_lane aotmm_lanes[];
extern const uint32_t aotmm_block_count; /* of lanes */
extern const aotmm_span aotmm_spans[];
/* Products and partials: in aotmm_spans, by storage types. */
extern const aotmm_group aotmm_mains[AOTMM_DTYPE_COUNT][AOTMM_DTYPE_COUNT][AOTMM_DTYPE_COUNT];
/* In aotmm_order. */
extern const aotmm_group aotmm_reduces[AOTMM_DTYPE_COUNT]; /* by type of C */
extern const aotmm_group aotmm_copies[5];                  /* by bytes of an element */

int aotmm_check(const aotmm_problem *, const aotmm_device *, uint64_t workspace_limit, uint32_t kernel, aotmm_verdict *);
int aotmm_select(const aotmm_problem *, const aotmm_device *, uint64_t workspace_limit, aotmm_plan *);
int aotmm_device_facts(int ordinal, aotmm_device *);
int aotmm_plan_for(const aotmm_problem *, int ordinal, uint64_t workspace_limit, aotmm_plan *);
int aotmm_run(const aotmm_plan *, const aotmm_problem *, int ordinal, void *stream, void *workspace);
int aotmm_matmul(const aotmm_problem *, int ordinal, void *stream);
int aotmm_retune(const aotmm_table *);
int aotmm_preload(int ordinal);
const aotmm_error *aotmm_last_error(void);

/* Records the calling thread's failure and returns `status`. */
int aotmm_fail(int status, int code, int device, const char *call, const char *format, ...)
    __attribute__((format(printf, 5, 6)));
/* The failure of every call that needs the driver in a child that was forked after the driver had been opened. */
int aotmm_fail_forked(int ordinal);

/* ---- the driver. Each function returns an aotmm_status after aotmm_fail. */

extern const uint64_t driver_max_threads; /* of a whole grid */
/* Opens the driver once and reads the device's facts; the pointer stays valid. Everything else is called after it. */
int driver_device(int ordinal, const aotmm_device **);
/* Makes the device current in this thread; *saved is what driver_leave restores. */
int driver_enter(int ordinal, void **saved);
void driver_leave(void *saved);
/* Loads a kernel for the current device; allowed during stream capture. */
int driver_load(const aotmm_kernel *, int ordinal, aotmm_function *);
/* Writes the tensor map of a matrix of inner x outer elements, whose lines are `stride_bytes` apart, to `encoded`. */
int driver_encode(const aotmm_kernel *, const aotmm_tensor_map *, int64_t address, int64_t inner, int64_t outer,
                  int64_t stride_bytes, int ordinal, void *encoded);
int driver_launch(aotmm_function, const aotmm_kernel *, uint32_t grid, int programmatic, void *stream,
                  void **parameters, int ordinal);

#endif
