/* Products of torch tensors, as torch_ops.c computes them for the ops, for override.c and for the direct call. */
#ifndef AOTMM_TORCH_OPS_H
#define AOTMM_TORCH_OPS_H

#include "arithmetic.h"
#include "launcher.h"

#define EXPORT __attribute__((visibility("default")))
#define TORCH_2_10 (2ull << 56 | 10ull << 48) /* the version of the calling conventions */

typedef uint64_t value;          /* StableIValue */
typedef struct tensor *tensor_t; /* AtenTensorHandle */

/* Functions of libtorch_cpu. Each that returns int returns 0 or an error. */
extern struct torch_functions {
  int (*aoti_torch_get_dim)(tensor_t, int64_t *);
  int (*aoti_torch_get_sizes)(tensor_t, int64_t **);
  int (*aoti_torch_get_strides)(tensor_t, int64_t **);
  int (*aoti_torch_get_dtype)(tensor_t, int32_t *);
  int (*aoti_torch_get_device_type)(tensor_t, int32_t *);
  int (*aoti_torch_get_device_index)(tensor_t, int32_t *);
  int (*torch_get_const_data_ptr)(tensor_t, const void **);
  int (*torch_get_mutable_data_ptr)(tensor_t, void **);
  int (*aoti_torch_empty_strided)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, tensor_t *);
  int (*aoti_torch_delete_tensor_object)(tensor_t);
  int (*aoti_torch_library_init_impl)(const char *, const char *, const char *, uint32_t, void **);
  int (*aoti_torch_delete_library_object)(void *);
  int (*torch_library_impl)(void *, const char *, void (*)(value *, uint64_t, uint64_t), uint64_t);
  void (*aoti_torch_check)(_Bool, const char *, const char *, uint32_t, const char *);
  int32_t (*aoti_torch_device_type_cuda)(void);
  int32_t (*aoti_torch_dtype_float16)(void);
  int32_t (*aoti_torch_dtype_bfloat16)(void);
  int32_t (*aoti_torch_dtype_float32)(void);
  int32_t (*aoti_torch_dtype_float8_e5m2)(void);
  int32_t (*aoti_torch_dtype_float8_e4m3fn)(void);
  int32_t (*aoti_torch_dtype_int8)(void);
  int32_t (*aoti_torch_dtype_int32)(void);
} torch;

/* A view of a tensor; sizes and strides (in elements) are borrowed from it. */
typedef struct view {
  const int64_t *sizes, *strides;
  uint64_t address;
  int32_t dim, dtype, device; /* AOTMM_*, -1 for one without kernels; the GPU's ordinal, -1 for anything else */
} view;

typedef struct matrix { /* (batch, rows, cols); a matrix is a batch of one */
  int64_t batch, rows, cols, z_stride, row_stride, col_stride;
  uint64_t address;
  int32_t dim, dtype, device, bytes; /* torch's, AOTMM_*, ordinal, of one element */
} matrix;

/* Return whether two elements of the matrix share memory; 1 also for some exotic strides where none do. */
int overlaps_itself(const matrix *);
/* Return whether two matrices share memory; 1 also for some interleaved views that do not. */
int share_memory(const matrix *, const matrix *);

/* A product to compute. An absent tensor is NULL; out_dtype is that of a new result, -1 for the default. */
typedef struct request {
  view a, b;
  const view *out, *bias, *scale_a, *scale_b, *offsets; /* the last of a grouped product alone */
  int64_t activation, library, out_dtype, expected_rows;
  double slope;
  int allow_tf32, fast_accum, batch_invariant;
} request;

/* The failure of the calling thread's last product. */
enum { KIND_TYPE = 1, KIND_VALUE = 2, KIND_LAUNCHER = 3, KIND_RESOLVER = 4, KIND_TORCH = 5 };
typedef struct torch_error {
  int32_t kind;
  aotmm_error error;
} torch_error;
const torch_error *aotmm_torch_last_error(void);

/* Describe a tensor; outside GPUs only its dimensions. Return 0, or 1 with the error recorded. */
int aotmm_torch_view(tensor_t, int writable, view *);

/* Return whether tensor cores multiply fp32 in full precision there, as the sum of several numbers, by the first pack for
   the device that multiplies it at all: then it is faster than torch's. Return -1 without a pack. */
int aotmm_torch_splits_fp32(int64_t library, int device);

/* Launch the product on torch's current stream. Without `out` the result is new and the caller's. Return 0, or 1 with
   the error recorded. */
int aotmm_torch_multiply(const request *, tensor_t *result);

/* Launch a grouped product likewise. */
int aotmm_torch_multiply_groups(const request *, tensor_t *result);

/* Return whether the last product was refused for its arguments, not because the driver failed. */
int aotmm_torch_declined(void);

#endif
