/* Multiplies matrices on every NVIDIA GPU with the kernels of a pack, and checks each element. It takes no Python, no torch
 * and no CUDA toolkit, neither to build nor to run:
 *
 *     cc -I artifacts/sm90 examples/c/matmul.c -o matmul -ldl && ./matmul artifacts/sm90/libaotmm_sm90.so
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "launcher.h"

/* What of the CUDA driver a program needs for memory; one that uses the CUDA runtime has cudaMalloc and so on. */
static struct {
  int (*cuInit)(unsigned);
  int (*cuDeviceGetCount)(int *);
  int (*cuDevicePrimaryCtxRetain)(void **, int);
  int (*cuDevicePrimaryCtxRelease)(int);
  int (*cuCtxSetCurrent)(void *);
  int (*cuMemAlloc)(uint64_t *, size_t);
  int (*cuMemFree)(uint64_t);
  int (*cuMemcpyHtoD)(uint64_t, const void *, size_t);
  int (*cuMemcpyDtoH)(void *, uint64_t, size_t); /* waits for the default stream */
} cu;
static const struct {
  const char *name;
  void *slot;
} symbols[] = {
    {"cuInit", &cu.cuInit},
    {"cuDeviceGetCount", &cu.cuDeviceGetCount},
    {"cuDevicePrimaryCtxRetain", &cu.cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease_v2", &cu.cuDevicePrimaryCtxRelease},
    {"cuCtxSetCurrent", &cu.cuCtxSetCurrent},
    {"cuMemAlloc_v2", &cu.cuMemAlloc},
    {"cuMemFree_v2", &cu.cuMemFree},
    {"cuMemcpyHtoD_v2", &cu.cuMemcpyHtoD},
    {"cuMemcpyDtoH_v2", &cu.cuMemcpyDtoH},
};

enum { A, B, BIAS, C, WORKSPACE, BUFFERS };

static int fail(const char *what) {
  fprintf(stderr, "%s\n", what);
  return 1;
}

static int open_driver(void) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return fail(dlerror());
  for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
    void *found = dlsym(driver, symbols[i].name);
    if (!found) return fail(dlerror());
    memcpy(symbols[i].slot, &found, sizeof found);
  }
  return 0;
}

/* The functions of the pack's library at `path`, which stays loaded: its kernels will be in the driver. */
static const aotmm_launcher *open_pack(const char *path) {
  char arch[32], entry[64];
  const char *slash = strrchr(path, '/');
  if (sscanf(slash ? slash + 1 : path, "libaotmm_%31[^.].so", arch) != 1) return fail("not a libaotmm_ARCH.so"), NULL;
  void *library = dlopen(path, RTLD_NOW);
  if (!library) return fail(dlerror()), NULL;
  snprintf(entry, sizeof entry, "aotmm_launcher_%s", arch);
  const aotmm_launcher *(*launcher)(void);
  void *found = dlsym(library, entry);
  if (!found) return fail(dlerror()), NULL;
  memcpy(&launcher, &found, sizeof found);
  const aotmm_launcher *mm = launcher();
  if (mm->abi == AOTMM_ABI && mm->problem_bytes == sizeof(aotmm_problem)) return mm;
  return fail("the library is not of the launcher.h that this program was compiled with"), NULL;
}

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

static int use_device(const aotmm_launcher *mm, int device, int64_t m, int64_t n, int64_t k) {
  const int64_t counts[] = {m * k, k * n, n, m * n};
  float *host[BUFFERS] = {0};
  uint64_t memory[BUFFERS] = {0};
  void *context;
  if (cu.cuDevicePrimaryCtxRetain(&context, device)) return fail("the GPU has no context");
  int failed = cu.cuCtxSetCurrent(context) ? fail("the GPU's context cannot be used") : 0;
  for (int i = A; i <= C && !failed; i++) {
    host[i] = malloc((size_t)counts[i] * sizeof(float));
    if (!host[i] || cu.cuMemAlloc(&memory[i], (size_t)counts[i] * sizeof(float))) failed = fail("out of memory");
  }
  failed = failed || multiply(mm, device, m, n, k, host, memory);
  for (int i = A; i < BUFFERS; i++) {
    if (memory[i]) cu.cuMemFree(memory[i]);
    free(host[i]);
  }
  cu.cuCtxSetCurrent(NULL);
  cu.cuDevicePrimaryCtxRelease(device);
  return failed;
}

int main(int argc, char **argv) {
  if (argc != 2 && argc != 5) return fail("usage: matmul LIBRARY [M N K]");
  int64_t sizes[3] = {512, 384, 256};
  for (int i = 2; i < argc; i++)
    if ((sizes[i - 2] = atoi(argv[i])) < 1) return fail("sizes are numbers above 0");
  const aotmm_launcher *mm = open_pack(argv[1]);
  int devices = 0, failed = !mm || open_driver();
  if (!failed && (cu.cuInit(0) || cu.cuDeviceGetCount(&devices) || !devices)) failed = fail("there is no GPU");
  for (int device = 0; device < devices; device++) failed |= use_device(mm, device, sizes[0], sizes[1], sizes[2]);
  return failed;
}
