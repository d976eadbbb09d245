// Loops of launches from C, for `aotmm bench own`: by a pack's library, and by the driver alone. ns per launch.
#include <chrono>
#include <cstdint>
#include <cuda.h>
#include <dlfcn.h>
#include <launcher.h>

template <typename Launch>
static double ns_per_launch(int count, Launch launch) {
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < count; i++)
    if (int status = launch()) return -status;
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / count;
}

extern "C" double by_pack(const aotmm_own *pack, uint32_t function, const int64_t *values, uint64_t open,
                          const int64_t *grid, int device, void *stream, int count) {
  return ns_per_launch(count, [&] { return pack->launch(function, values, open, grid, device, stream); });
}

// `parameters` are the addresses of the kernel's, in order.
extern "C" double by_driver(const void *image, const char *symbol, int threads, int shared_bytes, void **parameters,
                            const int64_t *grid, void *stream, int count) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
#define FIND(name) const auto name##_ = reinterpret_cast<decltype(&name)>(dlsym(driver, #name))
  FIND(cuModuleLoadData);
  FIND(cuModuleGetFunction);
  FIND(cuFuncSetAttribute);
  FIND(cuLaunchKernelEx);
  static const void *loaded;
  static CUmodule module;
  static CUfunction function;
  CUresult code = CUDA_SUCCESS;
  if (loaded != image) {
    if (!code) code = cuModuleLoadData_(&module, image);
    if (!code) code = cuModuleGetFunction_(&function, module, symbol);
    if (!code) code = cuFuncSetAttribute_(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes);
    if (code) return -code;
    loaded = image;
  }
  CUlaunchConfig config = {};
  config.gridDimX = grid[0], config.gridDimY = grid[1], config.gridDimZ = grid[2];
  config.blockDimX = threads, config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shared_bytes, config.hStream = static_cast<CUstream>(stream);
  return ns_per_launch(count, [&] { return cuLaunchKernelEx_(&config, function, parameters, nullptr); });
}
