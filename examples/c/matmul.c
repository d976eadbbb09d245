/* Multiplies matrices on every NVIDIA GPU with the kernels of a pack, and checks each element. It takes no Python, no torch
 * and no CUDA toolkit, neither to build nor to run:
 *
 *     cc -I artifacts/sm90 examples/c/matmul.c -o matmul -ldl && ./matmul artifacts/sm90/libaotmm_sm90.so
 */
#include "gpu.h"

enum { A, B, BIAS, C, WORKSPACE, BUFFERS };

/* C = relu(A @ B + bias) of small integers, which fp32 and tf32 hold exactly. */
static int multiply(const aotmm_launcher *mm, int device, int64_t m, int64_t n, int64_t k, float *host[BUFFERS],
                    uint64_t memory[BUFFERS]) {
  const int64_t counts[] = {m * k, k * n, n, m * n};
  for (int i = A; i <= BIAS; i++) {
    for (int64_t j = 0; j < counts[i]; j++) host[i][j] = (float)(j % 7 - 3);
    if (cu.cuMemcpyHtoD(memory[i], host[i], (size_t)counts[i] * sizeof(float))) return fail("no copy to the GPU");
  }
  const aotmm_problem problem = {
      .a_ptr = (int64_t)memory[A], .b_ptr = (int64_t)memory[B], .c_ptr = (int64_t)memory[C],
      .M = m, .N = n, .K = k, .batch = 1,
      .stride_am = k, .stride_ak = 1, .stride_bk = n, .stride_bn = 1, .stride_cm = n, .stride_cn = 1,
      .bias_ptr = (int64_t)memory[BIAS], .stride_bias_n = 1, .activation = AOTMM_ACTIVATION_RELU, .allow_tf32 = 1,
      .dtype_a = AOTMM_FP32, .dtype_b = AOTMM_FP32, .dtype_c = AOTMM_FP32,
  };
  aotmm_plan plan;
  if (mm->plan(&problem, device, AOTMM_WORKSPACE_LIMIT, &plan)) return fail(mm->last_error()->text);
  if (plan.workspace_bytes && cu.cuMemAlloc(&memory[WORKSPACE], plan.workspace_bytes)) return fail("no workspace");
  if (mm->run(&plan, &problem, device, NULL, (void *)(uintptr_t)memory[WORKSPACE])) return fail(mm->last_error()->text);
  if (cu.cuMemcpyDtoH(host[C], memory[C], (size_t)counts[C] * sizeof(float))) return fail("the kernel failed");

  int64_t wrong = 0;
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j++) {
      float want = host[BIAS][j];
      for (int64_t l = 0; l < k; l++) want += host[A][i * k + l] * host[B][l * n + j];
      wrong += host[C][i * n + j] != (want > 0 ? want : 0);
    }
  printf("GPU %d: %s%s, K in %u, %llu bytes of workspace: %lld of %lld elements are wrong\n", device,
         mm->kernels[plan.kernel].name, plan.copies ? " and copies" : "", plan.split,
         (unsigned long long)plan.workspace_bytes, (long long)wrong, (long long)(m * n));
  return wrong != 0;
}

static int use_device(const aotmm_launcher *mm, int device, const int64_t sizes[3]) {
  const int64_t m = sizes[0], n = sizes[1], k = sizes[2], counts[] = {m * k, k * n, n, m * n};
  float *host[BUFFERS] = {0};
  uint64_t memory[BUFFERS] = {0};
  int failed = 0;
  for (int i = A; i <= C && !failed; i++) {
    host[i] = malloc((size_t)counts[i] * sizeof(float));
    if (!host[i] || cu.cuMemAlloc(&memory[i], (size_t)counts[i] * sizeof(float))) failed = fail("out of memory");
  }
  failed = failed || multiply(mm, device, m, n, k, host, memory);
  for (int i = A; i < BUFFERS; i++) {
    if (memory[i]) cu.cuMemFree(memory[i]);
    free(host[i]);
  }
  return failed;
}

int main(int argc, char **argv) {
  if (argc != 2 && argc != 5) return fail("usage: matmul LIBRARY [M N K]");
  int64_t sizes[3] = {512, 384, 256};
  return read_sizes(argc, argv, sizes) || on_every_gpu(argv[1], sizes, use_device);
}
