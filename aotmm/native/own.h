/* What functions of a user's own add to the launch of kernels (kernel.h), and the arithmetic of their grids. Tables
   declared `extern` are in the generated launcher.c. */
#ifndef AOTMM_OWN_CORE_H
#define AOTMM_OWN_CORE_H

#include "kernel.h"

extern const aotmm_own_function aotmm_own_functions[];
extern const uint32_t aotmm_own_function_count;
/* By kernel: the function that sets its grid and returns whether that failed; NULL if a caller says it. */
extern int (*const aotmm_own_grids[])(const int64_t *values, int64_t grid[3]);

int aotmm_own_check(uint32_t kernel, const int64_t *values, uint64_t open, uint32_t *guard);
int aotmm_own_choose(uint32_t function, const int64_t *values, uint64_t open, int ordinal, uint32_t *kernel);
int aotmm_own_run(uint32_t kernel, const int64_t *values, uint64_t open, const int64_t *grid, int ordinal, void *stream);
void aotmm_own_allocate_by(aotmm_allocate, aotmm_release);
int aotmm_own_retune(const aotmm_own_choice *choices, uint32_t count);
int aotmm_own_launch(uint32_t function, const int64_t *values, uint64_t open, const int64_t *grid, int ordinal, void *stream);

static inline int64_t add(int64_t a, int64_t b, int *failed) {
  *failed |= __builtin_add_overflow(a, b, &a);
  return a;
}

static inline int64_t subtract(int64_t a, int64_t b, int *failed) {
  *failed |= __builtin_sub_overflow(a, b, &a);
  return a;
}

static inline int64_t multiply(int64_t a, int64_t b, int *failed) {
  *failed |= __builtin_mul_overflow(a, b, &a);
  return a;
}

/* Python's a // b, which rounds down. */
static inline int64_t floor_div(int64_t a, int64_t b, int *failed) {
  if (b == 0 || (a == INT64_MIN && b == -1)) return *failed = 1;
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}

/* triton.cdiv: (a + b - 1) // b. */
static inline int64_t ceil_div_of(int64_t a, int64_t b, int *failed) {
  return floor_div(add(a, subtract(b, 1, failed), failed), b, failed);
}

static inline int64_t least(int64_t a, int64_t b, int *failed) {
  (void)failed;
  return a < b ? a : b;
}

static inline int64_t most(int64_t a, int64_t b, int *failed) {
  (void)failed;
  return a > b ? a : b;
}

#endif
