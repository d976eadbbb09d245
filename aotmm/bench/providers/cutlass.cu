// C (M, N) = A (M, K) @ B (K, N), C row-major, fp32 sums: one CUTLASS kernel, chosen by macros (providers/cutlass.py).
//   ELEMENT         element type
//   LAYOUT_A, _B    RowMajor or ColumnMajor
//   TILE_M, _N, _K  tile of a block
//   Hopper (warp-specialised, TMA and wgmma): CLUSTER_M, CLUSTER_N, SCHEDULE (Cooperative or Pingpong)
//   Ampere (cp.async and mma.sync): WARP_M, WARP_N, STAGES
// `option` is, for Hopper, how many rows of tiles are taken side by side at most. Ampere's kernels always take up to 8;
// it is their number of slices of K, which add their sums to C one after the other.
// `matmul` returns 0, or what went wrong as a cutlass::Status.

#include <cutlass/cutlass.h>

#ifdef SCHEDULE
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/util/packed_stride.hpp>
#else
#include <cutlass/gemm/device/gemm.h>
#endif

namespace {

using Row = cutlass::layout::RowMajor;
using LayoutA = cutlass::layout::LAYOUT_A;
using LayoutB = cutlass::layout::LAYOUT_B;
constexpr int kVector = 8;  // elements in 16 bytes

#ifdef SCHEDULE

using Tile = cute::Shape<cute::Int<TILE_M>, cute::Int<TILE_N>, cute::Int<TILE_K>>;
using Cluster = cute::Shape<cute::Int<CLUSTER_M>, cute::Int<CLUSTER_N>, cute::_1>;
#define JOIN(x, y) x##y
#define NAMED(x, y) JOIN(x, y)
using Schedule = cutlass::gemm::NAMED(KernelTmaWarpSpecialized, SCHEDULE);
using EpilogueSchedule = std::conditional_t<
    std::is_same_v<Schedule, cutlass::gemm::KernelTmaWarpSpecializedCooperative>,
    cutlass::epilogue::TmaWarpSpecializedCooperative, cutlass::epilogue::TmaWarpSpecialized>;

using Epilogue = cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, kVector, ELEMENT, Row, kVector,
    EpilogueSchedule>::CollectiveOp;
using Mainloop = cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, ELEMENT, LayoutA, kVector, ELEMENT, LayoutB, kVector, float,
    Tile, Cluster, cutlass::gemm::collective::StageCountAutoCarveout<sizeof(typename Epilogue::SharedStorage)>,
    Schedule>::CollectiveOp;
using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

Gemm::Arguments arguments(const void *a, const void *b, void *c, int m, int n, int k, int option) {
  auto pitch_a = cutlass::make_cute_packed_stride(Kernel::StrideA{}, {m, k, 1});
  auto pitch_b = cutlass::make_cute_packed_stride(Kernel::StrideB{}, {n, k, 1});
  auto pitch_c = cutlass::make_cute_packed_stride(Kernel::StrideC{}, {m, n, 1});
  auto pitch_d = cutlass::make_cute_packed_stride(Kernel::StrideD{}, {m, n, 1});
  cutlass::KernelHardwareInfo device;
  cudaGetDevice(&device.device_id);
  cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, device.device_id);
  Gemm::Arguments given{cutlass::gemm::GemmUniversalMode::kGemm,
                        {m, n, k, 1},
                        {static_cast<const ELEMENT *>(a), pitch_a, static_cast<const ELEMENT *>(b), pitch_b},
                        {{1.0f, 0.0f}, nullptr, pitch_c, static_cast<ELEMENT *>(c), pitch_d},
                        device};
  given.scheduler.max_swizzle_size = option;
  return given;
}

#else

using Gemm = cutlass::gemm::device::Gemm<
    ELEMENT, LayoutA, ELEMENT, LayoutB, ELEMENT, Row, float, cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80,
    cutlass::gemm::GemmShape<TILE_M, TILE_N, TILE_K>, cutlass::gemm::GemmShape<WARP_M, WARP_N, TILE_K>,
    cutlass::gemm::GemmShape<16, 8, 16>,
    cutlass::epilogue::thread::LinearCombination<ELEMENT, kVector, float, float>,
    cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>, STAGES, kVector, kVector, true>;

Gemm::Arguments arguments(const void *a, const void *b, void *c, int m, int n, int k, int option) {
  auto out = static_cast<ELEMENT *>(c);
  const int pitch_a = std::is_same_v<LayoutA, Row> ? k : m, pitch_b = std::is_same_v<LayoutB, Row> ? n : k;
  return {{m, n, k}, {static_cast<const ELEMENT *>(a), pitch_a}, {static_cast<const ELEMENT *>(b), pitch_b}, {out, n},
          {out, n}, {}, option};
}

#endif

}  // namespace

extern "C" size_t workspace(int m, int n, int k, int option) {
  return Gemm::get_workspace_size(arguments(nullptr, nullptr, nullptr, m, n, k, option));
}

extern "C" int matmul(const void *a, const void *b, void *c, int m, int n, int k, int option, void *space,
                      cudaStream_t stream) {
  Gemm gemm;
  auto given = arguments(a, b, c, m, n, k, option);
  auto status = gemm.can_implement(given);
  if (status == cutlass::Status::kSuccess) status = gemm.initialize(given, space, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  return static_cast<int>(status);
}
