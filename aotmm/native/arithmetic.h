/* Arithmetic with sizes and strides: of any views, also of those that are never read. */
#ifndef AOTMM_ARITHMETIC_H
#define AOTMM_ARITHMETIC_H

#include <stdint.h>

/* Multiply numbers from 0 on; return INT64_MAX on overflow. */
static inline int64_t saturated(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}

static inline int64_t ceil_div(int64_t a, int64_t b) {
  if (((uint64_t)a | (uint64_t)b) >> 32) return a / b + (a % b != 0);
  uint32_t quotient = (uint32_t)a / (uint32_t)b; /* most are small, and 64-bit division is slow */
  return (int64_t)quotient + (quotient * (uint32_t)b != (uint32_t)a);
}

#endif
