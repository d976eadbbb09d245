/* The fake CUDA driver with memory, of one GPU for sm90, whose launches are fp32 products with bias and relu: row-major, with
 * parameters that are numbered in parameters.h. For where no interpreter runs. */
#include "fake_memory.c"

#include "parameters.h"

#define AT(type, name) (*(type *)parameters[P_##name])

static int multiply(const unsigned char *image, size_t bytes, const char *name, const unsigned *grid, const unsigned *block,
                    unsigned shared, void **parameters, void *stream, int device, int captured) {
  (void)image, (void)bytes, (void)name, (void)grid, (void)block, (void)shared, (void)stream, (void)device, (void)captured;
  const float *a = AT(float *, a_ptr), *b = AT(float *, b_ptr), *bias = AT(float *, bias_ptr);
  float *c = AT(float *, c_ptr);
  const long m = AT(int32_t, M), n = AT(int32_t, N), k = AT(int32_t, K);
  for (long i = 0; i < m; i++)
    for (long j = 0; j < n; j++) {
      float sum = bias[j];
      for (long l = 0; l < k; l++) sum += a[i * k + l] * b[l * n + j];
      c[i * n + j] = sum > 0 ? sum : 0;
    }
  return OK;
}

__attribute__((constructor)) static void begin(void) { fake_setup(multiply, 1, "sm90", 12080); }
