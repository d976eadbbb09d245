/* Multiplies groups of rows, each by a matrix of its own, as the experts of a model do, and checks each element. The ends of
 * the groups are on the GPU alone: one plan serves whatever they are. As matmul.c it needs no Python, no torch, no toolkit:
 *
 *     cc -I artifacts/sm90 examples/c/grouped.c -o grouped -ldl && ./grouped artifacts/sm90/libaotmm_sm90.so
 */
#include "gpu.h"

enum { A, B, ENDS, C, BUFFERS };
enum { GROUPS = 5, ROUTINGS = 3, UNTOUCHED = 0x7fc0 /* a NaN of bf16 */ };

static float number_of(uint16_t bf16) {
  const uint32_t bits = (uint32_t)bf16 << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

/* The nearest bf16 number, of two the even one. */
static uint16_t bf16_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Set the ends of the groups: of equal size, one empty; all rows in one; and half of the rows in no group. */
static void route(int routing, int64_t rows, int32_t ends[GROUPS]) {
  for (int g = 0; g < GROUPS; g++)
    ends[g] = (int32_t)(routing == 0   ? rows * (g < 2 ? g + 1 : g) / (GROUPS - 1)
                        : routing == 1 ? (g < 2 ? 0 : rows)
                                       : rows * (g + 1) / GROUPS / 2);
}

static int64_t wrong_elements(int64_t rows, int64_t n, int64_t k, void *const host[BUFFERS]) {
  const uint16_t *a = host[A], *b = host[B], *c = host[C];
  const int32_t *ends = host[ENDS];
  int64_t wrong = 0;
  for (int64_t i = 0, group = 0; i < rows; i++) {
    while (group < GROUPS && i >= ends[group]) group++;
    for (int64_t j = 0; j < n; j++) {
      float want = 0;
      for (int64_t l = 0; group < GROUPS && l < k; l++) want += number_of(a[i * k + l]) * number_of(b[(group * n + j) * k + l]);
      wrong += c[i * n + j] != (group < GROUPS ? bf16_of(want) : UNTOUCHED);
    }
  }
  return wrong;
}

/* C = A @ B of small integers, B column-major: matrices of weights of n rows. */
static int multiply(const aotmm_launcher *mm, int device, const int64_t sizes[3], const size_t bytes[BUFFERS],
                    void *const host[BUFFERS], const uint64_t memory[BUFFERS]) {
  const int64_t rows = sizes[0], n = sizes[1], k = sizes[2];
  const aotmm_problem problem = {
      .a_ptr = (int64_t)memory[A], .b_ptr = (int64_t)memory[B], .c_ptr = (int64_t)memory[C],
      .M = rows, .N = n, .K = k, .batch = GROUPS, .grouped = AOTMM_GROUPED_M, .offsets_ptr = (int64_t)memory[ENDS],
      .stride_am = k, .stride_ak = 1, .stride_bk = 1, .stride_bn = k, .stride_bz = n * k, .stride_cm = n, .stride_cn = 1,
      .dtype_a = AOTMM_BF16, .dtype_b = AOTMM_BF16, .dtype_c = AOTMM_BF16,
  };
  aotmm_plan plan;
  int64_t wrong = 0;
  if (mm->plan(&problem, device, 0, &plan)) return fail(mm->last_error()->text); /* 0: it takes no workspace */
  for (int i = A; i <= B; i++) {
    uint16_t *numbers = host[i];
    for (size_t j = 0; j < bytes[i] / sizeof *numbers; j++) numbers[j] = bf16_of((float)(j % 7) - 3);
    if (cu.cuMemcpyHtoD(memory[i], host[i], bytes[i])) return fail("no copy to the GPU");
  }
  for (int routing = 0; routing < ROUTINGS; routing++) {
    uint16_t *c = host[C];
    for (int64_t j = 0; j < rows * n; j++) c[j] = UNTOUCHED;
    route(routing, rows, host[ENDS]);
    if (cu.cuMemcpyHtoD(memory[ENDS], host[ENDS], bytes[ENDS]) || cu.cuMemcpyHtoD(memory[C], c, bytes[C]))
      return fail("no copy to the GPU");
    if (mm->run(&plan, &problem, device, NULL, NULL)) return fail(mm->last_error()->text);
    if (cu.cuMemcpyDtoH(c, memory[C], bytes[C])) return fail("the kernel failed");
    wrong += wrong_elements(rows, n, k, host);
  }
  printf("GPU %d: %s, %d groups, %d routings: %lld of %lld elements are wrong\n", device, mm->kernels[plan.kernel].name,
         GROUPS, ROUTINGS, (long long)wrong, (long long)(ROUTINGS * rows * n));
  return wrong != 0;
}

static int use_device(const aotmm_launcher *mm, int device, const int64_t sizes[3]) {
  const int64_t rows = sizes[0], n = sizes[1], k = sizes[2];
  const size_t bytes[BUFFERS] = {(size_t)(rows * k) * sizeof(uint16_t), (size_t)(GROUPS * n * k) * sizeof(uint16_t),
                                 GROUPS * sizeof(int32_t), (size_t)(rows * n) * sizeof(uint16_t)};
  void *host[BUFFERS] = {0};
  uint64_t memory[BUFFERS] = {0};
  int failed = 0;
  for (int i = A; i < BUFFERS && !failed; i++)
    if (!(host[i] = malloc(bytes[i])) || cu.cuMemAlloc(&memory[i], bytes[i])) failed = fail("out of memory");
  failed = failed || multiply(mm, device, sizes, bytes, host, memory);
  for (int i = A; i < BUFFERS; i++) {
    if (memory[i]) cu.cuMemFree(memory[i]);
    free(host[i]);
  }
  return failed;
}

int main(int argc, char **argv) {
  if (argc != 2 && argc != 5) return fail("usage: grouped LIBRARY [ROWS N K]");
  int64_t sizes[3] = {300, 384, 256};
  return read_sizes(argc, argv, sizes) || on_every_gpu(argv[1], sizes, use_device);
}
