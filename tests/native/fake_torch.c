/* Stands in for libtorch_cpu and for a launcher, so that torch_ops.c runs where there is no GPU. Both write what they are
 * asked for to `events`, one word each. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher.h"

#define EXPORT __attribute__((visibility("default")))

typedef struct tensor {
  int64_t dim, sizes[3], strides[3];
  int32_t dtype, device;
  void *data;
} tensor;

EXPORT char events[1000], raised[600];
EXPORT uint64_t wanted;      /* bytes of workspace that the launcher's plans need where they may */
EXPORT int memory_is_short;  /* torch allocates nothing */
EXPORT int run_fails;
EXPORT int64_t strides[3][2]; /* of the operands, and of an `out`; 0: as of dense ones */
EXPORT int64_t live; /* tensors that were not deleted */
EXPORT void (*kernels[2])(uint64_t *, uint64_t, uint64_t); /* mm, mm.out */

static void note(const char *word, uint64_t number) {
  size_t end = strlen(events);
  snprintf(events + end, sizeof events - end, end ? " %s%llu" : "%s%llu", word, (unsigned long long)number);
}

EXPORT int aoti_torch_get_dim(tensor *t, int64_t *dim) { return *dim = t->dim, 0; }
EXPORT int aoti_torch_get_sizes(tensor *t, int64_t **sizes) { return *sizes = t->sizes, 0; }
EXPORT int aoti_torch_get_strides(tensor *t, int64_t **strides) { return *strides = t->strides, 0; }
EXPORT int aoti_torch_get_dtype(tensor *t, int32_t *dtype) { return *dtype = t->dtype, 0; }
EXPORT int aoti_torch_get_device_type(tensor *t, int32_t *type) { return (void)t, *type = 1, 0; }
EXPORT int aoti_torch_get_device_index(tensor *t, int32_t *index) { return *index = t->device, 0; }
EXPORT int torch_get_const_data_ptr(tensor *t, const void **data) { return *data = t->data, 0; }
EXPORT int torch_get_mutable_data_ptr(tensor *t, void **data) { return *data = t->data, 0; }
EXPORT int aoti_torch_delete_tensor_object(tensor *t) {
  if (t->dtype == AOTMM_INT8) note("free", (uint64_t)t->sizes[0]);
  live--;
  free(t);
  return 0;
}

EXPORT int aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                    int32_t device_type, int32_t device, tensor **result) {
  if (dtype == AOTMM_INT8) note("allocate", (uint64_t)sizes[0]);
  if (memory_is_short || device_type != 1) return 1;
  tensor *t = *result = calloc(1, sizeof *t);
  live++;
  t->dim = dim, t->dtype = dtype, t->device = device, t->data = (void *)0x10000;
  memcpy(t->sizes, sizes, (size_t)dim * sizeof *sizes);
  memcpy(t->strides, strides, (size_t)dim * sizeof *strides);
  return 0;
}

EXPORT int aoti_torch_library_init_impl(const char *name, const char *key, const char *file, uint32_t line,
                                        void **library) {
  return (void)name, (void)key, (void)file, (void)line, *library = events, 0;
}
EXPORT int aoti_torch_delete_library_object(void *library) { return (void)library, 0; }
EXPORT int torch_library_impl(void *library, const char *name, void (*kernel)(uint64_t *, uint64_t, uint64_t),
                              uint64_t version) {
  if (!strcmp(name, "mm")) kernels[0] = kernel;
  if (!strcmp(name, "mm.out")) kernels[1] = kernel;
  return (void)library, (void)version, 0;
}
EXPORT void torch_delete_stable_ivalue(void *value) { free(value); }
EXPORT void aoti_torch_check(_Bool holds, const char *function, const char *file, uint32_t line, const char *text) {
  (void)function, (void)file, (void)line;
  if (!holds) snprintf(raised, sizeof raised, "%s", text);
}
EXPORT int aoti_torch_get_current_cuda_stream(int32_t device, void **stream) {
  return *stream = (void *)(uintptr_t)(0x500 + device), 0;
}

