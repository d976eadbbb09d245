// Multiplies matrices of int8 on the first NVIDIA GPU with the kernels of a pack, through aotmm.hpp, and checks each element:
//
//     c++ -std=c++17 -I artifacts/sm90 examples/c/matmul.cpp -o matmul -ldl && ./matmul artifacts/sm90/libaotmm_sm90.so sm90
#include <cstdint>
#include <cstdio>
#include <vector>

#include "aotmm.hpp"

namespace {

// What a function of the CUDA driver returns; a program that uses the CUDA runtime needs none of this.
template <class... Arguments>
int call(const char *name, Arguments... arguments) {
  static void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
  void *found = driver ? dlsym(driver, name) : nullptr;
  if (!found) throw std::runtime_error(dlerror());
  return reinterpret_cast<int (*)(Arguments...)>(found)(arguments...);
}

template <class... Arguments>
void cuda(const char *name, Arguments... arguments) {
  if (const int code = call(name, arguments...))
    throw std::runtime_error(std::string(name) + " failed: " + std::to_string(code));
}

class memory {
 public:
  explicit memory(std::size_t bytes) { cuda("cuMemAlloc_v2", &address_, bytes); }
  template <class T>
  explicit memory(const std::vector<T> &values) : memory(values.size() * sizeof(T)) {
    cuda("cuMemcpyHtoD_v2", address_, static_cast<const void *>(values.data()), values.size() * sizeof(T));
  }
  memory(memory &&other) noexcept : address_(std::exchange(other.address_, 0)) {}
  ~memory() {
    if (address_) call("cuMemFree_v2", address_);  // waits for what runs
  }

  std::int64_t address() const { return static_cast<std::int64_t>(address_); }
  void *get() const { return reinterpret_cast<void *>(address_); }

 private:
  std::uint64_t address_ = 0;
};

int multiply(const aotmm::library &mm, std::size_t m, std::size_t n, std::size_t k) {
  std::vector<std::int8_t> a(m * k), b(k * n);
  std::vector<std::int32_t> c(m * n);
  for (std::size_t i = 0; i < a.size(); i++) a[i] = static_cast<std::int8_t>(static_cast<int>(i % 251) - 125);
  for (std::size_t i = 0; i < b.size(); i++) b[i] = static_cast<std::int8_t>(static_cast<int>(i % 255) - 127);
  const memory on_gpu[] = {memory(a), memory(b), memory(c)};

  aotmm_problem problem{};
  problem.a_ptr = on_gpu[0].address(), problem.b_ptr = on_gpu[1].address(), problem.c_ptr = on_gpu[2].address();
  problem.M = static_cast<std::int64_t>(m), problem.N = static_cast<std::int64_t>(n);
  problem.K = static_cast<std::int64_t>(k), problem.batch = 1;
  problem.stride_am = problem.K, problem.stride_bk = problem.stride_cm = problem.N;
  problem.stride_ak = problem.stride_bn = problem.stride_cn = 1;
  problem.dtype_a = problem.dtype_b = AOTMM_INT8, problem.dtype_c = AOTMM_INT32;
  mm.matmul(problem, 0, nullptr, [](std::size_t bytes) { return memory(bytes); });
  cuda("cuMemcpyDtoH_v2", static_cast<void *>(c.data()), on_gpu[2].address(), c.size() * sizeof c[0]);

  std::size_t wrong = 0;
  for (std::size_t i = 0; i < c.size(); i++) {
    std::int32_t want = 0;
    for (std::size_t l = 0; l < k; l++) want += a[i / n * k + l] * b[l * n + i % n];
    wrong += c[i] != want;
  }
  std::printf("%s: %zu of %zu elements are wrong\n", mm.kernel(mm.plan(problem, 0)).name, wrong, c.size());
  return wrong != 0;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: matmul_cpp LIBRARY ARCH\n"), 1;
  try {
    const aotmm::library mm(argv[1], argv[2]);
    void *context = nullptr;
    cuda("cuInit", 0u);
    cuda("cuDevicePrimaryCtxRetain", &context, 0);
    cuda("cuCtxSetCurrent", context);
    return multiply(mm, 300, 200, 128);
  } catch (const std::exception &error) {
    return std::fprintf(stderr, "%s\n", error.what()), 1;
  }
}
