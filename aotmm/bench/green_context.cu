// A stream whose work runs on some of a GPU's multiprocessors, and a kernel that tells which ones run it.
// Source: CUDA driver API, "Green Contexts".

#include <cuda.h>

// Each block marks its multiprocessor, for long enough that all blocks do not fit on a few.
__global__ void mark(unsigned char *seen) {
  unsigned number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  seen[number] = 1;
  for (long long start = clock64(); clock64() - start < 20000;) continue;
}

// Launch `mark` on a stream; `seen` has an element for each multiprocessor of the device. Return a cudaError_t.
extern "C" int visit(unsigned char *seen, cudaStream_t stream) {
  mark<<<4096, 32, 0, stream>>>(seen);
  return cudaGetLastError();
}

// Make a stream of at least `count` multiprocessors of the device, as few as the driver can take, and set their number.
// The stream stays for the life of the process. Return a CUresult.
extern "C" int open_stream(int ordinal, unsigned count, unsigned *found, CUstream *stream) {
  CUdevice device;
  CUdevResource all, part;
  CUdevResourceDesc described;
  CUgreenCtx context;
  unsigned groups = 1;
  CUresult code = cuDeviceGet(&device, ordinal);
  if (!code) code = cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM);
  if (!code) code = cuDevSmResourceSplitByCount(&part, &groups, &all, NULL, 0, count);
  if (!code) code = cuDevResourceGenerateDesc(&described, &part, 1);
  if (!code) code = cuGreenCtxCreate(&context, described, device, CU_GREEN_CTX_DEFAULT_STREAM);
  if (!code) code = cuGreenCtxStreamCreate(stream, context, CU_STREAM_NON_BLOCKING, 0);
  if (!code) *found = part.sm.smCount;
  return code;
}