EXPORT int32_t aoti_torch_device_type_cuda(void) { return 1; }
EXPORT int32_t aoti_torch_dtype_float16(void) { return AOTMM_FP16; }
EXPORT int32_t aoti_torch_dtype_bfloat16(void) { return AOTMM_BF16; }
EXPORT int32_t aoti_torch_dtype_float32(void) { return AOTMM_FP32; }
EXPORT int32_t aoti_torch_dtype_float8_e5m2(void) { return AOTMM_FP8E5; }
EXPORT int32_t aoti_torch_dtype_float8_e4m3fn(void) { return AOTMM_FP8E4; }
EXPORT int32_t aoti_torch_dtype_int8(void) { return AOTMM_INT8; }
EXPORT int32_t aoti_torch_dtype_int32(void) { return AOTMM_INT32; }

static int plan(const aotmm_problem *problem, int ordinal, uint64_t limit, aotmm_plan *found) {
  (void)problem, (void)ordinal;
  note("plan", limit);
  memset(found, 0, sizeof *found);
  found->workspace_bytes = wanted <= limit ? wanted : 0;
  return AOTMM_OK;
}

static int run(const aotmm_plan *chosen, const aotmm_problem *problem, int ordinal, void *stream, void *workspace) {
  (void)problem;
  note("run", chosen->workspace_bytes);
  if ((uint64_t)stream != 0x500 + (uint64_t)ordinal || !workspace != !chosen->workspace_bytes) note("wrong", 0);
  return run_fails ? AOTMM_DRIVER : AOTMM_OK;
}

static const aotmm_error *last_error(void) {
  static const aotmm_error error = {.status = AOTMM_DRIVER, .text = "the launch failed"};
  return &error;
}

EXPORT const aotmm_launcher launcher = {.abi = AOTMM_ABI, .problem_bytes = sizeof(aotmm_problem), .plan = plan,
                                        .run = run, .last_error = last_error};

/* A pack that lacks kernels for every product. */
static int plan_nothing(const aotmm_problem *problem, int ordinal, uint64_t limit, aotmm_plan *found) {
  (void)problem, (void)ordinal, (void)found;
  note("refuse", limit);
  return AOTMM_NO_KERNEL;
}

static const aotmm_error *no_kernel(void) {
  static const aotmm_error error = {.status = AOTMM_NO_KERNEL, .text = "no kernel"};
  return &error;
}

EXPORT const aotmm_launcher lacking = {.abi = AOTMM_ABI, .problem_bytes = sizeof(aotmm_problem), .plan = plan_nothing,
                                       .run = run, .last_error = no_kernel};

/* An fp16 matrix that the op owns. */
static tensor *matrix(int64_t rows, int64_t cols, int64_t address, const int64_t apart[2]) {
  tensor *t = calloc(1, sizeof *t);
  live++;
  *t = (tensor){2, {rows, cols}, {apart[0] ? apart[0] : cols ? cols : 1, apart[1] ? apart[1] : 1}, AOTMM_FP16, 3,
                (void *)address};
  return t;
}

/* mm or mm.out of (M, K) and (K, N) on device 3, for library 0. */
EXPORT void multiply(int into_out, int64_t M, int64_t N, int64_t K) {
  uint64_t stack[12] = {(uint64_t)matrix(M, K, 1 << 20, strides[0]), (uint64_t)matrix(K, N, 2 << 20, strides[1])};
  stack[11] = into_out ? (uint64_t)matrix(M, N, 3 << 20, strides[2]) : (uint64_t)-1;
  events[0] = raised[0] = 0;
  kernels[into_out](stack, 12, 1);
  if (!raised[0]) aoti_torch_delete_tensor_object((tensor *)stack[0]);
}
