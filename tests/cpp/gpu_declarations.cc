// tests/python/core/test_gpu_declarations.py compiles this file, without running it, if the headers
// of CUDA and NCCL (2.14 or later) are installed: the declarations of csrc/gpu must agree with
// them.
#include <cuda.h>
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "gpu/cuda_api.h"
#include "gpu/nccl_api.h"

namespace hororing {
namespace {

// Types that are passed in the same way: pointers, numbers of one size, structs of one size.
template <typename Ours, typename Theirs>
constexpr bool Alike() {
  if (std::is_pointer_v<Ours> || std::is_pointer_v<Theirs>) {
    return std::is_pointer_v<Ours> && std::is_pointer_v<Theirs>;
  }
  return sizeof(Ours) == sizeof(Theirs) && std::is_class_v<Ours> == std::is_class_v<Theirs> &&
         std::is_floating_point_v<Ours> == std::is_floating_point_v<Theirs>;
}

template <typename R, typename... A, typename S, typename... B>
constexpr bool Same(R (*)(A...), S (*)(B...)) {
  if constexpr (sizeof...(A) != sizeof...(B)) {
    return false;
  } else {
    return Alike<R, S>() && (Alike<A, B>() && ...);
  }
}

#define CHECK_CUDA(member, symbol, parameters) \
  static_assert(Same(decltype(CudaApi::member)::Pointer{}, decltype(&symbol){}), #symbol);
HORORING_CUDA_FUNCTIONS(CHECK_CUDA)
#define CHECK_NCCL(member, symbol, parameters) \
  static_assert(Same(decltype(NcclApi::member)::Pointer{}, decltype(&symbol){}), #symbol);
HORORING_NCCL_FUNCTIONS(CHECK_NCCL)

static_assert(kCuSuccess == CUDA_SUCCESS && kCuNotReady == CUDA_ERROR_NOT_READY);
static_assert(kCuFirstCaptureError == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
static_assert(kCuLastCaptureError == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
static_assert(kCuStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kCuEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kCuMemHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(kCuMemoryPoolsSupported == CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED);
static_assert(kCuStreamCaptureStatusNone == CU_STREAM_CAPTURE_STATUS_NONE);
static_assert(kCuStreamCaptureModeRelaxed == CU_STREAM_CAPTURE_MODE_RELAXED);
static_assert(sizeof(CuUuid) == sizeof(CUuuid) && sizeof(CuAddress) == sizeof(CUdeviceptr));

static_assert(kNcclSuccess == int{ncclSuccess} && kNcclInProgress == int{ncclInProgress});
static_assert(kNcclInt8 == int{ncclInt8} && kNcclUint8 == int{ncclUint8});
static_assert(kNcclInt32 == int{ncclInt32} && kNcclInt64 == int{ncclInt64});
static_assert(kNcclFloat16 == int{ncclFloat16} && kNcclBfloat16 == int{ncclBfloat16});
static_assert(kNcclFloat32 == int{ncclFloat32} && kNcclFloat64 == int{ncclFloat64});
static_assert(kNcclSum == int{ncclSum} && kNcclProd == int{ncclProd});
static_assert(kNcclMax == int{ncclMax} && kNcclMin == int{ncclMin} && kNcclAvg == int{ncclAvg});
static_assert(kNcclScalarHostImmediate == int{ncclScalarHostImmediate});
constexpr ncclConfig_t kConfig = NCCL_CONFIG_INITIALIZER;
static_assert(kNcclConfigMagic == kConfig.magic);
static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));

}  // namespace
}  // namespace hororing
