// launcher.h for C++17: a library that is opened and checked, and exceptions in the place of return codes. Copy it.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "launcher.h"

namespace aotmm {

// A call that failed; what() says what failed, what was found and what to do.
class error : public std::runtime_error {
 public:
  explicit error(const aotmm_error &e) : std::runtime_error(e.text), status_(e.status), code_(e.code), device_(e.device) {}

  int status() const noexcept { return status_; }  // aotmm_status
  int code() const noexcept { return code_; }      // the driver's error number, or 0
  int device() const noexcept { return device_; }  // ordinal, or -1

 private:
  int status_, code_, device_;
};

// The launcher of a pack. Can be copied and used from any thread, as what it wraps; its code stays in the process, because its
// kernels stay in the driver.
class library {
 public:
  // The library `path`, whose pack is for `arch`. Throws std::runtime_error if it is none or of another version.
  library(const std::string &path, const std::string &arch)
      : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE), [](void *handle) {
          if (handle) dlclose(handle);
        }) {
    void *entry = handle_ ? dlsym(handle_.get(), ("aotmm_launcher_" + arch).c_str()) : nullptr;
    if (!entry) throw std::runtime_error(dlerror());
    launcher_ = reinterpret_cast<const aotmm_launcher *(*)()>(entry)();
    if (launcher_->abi != AOTMM_ABI || launcher_->problem_bytes != sizeof(aotmm_problem))
      throw std::runtime_error(path + " is not of the launcher.h that this program was compiled with");
  }

  const aotmm_launcher *operator->() const noexcept { return launcher_; }
  const aotmm_kernel &kernel(const aotmm_plan &plan) const noexcept { return launcher_->kernels[plan.kernel]; }

  aotmm_device device(int ordinal) const {
    aotmm_device facts;
    check(launcher_->device(ordinal, &facts));
    return facts;
  }

  aotmm_plan plan(const aotmm_problem &problem, int ordinal, std::uint64_t workspace_limit = AOTMM_WORKSPACE_LIMIT) const {
    aotmm_plan found;
    check(launcher_->plan(&problem, ordinal, workspace_limit, &found));
    return found;
  }

  void run(const aotmm_plan &plan, const aotmm_problem &problem, int ordinal, void *stream, void *workspace = nullptr) const {
    check(launcher_->run(&plan, &problem, ordinal, stream, workspace));
  }

  // The product by its best plan. `allocate(bytes)` gives an object whose get() is device memory; it is destroyed when
  // everything is launched, so it must give the memory back in the order of the stream, as cudaFreeAsync does.
  template <class Allocate>
  void matmul(const aotmm_problem &problem, int ordinal, void *stream, Allocate &&allocate) const {
    const aotmm_plan best = plan(problem, ordinal);
    if (!best.workspace_bytes) return run(best, problem, ordinal, stream);
    auto workspace = std::forward<Allocate>(allocate)(best.workspace_bytes);
    run(best, problem, ordinal, stream, workspace.get());
  }

  void load(const aotmm_plan &plan, const aotmm_problem &problem, int ordinal) const {
    check(launcher_->load(&plan, &problem, ordinal));
  }

  void preload(int ordinal) const { check(launcher_->preload(ordinal)); }

 private:
  void check(int status) const {
    if (status != AOTMM_OK) throw error(*launcher_->last_error());
  }

  std::shared_ptr<void> handle_;
  const aotmm_launcher *launcher_;
};

}  // namespace aotmm
